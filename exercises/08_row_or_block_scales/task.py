"""Tests of 08_row_or_block_scales."""

import torch

from exercises.task import Call, Task, off_ties

task = Task(agree="roundings")


def uneven(draw, rows, columns):
    """Draw a matrix whose rows differ in size by a factor of up to 300, and its columns by 30."""
    sizes = 10 ** draw.uniform(rows, 1, low=-2, high=0.5) * 10 ** draw.uniform(1, columns, low=-1, high=0.5)
    return draw.normal(rows, columns) * sizes


@task.test("quantize: one scale per tile or per row", points=3, agree="int8")
def scales(draw):
    """The scale is max|X| / 127 of the whole tile, [1, 1], or of each row, [R, 1]. What is 0 / 0?"""
    rows, columns = draw.integers(20, 50), draw.integers(20, 50)
    for n_columns in (rows, columns):
        for granularity in ("row", "block"):
            yield Call("quantize", (uneven(draw, rows, n_columns), granularity))
    x = uneven(draw, draw.integers(8, 20), draw.integers(8, 20))
    x[::2] = 0
    for tile, granularity in ((x, "row"), (0 * x, "row"), (0 * x, "block")):
        yield Call("quantize", (tile, granularity))


@task.test("tiled_matmul: a tile at a time", points=3)
def products(draw):
    """The product is off. Each tile is rounded, multiplied, scaled, and then added to its rows."""
    block = draw.choice((16, 24))
    for extra in (0, draw.integers(3, block)):
        left = uneven(draw, 2 * block + extra, 3 * block + extra)
        right = off_ties(uneven(draw, left.shape[1], draw.choice((16, 32))), block)
        for granularity in ("row", "block"):
            yield Call("tiled_matmul", (left, right, granularity, block))


def inputs(draw, block):
    """Draw P, dS [Nq, Nk], dO, Q, K; the last tiles are partial."""
    n_q, n_k = 2 * block + draw.integers(4, block), 3 * block + draw.integers(4, block)
    head_dim = draw.choice((16, 32))
    do, q, k = (off_ties(draw.normal(n, head_dim), block) for n in (n_q, n_q, n_k))
    return uneven(draw, n_q, n_k).abs(), uneven(draw, n_q, n_k), do, q, k


@task.test("gradients: scales that may leave the sum, and causal dS", points=4)
def gradients(draw):
    """A gradient is off. Which operand is on the left, and is it transposed?"""
    block = draw.choice((16, 24))
    tensors = inputs(draw, block)
    for granularity in ("row", "block"):
        yield Call("gradients", (*tensors, granularity, block))
    block, n, head_dim = 16, 16 * draw.integers(2, 4), draw.choice((8, 16))
    p, ds = (torch.ones(n, n).tril() * uneven(draw, n, n) for _ in range(2))
    ds[0] = 0
    do, q, k = (off_ties(draw.normal(n, head_dim), block) for _ in range(3))
    for granularity in ("row", "block"):
        yield Call("gradients", (p.abs(), ds, do, q, k, granularity, block))


@task.test("relative_errors: row scales against block scales", points=4, agree=0.01)
def errors(draw):
    """The errors are off. Each is one number over the whole matrix; exact is the same product without rounding."""
    block = draw.choice((16, 24))
    yield Call("relative_errors", (*inputs(draw, block), block))
