"""Grader of 13_soft_top_k."""

import torch
from torch import Tensor

from exercises.grading import Draw, Grader, close, expect
from sage_ref.sla2 import soft_top_k

grader = Grader("13_soft_top_k", {"soft_top_k": Tensor})
grader.hint(
    "row_sum", "Each row has to sum to count. Does lambda move until it does, and has the bisection come to an end?"
)
grader.hint("per_row", "All rows together sum to the right number, but not each of them: lambda is one number per row.")
grader.hint("range", "s is a sigmoid: between 0 and 1, so no block is chosen more than once.")
grader.hint("values", "s is off. It is sigmoid(x / tau + lambda), with the lambda at which its row sums to count.")
grader.hint("bracket", "Scores can be far from 0, and tau small. Does lambda's first interval depend on the scores?")
grader.hint("dtype", "s and its gradient have the dtype of x.")
grader.hint("detached", "No gradient reaches x. Is x detached somewhere, or SoftTopK not applied?")
grader.hint(
    "lambda_moves",
    "This is the gradient at constant lambda. When one score rises, lambda falls, and the row keeps its sum.",
)
grader.hint("temperature", "The gradient is off by a factor: x enters as x / tau.")
grader.hint(
    "gradient",
    "The gradient is off. Compare with finite differences, score by score: does your change of s keep the row's sum?",
)
grader.hint(
    "saturated", "Where every s of a row is 0 or 1, no small change of x moves it: the gradient is 0. What is 0 / 0?"
)


def draw_scores(draw: Draw, spread: float = 1.0) -> tuple[Tensor, int, float]:
    """x in float64, count and temperature."""
    columns = draw.integers(6, 20)
    x = draw.normal(draw.integers(2, 5), draw.integers(3, 9), columns, dtype=torch.float64) * spread
    return x, draw.integers(2, columns), draw.choice((0.1, 0.25, 0.5))


def expected_gradient(x: Tensor, count: int, temperature: float, upstream: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(soft_top_k(x, count, temperature), x, upstream)[0]


@grader.test("rows that sum to count", points=2)
def row_sums(student, draw):
    x, count, temperature = draw_scores(draw)
    s = student.soft_top_k(x, count, temperature)
    expect(s.shape == x.shape, "values")
    sums = s.double().sum(-1)
    off = (sums - count).abs().max()
    expect(off < 1e-2 or (sums.sum() - count * sums.numel()).abs() > 1e-3, "per_row")
    expect(off <= 1e-5, "row_sum")
    expect(s.min() >= 0 and s.max() <= 1, "range")


@grader.test("the values of s", points=2)
def values(student, draw):
    x, count, temperature = draw_scores(draw)
    close(student.soft_top_k(x, count, temperature), soft_top_k(x, count, temperature), "values", relative_l2=1e-6)
    single = student.soft_top_k(x.float(), count, temperature)
    expect(single.dtype == torch.float32, "dtype")
    close(single, soft_top_k(x, count, temperature), "values", relative_l2=1e-4)


@grader.test("scores far from zero")
def far_away(student, draw):
    x, count, temperature = draw_scores(draw)
    for offset, k in ((1e3, count), (-1e3, 1)):
        s = student.soft_top_k(x + offset, k, temperature)
        close(s, soft_top_k(x + offset, k, temperature), "bracket", relative_l2=1e-6)


@grader.test("the gradient of x", points=3)
def gradient(student, draw):
    x, count, temperature = draw_scores(draw, spread=0.3)
    upstream = draw.normal(*x.shape, dtype=torch.float64)
    s, (found, *_) = student.soft_top_k.gradients(x, count, temperature, upstream=upstream)
    expect(isinstance(found, Tensor), "detached")
    expect(s.shape == x.shape, "values")
    expect(found.shape == x.shape, "gradient")
    expected = expected_gradient(x, count, temperature, upstream)
    w = s * (1 - s)
    for at_constant_lambda in (w * upstream / temperature, w * upstream):
        expect((found - at_constant_lambda).norm() > 1e-4 * found.norm(), "lambda_moves")
    along = (found * expected).sum() / expected.norm() ** 2
    expect((found - along * expected).norm() > 1e-4 * found.norm() or (along - 1).abs() < 1e-4, "temperature")
    close(found, expected, "gradient", relative_l2=1e-6)


@grader.test("rows that are all 0 and 1", points=2)
def saturated(student, draw):
    x, count, _ = draw_scores(draw)
    x = x.argsort(-1).argsort(-1).double()  # 0, 1, 2, ... in some order: far apart at a low temperature
    upstream = draw.normal(*x.shape, dtype=torch.float64)
    s, (found, *_) = student.soft_top_k.gradients(x, count, 1e-4, upstream=upstream)
    close(s, soft_top_k(x, count, 1e-4), "bracket", relative_l2=1e-6)
    expect(isinstance(found, Tensor) and found.shape == x.shape and (found.abs() <= 1e-6).all(), "saturated")
