"""psi in one pass over memory: smooth, scale, round to INT8, and write every copy that the matmuls want.

INT8 tensor cores want both operands with the contraction index innermost. V (forward), Q, K and dO (backward) are
contracted over tokens, so their transposes are written too. All copies are padded with zeros to whole blocks of
tokens and to a power-of-two head size; no kernel needs a mask to load them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.tiles import group_columns, low_byte

SCALE_BLOCK = 128  # tokens that share a scale: queries (and rows of dO), keys or values


class Quantized(NamedTuple):
    """int8 values [B, H, Np, Dp], their transpose [B, H, Dp, Np], scale [B, H, Np / block] in float32.

    Np is N rounded up to whole blocks of 128 tokens, Dp the head size rounded up to a power of two. A copy that
    was not asked for is None.
    """

    values: Tensor | None
    transposed: Tensor | None
    scale: Tensor


def padded_length(n: int) -> int:
    return -(-n // SCALE_BLOCK) * SCALE_BLOCK


def padded_head_dim(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


@triton.jit
def psi(x):
    """(X^, s) of a float32 tile with one scale: int8, in [-127, 127], and float32."""
    # s = max|X| / 127, correctly rounded as in the reference; NaN if the block holds a NaN (which tl.max passes over)
    # or an infinity.
    largest = tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1), 0)
    scale = tl.where(largest < float("inf"), tl.math.div_rn(largest, largest * 0 + 127.0), float("nan"))
    # A subnormal s has too few digits; such a block becomes zeros, as in the reference.
    divisor = tl.where(scale < 1.1754944e-38, 1.0, scale)
    inverse = tl.math.div_rn(1.0 + divisor * 0, divisor)
    # X / s, correctly rounded: a product with 1/s, and what it missed by. The reference divides, and X = max|X| / 2 is
    # a tie that either of two neighbouring quotients would round its own way.
    ratio = x * inverse
    ratio = tl.fma(tl.fma(-ratio, divisor, x), inverse, ratio)
    return low_byte(ratio), scale


@triton.jit(do_not_specialize=["n"])
def _quantize_kernel(
    x_ptr, stride_b, stride_h, stride_n, mean_ptr, other_ptr, other_stride_b, other_stride_h, other_stride_n,
    values_ptr, transposed_ptr, scale_ptr, row_sum_ptr, block_mean_ptr, heads, n, n_padded,
    factor, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, WRITE_VALUES: tl.constexpr, WRITE_TRANSPOSED: tl.constexpr,
    WRITE_ROW_SUM: tl.constexpr, WRITE_BLOCK_MEAN: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """One program: one block of BLOCK tokens of one head."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    inside = (token[:, None] < n) & (d[None, :] < D)
    # [BLOCK, DP]
    offsets = token[:, None].to(tl.int64) * stride_n + d[None, :]
    x = tl.load(x_ptr + batch * stride_b + h * stride_h + offsets, mask=inside, other=0.0).to(tl.float32)
    if WRITE_ROW_SUM:  # delta = rowsum(dO * O)
        offsets = token[:, None].to(tl.int64) * other_stride_n + d[None, :]
        other_ptr += batch * other_stride_b + h * other_stride_h
        other = tl.load(other_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(row_sum_ptr + head * n_padded + token, tl.sum(x * other, 1), mask=token < n_padded)
    if WRITE_BLOCK_MEAN:
        mean = tl.sum(x, 0) / tl.minimum(n - block * BLOCK, BLOCK)
        tl.store(block_mean_ptr + (head * tl.cdiv(n, BLOCK) + block) * D + d, mean, mask=d < D)
    if SUBTRACT_MEAN:
        mean = tl.load(mean_ptr + head * D + d, mask=d < D, other=0.0)
        x = tl.where(inside, x - mean[None, :], 0.0)
    x_hat, scale = psi(x)
    tl.store(scale_ptr + head * (n_padded // BLOCK) + block, scale * factor)
    if WRITE_VALUES:
        tl.store(values_ptr + head * n_padded * DP + token[:, None] * DP + d[None, :], x_hat)
    if WRITE_TRANSPOSED:
        x_hat_t = tl.trans(x_hat)
        if GROUPED:
            x_hat_t = group_columns(x_hat_t, DP, BLOCK)
        tl.store(transposed_ptr + head * n_padded * DP + d[:, None] * n_padded + token[None, :], x_hat_t)


def quantize(
    x: Tensor,
    block: int,
    *,
    mean: Tensor | None = None,
    row_sum_with: Tensor | None = None,
    block_mean: bool = False,
    factor: float = 1.0,
    values: bool = True,
    transposed: bool = False,
    grouped: bool = False,
) -> tuple[Quantized, Tensor | None]:
    """psi per block of `block` tokens of x [B, H, N, D], after subtracting mean [B, H, D] if given.

    row_sum_with: a tensor O shaped like x; then the second result is rowsum(x * O), float32 [B, H, Np].
    block_mean: then the second result is the mean of each block of x, float32 [B, H, ceil(N / block), D].
    factor: multiplied into the stored scales (c log2(e) for Q), not into the values.
    grouped: the transpose in the order of `tiles.group_columns`.
    """
    batch, heads, n, head_dim = x.shape
    n_padded, dp = padded_length(n), padded_head_dim(head_dim)
    x = last_axis_contiguous(x)
    other = x if row_sum_with is None else last_axis_contiguous(row_sum_with)
    scale = x.new_empty(batch, heads, n_padded // block, dtype=torch.float32)
    x_hat = x.new_empty(batch, heads, n_padded, dp, dtype=torch.int8) if values else None
    x_hat_t = x.new_empty(batch, heads, dp, n_padded, dtype=torch.int8) if transposed else None
    row_sum = x.new_empty(batch, heads, n_padded, dtype=torch.float32) if row_sum_with is not None else None
    means = x.new_empty(batch, heads, triton.cdiv(n, block), head_dim, dtype=torch.float32) if block_mean else None
    _quantize_kernel[(n_padded // block, batch * heads)](
        x, *x.stride()[:3], mean, other, *other.stride()[:3], x_hat, x_hat_t, scale, row_sum, means, heads, n,
        n_padded, factor, D=head_dim, DP=dp, BLOCK=block, SUBTRACT_MEAN=mean is not None, WRITE_VALUES=values,
        WRITE_TRANSPOSED=transposed, WRITE_ROW_SUM=row_sum_with is not None,
        WRITE_BLOCK_MEAN=block_mean, GROUPED=grouped, num_warps=4 if block * dp <= 8192 or not transposed else 8,
    )  # fmt: skip
    return Quantized(x_hat, x_hat_t, scale), means if block_mean else row_sum


@triton.jit
def _transpose_kernel(
    values_ptr, transposed_ptr, n_padded, DP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    x_hat = tl.load(values_ptr + head * n_padded * DP + token[:, None] * DP + d[None, :])
    x_hat_t = tl.trans(x_hat)
    if GROUPED:
        x_hat_t = group_columns(x_hat_t, DP, BLOCK)
    tl.store(transposed_ptr + head * n_padded * DP + d[:, None] * n_padded + token[None, :], x_hat_t)


def transpose(values: Tensor, grouped: bool) -> Tensor:
    """int8 [B, H, Np, Dp] -> [B, H, Dp, Np]: what the backward pass makes of the forward's saved Q^ and K^."""
    batch, heads, n_padded, dp = values.shape
    transposed = values.new_empty(batch, heads, dp, n_padded)
    _transpose_kernel[(n_padded // SCALE_BLOCK, batch * heads)](
        values, transposed, n_padded, DP=dp, BLOCK=SCALE_BLOCK, GROUPED=grouped
    )
    return transposed


def last_axis_contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy if a token's D numbers don't lie side by side, as every kernel expects them to."""
    return x if x.stride(-1) == 1 else x.contiguous()
