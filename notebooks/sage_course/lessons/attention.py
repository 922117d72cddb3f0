"""Notebook 01: the backward pass of attention, one matmul after the other."""

from functools import partial

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes


def through_the_output(p, v, do):
    dv = p.mT @ do
    dp = do @ v.mT
    return dv, dp


def through_the_softmax(p, dp):
    delta = (p * dp).sum(-1, keepdim=True)
    return p * (dp - delta)


def delta_of(do, o):
    return (do * o).sum(-1, keepdim=True)


def through_the_scores(ds, q, k, c):
    dq = ds @ k * c
    dk = ds.mT @ q * c
    return dq, dk


def probabilities_again(q, k, log_sum_exp, c):
    s = q @ k.mT * c
    return torch.exp(s - log_sum_exp)


_draw = partial(draws, dtype=torch.float64)


def _probabilities(seed: int) -> torch.Tensor:
    return torch.softmax(_draw(seed, (3, 5))[0], -1)


def _queries_keys_and_l() -> list[tuple]:
    """Return trials with all keys and with one tile of them."""
    q, k = _draw(4, (3, 4), (5, 4))
    log_sum_exp = (0.5 * q @ k.mT).logsumexp(-1, keepdim=True)
    return [(q, k, log_sum_exp, 0.5), (q, k[:2], log_sum_exp, 0.5)]


GAPS = with_mistakes(
    __file__,
    {
        "through_the_output": Gap(through_the_output, lambda: [(_probabilities(0), *_draw(1, (5, 4), (3, 4)))]),
        "through_the_softmax": Gap(through_the_softmax, lambda: [(_probabilities(2), *_draw(3, (3, 5)))]),
        "delta_of": Gap(delta_of, lambda: [_draw(5, (3, 4), (3, 4))]),
        "through_the_scores": Gap(through_the_scores, lambda: [(*_draw(6, (3, 5), (3, 4), (5, 4)), 0.5)]),
        "probabilities_again": Gap(probabilities_again, _queries_keys_and_l),
    },
)
