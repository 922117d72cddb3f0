"""Level 1: six matmuls in INT8 with a scale per row of each result; dP stays in 16 bit.

Idea: an INT8 matmul takes any scale that is constant along its contraction. dQ contracts over keys, so dS may have one
scale per query; dV and dK contract over queries, so P^T and dS^T may have one per key. In a split backward these are
the rows of a program's own tile: the maximum stays inside four neighbouring threads, and it is finer than the paper's
scale per block.

Level 2 is the same loop with PER_BLOCK, the paper's choice.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import (
    integer_dot,
    is_visible,
    load_padded,
    load_tile,
    load_transposed,
    round_to_int8,
    row_scale,
)


@triton.jit
def key_tile(dq_i, queries, j, keys, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Return dQ_i after key tile j. queries: QueryTile; keys: KeyHead."""
    query, q_hat_i, s_q, do_i, log_sum_exp_i, delta_i = queries
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(keys.k, key, TILE.DP)
    s_k = tl.load(keys.k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    # [Bq, Bkv]
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    p_ij = tl.math.exp2(s_ij - log_sum_exp_i[:, None])
    if IS_MASKED:
        p_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), p_ij, 0.0)
    v_j = load_tile(keys.v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    dp_ij = tl.dot(do_i, tl.trans(v_j))
    ds_ij = p_ij * (dp_ij - delta_i[:, None])
    s_ds, inverse = row_scale(ds_ij, PER_BLOCK)
    ds_hat_ij = round_to_int8(ds_ij * inverse[:, None])
    kt_hat_j = load_transposed(keys.kt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    return dq_i + integer_dot(ds_hat_ij, tl.trans(kt_hat_j)) * (s_ds * s_k)[:, None]


@triton.jit
def query_tile(
    dk_j, dv_j, keys, i, queries, n_q, n_k,
    TILE: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Return dK_j and dV_j after query tile i. keys: KeyTile; queries: QueryHead."""
    key, k_hat_j, s_k, v_j = keys
    query = i * TILE.BLOCK_Q + tl.arange(0, TILE.BLOCK_Q)
    q_hat_i = load_padded(queries.q, query, TILE.DP)
    s_q = tl.load(queries.q.scale + i * TILE.BLOCK_Q // TILE.SCALE_BLOCK)
    log_sum_exp_i = tl.load(queries.log_sum_exp + query)
    # [Bkv, Bq]
    st_ij = integer_dot(k_hat_j, tl.trans(q_hat_i)) * (s_q * s_k)[:, None]
    pt_ij = tl.math.exp2(st_ij - log_sum_exp_i[None, :])
    if IS_MASKED:
        pt_ij = tl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    if PER_BLOCK:  # a key past the end must not widen the block's scale
        pt_ij = tl.where(key[:, None] < n_k, pt_ij, 0.0)
    s_p, inverse = row_scale(pt_ij, PER_BLOCK)
    pt_hat_ij = round_to_int8(pt_ij * inverse[:, None])
    dot_hat_i = load_transposed(queries.dot, i * TILE.BLOCK_Q, TILE.DP, TILE.BLOCK_Q)
    s_do = tl.load(queries.dot.scale + i * TILE.BLOCK_Q // TILE.SCALE_BLOCK)
    dv_j += integer_dot(pt_hat_ij, tl.trans(dot_hat_i)) * (s_p * s_do)[:, None]
    do_i = load_tile(queries.do, i * TILE.BLOCK_Q, n_q, TILE.BLOCK_Q, TILE, True)
    dpt_ij = tl.dot(v_j, tl.trans(do_i))
    dst_ij = pt_ij * (dpt_ij - tl.load(queries.delta + query)[None, :])
    s_ds, inverse = row_scale(dst_ij, PER_BLOCK)
    dst_hat_ij = round_to_int8(dst_ij * inverse[:, None])
    qt_hat_i = load_transposed(queries.qt, i * TILE.BLOCK_Q, TILE.DP, TILE.BLOCK_Q)
    dk_j += integer_dot(dst_hat_ij, tl.trans(qt_hat_i)) * (s_ds * s_q)[:, None]
    return dk_j, dv_j
