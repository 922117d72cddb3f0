"""Tests of 04_query_smoothing."""

import torch

from exercises.task import Call, Task

task = Task(agree=1e-05)
SIZES = ((16, 0), (16, 5), (32, 11))  # block, and how many tokens stand in the last, partial block


def inputs(draw):
    """Draw Q whose offset changes from block to block, K, a dS whose columns don't sum to 0, and the block's size."""
    for block, partial in SIZES:
        blocks = draw.integers(3, 5)
        n, head_dim = blocks * block + partial, draw.choice((24, 48, 64))
        offset = 3 * draw.normal(1, head_dim) + 2 * draw.normal(blocks + 1, head_dim)
        q = draw.normal(n, head_dim) + offset.repeat_interleave(block, 0)[:n]
        ds = 0.1 * torch.softmax(2 * draw.normal(n, n), -1) * draw.normal(n, n)
        yield q, draw.normal(n, head_dim), ds, block


@task.test("smooth_query: one mean per block")
def means(draw):
    """The block means are off. Is the mean over tokens, and is the last block shorter?"""
    yield from (Call("smooth_query", (q, block)) for q, _, _, block in inputs(draw))


@task.test("scores: the INT8 product, and mu_Q K^T put back", points=3, agree=0.0007)
def scores(draw):
    """The scores are off. Every block of queries has its own mean, every tile its own scales."""
    yield from (Call("scores", (q, k, block)) for q, k, _, block in inputs(draw))


@task.test("grad_key: both branches", points=3, agree=0.001)
def grad_key(draw):
    """dK is off. Add both branches for every tile of dS."""
    yield from (Call("grad_key", (ds, q, block)) for q, _, ds, block in inputs(draw))


@task.test("without INT8's share both are exact")
def exact(draw):
    """Every block of queries has its own mean, every tile its own scales; dK adds both branches of every tile."""
    # Operands that lie on their INT8 grid: nothing is lost, so the sums must agree to float32.
    block, head_dim = 16, draw.choice((8, 24))
    n = 3 * block
    q, k, ds = (draw.integers(-63, 64, *shape).float() for shape in ((n, head_dim), (n, head_dim), (n, n)))
    for rows in range(0, n, block):
        # Every block of Q and of K and every tile of dS has the maximum 127, every block of Q a mean of whole numbers.
        tile = q[rows : rows + block]
        tile[1::2] = -tile[::2]
        tile[0, 0], tile[1, 0] = 127, -127
        tile += 10 * draw.integers(-5, 6, 1, head_dim)
        k[rows, 0] = 127
        ds[rows, ::block] = 127
    yield Call("scores", (q, k, block))
    yield Call("grad_key", (ds, q, block))
