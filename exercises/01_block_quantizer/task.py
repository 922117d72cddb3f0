"""Tests of 01_block_quantizer."""

from exercises.task import Call, Task, off_ties, quantize

task = Task(agree=1e-06)


def rows(draw, block, blocks):
    """Draw whole blocks of rows that differ in size from block to block, so that each needs its own scale."""
    sizes = 10 ** draw.uniform(blocks, 1, low=-2, high=2)
    return draw.normal(blocks * block, draw.choice((24, 64, 80))) * sizes.repeat_interleave(block, 0)


@task.test("int8 values and one float32 scale per block", agree="form")
@task.test("values and scales", points=3)
def whole_blocks(draw):
    """The largest number of a block should become 127 or -127: is the scale max|X| / 127, of this block alone?"""
    block = draw.choice((16, 32))
    x = rows(draw, block, draw.integers(2, 5))
    x[0, 0] = 127 * 8
    x[:block].clamp_(-127 * 8, 127 * 8)
    x = off_ties(x, block)
    x[0, 1] = 0.5 * 8  # a tie in any order of operations: 0.5 goes to 0
    yield Call("quantize_block", (x, block))


@task.test("a smaller last block, and zeros", points=2)
def edges(draw):
    """The last block may be smaller than block_size."""
    block = draw.choice((16, 32))
    x = off_ties(rows(draw, block, draw.integers(2, 5))[: -draw.integers(1, block)], block)
    yield Call("quantize_block", (x, block))
    zeros = x.clone()
    zeros[:block] = 0
    yield Call("quantize_block", (zeros, block))


@task.test("back to float32", points=2, agree="entries")
def back(draw):
    """s * X^ should be X up to rounding: has every row the scale of its own block?"""
    block = draw.choice((16, 32))
    values, scale = quantize(rows(draw, block, 7)[: draw.integers(70, 100)], block)
    yield Call("dequantize_block", (values, scale[:, None], block))
