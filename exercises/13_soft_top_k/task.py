"""Tests of 13_soft_top_k."""

from exercises.task import Call, Task

task = Task(agree=1e-05)


def drawn(draw, spread=1.0):
    """Draw x in float64, count and temperature."""
    columns = draw.integers(6, 20)
    x = draw.normal(draw.integers(2, 5), draw.integers(3, 9), columns).double() * spread
    return x, draw.integers(2, columns), draw.choice((0.1, 0.25, 0.5))


@task.test("the values of s, in rows that sum to count", points=4)
def values(draw):
    """s is sigmoid(x / tau + lambda), with the lambda at which a row sums to count. Does bisection end too early?"""
    x, count, temperature = drawn(draw)
    yield Call("soft_top_k", (x, count, temperature))
    yield Call("soft_top_k", (x.float(), count, temperature))


@task.test("scores far from zero")
def far_away(draw):
    """Scores can be far from 0, and tau small. Does lambda's first interval depend on the scores?"""
    x, count, temperature = drawn(draw)
    yield Call("soft_top_k", (x + 1e3, count, temperature))
    yield Call("soft_top_k", (x - 1e3, 1, temperature))


@task.test("the gradient of x", points=3)
def gradient(draw):
    """Compare with finite differences, score by score: does your s keep the row's sum? x enters as x / tau."""
    x, count, temperature = drawn(draw, spread=0.3)
    yield Call("soft_top_k", (x, count, temperature), upstream=draw.normal(*x.shape).double())


@task.test("rows that are all 0 and 1", points=2)
def saturated(draw):
    """Where every s of a row is 0 or 1, no small change of x moves it: the gradient is 0. What is 0 / 0?"""
    x, count, _ = drawn(draw)
    x = x.argsort(-1).argsort(-1).double()  # 0, 1, 2, ... in some order: far apart at a low temperature
    yield Call("soft_top_k", (x, count, 1e-4), upstream=draw.normal(*x.shape).double())
    x[0] = 0
    yield Call("soft_top_k", (x, count, 1e-4), upstream=draw.normal(*x.shape).double())
