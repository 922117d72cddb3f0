"""The loop bodies of SLA2's portable backward programs, in 16 bit, and what they are given.

They differ from level 0 of the SageBwd ladder in two ways. S may come from the INT8 copies of the forward pass, so that
P = 2^(S - L) is the forward's ("matched"). And a block may have a weight W between 0 and 1, as in stage 1:
P = W 2^(S - L), whose gradient is dW = sum of dS over the tile, divided by W.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from sage_kernels.common.tiles import Operand, integer_dot, load_padded, load_tile


class QueryTile(NamedTuple):
    """The queries that a program of dQ holds."""

    q_i: tl.tensor  # [Bq, D]
    q_hat_i: tl.tensor | None  # INT8 [Bq, D]
    s_q: tl.tensor  # the scale of Q^, which has c log2(e) in it, or c log2(e)
    do_i: tl.tensor  # [Bq, D]
    log_sum_exp_i: tl.tensor  # [Bq]
    delta_i: tl.tensor  # [Bq]


class KeyTile(NamedTuple):
    """The keys and values that a program of dK and dV holds."""

    k_j: tl.tensor  # [Bkv, D]
    k_hat_j: tl.tensor | None  # INT8 [Bkv, D]
    s_k: tl.tensor  # the scale of K^, or 1
    v_j: tl.tensor  # [Bkv, D]


class QueryHead(NamedTuple):
    """One head's operands from which tiles of queries are read."""

    q: Operand
    q_hat: Operand | None  # with one scale per block of the mask, as is k_hat
    do: Operand
    log_sum_exp: tl.tensor  # pointer, as is delta
    delta: tl.tensor


class KeyHead(NamedTuple):
    """One head's operands from which tiles of keys are read."""

    k: Operand
    k_hat: Operand | None
    v: Operand


@triton.jit
def key_tile(dq_i, queries, j, keys, log2_weight, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    """Return dQ_i after key tile j, and the sum of dS_ij. queries: QueryTile; keys: KeyHead; log2_weight: of W_ij."""
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_j = load_tile(keys.k, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    # [Bq, Bkv]
    if keys.k_hat is None:
        s_ij = tl.dot(queries.q_i, tl.trans(k_j)) * queries.s_q
    else:
        k_hat_j = load_padded(keys.k_hat, key, TILE.DP)
        s_ij = integer_dot(queries.q_hat_i, tl.trans(k_hat_j)) * (queries.s_q * tl.load(keys.k_hat.scale + j))
    p_ij = tl.math.exp2(s_ij - (queries.log_sum_exp_i - log2_weight)[:, None])
    if IS_MASKED:
        p_ij = tl.where(key[None, :] < n_k, p_ij, 0.0)
    v_j = load_tile(keys.v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    dp_ij = tl.dot(queries.do_i, tl.trans(v_j))
    ds_ij = p_ij * (dp_ij - queries.delta_i[:, None])
    return tl.dot(ds_ij.to(k_j.dtype), k_j, dq_i), tl.sum(tl.sum(ds_ij, 1), 0)


@triton.jit
def query_tile(dk_j, dv_j, keys, i, queries, log2_weight, n_q, log2_scale, TILE: tl.constexpr):
    """Return dK_j and dV_j after query tile i. keys: KeyTile; queries: QueryHead."""
    query = i * TILE.BLOCK_Q + tl.arange(0, TILE.BLOCK_Q)
    q_i = load_tile(queries.q, i * TILE.BLOCK_Q, n_q, TILE.BLOCK_Q, TILE, True)
    log_sum_exp_i = tl.load(queries.log_sum_exp + query) - log2_weight
    # [Bkv, Bq]
    if queries.q_hat is None:
        st_ij = tl.dot(keys.k_j, tl.trans(q_i)) * log2_scale
    else:
        q_hat_i = load_padded(queries.q_hat, query, TILE.DP)
        s_q = tl.load(queries.q_hat.scale + i * TILE.BLOCK_Q // TILE.SCALE_BLOCK)
        st_ij = integer_dot(keys.k_hat_j, tl.trans(q_hat_i)) * (s_q * keys.s_k)
    pt_ij = tl.math.exp2(st_ij - log_sum_exp_i[None, :])
    do_i = load_tile(queries.do, i * TILE.BLOCK_Q, n_q, TILE.BLOCK_Q, TILE, True)
    dv_j = tl.dot(pt_ij.to(do_i.dtype), do_i, dv_j)
    dpt_ij = tl.dot(keys.v_j, tl.trans(do_i))
    dst_ij = pt_ij * (dpt_ij - tl.load(queries.delta + query)[None, :])
    dk_j = tl.dot(dst_ij.to(q_i.dtype), q_i, dk_j)
    return dk_j, dv_j
