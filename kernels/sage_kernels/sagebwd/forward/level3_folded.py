"""Level 3: Algorithm 1 without conversion instructions.

Idea: converting between integers and floats is an instruction of its own, slower than an addition, and level 2 needs
three per score. Let the int32 accumulators start at the bit pattern of ROUNDER = 1.5 * 2^23: their bits then *are* the
float ROUNDER + A^ B^. The exponent's one multiply-add takes ROUNDER out again, together with the maximum, and puts in
the factor 127; adding ROUNDER to 127 P~ leaves round(127 P~) in the low byte.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import (
    LOG2_INT8_MAX,
    NO_KEY,
    ROUNDER,
    TINY,
    is_visible,
    load_padded,
    load_transposed,
    low_byte,
    offset_dot,
)


@triton.jit
def folded_softmax(s_ij, s_qk, m, l, IS_MASKED: tl.constexpr):
    """(p_ij = 127 exp(S_ij - m_ij), s_p, m_new, l, rescale) from ROUNDER + integer scores and their scale per row.

    S - m_ij + log2(127) is one multiply-add: s_ij s_qk - taken_out. taken_out is large, so it is rounded; m_ij becomes
    the maximum that the rounded value stands for, which is just as good a reference point while s_qk << 1. From
    s_qk = 0.0065 on that rounding, up to 0.88 s_qk, could lift 127 P above 127.5, which wraps around in INT8; so from
    there on a little more is taken out.
    """
    if IS_MASKED:
        s_qk += TINY  # a block of zeros has scale 0, and 0 times a masked score's -inf is NaN
        m_ij = tl.maximum((tl.max(s_ij, 1) - ROUNDER) * s_qk, NO_KEY)
    else:
        m_ij = (tl.max(s_ij, 1) - ROUNDER) * s_qk
    taken_out = tl.fma(s_qk, ROUNDER, m_ij - LOG2_INT8_MAX + tl.maximum(s_qk - 0.005, 0.0))
    m_ij = tl.fma(-s_qk, ROUNDER, taken_out) + LOG2_INT8_MAX
    m_new = tl.maximum(m, m_ij)
    p_ij = tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -taken_out[:, None]))
    s_p = tl.math.exp2(m_ij - m_new) / 127.0
    rescale = tl.math.exp2(m - m_new)
    return p_ij, s_p, m_new, l * rescale + tl.sum(p_ij, 1) * s_p, rescale


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
