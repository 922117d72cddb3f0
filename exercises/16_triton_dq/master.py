"""dQ of the INT8 backward pass in Triton."""

import math

import torch  # noqa: F401, the worked value needs it
import triton
import triton.language as tl
from torch import Tensor


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
        ### SOLUTION: S_ij, P_ij and its mask, dP_ij, dS_ij, dS^_ij and its scale, and dQ_i
        s_ij = tl.dot(q_hat_i, tl.trans(k_hat_j), out_dtype=tl.int32).to(tl.float32) * (c * s_q * s_k)
        p_ij = tl.exp(s_ij - log_sum_exp_i[:, None])
        p_ij = tl.where(key[None, :] < n_k, p_ij, 0.0)  # [Bq, Bkv]
        dp_ij = tl.dot(do_i, tl.trans(v_j))
        ds_ij = p_ij * (dp_ij - delta_i[:, None])
        s_ds = tl.max(tl.abs(ds_ij), 1) / 127
        # A row of zeros has s_dS = 0.
        ds_hat_ij = tl.floor(ds_ij / tl.where(s_ds == 0, 1.0, s_ds)[:, None] + 0.5).to(tl.int8)
        product = tl.dot(ds_hat_ij, k_hat_j, out_dtype=tl.int32).to(tl.float32)
        dq_i += product * (s_ds * s_k)[:, None]
    ### SOLUTION: store dQ_i, of the queries that exist
    tl.store(dq_ptr + query[:, None] * D + d[None, :], dq_i * c, mask=query[:, None] < n_q)


def int8_dq(
    q_hat: Tensor, q_scale: Tensor, k_hat: Tensor, k_scale: Tensor, v: Tensor, do: Tensor, log_sum_exp: Tensor,
    delta: Tensor, dq: Tensor,
) -> None:  # fmt: skip
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
    ### SOLUTION: launch dq_kernel with one program per tile of queries
    dq_kernel[(triton.cdiv(n_q, block_q),)](
        q_hat, q_scale, k_hat, k_scale, v, do, log_sum_exp, delta, dq, n_q, len(v), 1 / math.sqrt(head_dim),
        D=head_dim, BLOCK_Q=block_q, BLOCK_KV=block_kv,
    )  # fmt: skip
