"""Level 2: both matmuls in INT8, the paper's Algorithm 1.

Idea: P~ = exp(S - m) needs no search for its scale, one per token: s_P = exp(rowmax(S_ij) - m_new) / 127 comes out of
the online softmax. V is read transposed, since INT8 tensor cores want the contraction index innermost. Both matmuls
twice as fast would be 2 times level 0; four conversions per score (S to float, P to INT8, P V to float) eat into it.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import NO_KEY, integer_dot, is_visible, load_padded, load_transposed, round_to_int8

ROUNDING = tl.constexpr(2.0**-23)  # relative; no product in float32 is off by more


@triton.jit
def key_tile(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    # [Bq, Bkv]
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_ij = tl.maximum(tl.max(s_ij, 1), NO_KEY)
    # A compiler may turn the product and the subtraction below into one multiply-add, which does not round the product.
    # A very large S_ij would then exceed its rounded maximum, and 127 P~ round to 128, which is -128 in INT8.
    m_ij += tl.abs(m_ij) * ROUNDING
    m_new = tl.maximum(m, m_ij)
    # 2^(S_ij - m_ij) = P~ / (127 s_P): the scale cancels m_new.
    p_ij = tl.math.exp2(s_ij - m_ij[:, None])
    s_p = tl.math.exp2(m_ij - m_new)
    rescale = tl.math.exp2(m - m_new)
    l = l * rescale + tl.sum(p_ij, 1) * s_p
    p_hat_ij = round_to_int8(p_ij * 127.0)
    vt_hat_j = load_transposed(vt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    s_v = tl.load(vt.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    o_i = o_i * rescale[:, None] + integer_dot(p_hat_ij, tl.trans(vt_hat_j)) * (s_p * (s_v / 127.0))[:, None]
    return m_new, l, o_i
