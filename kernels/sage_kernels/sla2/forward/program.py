"""The forward program: softmax attention along a query block's list, then the linear branch and the mix.

The loop body KEY_TILE is the SageBwd ladder's, 16 bit or INT8; what SLA2 changes is which key blocks it visits.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, last_axis_contiguous, strided
from sage_kernels.common.quantize import Quantized, padded_head_dim, padded_length
from sage_kernels.common.tiles import (
    NO_KEY,
    Operand,
    Tile,
    head_of,
    load_padded,
    load_tokens,
    positively_scaled,
    softmax_features,
    store_tokens,
)
from sage_kernels.sla2.lists import BlockLists, list_range
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q

SMALLEST_SUM = tl.constexpr(9.8607613e-32)  # float32's tiny / eps, as in `sage_ref.sla2.branches.divisor`


class ForwardInputs(NamedTuple):
    """16-bit tensors, INT8 copies for an INT8 key_tile, the lists by query block and the linear branch's sums."""

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor
    alpha: Tensor  # float32 [B, H, Tm]
    lists: BlockLists
    sums: Tensor  # [B, H, Tm, Dp (Dp + 1)]: H_i, then Z_i
    q_hat: Quantized | None = None
    k_hat: Quantized | None = None
    v_hat: Quantized | None = None
    log2_weights: Tensor | None = None  # float32 [B, H, Tm, Tn]: log2 W of every block, in stage 1


@triton.jit
def inverse_or_zero(x):
    """Return 1 / x, and 0 where x is so close to 0 that gradients would overflow: an empty branch adds nothing."""
    is_zero = x < SMALLEST_SUM
    return tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, x))


@triton.jit
def log2_weight_at(weights_ptr, place):
    """Return log2 W of a block, and 0 where blocks have no weights: weights_ptr None."""
    return 0.0 if weights_ptr is None else tl.load(weights_ptr + place)


@triton.jit
def mixed_output(o_s, alpha_i, q_i, sums_ptr, D: tl.constexpr, DP: tl.constexpr):
    """Return alpha O_s + (1 - alpha) O_l of one query block whose H_i and Z_i are at sums_ptr."""
    d = tl.arange(0, DP)
    q_phi_i = softmax_features(q_i.to(tl.float32), D, DP).to(sums_ptr.dtype.element_ty)
    z_i = tl.load(sums_ptr + DP * DP + d).to(tl.float32)
    share = (1.0 - alpha_i) * inverse_or_zero(tl.sum(q_phi_i.to(tl.float32) * z_i[None, :], 1))
    h_i = tl.load(sums_ptr + d[:, None] * DP + d[None, :])
    return alpha_i * o_s + tl.dot(q_phi_i, h_i) * share[:, None]


