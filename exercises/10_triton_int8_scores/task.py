"""Tests of 10_triton_int8_scores."""

import torch

from exercises.task import Call, Task

task = Task(triton=True, agree=1e-06)


def call(draw, n_q, n_k, block_q, block_kv, plain=False):
    """Draw Q^ and K^ of n_q and n_k rows in tiles, with junk in the padding; plain: scales and c are 1."""
    d, tiles_q, tiles_k = draw.choice((32, 64)), -(-n_q // block_q), -(-n_k // block_kv)
    q, k = (draw.integers(-127, 128, n, d, dtype=torch.int8) for n in (tiles_q * block_q, tiles_k * block_kv))
    s_q, s_k = (draw.uniform(tiles, low=0.005, high=0.02) for tiles in (tiles_q, tiles_k))
    c = draw.uniform(low=0.1, high=0.5)
    if plain:
        q[0], k[0], k[1], c = 127, 127, -127, 1.0  # the largest products
        s_q, s_k = torch.ones(tiles_q), torch.ones(tiles_k)
    return Call("int8_scores", (q, s_q, k, s_k, c, torch.full((n_q, n_k), torch.nan)), outputs=1)


@task.test("the product of one tile, as integers", points=2, agree="entries")
def product(draw):
    """With scales and c of 1, S is the integer matrix Q^ K^^T. Which rows meet which, and in which dtype?"""
    yield call(draw, 16, 32, 16, 32, plain=True)


@task.test("scales and c, and several tiles, each with its own", points=5)
def scaled(draw):
    """Each integer stands for s_Q times s_K, of its own tiles (i, j), and S is multiplied by c. Are all three in S?"""
    block_q, block_kv = draw.choice((16, 32)), draw.choice((16, 32))
    yield call(draw, block_q, block_kv, block_q, block_kv)
    block_q, block_kv = draw.choice(((16, 32), (32, 16)))
    yield call(draw, block_q * draw.integers(2, 4), block_kv * draw.integers(2, 4), block_q, block_kv)


@task.test("partial tiles at the edges", points=3)
def ragged(draw):
    """Entries outside of S were written, or those of the next row: which of a tile's entries exist?"""
    sizes = (draw.integers(33, 64), draw.integers(17, 32)), (32, draw.integers(1, 16)), (draw.integers(1, 16), 32)
    for n_q, n_k in sizes:
        yield call(draw, n_q, n_k, draw.choice((16, 32)), draw.choice((16, 32)))
