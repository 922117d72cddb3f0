"""One tile of INT8 scores per Triton program."""

import torch  # noqa: F401, the worked value needs it
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scores_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, s_ptr, n_q, n_k, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the tile S_ij [BLOCK_Q, BLOCK_KV] of S [n_q, n_k]."""
    i, j = tl.program_id(0), tl.program_id(1)
    query, key, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), j * BLOCK_KV + tl.arange(0, BLOCK_KV), tl.arange(0, D)
    ### SOLUTION: load Q^_i and K^_j, multiply integers, apply the scales, store S_ij
    q_hat_i = tl.load(q_ptr + query[:, None] * D + d[None, :])  # [Bq, D]
    k_hat_j = tl.load(k_ptr + key[:, None] * D + d[None, :])  # [Bkv, D]
    integers = tl.dot(q_hat_i, tl.trans(k_hat_j), out_dtype=tl.int32)
    s_ij = integers.to(tl.float32) * (c * tl.load(q_scale_ptr + i) * tl.load(k_scale_ptr + j))
    inside = (query[:, None] < n_q) & (key[None, :] < n_k)
    tl.store(s_ptr + query[:, None] * n_k + key[None, :], s_ij, mask=inside)


def int8_scores(q_hat: Tensor, q_scale: Tensor, k_hat: Tensor, k_scale: Tensor, c: float, s: Tensor) -> None:
    """Write S = c Q K^T into s, float32 [n_q, n_k].

    q_hat: int8 [Tm * Bq, D], k_hat: int8 [Tn * Bkv, D]. Rows n_q, n_k and beyond are padding and hold anything.
    q_scale: float32 [Tm], k_scale: float32 [Tn]: one scale per tile of Bq or Bkv rows. All contiguous.
    Bq and Bkv are at least 16, D at least 32, all powers of two: less is no INT8 matmul for a GPU.

    >>> q_hat, k_hat = torch.full((16, 32), 2, dtype=torch.int8), torch.full((32, 32), -3, dtype=torch.int8)
    >>> s = torch.empty(2, 3)
    >>> int8_scores(q_hat, torch.tensor([0.5]), k_hat, torch.tensor([0.1]), 0.25, s)
    >>> s  # 32 * 2 * -3 = -192, times 0.25 * 0.5 * 0.1
    tensor([[-2.4000, -2.4000, -2.4000],
            [-2.4000, -2.4000, -2.4000]])
    """
    n_q, n_k = s.shape
    block_q, block_kv = len(q_hat) // len(q_scale), len(k_hat) // len(k_scale)
    ### SOLUTION: launch scores_kernel with one program per tile of S
    grid = (triton.cdiv(n_q, block_q), triton.cdiv(n_k, block_kv))
    scores_kernel[grid](
        q_hat, q_scale, k_hat, k_scale, s, n_q, n_k, c, D=q_hat.shape[1], BLOCK_Q=block_q, BLOCK_KV=block_kv
    )  # fmt: skip
