"""Tests of 02_integer_matmul."""

import torch

from exercises.task import Call, Task

task = Task()


def int8(draw, *shape, low=-127, high=128):
    return draw.integers(low, high, *shape, dtype=torch.int8)


@task.test("integer_matmul returns int32 [M, N]", agree="form")
@task.test("integer_matmul is exact", points=3)
def integers(draw):
    """Some sums of integers are wrong, even small ones. Is it rows of A times columns of B?"""
    rows, length, columns = (draw.integers(20, 60) for _ in range(3))
    # Products of -1, 0 and 1: sums that any type holds. Of 1 to 4: beyond 127, and float16 holds them still.
    for low, high in ((-1, 2), (1, 5), (-127, 128)):
        a, b = int8(draw, rows, length, low=low, high=high), int8(draw, length, columns, low=low, high=high)
        yield Call("integer_matmul", (a, b))
    for length in (draw.integers(521, 999) * 2 + 1, 70_001):
        a, b = int8(draw, 3, length, low=125), int8(draw, length, 4, low=125)
        b[:, 0] = -b[:, 0]
        yield Call("integer_matmul", (a, b))


def scales(draw, *shape):
    return 10 ** draw.uniform(*shape, low=-2, high=1)


def cancelling(draw, rows, length, columns):
    """Draw A and B, int8 [rows, 2 length] and [2 length, columns], of which every product's sum is 0."""
    a, b = int8(draw, rows, length), int8(draw, length, columns)
    order = draw.permutation(2 * length)
    return torch.cat([a, -a], 1)[:, order], torch.cat([b, b])[order]


@task.test("scaled_matmul: one scale per block of rows and of columns", points=3, agree=1e-06)
def scaled(draw):
    """Try one row, one column and block=1 by hand. Integers that cancel leave exactly 0: scales come after the sum."""
    block, length = draw.choice((3, 8, 16)), draw.integers(30, 70)
    size = 3 * block
    for rows, columns in ((size, size), (size + draw.integers(1, block), 2 * block + 1), (block + 2, 4 * block - 1)):
        a, b = int8(draw, rows, length), int8(draw, length, columns)
        yield Call("scaled_matmul", (a, scales(draw, -(-rows // block)), b, scales(draw, -(-columns // block)), block))
    a, b = cancelling(draw, 2 * block, draw.integers(100, 200), 3 * block)
    yield Call("scaled_matmul", (a, scales(draw, 2), b, scales(draw, 3), block))


@task.test("tiled_matmul: scales that change along the contraction", points=4, agree=1e-06)
def tiled(draw):
    """Is every tile multiplied by its own two scales before it is added, and integers that cancel leave exactly 0?"""
    block = draw.choice((8, 16, 32))
    for length in (block, 3 * block, 4 * block + draw.integers(1, block)):
        rows, columns, tiles = draw.integers(10, 40), draw.integers(10, 40), -(-length // block)
        a, b = int8(draw, rows, length), int8(draw, length, columns)
        yield Call("tiled_matmul", (a, scales(draw, rows, tiles), b, scales(draw, tiles), block))
    half = draw.integers(20, 40)
    pairs = [cancelling(draw, rows, half, columns) for _ in range(3)]
    a, b = torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs])
    yield Call("tiled_matmul", (a, scales(draw, rows, 3), b, scales(draw, 3), 2 * half))
