"""Notebook 03c: the error of INT8 scores, RMS normalisation, the bound it gives, and the gradient through it."""

import math

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draw, with_mistakes

HEAD_DIM = 16


def std_of_score_error(s_q, rms_q, s_k, rms_k):
    return math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)


def rms_norm(x, gain):
    return x * gain / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def bound_on_scores(gain_q, gain_k):
    return math.sqrt(len(gain_q)) * (gain_q * gain_k).abs().max().item()


def grad_through_norm(dy, x, gain):
    r = x.square().mean(-1, keepdim=True).sqrt()
    x_hat, dx_hat = x / r, gain * dy
    return (dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)) / r


def _tokens() -> list[tuple]:
    gain = 1 + 0.3 * draw(0, HEAD_DIM)
    return [(3 * draw(1, 5, HEAD_DIM) + 2, gain), (1e-3 * draw(2, 2, 5, HEAD_DIM), gain)]


def _gains() -> list[tuple]:
    gain_q, gain_k = 1 + 0.3 * draw(3, HEAD_DIM), 1 + 0.3 * draw(4, HEAD_DIM)
    gain_q[3], gain_q[7], gain_k[7], gain_k[9] = -3.0, -2.0, 4.0, 5.0
    return [(gain_q, gain_k)]


GAPS = with_mistakes(
    __file__,
    {
        "std_of_score_error": Gap(std_of_score_error, lambda: [(0.03, 1.3, 0.02, 2.1), (0.3, 10.0, 0.4, 5.0)]),
        "rms_norm": Gap(rms_norm, _tokens),
        "bound_on_scores": Gap(bound_on_scores, _gains),
        "grad_through_norm": Gap(
            grad_through_norm, lambda: [(draw(5, 6, HEAD_DIM), 3 * draw(6, 6, HEAD_DIM), 1 + 0.3 * draw(7, HEAD_DIM))]
        ),
    },
)