@triton.jit(do_not_specialize=["n_q", "n_k", "width"])
def sla2_forward_program(
    q_strided, q_hat_ptr, q_scale_ptr, k_strided, k_scale_ptr, v_strided, v_scale_ptr, alpha_ptr, entries_ptr,
    counts_ptr, sums_ptr, weights_ptr, o_strided, o_s_ptr, log_sum_exp_ptr, heads, group_size, n_q, n_k, n_q_padded,
    n_k_padded, width, log2_scale,
    KEY_TILE: tl.constexpr, NEGATED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr,
    MASK_BLOCK_Q: tl.constexpr, MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q queries of one block.

    q_hat_ptr None: 16 bit. o_strided None: no linear branch, O_s and L alone. o_s_ptr None: O alone. weights_ptr: log2
    of the weight W_ij of each block, P_ij = W_ij 2^(S - m); relative to its own tile's scores, m is less by log2 W_ij.
    """
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, MASK_BLOCK_KV, MASK_BLOCK_KV, False)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    kv_head, h_kv = head // group_size, h // group_size
    query = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    block = head * tl.cdiv(n_q, MASK_BLOCK_Q) + tile * BLOCK_Q // MASK_BLOCK_Q
    entries_ptr += block * width
    full, count = list_range(entries_ptr, counts_ptr + block, n_k, MASK_BLOCK_KV)
    q = Operand(head_of(q_strided, batch, h), q_strided.stride_n)
    s_k_ptr = None if k_scale_ptr is None else k_scale_ptr + kv_head * (n_k_padded // MASK_BLOCK_KV)
    s_v_ptr = None if v_scale_ptr is None else v_scale_ptr + kv_head * (n_k_padded // MASK_BLOCK_KV)
    k = Operand(head_of(k_strided, batch, h_kv), k_strided.stride_n, s_k_ptr)
    v = Operand(head_of(v_strided, batch, h_kv), v_strided.stride_n, s_v_ptr)
    # [Bq, D]
    if q_hat_ptr is None:
        q_tile, s_q = positively_scaled(load_tokens(q, query, n_q, D, DP, True), log2_scale, BLOCK_Q, NEGATED)
    else:
        q_tile = load_padded(Operand(q_hat_ptr, DP), head * n_q_padded + query, DP)
        first_query = head * n_q_padded + tile * BLOCK_Q
        s_q = tl.zeros([BLOCK_Q], tl.float32) + tl.load(q_scale_ptr + first_query // MASK_BLOCK_Q)
    m = tl.full([BLOCK_Q], NO_KEY, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    weights_row = block * tl.cdiv(n_k, MASK_BLOCK_KV)
    for entry in range(0, full):
        j = tl.load(entries_ptr + entry)
        log2_weight = log2_weight_at(weights_ptr, weights_row + j)
        m, l, o_i = KEY_TILE(m - log2_weight, l, o_i, q_tile, s_q, query, j, k, v, n_k, TILE, False)
        m += log2_weight
    for entry in range(full, count):
        j = tl.load(entries_ptr + entry)
        log2_weight = log2_weight_at(weights_ptr, weights_row + j)
        m, l, o_i = KEY_TILE(m - log2_weight, l, o_i, q_tile, s_q, query, j, k, v, n_k, TILE, True)
        m += log2_weight
    o_i = o_i * inverse_or_zero(l)[:, None]
    if o_s_ptr is not None:
        store_tokens(o_i, Operand(o_s_ptr + head * n_q * D, D), query, n_q, D, DP)
        # A huge L where there is no key or no query: P is then 0 in the backward pass.
        log_sum_exp = tl.where((count > 0) & (query < n_q), m + tl.math.log2(tl.where(l == 0.0, 1.0, l)), 0.0 - NO_KEY)
        tl.store(log_sum_exp_ptr + head * n_q_padded + query, log_sum_exp)
    if o_strided is not None:
        q_i = load_tokens(q, query, n_q, D, DP, True)
        o_i = mixed_output(o_i, tl.load(alpha_ptr + block), q_i, sums_ptr + block * DP * (DP + 1), D, DP)
        store_tokens(o_i, Operand(head_of(o_strided, batch, h), o_strided.stride_n), query, n_q, D, DP)


def tile_constants(head_dim: int, launch: Launch) -> dict:
    """Return the constants of all sparse programs."""
    return {
        "D": head_dim, "DP": padded_head_dim(head_dim), "BLOCK_Q": launch.block_q, "MASK_BLOCK_Q": MASK_BLOCK_Q,
        "MASK_BLOCK_KV": MASK_BLOCK_KV,
    }  # fmt: skip


class Forward(NamedTuple):
    """O, and for the backward pass O_s and L [B, H, Nq padded], log2-sum-exp2 of the (smoothed) scores."""

    output: Tensor | None
    sparse_output: Tensor | None
    log_sum_exp: Tensor | None


def run_sparse_forward(
    inputs: ForwardInputs,
    key_tile,
    launch: Launch,
    start: Start,
    *,
    scale: float,
    fused: bool,
    save: bool,
) -> Forward:
    """Run the program with loop body key_tile, for all query blocks.

    scale: c, for 16-bit Q; the INT8 copy carries it in its scale.
    """
    query = last_axis_contiguous(inputs.query)
    batch, heads, n_q, head_dim = query.shape
    n_k = inputs.key.shape[2]
    k, v = last_axis_contiguous(inputs.key), last_axis_contiguous(inputs.value)
    q_hat = q_scale = k_scale = v_scale = None
    if inputs.q_hat is not None:
        q_hat, k, v = inputs.q_hat.values, inputs.k_hat.values, inputs.v_hat.transposed
        q_scale, k_scale, v_scale = inputs.q_hat.scale, inputs.k_hat.scale, inputs.v_hat.scale
    output = empty_in_layout_of(inputs.query) if fused else None
    o_s = query.new_empty(query.shape) if save else None
    log_sum_exp = query.new_empty(batch, heads, padded_length(n_q), dtype=torch.float32) if save else None
    # Whole blocks of queries, for L to be there wherever the backward pass reads it.
    arguments = (
        strided(query), q_hat, q_scale, strided(k), k_scale, strided(v), v_scale,
        inputs.alpha, *inputs.lists, inputs.sums, inputs.log2_weights, strided(output) if fused else None, o_s,
        log_sum_exp, heads, heads // inputs.key.shape[1],
        n_q, n_k, padded_length(n_q), padded_length(n_k), inputs.lists.entries.shape[-1], scale * math.log2(math.e),
    )  # fmt: skip
    chosen = {"KEY_TILE": key_tile, "NEGATED": q_hat is None and scale < 0}
    constants = tile_constants(head_dim, launch) | chosen
    grid = (padded_length(n_q) // launch.block_q, batch * heads)
    start(sla2_forward_program, grid, arguments, constants, launch.options)
    return Forward(output, o_s, log_sum_exp)
