"""Level 1: Q K^T in INT8, P V still in 16 bit.

Idea: INT8 tensor cores run at twice the 16-bit rate and K needs half the bytes. One of two matmuls twice as fast is
at best 2 / (1/2 + 1) = 1.33 times as fast, less what the conversion of S from int32 costs.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import NO_KEY, integer_dot, is_visible, load_padded, load_tile


@triton.jit
def key_tile(m, l, o_i, q_hat_i, s_q, query, j, k, v, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    # [Bq, Bkv]
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_new = tl.maximum(m, tl.maximum(tl.max(s_ij, 1), NO_KEY))
    p_ij = tl.math.exp2(s_ij - m_new[:, None])
    rescale = tl.math.exp2(m - m_new)
    l = l * rescale + tl.sum(p_ij, 1)
    v_j = load_tile(v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    o_i = tl.dot(p_ij.to(v_j.dtype), v_j, o_i * rescale[:, None])
    return m_new, l, o_i
