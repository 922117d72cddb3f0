"""Tests of 14_router_top_k."""

import torch

from exercises.task import Call, Task

task = Task(agree=1e-05)


def tokens(draw, n):
    """Draw heads of n tokens; neighbours resemble each other, so block means differ."""
    heads, head_dim = draw.integers(2, 4), draw.choice((16, 32))
    return draw.normal(heads, n, head_dim) + draw.normal(heads, n, head_dim).cumsum(1) / 8


@task.test("block means", points=2)
def means(draw):
    """One mean per block and head, over the tokens of that block that exist."""
    block = draw.choice((4, 16))
    yield Call("block_means", (tokens(draw, block * draw.integers(3, 6)), block))
    for _ in range(2):
        block = draw.choice((8, 16))
        yield Call("block_means", (tokens(draw, block * draw.integers(0, 4) + draw.integers(1, block)), block))


@task.test("scores of key blocks", points=2)
def scores(draw):
    """It is softmax of c Qbar Kbar^T over key blocks; blocks hold block_q queries and block_kv keys."""
    k = tokens(draw, 128 * draw.integers(2, 4) + draw.integers(1, 128))
    q = k.flip(1) + draw.normal(*k.shape)
    yield Call("router_scores", (q, k))
    yield Call("router_scores", (q, k, 32, 16))


@task.test("keys with a large offset", points=2, agree=3e-4)
def offset(draw):
    """The keys share a large offset. Is their mean over the sequence subtracted first, before digits are lost?"""
    k = tokens(draw, 64 * draw.integers(4, 8))
    q = k.flip(1) + 3 * draw.normal(len(k), 1, k.shape[-1])
    yield Call("router_scores", (q, k + 1e5 * draw.normal(len(k), 1, k.shape[-1])))


@task.test("the k largest of each row, and at least one block", points=3, agree="entries")
def largest(draw):
    """The k largest scores of a row are kept, and at least one, in each row of each head by itself."""
    for blocks, sparsity in ((10, 0.7), (16, 0.75), (9, 0.7), (11, 0.6)):  # k = 3, 4, 2.7, 4.4
        order = torch.stack([draw.permutation(blocks) for _ in range(draw.integers(6, 15))])
        yield Call("select_blocks", (torch.stack([order, order.flip(-1)]).float().softmax(-1), sparsity))
    yield Call("select_blocks", (draw.normal(2, draw.integers(2, 5), draw.integers(2, 14)).softmax(-1), 0.97))


@task.test("equal scores", points=2, agree="entries")
def ties(draw):
    """Among equal scores the first block wins: every row keeps exactly k, and the same ones on every machine."""
    blocks = draw.choice((8, 40, 200))
    p = draw.integers(0, 3, 2, draw.integers(3, 9), blocks).float() / blocks
    p[0, 0] = 1 / blocks
    yield Call("select_blocks", (p, 0.75))
