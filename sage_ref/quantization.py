"""psi, the INT8 quantiser of both papers, and the exact integer matmul it feeds.

psi(X) = (s, X^):   s = max|X| / 127 over one block,   X^ = round(X / s) in [-127, 127].

A block is any rectangle of the last two axes: a tile, a token (one row), a channel (one column) or
the whole matrix. An INT8 matmul can use a scale only if it is constant along the contraction:
(s_a A^)(s_b B^) = s_a s_b (A^ B^) leaves the integers alone just then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sage_ref.checks import check_block_shape, check_choice, check_dense, check_has_data, check_matrix
from sage_ref.shapes import block_that_fits, in_blocks

INT8_MAX = 127
ROUNDINGS = ("nearest", "stochastic", "ordered")
# float32 holds every integer up to 2^24, so a dot product of at most this many INT8 pairs is exact in it.
EXACT_FLOAT32_CONTRACTION = 2**24 // 128**2
BlockShape = tuple[int | None, int | None]  # (rows, columns) that share a scale; None: the whole axis


@dataclass(frozen=True)
class QuantizedTensor:
    """X ~ scale * values: int8 [..., R, C], and [..., ceil(R/rows), ceil(C/columns)] in float32 or wider."""

    values: Tensor
    scale: Tensor
    block_shape: tuple[int, int]

    @property
    def mT(self) -> "QuantizedTensor":
        """The transpose, scales and all."""
        return QuantizedTensor(self.values.mT, self.scale.mT, self.block_shape[::-1])

    def dequantize(self) -> Tensor:
        """Return scale * values, [..., R, C], in the dtype of scale."""
        rows, columns = self.values.shape[-2:]
        return self.values.to(self.scale.dtype) * spread(self.scale, self.block_shape, rows, columns)


def quantize(
    x: Tensor,
    block_shape: BlockShape = (None, None),
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> QuantizedTensor:
    """Compute psi(X): INT8 values with one scale per block of x.

    A block of zeros gets scale 0. A block so small that its scale is subnormal becomes zeros. A block that holds a NaN
    or an infinity gets a scale that makes all its values NaN when dequantised; other blocks are not affected. Entries
    may be as large as their dtype allows.

    Args:
        x: [..., R, C], floating, dense and not empty.
        block_shape: The (rows, columns) that share a scale, each at least 1; None or a longer side is the whole axis.
        rounding: "nearest" (ties to even); "stochastic": up with a probability equal to the fraction, so that the
            expected value is X itself; "ordered": up where the fraction exceeds a threshold that row and column fix
            (`ordered_thresholds`), so that the mean over neighbours is close to X.
        generator: Source of the stochastic draws; None means torch's global one.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it.
    """
    integers, scale, block_shape = _round_to_grid(x, block_shape, rounding, generator)
    shape = tuple(size if block is None else block for size, block in zip(x.shape[-2:], block_shape, strict=True))
    rows, columns = ((size + block - 1) // block for size, block in zip(x.shape[-2:], shape, strict=True))
    return QuantizedTensor(integers.to(torch.int8), scale[..., :rows, :columns], shape)


def fake_quantize(
    x: Tensor,
    block_shape: BlockShape = (None, None),
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round x to its own INT8 grid: quantize(x, ...).dequantize() without the detour through int8."""
    integers, scale, block_shape = _round_to_grid(x, block_shape, rounding, generator)
    return integers.mul_(spread(scale, block_shape, *x.shape[-2:]))


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute A^ B^ of two int8 tensors [..., M, K] x [..., K, N] -> int32 [..., M, N], exactly.

    It runs on float32 units: no dot product of 1024 int8 pairs exceeds 2^24, the last integer before float32 has gaps.
    Longer contractions are summed in int32, piece by piece.
    """
    for name, x in (("a", a), ("b", b)):
        check_dense(name, x)
        check_has_data(name, x)
        if x.dtype != torch.int8:
            raise TypeError(f"{name}: expected dtype torch.int8, got {x.dtype}")
        if x.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions, got shape {tuple(x.shape)}")
    if b.shape[-2] != a.shape[-1]:
        raise ValueError(f"b: expected {a.shape[-1]} rows, as many as a has columns, got shape {tuple(b.shape)}")
    for one, other in zip(a.shape[-3::-1], b.shape[-3::-1], strict=False):
        if one != other and 1 not in (one, other):
            raise ValueError(f"b: expected to broadcast with a of shape {tuple(a.shape)}, got {tuple(b.shape)}")
    if a.shape[-1] * 128**2 >= 2**31:
        raise ValueError(f"a: expected at most {2**31 // 128**2 - 1} columns (int32 range), got {a.shape[-1]}")
    pieces = zip(a.split(EXACT_FLOAT32_CONTRACTION, dim=-1), b.split(EXACT_FLOAT32_CONTRACTION, dim=-2), strict=True)
    return sum((x.float() @ y.float()).to(torch.int32) for x, y in pieces)


def quantized_matmul(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """Compute MM(A^, B^) s_A s_B: an exact integer matmul, then the two scales.

    a [..., M, K], b [..., K, N]; each scale must be constant along K, else ValueError.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, QuantizedTensor):
            raise TypeError(f"{name}: expected a QuantizedTensor, got {type(x).__name__}")
    for name, scale_count in (("a", a.scale.shape[-1]), ("b", b.scale.shape[-2])):
        if scale_count != 1:
            raise ValueError(f"{name}: expected one scale along the contraction, got {scale_count}")
    rows, columns = a.values.shape[-2], b.values.shape[-1]
    s_a = spread(a.scale, (a.block_shape[0], 1), rows, 1)
    s_b = spread(b.scale, (1, b.block_shape[1]), 1, columns)
    return integer_matmul(a.values, b.values) * s_a * s_b


