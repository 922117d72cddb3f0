"""dK and dV of the INT8 backward pass in Triton."""

import math

import torch  # noqa: F401, the worked value needs it
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def round_rows(x):
    """(X^, s): INT8 values and one scale per row, float32 [rows]; a row of zeros has scale 0."""
    ### SOLUTION: one scale per row, and x / s rounded to nearest
    s = tl.max(tl.abs(x), 1) / 127
    return tl.floor(x / tl.where(s == 0, 1.0, s)[:, None] + 0.5).to(tl.int8), s


@triton.jit
def dk_dv_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, v_ptr, do_ptr, do_hat_ptr, do_scale_ptr, log_sum_exp_ptr, delta_ptr,
    dk_ptr, dv_ptr, n_q, n_k, c, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Program j: dK_j and dV_j [BLOCK_KV, D]."""
    j = tl.program_id(0)
    key, d = j * BLOCK_KV + tl.arange(0, BLOCK_KV), tl.arange(0, D)
    k_hat_j = tl.load(k_ptr + key[:, None] * D + d[None, :])  # [Bkv, D]
    s_k = tl.load(k_scale_ptr + j)
    v_j = tl.load(v_ptr + key[:, None] * D + d[None, :], mask=key[:, None] < n_k, other=0.0)  # [Bkv, D], float16
    dk_j = tl.zeros([BLOCK_KV, D], tl.float32)
    dv_j = tl.zeros([BLOCK_KV, D], tl.float32)
    for i in range(0, tl.cdiv(n_q, BLOCK_Q)):
        query = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_hat_i = tl.load(q_ptr + query[:, None] * D + d[None, :])  # [Bq, D]
        do_hat_i = tl.load(do_hat_ptr + query[:, None] * D + d[None, :])
        s_q, s_do = tl.load(q_scale_ptr + i), tl.load(do_scale_ptr + i)
        do_i = tl.load(do_ptr + query[:, None] * D + d[None, :], mask=query[:, None] < n_q, other=0.0)  # float16
        log_sum_exp_i = tl.load(log_sum_exp_ptr + query, mask=query < n_q, other=0.0)  # [Bq]
        delta_i = tl.load(delta_ptr + query, mask=query < n_q, other=0.0)
        ### SOLUTION: S_ij^T, P_ij^T and its mask, dV_j, then dP_ij^T, dS_ij^T and dK_j
        st_ij = tl.dot(k_hat_j, tl.trans(q_hat_i), out_dtype=tl.int32).to(tl.float32) * (c * s_q * s_k)
        st_ij = tl.where(query[None, :] < n_q, st_ij, -float("inf"))
        pt_ij = tl.exp(st_ij - log_sum_exp_i[None, :])  # [Bkv, Bq]
        pt_hat_ij, s_p = round_rows(pt_ij)
        dv_j += tl.dot(pt_hat_ij, do_hat_i, out_dtype=tl.int32).to(tl.float32) * (s_p * s_do)[:, None]
        dpt_ij = tl.dot(v_j, tl.trans(do_i))
        dst_ij = pt_ij * (dpt_ij - delta_i[None, :])
        dst_hat_ij, s_ds = round_rows(dst_ij)
        dk_j += tl.dot(dst_hat_ij, q_hat_i, out_dtype=tl.int32).to(tl.float32) * (s_ds * s_q)[:, None]
    ### SOLUTION: store dK_j and dV_j, of the keys that exist
    exists = key[:, None] < n_k
    tl.store(dk_ptr + key[:, None] * D + d[None, :], dk_j * c, mask=exists)
    tl.store(dv_ptr + key[:, None] * D + d[None, :], dv_j, mask=exists)


def int8_dk_dv(
    q_hat: Tensor, q_scale: Tensor, k_hat: Tensor, k_scale: Tensor, v: Tensor, do: Tensor, do_hat: Tensor,
    do_scale: Tensor, log_sum_exp: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Write dK = c dS^T Q into `dk` and dV = P^T dO into `dv`; dS = P (dO V^T - delta) and P = e^(c Q K^T - L).

    q_hat, do_hat: int8 [Tm * Bq, D], k_hat: int8 [Tn * Bkv, D]. Rows n_q, n_k and beyond are padding and hold anything.
    q_scale, do_scale: float32 [Tm], k_scale: float32 [Tn]: one scale per tile.
    v: float16 [n_k, D], do: float16 [n_q, D]: not padded, not rounded, for dP alone. dP is summed in float32.
    log_sum_exp, delta: float32 [n_q], L (a natural logarithm) and rowsum(dO * O) of the forward pass.
    dk, dv: float32 [n_k, D]. All contiguous. Bq, Bkv and D are at least 32, powers of two. c = 1/sqrt(D).

    >>> q_hat, do_hat, k_hat = (torch.zeros(32, 32, dtype=torch.int8) for _ in range(3))
    >>> q_hat[0, 1], do_hat[0, 0] = 127, 127  # one query, and k = 0: P = 1/2 and 1/2
    >>> v, do, dk, dv = torch.zeros(2, 32).half(), torch.zeros(1, 32).half(), torch.empty(2, 32), torch.empty(2, 32)
    >>> v[0, 0], do[0, 0] = 4, 1  # dP = 4 and 0, delta = 2, dS = 1 and -1
    >>> one, l, delta = torch.ones(1), torch.tensor([math.log(2)]), torch.tensor([2.0])
    >>> int8_dk_dv(q_hat, one / 127, k_hat, one, v, do, do_hat, one / 127, l, delta, dk, dv)
    >>> dk[:, 1], dv[:, 0]  # 1 / sqrt(32) and -1 / sqrt(32); 1/2 of dO each
    (tensor([ 0.1768, -0.1768]), tensor([0.5000, 0.5000]))
    """
    n_k, head_dim = dk.shape
    block_q, block_kv = len(q_hat) // len(q_scale), len(k_hat) // len(k_scale)
    ### SOLUTION: launch dk_dv_kernel with one program per tile of keys
    dk_dv_kernel[(triton.cdiv(n_k, block_kv),)](
        q_hat, q_scale, k_hat, k_scale, v, do, do_hat, do_scale, log_sum_exp, delta, dk, dv, len(do), n_k,
        1 / math.sqrt(head_dim), D=head_dim, BLOCK_Q=block_q, BLOCK_KV=block_kv,
    )  # fmt: skip
