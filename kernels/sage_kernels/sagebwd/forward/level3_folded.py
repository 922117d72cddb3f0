"""Level 3: Algorithm 1 without conversion instructions.

Idea: converting between integers and floats is an instruction of its own, slower than an addition, and level 2 needs
three per score. Let the int32 accumulators start at the bit pattern of ROUNDER = 1.5 * 2^23: their bits then *are* the
float ROUNDER + A^ B^. The exponent's one multiply-add takes ROUNDER out again, together with the maximum, and puts in
the factor 127; adding ROUNDER to 127 P~ leaves round(127 P~) in the low byte.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import (
    ROUNDER,
    folded_softmax,
    is_visible,
    load_padded,
    load_transposed,
    low_byte,
    offset_dot,
)


@triton.jit
def key_tile(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    # [Bq, Bkv], ROUNDER too large
    s_ij = offset_dot(q_hat_i, tl.trans(k_hat_j), TILE.BLOCK_Q, TILE.BLOCK_KV)
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    p_ij, s_p, m_new, l, rescale = folded_softmax(s_ij, s_q * s_k, m, l, IS_MASKED)
    vt_hat_j = load_transposed(vt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    s_pv = s_p * tl.load(vt.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    pv_ij = offset_dot(low_byte(p_ij), tl.trans(vt_hat_j), TILE.BLOCK_Q, TILE.DP) - ROUNDER
    o_i = o_i * rescale[:, None] + pv_ij * s_pv[:, None]
    return m_new, l, o_i