def _round_to_grid(x, block_shape, rounding, generator):
    """Return round(X / s) as floats, s, and the block shape that fits."""
    check_matrix("x", x)
    check_block_shape(block_shape)
    check_choice("rounding", rounding, ROUNDINGS)
    sides = zip(x.shape[-2:], block_shape, strict=True)
    block_shape = tuple(None if block is None else block_that_fits(block, size) for size, block in sides)
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # in float16, s of a small gradient underflows
    largest = block_max(x, *block_shape)
    # By a tensor: dividing by a number, CUDA multiplies by its rounded inverse, and a tie at max|X| / 2 may flip.
    scale = largest / torch.full_like(largest, INT8_MAX)
    # A subnormal s has too few digits: X / s would leave the INT8 range.
    divisor = torch.where(scale < torch.finfo(scale.dtype).tiny, 1, scale)
    ratio = x / spread(divisor, block_shape, *x.shape[-2:])
    if rounding == "nearest":
        integers = ratio.round_()
    else:
        if rounding == "stochastic":
            added = torch.rand(ratio.shape, dtype=ratio.dtype, device=ratio.device, generator=generator)
        else:
            added = ordered_thresholds(*ratio.shape[-2:], ratio)
        integers = ratio.add_(added).floor_().clamp_(-INT8_MAX, INT8_MAX)
    # An infinity divides to NaN and a NaN has no integer: the block's scale carries both.
    return torch.nan_to_num_(integers, nan=0.0), torch.where(scale.isfinite(), scale, torch.nan), block_shape


def ordered_thresholds(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return what ordered dither adds before it rounds down: an 8 x 8 pattern, repeated over [rows, columns].

    The numbers are 1/128, 3/128, ... 127/128. Eight neighbours in a row are in different eighths of (0, 1), and so are
    eight on a diagonal: P may depend on the distance of query and key alone. dtype and device are those of `like`.
    """
    row, column = (torch.arange(size, device=like.device) for size in (rows, columns))
    eighth, part = (column[None, :] + 2 * row[:, None]) % 8, (5 * row % 8)[:, None]
    return ((eighth + (part + 0.5) / 8) / 8).to(like.dtype)


def block_max(x, rows, columns):
    """Return max|X| of each block, [..., ceil(R/rows), ceil(C/columns)]; None is the whole axis.

    The last blocks may be partial, and compiled code has one block of zeros more (see `in_blocks`).
    """
    x = x.abs()
    for axis, block in ((-1, columns), (-2, rows)):
        if block is None:
            x = x.amax(axis, keepdim=True)
        elif block > 1:
            x = in_blocks(x, axis, block).amax(-1)
    return x


def spread(scale, block_shape, rows, columns):
    """Repeat scale [..., blocks, blocks] over its blocks and cut it to [..., rows, columns].

    Size 1 broadcasts, and None is the whole axis.
    """
    for axis, block, size in ((-2, block_shape[0], rows), (-1, block_shape[1], columns)):
        if block in (None, 1):
            continue
        if torch.compiler.is_compiling():  # cutting, or asking whether there is one block, would fix the size
            scale = scale.index_select(axis, torch.arange(size, device=scale.device) // block)
        elif scale.shape[axis] != 1:
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale
