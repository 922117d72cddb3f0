"""Level 3: no conversion instructions, no shuffles, and dK and dV in two programs where one would spill.

Ideas: the forward's levels 3 and 4 (ROUNDER in the accumulators, group_columns), and a measurement: at D = 128 two
float32 accumulators of [Bkv, D] and their int32 temporaries exceed the 255 registers of a thread, so the compiler
spills them to memory. Recomputing S once more in a program of its own is cheaper than that.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import (
    ROUNDER,
    group_columns,
    is_visible,
    load_padded,
    load_tile,
    load_transposed,
    low_byte,
    offset_dot,
    row_scale,
)


@triton.jit
def key_tile(dq_i, queries, j, keys, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Return dQ_i after key tile j. queries: QueryTile; keys: KeyHead."""
    query, q_hat_i, s_q, do_i, log_sum_exp_i, delta_i = queries
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(keys.k, key, TILE.DP)
    s_k = tl.load(keys.k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    # [Bq, Bkv], ROUNDER too large
    s_ij = offset_dot(q_hat_i, tl.trans(k_hat_j), TILE.BLOCK_Q, TILE.BLOCK_KV)
    s_qk = s_q * s_k
    # taken_out is large, hence rounded: P is off by a factor per row, which s_ds below corrects.
    taken_out = s_qk * ROUNDER + log_sum_exp_i
    p_ij = tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -taken_out[:, None]))
    correction = tl.math.exp2(tl.fma(-s_qk, ROUNDER, taken_out) - log_sum_exp_i)
    if IS_MASKED:
        p_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), p_ij, 0.0)
    v_j = load_tile(keys.v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    dp_ij = tl.dot(do_i, tl.trans(v_j))
    ds_ij = p_ij * (dp_ij - delta_i[:, None])
    s_ds, inverse = row_scale(ds_ij, PER_BLOCK)
    ds_hat_ij = group_columns(low_byte(ds_ij * inverse[:, None]), TILE.BLOCK_Q, TILE.BLOCK_KV)
    kt_hat_j = load_transposed(keys.kt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    s_dq = s_ds * s_k * correction
    return (dq_i - (s_dq * ROUNDER)[:, None]) + offset_dot(ds_hat_ij, tl.trans(kt_hat_j), TILE.BLOCK_Q, TILE.DP) * s_dq[
        :, None
    ]


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
    # [Bkv, Bq], ROUNDER too large
    st_ij = offset_dot(k_hat_j, tl.trans(q_hat_i), TILE.BLOCK_KV, TILE.BLOCK_Q)
    pt_ij = tl.math.exp2((st_ij - ROUNDER) * (s_q * s_k)[:, None] - log_sum_exp_i[None, :])
    if IS_MASKED:
        pt_ij = tl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    if WITH_DV:
        s_p, inverse = row_scale(pt_ij, PER_BLOCK)
        pt_hat_ij = group_columns(low_byte(pt_ij * inverse[:, None]), TILE.BLOCK_KV, TILE.BLOCK_Q)
        dot_hat_i = load_transposed(queries.dot, i * TILE.BLOCK_Q, TILE.DP, TILE.BLOCK_Q)
        s_dv = s_p * tl.load(queries.dot.scale + i * TILE.BLOCK_Q // TILE.SCALE_BLOCK)
        pdo_ij = offset_dot(pt_hat_ij, tl.trans(dot_hat_i), TILE.BLOCK_KV, TILE.DP)
        dv_j = (dv_j - (s_dv * ROUNDER)[:, None]) + pdo_ij * s_dv[:, None]
    if WITH_DK:
        do_i = load_tile(queries.do, i * TILE.BLOCK_Q, n_q, TILE.BLOCK_Q, TILE, True)
        dpt_ij = tl.dot(v_j, tl.trans(do_i))
        dst_ij = pt_ij * (dpt_ij - tl.load(queries.delta + query)[None, :])
        s_ds, inverse = row_scale(dst_ij, PER_BLOCK)
        dst_hat_ij = group_columns(low_byte(dst_ij * inverse[:, None]), TILE.BLOCK_KV, TILE.BLOCK_Q)
        qt_hat_i = load_transposed(queries.qt, i * TILE.BLOCK_Q, TILE.DP, TILE.BLOCK_Q)
        s_dk = s_ds * s_q
        dsq_ij = offset_dot(dst_hat_ij, tl.trans(qt_hat_i), TILE.BLOCK_KV, TILE.DP)
        dk_j = (dk_j - (s_dk * ROUNDER)[:, None]) + dsq_ij * s_dk[:, None]
    return dk_j, dv_j
