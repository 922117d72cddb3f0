"""dQ of the INT8 backward pass in Triton.

Difficulty: hard
Importance: high
Minutes: 60

Half of SageBwd's Algorithm 2 as one kernel. A program holds one tile of queries and walks over the tiles of keys. For
each it computes S_ij as integers once more, P_ij from the forward's L, dP_ij in 16 bit, and dS_ij = P_ij (dP_ij -
delta). It rounds dS_ij to INT8 with one scale per row, multiplies it with K^_j as integers, and adds to dQ_i. No other
program adds to the same dQ_i, so there are no atomic additions.

One scale per row is finer than the paper's one per tile, and it costs nothing: the product dS^_ij K^_j sums over keys,
so a scale that differs from query to query stays outside of the sum.

Afterwards you know what a backward kernel recomputes, what it must not round, and why dQ has a program of its own.
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def dq_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, v_ptr, do_ptr, log_sum_exp_ptr, delta_ptr, dq_ptr, n_q, n_k, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Program i: dQ_i [BLOCK_Q, D]."""
    i = tl.program_id(0)
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    q_hat_i = tl.load(q_ptr + query[:, None] * D + d[None, :])  # [Bq, D]
    s_q = tl.load(q_scale_ptr + i)
    do_i = tl.load(do_ptr + query[:, None] * D + d[None, :], mask=query[:, None] < n_q, other=0.0)  # [Bq, D], float16
    # L = infinity makes P = 0 for a query that doesn't exist.
    log_sum_exp_i = tl.load(log_sum_exp_ptr + query, mask=query < n_q, other=float("inf"))  # [Bq]
    delta_i = tl.load(delta_ptr + query, mask=query < n_q, other=0.0)
    dq_i = tl.zeros([BLOCK_Q, D], tl.float32)
    for j in range(0, tl.cdiv(n_k, BLOCK_KV)):
        key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_hat_j = tl.load(k_ptr + key[:, None] * D + d[None, :])  # [Bkv, D]
        s_k = tl.load(k_scale_ptr + j)
        v_j = tl.load(v_ptr + key[:, None] * D + d[None, :], mask=key[:, None] < n_k, other=0.0)  # [Bkv, D], float16
        raise NotImplementedError(
            "dq_kernel: S_ij, P_ij and its mask, dP_ij, dS_ij, then dS^_ij and its scale, and dQ_i"
        )
    raise NotImplementedError("dq_kernel: store dQ_i, of the queries that exist")


def int8_dq(
    q_hat: torch.Tensor,
    q_scale: torch.Tensor,
    k_hat: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    log_sum_exp: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
) -> None:
    """Write dQ = c dS K into `dq`, with dS = P (dO V^T - delta) and P = e^(c Q K^T - L).

    q_hat: int8 [Tm * Bq, D], k_hat: int8 [Tn * Bkv, D]. Rows n_q, n_k and beyond are padding and hold anything.
    q_scale: float32 [Tm], k_scale: float32 [Tn]: one scale per tile.
    v: float16 [n_k, D], do: float16 [n_q, D]: not padded, not rounded. dP is summed in float32.
    log_sum_exp, delta: float32 [n_q], L (a natural logarithm) and rowsum(dO * O) of the forward pass.
    dq: float32 [n_q, D]. All contiguous. Bq is at least 16, Bkv and D at least 32, powers of two. c = 1/sqrt(D).

    >>> q_hat = torch.zeros(16, 32, dtype=torch.int8)
    >>> k_hat = torch.zeros(32, 32, dtype=torch.int8)
    >>> k_hat[:2, 0] = torch.tensor([127, -127])
    >>> v, do, dq = torch.zeros(2, 32).half(), torch.zeros(1, 32).half(), torch.empty(1, 32)
    >>> v[0, 0], do[0, 0] = 4, 1  # two keys: P = 1/2 and 1/2, dP = 4 and 0, delta = 2, dS = 1 and -1
    >>> one, l, delta = torch.ones(1), torch.tensor([math.log(2)]), torch.tensor([2.0])
    >>> int8_dq(q_hat, one, k_hat, one / 127, v, do, l, delta, dq)
    >>> dq[0, :2]  # (1 * 1 + -1 * -1) / sqrt(32)
    tensor([0.3536, 0.0000])
    """
    n_q, head_dim = dq.shape
    block_q, block_kv = len(q_hat) // len(q_scale), len(k_hat) // len(k_scale)
    raise NotImplementedError("int8_dq: launch dq_kernel with one program per tile of queries")
