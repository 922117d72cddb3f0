"""Tests of 05_online_softmax."""

import math

import torch

from exercises.task import Call, Task, off_ties, quantize

task = Task(agree="roundings")


@task.test("probabilities: shapes and dtypes", agree="form")
@task.test("probabilities: one scale per row", points=2, agree="int8")
def tile(draw):
    """The scale of a row is its largest entry of P~, divided by 127; the integers are P~ / scale, rounded."""
    s = 2 * draw.normal(draw.integers(20, 50), draw.integers(20, 50))
    yield Call("probabilities", (s, s.amax(-1, keepdim=True) + draw.uniform(len(s), 1, low=0, high=6)))


@task.test("probabilities: rows without a visible key", agree="int8")
def masked_rows(draw):
    """A row without a visible key, or far below m_new, has values 0; scale and row sum are 0, too."""
    s = 2 * draw.normal(draw.integers(8, 20), draw.integers(8, 20))
    s[::3] = -math.inf
    s[1::3] -= 200  # e^-200 is 0 in float32
    s[2::6] += -91 - s[2::6].amax(-1, keepdim=True)  # and e^-101 is not, but a 127th of it is
    yield Call("probabilities", (s, torch.full((len(s), 1), 10.0)))


@task.test("online_step: maximum and sum", points=2, parts=(0, 1), agree=1e-05)
@task.test("online_step: O from integers", points=2, parts=(2,))
def step(draw):
    """m_new is the larger maximum, l sums P~ before rounding, O adds the integer product times both scales."""
    # Draw the state after a first tile of 16 keys, whose maximum isn't that of the next, and the next tile.
    rows, columns, head_dim = draw.integers(20, 40), draw.integers(30, 60), draw.choice((8, 16))
    s, v = draw.normal(rows, 16) + draw.uniform(rows, 1, low=-2.5, high=1.5), draw.normal(16, head_dim)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    values, scale = quantize(3 * draw.normal(columns, head_dim), columns)
    yield Call("online_step", (m, p.sum(-1, keepdim=True), p @ v, draw.normal(rows, columns), values, scale[0]))


@task.test("online_softmax: the output", points=2, parts=(0,))
def attention(draw):
    """The output is off. Is every block visited once, the last too, and rounded by itself, and is O divided by l?"""
    block = draw.choice((16, 24, 32))
    for columns in (block, 3 * block, 2 * block + draw.integers(2, block)):
        s, v = draw.normal(draw.integers(30, 60), columns), draw.normal(columns, draw.choice((16, 32)))
        yield Call("online_softmax", (s, off_ties(v * draw.uniform(columns, 1, low=0.2, high=2), block), block))


@task.test("online_softmax: L, causal masks, and scores far below zero", points=3)
def far_below(draw):
    """NaN or infinity where tiles are masked or far below others? Is there a 0 / 0 or inf - inf? L = m + log(l)."""
    block = draw.choice((16, 32))
    for shift in (0, -150, -1000):
        s = 2 * draw.normal(draw.integers(20, 40), 3 * block + 3) + shift
        yield Call("online_softmax", (s, off_ties(draw.normal(3 * block + 3, 16), block), block))
    block, tiles = draw.choice((16, 24)), draw.integers(3, 5)
    n = block * tiles
    s, v = 2 * draw.normal(n, n), off_ties(draw.normal(n, draw.choice((16, 32))), block)
    s[:, block : 2 * block] -= 300
    yield Call("online_softmax", (s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf), v, block))
