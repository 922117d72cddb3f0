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
from sage_kernels.common.quantize import Quantized, last_axis_contiguous, padded_head_dim, padded_length
from sage_kernels.common.tiles import NO_KEY, load_padded, softmax_features
from sage_kernels.sla2.lists import BlockLists, list_range
from sage_kernels.sla2.routing import BLOCK_KV, BLOCK_Q

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


@triton.jit
def inverse_or_zero(x):
    """1 / x, and 0 where x is 0, or so close that gradients would overflow: an empty branch adds nothing."""
    is_zero = x < SMALLEST_SUM
    return tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, x))


@triton.jit
def linear_output(q_phi_i, sums_ptr, DP: tl.constexpr):
    """(O_l, 1 / (phi(Q_i) Z_i), H_i, Z_i) of one query block whose H_i is at sums_ptr. q_phi_i: rounded as H_i is."""
    d = tl.arange(0, DP)
    h_i = tl.load(sums_ptr + d[:, None] * DP + d[None, :])
    z_i = tl.load(sums_ptr + DP * DP + d).to(tl.float32)
    inverse = inverse_or_zero(tl.sum(q_phi_i.to(tl.float32) * z_i[None, :], 1))
    return tl.dot(q_phi_i, h_i) * inverse[:, None], inverse, h_i, z_i


@triton.jit
def mixed_output(o_s, alpha_i, q_i, sums_ptr, D: tl.constexpr, DP: tl.constexpr):
    """alpha O_s + (1 - alpha) O_l of one query block."""
    q_phi_i = softmax_features(q_i.to(tl.float32), D, DP).to(sums_ptr.dtype.element_ty)
    o_l, _, _, _ = linear_output(q_phi_i, sums_ptr, DP)
    return alpha_i * o_s + (1.0 - alpha_i) * o_l


