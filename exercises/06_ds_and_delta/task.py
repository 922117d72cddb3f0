"""Tests of 06_ds_and_delta."""

import math

from exercises.task import Call, Task

task = Task(agree=1e-05)


def inputs(draw, shared=0.0):
    """Draw Q, K, V, dO float16 [N, D]; values share a vector of length `shared` sqrt(D), which dP - delta cancels."""
    shape = draw.integers(40, 100), draw.choice((16, 32, 64))
    q, k, v, do = (draw.normal(*shape) for _ in range(4))
    return [x.half() for x in (q, k, v + shared * draw.normal(1, shape[1]), do)]


@task.test("delta = rowsum(dO * O), in float32", points=2)
def delta(draw):
    """delta is one number per query, [N, 1]: the sum of dO * O, over which axis?"""
    _, _, output, do = inputs(draw)
    for size in (1.0, 1e-4):
        yield Call("delta", ((size * do.float()).half(), (size * output.float()).half()))


def scores(q, k):
    return q.double() @ k.double().mT / math.sqrt(q.shape[1])


@task.test("matching_delta = rowsum(P * dP), tile by tile", points=3)
def matching(draw):
    """rowsum(P * dP) is off. Is P exp(S - L), which axes do P and dP have, is every tile added?"""
    q, k, v, do = inputs(draw, shared=2.0)
    log_sum_exp = (scores(q, k).logsumexp(-1) + 0.1 * draw.normal(len(q))).float()
    yield Call("matching_delta", (q, k, v, do, log_sum_exp, draw.choice((16, 24, 200))))


@task.test("grad_scores_tile: dS = P * (dP - delta)", points=2, parts=(0,))
def tile(draw, shared=0.0, size=1.0):
    """dS is off. It is P * (dP - delta), entry by entry; in dP = dO V^T queries are rows."""
    # Draw P, V, dO and delta of one tile [Bq, Bkv]; delta is exact to float32.
    q, k, v, do = inputs(draw, shared)
    p, dp = scores(q, k).softmax(-1), do.double() @ v.double().mT
    rows, columns = slice(draw.integers(0, 10), 37), slice(draw.integers(0, 10), 30)
    root = math.sqrt(size)
    d = (p * dp).sum(-1, keepdim=True)[rows]
    yield Call(
        "grad_scores_tile",
        ((size * p[rows, columns]).float(), v[columns], (root * do[rows]).half(), (root * d).float()),
    )


@task.test("grad_scores_tile: the difference in float32", parts=(0,), agree=0.0001)
def difference(draw):
    """dS is off where dP and delta are large and their difference is small. Is all of it float32?"""
    yield from tile(draw, shared=20.0)


@task.test("grad_scores_tile: psi(dS), however small", points=3, agree="int8")
def small(draw):
    """psi of a tile: round(dS / scale), with one float32 scale, max|dS| / 127, however small. What is 0 / 0?"""
    for power in (0, -10, -16):
        yield from tile(draw, size=2.0**power)
    (call,) = tile(draw)
    yield call._replace(arguments=(0 * call.arguments[0], *call.arguments[1:]))
