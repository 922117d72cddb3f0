"""The preparation of an INT8 backward program, in one launch: delta, dO^ and the transposes of dO^, Q^ and K^.

Of Q^ and K^ the forward pass keeps one copy, to save memory; the matmuls that contract over tokens want the other.

NaN: a GPU's maximum passes over it, and INT8 has none. So a query whose L or delta is NaN spoils the scales of its
block, of Q^ and of dO^, and through them every gradient that the block reaches.

Units, for levels 5 and 6. They keep P and dS in float16, and level 5 keeps dQ in sums of integers. Both need bounds
that are known before:
- P is stretched by 2^15 and dP - delta by `fit`, the power of two that makes it just fit: |dP - delta| is at most
  2 D max|dO| max|V|, and |dS| = P (1 - P) |dP - its mean over the other keys| at most a quarter of that.
- The parts of dQ are rounded to integers, in a unit per block of queries that keeps the sums within 31 bits: rows of P
  add up to one, so a row of |dS| adds up to the bound above at most, and dQ is at most max|K| times that.
Both bounds come from scales: 127 s is the largest number of a block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import last_axis_contiguous, strided
from sage_kernels.common.quantize import (
    SCALE_BLOCK,
    Quantized,
    empty_copies,
    load_block,
    padded_length,
    psi,
    store_transposed,
)

STRETCH = tl.constexpr(15)  # log2; of P, for float16 ends at 2^16
LARGEST_SUM = tl.constexpr(30)  # log2; of the sums of dQ, for int32 ends at 2^31
WARPS = 8


class Units(NamedTuple):
    """Additional inputs of levels 5 and 6: see `store_units`. Level 6 needs neither step nor unit."""

    log_sum_exp: Tensor  # [B, H, Nq padded]: L - 15
    delta: Tensor  # [B, H, Nq padded]: delta fit
    factors: Tensor  # [B, H, blocks, 4]: s_Q, fit, s_Q 2^-15 / fit, s_dO 2^-15
    step: Tensor  # [B, H, blocks]: what turns dS K, stretched and fitted as it is, into integers of dQ
    unit: Tensor  # [B, H, blocks]: what turns such an integer back into dQ / c
    sums: Tensor | None = None  # int32 [B, H, Nq padded, Dp], zeros: where level 5 adds these up, once


class Prepared(NamedTuple):
    q_hat: Quantized  # with its transpose; its scale is NaN in blocks whose L or delta is
    k_hat: Quantized
    do_hat: Quantized
    delta: Tensor  # float32 [B, H, Nq padded]: rowsum(dO * O)
    units: Units | None


class UnitPointers(NamedTuple):
    """`Units` in a kernel, each where its head begins."""

    log_sum_exp: tl.tensor
    delta: tl.tensor
    factors: tl.tensor
    step: tl.tensor
    unit: tl.tensor


@triton.jit
def largest_of_scales(pointer, blocks, BLOCK: tl.constexpr):
    """Return 127 times the largest of so many scales: the largest number that they stand for, NaN passed over."""
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        scale = tl.load(pointer + block, mask=block < blocks, other=0.0)
        largest = tl.maximum(largest, tl.where(scale < float("inf"), scale, 0.0))
    return 127 * tl.max(largest, 0)


@triton.jit
def store_units(
    units, s_q, s_do, log_sum_exp_i, delta_i, block, s_k_ptr, range_ptr, kv_blocks,
    D: tl.constexpr, BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Store the units of a block of queries. s_k_ptr, range_ptr: scales of its head's keys, ranges of its values."""
    visible = kv_blocks
    if IS_CAUSAL:  # what comes later must not change a bit; blocks of queries and of keys are equally long
        visible = tl.minimum(kv_blocks, block + 1)
    largest_do = 127 * tl.where(s_do < float("inf"), s_do, 0.0)
    bound = 2 * D * largest_do * largest_of_scales(range_ptr, visible, BLOCK)
    bound = tl.log2(tl.minimum(tl.maximum(bound, 1e-30), 1e37))
    bits = tl.floor(-bound - tl.log2(tl.maximum(largest_of_scales(s_k_ptr, visible, BLOCK), 1e-30)) + LARGEST_SUM)
    bits = tl.minimum(tl.maximum(bits, -120.0), 120.0)  # 2^-bits is a float32
    shift = tl.floor(1 - bound)
    fit, shrink = tl.exp2(shift), tl.exp2(-shift - STRETCH)
    tl.store(units.factors + 4 * block, s_q)
    tl.store(units.factors + 4 * block + 1, fit)
    tl.store(units.factors + 4 * block + 2, s_q * shrink)
    tl.store(units.factors + 4 * block + 3, s_do * tl.exp2(0.0 - STRETCH))
    tl.store(units.step + block, tl.exp2(bits) * shrink)
    tl.store(units.unit + block, tl.exp2(-bits))
    query = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(units.log_sum_exp + query, log_sum_exp_i - STRETCH)
    tl.store(units.delta + query, delta_i * fit)


