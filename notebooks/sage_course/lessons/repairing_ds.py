"""Notebook 14: an offset that all values share, the error that dS inherits from delta, two remedies, dither, bias."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draw, with_mistakes


def offset_share(v):
    return (v.mean(-2).norm(dim=-1) / v.norm(dim=-1).mean(-1)).mean().item()


def inherited(p, delta, exact_delta):
    return p * (exact_delta - delta)


def matching_delta(p, dp):
    return (p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)


def without_mean(do, v, o):
    mean = v.mean(-2, keepdim=True)
    dp = do @ (v - mean).mT
    delta = (do * (o - mean)).sum(-1, keepdim=True)
    return dp, delta


def thresholds(rows, columns):
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    eighth = (column + 2 * row) % 8
    part = 5 * row % 8
    return (eighth + (part + 0.5) / 8) / 8


def bias_and_error(errors):
    products = errors @ errors.mT
    count = len(errors)
    bias_square = (products.sum() - products.trace()) / (count * (count - 1))
    error_square = products.trace() / count
    return bias_square, error_square


def _wrong_deltas() -> list[tuple]:
    p, delta = torch.softmax(draw(3, 6, 8), -1), draw(4, 6, 1)
    return [(p, delta + 0.1 * draw(5, 6, 1), delta)]


def _weights_and_dp() -> list[tuple]:
    """Return rows of P as a backward pass has them: they don't quite add up to one."""
    p = torch.softmax(draw(6, 6, 8), -1) * torch.linspace(0.9, 1.1, 6)[:, None]
    return [(p, 3 + draw(7, 6, 8))]


def _shared_values() -> list[tuple]:
    v = 2 + draw(8, 8, 4)
    return [(draw(9, 6, 4), v, torch.softmax(draw(10, 6, 8), -1) @ v)]


GAPS = with_mistakes(
    __file__,
    {
        "offset_share": Gap(offset_share, lambda: [(draw(0, 2, 16, 4) + 1.5,), (draw(1, 1, 16, 4) + 3 * draw(2, 4),)]),
        "inherited": Gap(inherited, _wrong_deltas),
        "matching_delta": Gap(matching_delta, _weights_and_dp),
        "without_mean": Gap(without_mean, _shared_values),
        "thresholds": Gap(thresholds, lambda: [(8, 8), (5, 24)]),
        "bias_and_error": Gap(bias_and_error, lambda: [(0.5 + draw(11, 6, 10),), (draw(12, 3, 4) - 1,)]),
    },
)
