"""Tests of 11_triton_int8_forward."""

import math

import torch

from exercises.task import Call, Task, int8_tiles

task = Task(triton=True, agree="roundings")


def call(q, k, v, block_q, block_kv, is_causal=False):
    output, log_sum_exp = torch.full(q.shape, -12345.0), torch.full(q.shape[:1], -12345.0)
    tiles = *int8_tiles(q, block_q), *int8_tiles(k, block_kv), *int8_tiles(v, block_kv)
    return Call("int8_forward", (*tiles, len(k), is_causal, output, log_sum_exp), outputs=2)


def drawn(draw, n_q, n_k, block_q, block_kv, is_causal=False, ramp=0.0):
    """Draw Q, K, V; ramp: how much the scores grow from the first key to the last, roughly."""
    d = draw.choice((32, 64))
    rising = torch.linspace(-ramp, ramp, n_k)[:, None] / math.sqrt(d)
    return call(
        draw.normal(n_q, d) + ramp / 2, draw.normal(n_k, d) + rising, draw.normal(n_k, d), block_q, block_kv, is_causal
    )


@task.test("one tile of keys", points=2, parts=(0,))
def one_tile(draw):
    """Check S_ij (both scales and c), P~ = 2^(S_ij - m), s_P s_V, and the division by l."""
    block_kv = draw.choice((32, 64))
    yield drawn(draw, 16 * draw.integers(1, 3), block_kv, 16, block_kv)


@task.test("tiles that raise the maximum", points=3, parts=(0,))
def rising(draw):
    """When a later tile raises the maximum, what happens to l and O_i so far? Has each tile of V^ its s_V?"""
    yield drawn(draw, 32, 32 * draw.integers(2, 5), draw.choice((16, 32)), 32, ramp=3.0)


@task.test("scores far below zero, or far below the maximum", parts=(0,))
def far_below(draw):
    """All scores of a row can be far below 0: where does m start? In a tile far below m, P~ is 0: what is its s_P?"""
    d = draw.choice((32, 64))
    for first in (-6, 6):  # in the second case the second tile is far below the first
        k = draw.normal(64, d) + torch.tensor([first, -6]).repeat_interleave(32)[:, None]
        yield call(draw.normal(16, d) + 6, k, draw.normal(64, d), 16, 32)


@task.test("partial tiles at the ends", points=3, parts=(0,))
def ragged(draw):
    """Keys from n_k on do not exist, whatever stands in the padding, and which queries of the last tile exist?"""
    sizes = (16, 32 + draw.integers(1, 32)), (draw.integers(17, 32), 64), (draw.integers(4, 16), draw.integers(1, 32))
    for (n_q, n_k), block_q in zip(sizes, (16, 16, 32), strict=True):
        yield drawn(draw, n_q, n_k, block_q, draw.choice((32, 64)))


@task.test("causal", points=3, parts=(0,))
def causal(draw):
    """Causal: query i sees the keys 0 to i, itself included."""
    n = draw.integers(49, 65)
    for n_q, n_k in ((n, n), (n, 40), (40, n)):
        yield drawn(draw, n_q, n_k, draw.choice((16, 32)), 32, is_causal=True)


@task.test("L, the natural logarithm of the sum", parts=(1,), agree=1e-05)
def logarithm(draw):
    """L is the natural logarithm of the whole sum, m included. Which base do m and l have here?"""
    yield drawn(draw, 32, draw.integers(65, 97), 16, 32, ramp=3.0)
