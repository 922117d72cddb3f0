"""Tests of 09_triton_quantize."""

import torch

from exercises.task import Call, Task, off_ties

task = Task(triton=True, agree=1e-06)


def call(x, block):
    values, scale = torch.full(x.shape, -128, dtype=torch.int8), torch.full((-(-len(x) // block),), -1.0)
    return Call("quantize_blocks", (off_ties(x.float(), block).to(x.dtype), block, values, scale), outputs=2)


@task.test("each block of rows has its scale", points=3, parts=(1,))
@task.test("values are rounded to the nearest integer", points=2)
def blocks(draw):
    """Is s the block's largest magnitude / 127, over all rows and columns, and X / s rounded to nearest?"""
    # Draw two blocks or more that differ; the largest magnitudes are positive, then negative.
    block = draw.choice((16, 32))
    x = draw.normal(block * draw.integers(2, 4), draw.choice((16, 32, 64)))
    x = x * (torch.arange(len(x)) // block + 1)[:, None]
    largest = x.abs().max() * torch.arange(1, len(x) // block + 1)
    for sign in (1, -1):
        x[draw.integers(0, block) :: block, draw.integers(0, 16)] = sign * largest
        yield call(x, block)


@task.test("a last block with fewer rows", points=3)
def ragged(draw):
    """Rows past the end: what do they do to the scale of the last block, and which rows may be stored?"""
    for n in (draw.integers(1, 16), 32 * draw.integers(1, 3) + draw.integers(1, 32)):
        yield call(draw.normal(n, draw.choice((16, 32, 64))), draw.choice((16, 32, 64)))


@task.test("float16 input, float32 arithmetic")
def half(draw):
    """float16 has 11 bits: is the scale computed, and X divided by it, in float32?"""
    block = draw.choice((16, 32))
    yield call((draw.normal(block * 2, 32) * draw.uniform(low=0.01, high=0.1)).half(), block)


@task.test("small blocks and blocks of zeros", points=2)
def small(draw):
    """Is a block scaled by its own maximum, however small? And what is X / s in a block of zeros?"""
    block = draw.choice((16, 32))
    x = draw.normal(block * 3, 16) * 1e-7
    yield call(x, block)
    x[block : 2 * block] = 0
    yield call(x, block)
