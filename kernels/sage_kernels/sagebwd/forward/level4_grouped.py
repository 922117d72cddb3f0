"""Level 4: P never crosses threads.

Idea: after S = Q K^T a thread holds columns 2t, 2t+1, 2t+8, 2t+9 of each group of 16 keys; for P V the tensor core
wants 4t ... 4t+3 from it. Level 3 pays for the difference with shuffles between threads. But a sum over keys may run
in any order: with V^T stored in P's order (`group_columns`), nothing has to move.

`dithered_key_tile` rounds P by ordered dither, for which it takes no instruction more.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import (
    ROUNDER,
    dither,
    folded_softmax,
    group_columns,
    is_visible,
    load_padded,
    load_transposed,
    low_byte,
    offset_dot,
)


@triton.jit
def key_tile(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    return visited(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE, IS_MASKED, False)


@triton.jit
def dithered_key_tile(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    return visited(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE, IS_MASKED, True)


@triton.jit
def visited(
    m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k,
    TILE: tl.constexpr, IS_MASKED: tl.constexpr, IS_DITHERED: tl.constexpr,
):  # fmt: skip
    """Return (m, l, o_i) after key tile j."""
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    # [Bq, Bkv], ROUNDER too large
    s_ij = offset_dot(q_hat_i, tl.trans(k_hat_j), TILE.BLOCK_Q, TILE.BLOCK_KV)
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    p_ij, s_p, m_new, l, rescale = folded_softmax(s_ij, s_q * s_k, m, l, IS_MASKED, IS_DITHERED)
    vt_hat_j = load_transposed(vt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    s_pv = s_p * tl.load(vt.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    p_hat_ij = dither(p_ij, TILE.BLOCK_Q, TILE.BLOCK_KV) if IS_DITHERED else low_byte(p_ij)
    p_hat_ij = group_columns(p_hat_ij, TILE.BLOCK_Q, TILE.BLOCK_KV)
    pv_ij = offset_dot(p_hat_ij, tl.trans(vt_hat_j), TILE.BLOCK_Q, TILE.DP)
    # ROUNDER leaves through the accumulator's own multiply-add.
    o_i = (o_i * rescale[:, None] - (s_pv * ROUNDER)[:, None]) + pv_ij * s_pv[:, None]
    return m_new, l, o_i
