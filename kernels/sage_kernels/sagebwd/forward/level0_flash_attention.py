"""Level 0: FlashAttention-2 in 16 bit, the ladder's starting point.

Idea: never store S or P. A row's maximum m and sum l are kept while its keys go by tile by tile; what was added up
under the old maximum is rescaled by 2^(m_old - m_new). Memory traffic falls from O(N^2) to O(N D) per head. A score
meets c log2(e) only where the maximum is subtracted: one multiply-add does both.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import is_visible, load_tile


@triton.jit
def key_tile(m, l, o_i, q_i, s_q, query, j, k, v, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_j = load_tile(k, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    # [Bq, Bkv]
    s_ij = tl.dot(q_i, tl.trans(k_j))
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_new = tl.maximum(m, tl.max(s_ij, 1) * s_q)
    p_ij = tl.math.exp2(tl.fma(s_ij, s_q[:, None], -m_new[:, None]))
    rescale = tl.math.exp2(m - m_new)
    l = l * rescale + tl.sum(p_ij, 1)
    v_j = load_tile(v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    o_i = tl.dot(p_ij.to(v_j.dtype), v_j, o_i * rescale[:, None])
    return m_new, l, o_i
