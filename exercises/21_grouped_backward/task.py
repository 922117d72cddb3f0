"""Tests of 21_grouped_backward."""

import torch

from exercises.task import Call, Task

task = Task(agree=1e-4)


def case(draw, group, n):
    """Draw Q, K, V, and O, L and dO of causal attention whose key heads are shared by `group` query heads."""
    kv_heads, d = draw.integers(2, 4), draw.choice((8, 16, 32))
    query, key, value, grad_output = (
        draw.normal(h, n, d) for h in (kv_heads * group, kv_heads, kv_heads, kv_heads * group)
    )
    scores = d**-0.5 * query @ key.repeat_interleave(group, 0).mT
    scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    output = scores.softmax(-1) @ value.repeat_interleave(group, 0)
    return query, key, value, output, scores.logsumexp(-1, keepdim=True), grad_output


@task.test("dV", points=2, parts=(2,))
@task.test("dQ", points=3, parts=(0,))
@task.test("dK", points=3, parts=(1,))
def gradients(draw):
    """P = exp(S - L), 0 where a key is not seen. dS = P (dP - delta). Is c in dQ and dK, and not in dV?"""
    yield Call("attention_backward", case(draw, 1, draw.integers(9, 20)))
    yield Call("attention_backward", case(draw, draw.integers(2, 4), draw.integers(9, 20)))


@task.test("scores of masked keys may be huge", points=2)
def masked(draw):
    """A key that a query doesn't see may have a score far above L. Nothing of it may reach a gradient."""
    query, key, *rest = case(draw, 2, 12)
    far = torch.zeros_like(key)
    far[:, -1] = 1e4  # only the last query sees it, and that one doesn't count
    query, *rest = query.abs(), *rest
    rest[-1][:, -1] = rest[1][:, -1] = 0
    yield Call("attention_backward", (query, key.abs() + far, rest[0], rest[1], rest[2], rest[3]))


@task.test("bytes kept", points=2)
def kept(draw):
    """Q and O have H heads, K and V have Hkv. P is not kept: L has one number for each query."""
    kv_heads = draw.integers(1, 4)
    yield Call(
        "bytes_kept", (kv_heads * draw.integers(2, 5), kv_heads, draw.integers(100, 999), draw.choice((64, 128)))
    )
