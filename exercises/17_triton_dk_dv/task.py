"""Tests of 17_triton_dk_dv."""

import torch

from exercises.task import Call, Task, backward_case, int8_tiles

task = Task(triton=True, agree="roundings")


def call(draw, n_q, n_k, block_q, block_kv, **sizes):
    do, q, k, v, output, log_sum_exp = backward_case(draw, n_q, n_k, block_q, block_kv, **sizes)
    tiles = *int8_tiles(q, block_q), *int8_tiles(k, block_kv), v, do, *int8_tiles(do, block_q)
    outputs = (do * output).sum(-1).float(), torch.full(k.shape, -12345.0), torch.full(k.shape, -12345.0)
    return Call("int8_dk_dv", (*tiles, log_sum_exp, *outputs), outputs=2)


@task.test("dV, one tile of keys, one of queries", points=3, parts=(1,))
@task.test("dK, one tile of keys, one of queries", points=4, parts=(0,))
def one_tile(draw):
    """Check S (both scales and c), P = e^(S - L), s_P s_dO; dP, dS and s_dS s_Q. dK has a factor c, dV none."""
    block = draw.choice((32, 64))  # the same for queries and keys, so that mixing them up still runs
    yield call(draw, block, block, block, block)


@task.test("several tiles of queries, each with its own scales", points=3)
def query_tiles(draw):
    """Each tile of queries has its own s_Q and s_dO, and dK_j and dV_j are the sums of what all of them add."""
    count = draw.integers(3, 5)
    sizes = draw.sizes(count, 32)
    do_sizes = torch.where(torch.arange(len(sizes))[:, None] < 32, 0, 1 / sizes)  # the first tile has no gradient
    yield call(draw, count * 32, 32, 32, 32, q_sizes=sizes, do_sizes=do_sizes)


@task.test("several tiles of keys")
def key_tiles(draw):
    """Several tiles of keys: which rows and which s_K belong to program j?"""
    block_kv = draw.choice((32, 64))
    yield call(draw, 64, 2 * block_kv, 64, block_kv)


@task.test("partial tiles at the ends", points=3)
def ragged(draw):
    """Queries from n_q on don't exist: which P makes them count for nothing? Which keys of the last tile exist?"""
    sizes = (32 + draw.integers(1, 32), 32), (64, draw.integers(33, 64)), (draw.integers(8, 32), draw.integers(8, 32))
    for n_q, n_k in sizes:
        yield call(draw, n_q, n_k, draw.choice((32, 64)), draw.choice((32, 64)))