@triton.jit(do_not_specialize=["n_q", "n_k", "width"])
def sparse_forward_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, q_hat_ptr, q_scale_ptr,
    k_ptr, k_stride_b, k_stride_h, k_stride_n, k_scale_ptr, v_ptr, v_stride_b, v_stride_h, v_stride_n, v_scale_ptr,
    alpha_ptr, entries_ptr, counts_ptr, sums_ptr, o_ptr, o_s_ptr, log_sum_exp_ptr,
    heads, groups, n_q, n_k, n_q_padded, n_k_padded, width, scale,
    KEY_TILE: tl.constexpr, INT8: tl.constexpr, FUSED: tl.constexpr, SAVE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TILE_Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program: TILE_Q queries of one block. FUSED: O, with the linear branch. SAVE: O_s and L."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    kv_head, h_kv = head // groups, h // groups
    query, d = tile * TILE_Q + tl.arange(0, TILE_Q), tl.arange(0, DP)
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    block = head * tl.cdiv(n_q, BLOCK_Q) + tile * TILE_Q // BLOCK_Q
    entries_ptr += block * width
    full, count = list_range(entries_ptr, counts_ptr + block, n_k, BLOCK_KV)
    q_ptrs = q_ptr + batch * q_stride_b + h * q_stride_h + query[:, None].to(tl.int64) * q_stride_n + d[None, :]
    # [Bq, D]
    if INT8:
        q_tile = load_padded(q_hat_ptr, head * n_q_padded + query, DP, DP)
        s_q = tl.zeros([TILE_Q], tl.float32) + tl.load(q_scale_ptr + (head * n_q_padded + tile * TILE_Q) // BLOCK_Q)
        k_scale_ptr += kv_head * (n_k_padded // BLOCK_KV)
        v_scale_ptr += kv_head * (n_k_padded // BLOCK_KV)
    else:
        q_tile = tl.load(q_ptrs, mask=inside, other=0.0)
        s_q = tl.zeros([TILE_Q], tl.float32) + scale
    k_ptr += batch * k_stride_b + h_kv * k_stride_h
    v_ptr += batch * v_stride_b + h_kv * v_stride_h
    m = tl.full([TILE_Q], NO_KEY, tl.float32)
    l = tl.zeros([TILE_Q], tl.float32)
    o_i = tl.zeros([TILE_Q, DP], tl.float32)
    for entry in range(0, full):
        m, l, o_i = KEY_TILE(
            q_tile, s_q, m, l, o_i, tl.load(entries_ptr + entry), query, n_k, k_ptr, k_stride_n, k_scale_ptr,
            v_ptr, v_stride_n, v_scale_ptr, D, DP, TILE_Q, BLOCK_KV, BLOCK_KV, False, False,
        )  # fmt: skip
    for entry in range(full, count):
        m, l, o_i = KEY_TILE(
            q_tile, s_q, m, l, o_i, tl.load(entries_ptr + entry), query, n_k, k_ptr, k_stride_n, k_scale_ptr,
            v_ptr, v_stride_n, v_scale_ptr, D, DP, TILE_Q, BLOCK_KV, BLOCK_KV, False, True,
        )  # fmt: skip
    o_i = o_i * inverse_or_zero(l)[:, None]
    offsets = head * n_q * D + query[:, None] * D + d[None, :]
    if SAVE:
        tl.store(o_s_ptr + offsets, o_i.to(o_s_ptr.dtype.element_ty), mask=inside)
        # A huge L where there is no key or no query: P is then 0 in the backward pass.
        log_sum_exp = tl.where((count > 0) & (query < n_q), m + tl.math.log2(tl.where(l == 0.0, 1.0, l)), 0.0 - NO_KEY)
        tl.store(log_sum_exp_ptr + head * n_q_padded + query, log_sum_exp)
    if FUSED:
        q_i = tl.load(q_ptrs, mask=inside, other=0.0)
        o_i = mixed_output(o_i, tl.load(alpha_ptr + block), q_i, sums_ptr + block * DP * (DP + 1), D, DP)
        tl.store(o_ptr + offsets, o_i.to(o_ptr.dtype.element_ty), mask=inside)


class Forward(NamedTuple):
    """O, and for the backward pass O_s and L [B, H, Nq padded], log2-sum-exp2 of the (smoothed) scores."""

    output: Tensor | None
    sparse_output: Tensor | None
    log_sum_exp: Tensor | None


def run_forward(
    inputs: ForwardInputs, key_tile, launch: Launch, *, scale: float, fused: bool = True, save: bool = True
) -> Forward:
    """The program with loop body key_tile, for all query blocks. launch.block_q: TILE_Q.

    scale: c, for 16-bit Q; the INT8 copy carries it in its scale.
    """
    query = last_axis_contiguous(inputs.query)
    batch, heads, n_q, head_dim = query.shape
    n_k, int8 = inputs.key.shape[2], inputs.q_hat is not None
    k, v = last_axis_contiguous(inputs.key), last_axis_contiguous(inputs.value)
    q_hat = q_scale = k_scale = v_scale = None
    if int8:
        q_hat, k, v = inputs.q_hat.values, inputs.k_hat.values, inputs.v_hat.transposed
        q_scale, k_scale, v_scale = inputs.q_hat.scale, inputs.k_hat.scale, inputs.v_hat.scale
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if fused else None
    o_s = torch.empty(query.shape, dtype=query.dtype, device=query.device) if save else None
    log_sum_exp = query.new_empty(batch, heads, padded_length(n_q), dtype=torch.float32) if save else None
    # Whole blocks of queries, for L to be there wherever the backward pass reads it.
    sparse_forward_program[(padded_length(n_q) // launch.block_q, batch * heads)](
        query, *query.stride()[:3], q_hat, q_scale, k, *k.stride()[:3], k_scale, v, *v.stride()[:3], v_scale,
        inputs.alpha, *inputs.lists, inputs.sums, output, o_s, log_sum_exp, heads, heads // inputs.key.shape[1],
        n_q, n_k, padded_length(n_q), padded_length(n_k), inputs.lists.entries.shape[-1], scale * math.log2(math.e),
        KEY_TILE=key_tile, INT8=int8, FUSED=fused, SAVE=save, D=head_dim, DP=padded_head_dim(head_dim),
        TILE_Q=launch.block_q, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.max_registers,
    )  # fmt: skip
    return Forward(output, o_s, log_sum_exp)
