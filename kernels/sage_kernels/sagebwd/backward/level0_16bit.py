"""Level 0: the split backward in 16 bit, the ladder's starting point.

Idea: P is recomputed tile by tile from the saved log-sum-exp, P = 2^(S - L), so that nothing of size N x N was ever
stored. Five matmuls for the gradients and two more that the split computes twice: seven in all.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import is_visible, load_tile


@triton.jit
def key_tile(dq_i, queries, j, keys, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Return dQ_i after key tile j. queries: QueryTile; keys: KeyHead."""
    query, q_i, s_q, do_i, log_sum_exp_i, delta_i = queries
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_j = load_tile(keys.k, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    # [Bq, Bkv]
    s_ij = tl.dot(q_i, tl.trans(k_j)) * s_q[:, None]
    p_ij = tl.math.exp2(s_ij - log_sum_exp_i[:, None])
    if IS_MASKED:
        p_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), p_ij, 0.0)
    v_j = load_tile(keys.v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    dp_ij = tl.dot(do_i, tl.trans(v_j))
    ds_ij = p_ij * (dp_ij - delta_i[:, None])
    return tl.dot(ds_ij.to(k_j.dtype), k_j, dq_i)


@triton.jit
def query_tile(
    dk_j, dv_j, keys, i, queries, n_q, n_k,
    TILE: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Return dK_j and dV_j after query tile i. keys: KeyTile; queries: QueryHead."""
    key, k_j, s_k, v_j = keys
    query = i * TILE.BLOCK_Q + tl.arange(0, TILE.BLOCK_Q)
    q_i = load_tile(queries.q, i * TILE.BLOCK_Q, n_q, TILE.BLOCK_Q, TILE, True)
    log_sum_exp_i = tl.load(queries.log_sum_exp + query)
    # [Bkv, Bq]
    st_ij = tl.dot(k_j, tl.trans(q_i)) * s_k[:, None]
    pt_ij = tl.math.exp2(st_ij - log_sum_exp_i[None, :])
    if IS_MASKED:
        pt_ij = tl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    do_i = load_tile(queries.do, i * TILE.BLOCK_Q, n_q, TILE.BLOCK_Q, TILE, True)
    dv_j = tl.dot(pt_ij.to(do_i.dtype), do_i, dv_j)
    dpt_ij = tl.dot(v_j, tl.trans(do_i))
    dst_ij = pt_ij * (dpt_ij - tl.load(queries.delta + query)[None, :])
    dk_j = tl.dot(dst_ij.to(q_i.dtype), q_i, dk_j)
    return dk_j, dv_j
