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

from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import last_axis_contiguous, strided
from sage_kernels.common.tiles import Operand, group_columns, head_of, load_tokens, low_byte

SCALE_BLOCK = 128  # tokens that share a scale: queries (and rows of dO), keys or values; of SLA2's keys and values 64


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
    """Return (X^, s) of a float32 tile with one scale: int8, in [-127, 127], and float32."""
    scale = scale_of(largest_of(x))
    return rounded(x, scale), scale


@triton.jit
def largest_of(x):
    """Return max|X| of a float32 tile; infinity if it holds a NaN, which tl.max passes over."""
    return tl.max(tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1), 0)


@triton.jit
def scale_of(largest):
    """Return s = max|X| / 127, correctly rounded as in the reference; NaN if it is infinite."""
    return tl.where(largest < float("inf"), tl.math.div_rn(largest, largest * 0 + 127.0), float("nan"))


@triton.jit
def rounded(x, scale):
    """Return X^ = round(X / s)."""
    # A subnormal s has too few digits; such a block becomes zeros, as in the reference.
    divisor = tl.where(scale < 1.1754944e-38, 1.0, scale)
    inverse = tl.math.div_rn(1.0 + divisor * 0, divisor)
    # X / s, correctly rounded: a product with 1/s, and what it missed by. The reference divides, and X = max|X| / 2 is
    # a tie that either of two neighbouring quotients would round its own way.
    ratio = x * inverse
    ratio = tl.fma(tl.fma(-ratio, divisor, x), inverse, ratio)
    return low_byte(ratio)


class Copies(NamedTuple):
    """In a kernel: where psi of one head goes. A pointer that is None stands for a copy that nobody asked for."""

    hat: tl.tensor | None  # [Np, Dp]
    transposed: tl.tensor | None  # [Dp, Np]
    scale: tl.tensor  # [Np / block]


@triton.jit
def store_transposed(x_hat, pointer, block, n_padded, DP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    """Write the transpose of an int8 tile [BLOCK, DP] into [DP, Np]; GROUPED: in the order of `group_columns`."""
    token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    x_hat_t = tl.trans(x_hat)
    if GROUPED:
        x_hat_t = group_columns(x_hat_t, DP, BLOCK)
    tl.store(pointer + d[:, None] * n_padded + token[None, :], x_hat_t)


@triton.jit
def quantize_tile(x, out, block, n_padded, factor, DP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    """Write psi of one block, float32 [BLOCK, DP], into `Copies`. factor: multiplied into the stored scale."""
    x_hat, scale = psi(x)
    tl.store(out.scale + block, scale * factor)
    if out.hat is not None:
        token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
        tl.store(out.hat + token[:, None] * DP + d[None, :], x_hat)
    if out.transposed is not None:
        store_transposed(x_hat, out.transposed, block, n_padded, DP, BLOCK, GROUPED)


@triton.jit
def load_block(x, batch, h, block, n, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of tokens of a `Strided` tensor as float32 [BLOCK, DP], with zeros past its ends."""
    x = Operand(head_of(x, batch, h), x.stride_n)
    return load_tokens(x, block * BLOCK + tl.arange(0, BLOCK), n, D, DP, True).to(tl.float32)


@triton.jit
def without_mean(x, mean_ptr, is_token, feature, is_feature):
    """Return X - mu_K, [tokens, features]; positions past the last token or feature stay zero."""
    mean = tl.load(mean_ptr + feature, mask=is_feature, other=0.0)
    return tl.where(is_token[:, None] & is_feature[None, :], x - mean[None, :], 0.0)


@triton.jit(do_not_specialize=["n"])
def quantize_program(
    x_strided, mean_ptr, values_ptr, scale_ptr, heads, n, n_padded,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Smooth and quantise one block of BLOCK tokens of one head."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x = load_block(x_strided, head // heads, head % heads, block, n, D, DP, BLOCK)
    token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    x = without_mean(x, mean_ptr + head * D, token < n, d, d < D)
    out = Copies(values_ptr + head * n_padded * DP, None, scale_ptr + head * (n_padded // BLOCK))
    quantize_tile(x, out, block, n_padded, 1.0, DP, BLOCK, False)


def quantize(x: Tensor, block: int, start: Start = start_with_triton, *, mean: Tensor) -> Quantized:
    """Compute psi per block of `block` tokens of x [B, H, N, D] - mean [B, H, D]."""
    batch, heads, n, head_dim = x.shape
    x = last_axis_contiguous(x)
    out = empty_copies(x, block)
    arguments = strided(x), mean, out.values, out.scale, heads, n, padded_length(n)
    constants = {"D": head_dim, "DP": padded_head_dim(head_dim), "BLOCK": block}
    start(quantize_program, (padded_length(n) // block, batch * heads), arguments, constants, {})
    return out


def empty_copies(x: Tensor, block: int, *, transposed: bool = False) -> Quantized:
    """Allocate an INT8 copy of x [B, H, N, D], or its transpose instead, and the scales of its blocks."""
    batch, heads, n, head_dim = x.shape
    n_padded, dp = padded_length(n), padded_head_dim(head_dim)
    shape = (dp, n_padded) if transposed else (n_padded, dp)
    copy = x.new_empty(batch, heads, *shape, dtype=torch.int8)
    scale = x.new_empty(batch, heads, n_padded // block, dtype=torch.float32)
    return Quantized(None, copy, scale) if transposed else Quantized(copy, None, scale)