@triton.jit
def transpose_tile(values, transposed, block, n_padded, DP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    """Write the block's part of [Dp, Np] from an int8 copy [Np, Dp] of one head."""
    token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    store_transposed(
        tl.load(values + token[:, None] * DP + d[None, :]), transposed, block, n_padded, DP, BLOCK, GROUPED
    )


@triton.jit(do_not_specialize=["n_q", "n_k", "query_programs"])
def prepare_backward_program(
    do_strided, o_strided, log_sum_exp_ptr, q_hat_ptr, q_scale_ptr, k_hat_ptr, k_scale_ptr, v_range_ptr, qt_hat_ptr,
    marked_q_scale_ptr, kt_hat_ptr, dot_hat_ptr, do_scale_ptr, delta_ptr, stretched_ptr, fitted_ptr, factors_ptr,
    step_ptr, unit_ptr, sums_ptr, lengths_ptr, heads, group_size, n_q, n_q_padded, n_k_padded, query_programs,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Prepare a block of queries, or in programs after those one of keys.

    unit_ptr None: without units; sums_ptr None: without zeros for dQ's sums.
    """
    t = tl.program_id(0)
    q_blocks, kv_blocks = n_q_padded // BLOCK, n_k_padded // BLOCK
    if t < query_programs:
        block, head = t % q_blocks, (t // q_blocks).to(tl.int64)
        batch, h = head // heads, head % heads
        if lengths_ptr is not None:
            n_q = tl.load(lengths_ptr + batch)
        # [Bq, D]
        do_i = load_block(do_strided, batch, h, block, n_q, D, DP, BLOCK)
        o_i = load_block(o_strided, batch, h, block, n_q, D, DP, BLOCK)
        query = head * n_q_padded + block * BLOCK + tl.arange(0, BLOCK)
        delta_i = tl.sum(do_i * o_i, 1)
        tl.store(delta_ptr + query, delta_i)
        do_hat_i, s_do = psi(do_i)
        numbers = head * n_q_padded * DP
        store_transposed(do_hat_i, dot_hat_ptr + numbers, block, n_q_padded, DP, BLOCK, GROUPED)
        transpose_tile(q_hat_ptr + numbers, qt_hat_ptr + numbers, block, n_q_padded, DP, BLOCK, GROUPED)
        log_sum_exp_i = tl.load(log_sum_exp_ptr + query)
        nan_of_l, nan_of_delta = tl.sum(log_sum_exp_i * 0.0, 0), tl.sum(delta_i * 0.0, 0)  # 0 or NaN
        s_q, s_do = tl.load(q_scale_ptr + t) + nan_of_l + nan_of_delta, s_do + nan_of_l
        tl.store(marked_q_scale_ptr + t, s_q)
        tl.store(do_scale_ptr + t, s_do)
        if sums_ptr is not None:
            token, d = t.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
            tl.store(sums_ptr + token[:, None] * DP + d[None, :], tl.zeros([BLOCK, DP], tl.int32))
        if unit_ptr is not None:
            rows, first, kv_head = head * n_q_padded, head * q_blocks, head // group_size
            units = UnitPointers(
                stretched_ptr + rows, fitted_ptr + rows, factors_ptr + 4 * first, step_ptr + first, unit_ptr + first
            )  # fmt: skip
            s_k_ptr, range_ptr = k_scale_ptr + kv_head * kv_blocks, v_range_ptr + kv_head * kv_blocks
            store_units(
                units, s_q, s_do, log_sum_exp_i, delta_i, block, s_k_ptr, range_ptr, kv_blocks, D, BLOCK, IS_CAUSAL
            )  # fmt: skip
    else:
        t -= query_programs
        numbers = (t // kv_blocks).to(tl.int64) * n_k_padded * DP
        transpose_tile(k_hat_ptr + numbers, kt_hat_ptr + numbers, t % kv_blocks, n_k_padded, DP, BLOCK, GROUPED)


def prepare(
    grad_output: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    q_hat: Quantized,
    k_hat: Quantized,
    v_range: Tensor | None,
    start: Start,
    *,
    grouped: bool,
    is_causal: bool,
    with_sums: bool = False,
    lengths: Tensor | None = None,
) -> Prepared:
    """Prepare an INT8 backward level from grad_output and output [B, H, Nq, D] and what the forward pass left.

    v_range: max|V| / 127 of each block [B, Hkv, blocks], where units are wanted. grouped: transposes in the order of
    `tiles.group_columns`. is_causal: only units depend on it. with_sums: zeros for dQ's sums with the units, for one
    run of level 5. lengths: as in `ForwardInputs`.
    """
    grad_output, output = last_axis_contiguous(grad_output), last_axis_contiguous(output)
    batch, heads, n_q, head_dim = grad_output.shape
    kv_heads, n_k_padded, dp = k_hat.values.shape[1:]
    n_q_padded = padded_length(n_q)
    do_hat = empty_copies(grad_output, SCALE_BLOCK, transposed=True)
    q_hat_t, k_hat_t = (x.values.new_empty(*x.values.shape[:2], dp, x.values.shape[2]) for x in (q_hat, k_hat))
    marked, delta = torch.empty_like(q_hat.scale), torch.empty_like(log_sum_exp)
    units = None
    if v_range is not None:
        units = Units(
            torch.empty_like(log_sum_exp), torch.empty_like(log_sum_exp), marked.new_empty(*marked.shape, 4),
            torch.empty_like(marked), torch.empty_like(marked),
            torch.empty_like(q_hat.values, dtype=torch.int32) if with_sums else None,
        )  # fmt: skip
    query_programs = marked.numel()
    arguments = (
        strided(grad_output), strided(output), log_sum_exp,
        q_hat.values, q_hat.scale, k_hat.values, k_hat.scale, v_range,
        q_hat_t, marked, k_hat_t, do_hat.transposed, do_hat.scale, delta, *(units or [None] * len(Units._fields)),
        lengths, heads, heads // kv_heads, n_q, n_q_padded, n_k_padded, query_programs,
    )  # fmt: skip
    constants = {"D": head_dim, "DP": dp, "BLOCK": SCALE_BLOCK, "GROUPED": grouped, "IS_CAUSAL": is_causal}
    grid = (query_programs + k_hat.scale.numel(),)
    start(prepare_backward_program, grid, arguments, constants, {"num_warps": WARPS})
    q_hat, k_hat = q_hat._replace(transposed=q_hat_t, scale=marked), k_hat._replace(transposed=k_hat_t)
    return Prepared(q_hat, k_hat, do_hat, delta, units)
