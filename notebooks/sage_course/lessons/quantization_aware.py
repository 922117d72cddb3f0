"""Notebook 12b: training with an INT8 forward pass: the pass itself, its stand-in gradient, Algorithm 3's backward."""

import math
from statistics import mean, stdev

import torch
from torch import Tensor

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes
from sage_ref.quantization import fake_quantize

BLOCK_Q, BLOCK_KV = 128, 64


def int8_attention(q, k, v, hidden, c):
    k_mean = k.mean(-2, keepdim=True)
    q_hat = fake_quantize(q, (BLOCK_Q, None))
    k_hat, v_hat = fake_quantize(k - k_mean, (BLOCK_KV, None)), fake_quantize(v, (BLOCK_KV, None))
    s = (c * q_hat @ k_hat.mT).masked_fill(hidden, -math.inf)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    o = fake_quantize(p, (1, BLOCK_KV)) @ v_hat / l
    return o, m + torch.log(l) + c * q @ k_mean.mT


def straight_through(exact, quantized):
    return exact + (quantized - exact).detach()


def attention_backward(do, q, k, v, o, log_sum_exp, hidden, c):
    p = torch.exp(c * q @ k.mT - log_sum_exp).masked_fill(hidden, 0)
    delta = (do * o).sum(-1, keepdim=True)
    dp = do @ v.mT
    ds = p * (dp - delta)
    return c * ds @ k, c * ds.mT @ q, p.mT @ do


def paired_effect(trained, baseline):
    differences = [x - y for x, y in zip(trained, baseline, strict=True)]
    return mean(differences), stdev(differences)


def value_and_gradients(function, exact: Tensor, quantized: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the function's value, and the gradients of its exact and of its quantised argument."""
    leaves = [x.requires_grad_() for x in (exact, quantized)]
    found = function(*(1 * x for x in leaves))
    direction = torch.linspace(-1, 1, exact.numel(), dtype=exact.dtype).view(exact.shape)
    if not found.requires_grad:
        return found, *(torch.zeros_like(x) for x in leaves)
    gradients = torch.autograd.grad((found * direction).sum(), leaves, allow_unused=True, materialize_grads=True)
    return found.detach(), *gradients


def _half_hidden() -> Tensor:
    return torch.arange(192)[None, :].expand(192, -1) // BLOCK_KV == 1


def _inputs() -> list[tuple]:
    q, k, v = draws(0, *[(192, 8)] * 3, dtype=torch.float64)
    sizes = torch.linspace(0.2, 3, 192, dtype=torch.float64)[:, None]  # so that blocks differ
    with_zeros = torch.where(torch.arange(192)[:, None] < BLOCK_KV, 0.0, v)
    return [
        (sizes * q, sizes * k + 2, sizes.flip(0) * v, _half_hidden(), 0.35),
        (1e-7 * q, 1e-7 * k, 1e-7 * with_zeros, _half_hidden(), 0.35),
    ]


def _outputs() -> list[tuple]:
    (exact,) = draws(0, (4, 8), dtype=torch.float64)
    return [(exact, torch.round(4 * exact) / 4)]


def _handed_in() -> list[tuple]:
    q, k, v, do, o = draws(0, *[(192, 8)] * 5, dtype=torch.float64)
    return [(do, q, k, v, o, torch.logsumexp(0.35 * q @ k.mT, -1, keepdim=True) + 0.1, _half_hidden(), 0.35)]


GAPS = with_mistakes(
    __file__,
    {
        "int8_attention": Gap(int8_attention, _inputs),
        "straight_through": Gap(straight_through, _outputs, run=value_and_gradients),
        "attention_backward": Gap(attention_backward, _handed_in),
        "paired_effect": Gap(paired_effect, lambda: [([0.31, 0.35, 0.42], [0.3, 0.36, 0.4])]),
    },
)
