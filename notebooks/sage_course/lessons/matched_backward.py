"""Notebook 12c: P in the backward pass: from 16-bit scores, from their errors, from INT8 scores, and clamped."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes
from sage_course.lessons.quantization_aware import BLOCK_KV, BLOCK_Q
from sage_ref.quantization import quantize, quantized_matmul


def printed(q, k, log_sum_exp, c):
    return torch.exp(c * q @ k.mT - log_sum_exp)


def row_sums(p_int8, error):
    return (p_int8 * torch.exp(error)).sum(-1)


def matched(q, k, log_sum_exp, c):
    k_mean = k.mean(-2, keepdim=True)
    q_hat = quantize(q, (BLOCK_Q, None))
    k_hat = quantize(k - k_mean, (BLOCK_KV, None))
    s_int8 = c * quantized_matmul(q_hat, k_hat.mT)
    return torch.exp(s_int8 - (log_sum_exp - c * q @ k_mean.mT))


def clamped(q, k, log_sum_exp, c):
    return torch.exp((c * q @ k.mT - log_sum_exp).clamp(max=0))


def _handed_in() -> list[tuple]:
    """Draw Q, K and an L that is not quite theirs; keys share an offset."""
    q, k = draws(0, (192, 8), (192, 8), dtype=torch.float64)
    sizes = torch.linspace(0.5, 4, 192, dtype=torch.float64)[:, None]  # so that blocks differ
    q, k, c = sizes * q, sizes * k + 1, 0.35
    tiny = 1e-7 * q, torch.where(torch.arange(192)[:, None] < BLOCK_KV, 0.0, 1e-7 * k)  # and a block of zeros
    return [(*x, torch.logsumexp(c * x[0] @ x[1].mT, -1, keepdim=True) - 1.5, c) for x in ((q, k), tiny)]


def _with_large_scores() -> list[tuple]:
    """Return the same, and scores whose exponentials are infinite."""
    q, k, _, c = _handed_in()[0]
    return [*_handed_in(), (30 * q, k, torch.logsumexp(30 * c * q @ k.mT, -1, keepdim=True), c)]


def _errors() -> list[tuple]:
    scores, error = draws(0, (5, 7), (5, 7), dtype=torch.float64)
    return [(scores.softmax(-1), error)]


GAPS = with_mistakes(
    __file__,
    {
        "printed": Gap(printed, _with_large_scores),
        "row_sums": Gap(row_sums, _errors),
        "matched": Gap(matched, _handed_in),
        "clamped": Gap(clamped, _handed_in),
    },
)
