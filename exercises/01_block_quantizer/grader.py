"""Grader of 01_block_quantizer."""

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, off_ties
from sage_ref.quantization import QuantizedTensor, quantize

grader = Grader("01_block_quantizer", {"quantize_block": (Tensor, Tensor), "dequantize_block": Tensor})
grader.hint("dtype", "values must be int8 and scale float32: convert after rounding.")
grader.hint("axis", "Is the scale per block, or per tensor, row or column? One number per block of rows: [blocks, 1].")
grader.hint(
    "range", "The largest number of a block should become 127 or -127: is the scale max|X| / 127, of this block alone?"
)
grader.hint("rounding", "Values are off by one here and there: nearest integer, ties to even, not truncated.")
grader.hint("divided", "Values are off by more than one. Is every number divided by the scale of its own block?")
grader.hint("zeros", "A block of zeros should come out as zeros with a finite scale. What is 0 / 0?")
grader.hint("last block", "The last block may be smaller than block_size.")
grader.hint("scale", "s * X^ should be X up to rounding: has every row the scale of its own block?")


def draw_rows(draw, block_size, blocks):
    """Whole blocks of rows that differ in size from block to block, so that each needs its own scale."""
    sizes = 10 ** draw.uniform(blocks, 1, low=-2, high=2)
    return draw.normal(blocks * block_size, draw.choice((24, 64, 80))) * sizes.repeat_interleave(block_size, 0)


@grader.test("int8 values and one float32 scale per block")
def shapes(student, draw):
    block_size, blocks = draw.choice((16, 32)), draw.integers(2, 5)
    x = draw_rows(draw, block_size, blocks)
    values, scale = student.quantize_block(x, block_size)
    for found, shape, dtype in ((values, x.shape, torch.int8), (scale, (blocks, 1), torch.float32)):
        like = torch.empty(shape, dtype=dtype, device="meta")
        expect(found.dtype == dtype, "dtype", found=found, expected=like)
        expect(found.shape == shape, "axis", found=found, expected=like)


@grader.test("values and scales", points=3)
def quantized(student, draw):
    block_size, blocks = draw.choice((16, 32)), draw.integers(2, 5)
    x = draw_rows(draw, block_size, blocks)
    x[0, 0] = 127 * 8
    x[:block_size].clamp_(-127 * 8, 127 * 8)
    x = off_ties(x, block_size)
    x[0, 1] = 0.5 * 8  # a tie in any order of operations: 0.5 goes to 0
    oracle = quantize(x, (block_size, None))
    values, scale = student.quantize_block(x, block_size)
    expect(len(scale.unique()) == blocks, "axis")
    close(scale, oracle.scale, "range", relative_l2=1e-6)
    off = (values.int() - oracle.values).abs().max()
    expect(off <= 1, "divided", found=values, expected=oracle.values)
    expect(off == 0, "rounding", found=values, expected=oracle.values)


@grader.test("a smaller last block, and zeros", points=2)
def edges(student, draw):
    block_size, blocks = draw.choice((16, 32)), draw.integers(2, 5)
    x = off_ties(draw_rows(draw, block_size, blocks)[: -draw.integers(1, block_size)], block_size)
    values, scale = student.quantize_block(x, block_size)
    expect(values.shape == x.shape and scale.shape == (blocks, 1), "last block")
    close(scale, quantize(x, (block_size, None)).scale, "last block", relative_l2=1e-6)
    x[:block_size] = 0
    (values, scale), undefined = student.quantize_block.casts(x, block_size)
    expect(values.shape == x.shape and scale.shape == (blocks, 1), "last block")
    expect(scale.isfinite().all() and (values[:block_size] == 0).all(), "zeros")
    expect(not undefined, "zeros")  # 0 / 0 as an integer is 0 on some machines, by luck
    expected = quantize(x, (block_size, None)).values
    expect(torch.equal(values, expected), "last block", found=values, expected=expected)


@grader.test("back to float32", points=2)
def dequantized(student, draw):
    block_size, rows = draw.choice((16, 32)), draw.integers(70, 100)
    x = draw_rows(draw, block_size, 7)[:rows]
    oracle = quantize(x, (block_size, None))
    back = student.dequantize_block(oracle.values, oracle.scale, block_size)
    expect(back.dtype == torch.float32, "dtype")
    close(
        back, QuantizedTensor(oracle.values, oracle.scale, oracle.block_shape).dequantize(), "scale", relative_l2=1e-6
    )
