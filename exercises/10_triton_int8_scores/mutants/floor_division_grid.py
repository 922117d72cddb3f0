HINT = "grid"

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, s_ptr, n_q, n_k, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    query, key, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), j * BLOCK_KV + tl.arange(0, BLOCK_KV), tl.arange(0, D)
    q_hat_i = tl.load(q_ptr + query[:, None] * D + d[None, :])
    k_hat_j = tl.load(k_ptr + key[:, None] * D + d[None, :])
    integers = tl.dot(q_hat_i, tl.trans(k_hat_j), out_dtype=tl.int32)
    s_ij = integers.to(tl.float32) * (c * tl.load(q_scale_ptr + i) * tl.load(k_scale_ptr + j))
    inside = (query[:, None] < n_q) & (key[None, :] < n_k)
    tl.store(s_ptr + query[:, None] * n_k + key[None, :], s_ij, mask=inside)


def int8_scores(q_hat, q_scale, k_hat, k_scale, c, s):
    n_q, n_k = s.shape
    block_q, block_kv = len(q_hat) // len(q_scale), len(k_hat) // len(k_scale)
    scores_kernel[(n_q // block_q, n_k // block_kv)](
        q_hat, q_scale, k_hat, k_scale, s, n_q, n_k, c, D=q_hat.shape[1], BLOCK_Q=block_q, BLOCK_KV=block_kv
    )
