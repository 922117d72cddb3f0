"""Tests of 16_triton_dq."""

import torch

from exercises.task import Call, Task, backward_case, int8_tiles

task = Task(triton=True, agree="roundings")


def call(draw, n_q, n_k, block_q, block_kv, **sizes):
    do, q, k, v, output, log_sum_exp = backward_case(draw, n_q, n_k, block_q, block_kv, **sizes)
    tiles, delta = (*int8_tiles(q, block_q), *int8_tiles(k, block_kv)), (do * output).sum(-1).float()
    return Call("int8_dq", (*tiles, v, do, log_sum_exp, delta, torch.full(q.shape, -12345.0)), outputs=1)


@task.test("one tile of queries, one of keys", points=4)
def one_tile(draw):
    """One tile: check S_ij (both scales and c), P = e^(S - L), dP = dO V^T, dS, and s_dS s_K."""
    block_q, block_kv = draw.choice((16, 32)), draw.choice((32, 64))
    yield call(draw, block_q, block_kv, block_q, block_kv)


@task.test("several tiles of keys, each with its own scale", points=3)
def key_tiles(draw):
    """Each tile of K^ has its own scale. It is in S_ij, and in what this tile adds to dQ_i, the sum over all tiles."""
    count = draw.integers(2, 4)
    yield call(draw, 16, count * 32, 16, 32, k_sizes=draw.sizes(count, 32))


@task.test("several tiles of queries", points=2)
def query_tiles(draw):
    """Several tiles of queries: which rows and which s_Q belong to program i?"""
    block_q = draw.choice((16, 32))
    yield call(draw, 3 * block_q, 64, block_q, 64)


@task.test("partial tiles at the ends", points=3)
def ragged(draw):
    """Keys from n_k on do not exist: their P is 0. And which queries of the last tile exist?"""
    sizes = (16, 32 + draw.integers(1, 32)), (draw.integers(17, 32), 64), (draw.integers(4, 16), draw.integers(8, 32))
    for (n_q, n_k), block_q in zip(sizes, (16, 16, 32), strict=True):
        yield call(draw, n_q, n_k, block_q, draw.choice((32, 64)))
