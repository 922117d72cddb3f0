"""Grader of 09_triton_quantize."""

import torch
from torch import Tensor

from exercises.grading import Grader, Guarded, Student, expect
from sage_ref.quantization import quantize

grader = Grader("09_triton_quantize", ("quantize_blocks",), triton=True)
grader.hint("no_launch", "No Triton kernel was launched. The kernel is the exercise: launch it from this function.")
grader.hint("grid", "Is there one program for every block of rows, the last partial one included, and no other?")
grader.hint("scale", "Is the scale the block's largest magnitude divided by 127, over all its rows and columns?")
grader.hint("absolute", "The largest magnitude of a block can belong to a negative number.")
grader.hint("rounding", "Is X / s rounded to the nearest integer? Converting to int8 cuts the fraction off.")
grader.hint("load_mask", "Rows past the end are loaded into the last block: what do they do to its scale?")
grader.hint("store_mask", "Integers were written past the end of the output. Which rows may be stored?")
grader.hint("precision", "float16 has 11 bits: is the scale computed, and X divided by it, in float32?")
grader.hint(
    "small", "Is a block of small numbers scaled by its own maximum, however small? A bound below it costs digits."
)
grader.hint("speed", "Right, but slow: is every number read once, by one program per block, with no loop over rows?")
grader.hint("zeros", "What happens to a block of zeros, where X / s is 0 / 0?")

MARGIN = 1 << 14  # elements around every tensor, more than any tile
NOT_WRITTEN = -1.0


def quantized(student: Student, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """values and scale as the submission leaves them; a store outside of them fails the test."""
    values = torch.full(x.shape, -128, dtype=torch.int8)
    scale = torch.full((-(-x.shape[0] // block),), NOT_WRITTEN)
    _, (_, _, values, scale) = student.quantize_blocks.in_place(
        Guarded(x, MARGIN), block, Guarded(values, MARGIN), Guarded(scale, MARGIN)
    )
    expect(student.launches > 0, "no_launch")
    expect(values.intact, "store_mask")
    expect(scale.intact and (scale.tensor != NOT_WRITTEN).all(), "grid")
    return values.tensor, scale.tensor


def check_scale(x: Tensor, block: int, scale: Tensor, hint: str) -> None:
    expected = quantize(x, (block, None)).scale[:, 0]
    expect(((scale - expected).abs() <= 1e-6 * expected).all(), hint)


def check_values(x: Tensor, block: int, values: Tensor, scale: Tensor, hint: str) -> None:
    """Each integer is a nearest one: |X / s - X^| <= 1/2, and in [-127, 127]; a tie may go either way."""
    per_row = scale.double().repeat_interleave(block)[: len(x), None]
    expect(((x.double() / per_row - values.double()).abs() <= 0.5 + 1e-4).all(), hint)
    expect(values.min() >= -127, hint)


@grader.test("each block of rows has its scale", points=2)
def scales(student, draw):
    block = draw.choice((16, 32))
    x = draw.normal(block * draw.integers(2, 4), draw.choice((16, 32, 64)))
    x = x * (torch.arange(len(x)) // block + 1)[:, None]  # blocks differ
    # ... and the largest magnitude is positive
    x[draw.integers(0, block) :: block, draw.integers(0, 16)] = x.abs().max() * torch.arange(1, len(x) // block + 1)
    _, scale = quantized(student, x, block)
    check_scale(x, block, scale, "scale")


@grader.test("values are rounded to the nearest integer", points=2)
def rounding(student, draw):
    block = draw.choice((16, 32))
    x = draw.normal(block * 2, draw.choice((16, 32, 64)))
    x[draw.integers(0, block) :: block, draw.integers(0, 16)] = 4 + draw.uniform(2)
    values, scale = quantized(student, x, block)
    check_scale(x, block, scale, "scale")
    check_values(x, block, values, scale, "rounding")


@grader.test("the largest magnitude may be negative")
def negative(student, draw):
    block = draw.choice((16, 32))
    x = draw.normal(block * 2, draw.choice((16, 32)))
    x[draw.integers(0, block) :: block, draw.integers(0, 16)] = -6 - draw.uniform(2)
    values, scale = quantized(student, x, block)
    check_scale(x, block, scale, "absolute")
    check_values(x, block, values, scale, "absolute")


@grader.test("a last block with fewer rows", points=3)
def ragged(student, draw):
    for n in (draw.integers(1, 16), 32 * draw.integers(1, 3) + draw.integers(1, 32)):
        block = draw.choice((16, 32, 64))
        x = draw.normal(n, draw.choice((16, 32, 64)))
        values, scale = quantized(student, x, block)
        check_scale(x, block, scale, "load_mask")
        check_values(x, block, values, scale, "load_mask")


@grader.test("float16 input, float32 arithmetic")
def half(student, draw):
    block = draw.choice((16, 32))
    x = (draw.normal(block * 2, 32) * draw.uniform(1, low=0.01, high=0.1)).half()
    values, scale = quantized(student, x, block)
    check_scale(x, block, scale, "precision")
    check_values(x, block, values, scale, "precision")


@grader.test("small blocks and blocks of zeros", points=2)
def small(student, draw):
    block = draw.choice((16, 32))
    x = draw.normal(block * 3, 16) * 1e-7
    values, scale = quantized(student, x, block)
    check_scale(x, block, scale, "small")
    check_values(x, block, values, scale, "small")
    zeros = slice(block, 2 * block)
    x[zeros] = 0
    values, scale = quantized(student, x, block)
    expect((values[zeros] == 0).all() and 0 <= scale[1] <= 1e-20, "zeros")
    check_scale(x[zeros.stop :], block, scale[2:], "small")


def many_rows(draw):
    n, block, head_dim = 32768, 64, 64
    x = draw.normal(n, head_dim, dtype=torch.float16)
    return x, block, torch.empty(n, head_dim, dtype=torch.int8), torch.empty(n // block)


def library(x, block, *_):
    """What the exercise imitates: psi of the repository's kernels."""
    from sage_kernels.common.quantize import quantize as quantize_on_gpu

    quantize_on_gpu(x[None, None], block)


grader.speed_test("as fast as the library", "quantize_blocks", many_rows, library, slower=3.0, hint="speed")
