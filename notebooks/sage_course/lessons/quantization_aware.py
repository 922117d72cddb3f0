"""Notebook 12b: training with an INT8 forward pass: the pass itself, its stand-in gradient, Algorithm 3's backward."""

import math
from statistics import mean, stdev

import torch
from torch import Tensor

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws
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


GAPS = {
    "int8_attention": Gap(int8_attention, _inputs, (
        Mistake("fake_quantize(q, (BLOCK_Q, None))", "fake_quantize(q, (1, None))",
                "Queries of a block share a scale: (BLOCK_Q, None). The same goes for keys and values."),
        Mistake("q_hat = fake_quantize(q, (BLOCK_Q, None))\n"
                "    k_hat, v_hat = fake_quantize(k - k_mean, (BLOCK_KV, None)), fake_quantize(v, (BLOCK_KV, None))",
                "q_hat = fake_quantize(q, (1, None))\n"
                "    k_hat, v_hat = fake_quantize(k - k_mean, (1, None)), fake_quantize(v, (1, None))",
                "Tokens of a block share a scale: (BLOCK_Q, None) or (BLOCK_KV, None)."),
        Mistake("q_hat = fake_quantize(q, (BLOCK_Q, None))\n"
                "    k_hat, v_hat = fake_quantize(k - k_mean, (BLOCK_KV, None)), fake_quantize(v, (BLOCK_KV, None))",
                "q_hat = fake_quantize(q, (None, None))\n"
                "    k_hat, v_hat = fake_quantize(k - k_mean, (None, None)), fake_quantize(v, (None, None))",
                "One scale for each block of tokens, not one for all."),
        Mistake("fake_quantize(k - k_mean, (BLOCK_KV, None)), fake_quantize(v, (BLOCK_KV, None))",
                "fake_quantize(k - k_mean, (BLOCK_Q, None)), fake_quantize(v, (BLOCK_Q, None))",
                "Blocks of keys, and of their values, have BLOCK_KV tokens."),
        Mistake("fake_quantize(v, (BLOCK_KV, None))", "fake_quantize(v, (None, 1))",
                "That is a scale per channel. Here a block of tokens has one: exercise 3 tries yours."),
        Mistake("fake_quantize(q, (BLOCK_Q, None))", "fake_quantize(q, (None, None))",
                "One scale for each block of queries, not one for all."),
        Mistake("fake_quantize(p, (1, BLOCK_KV))", "fake_quantize(p, (1, None))",
                "A kernel sees one tile at a time: P has a scale per query and block of keys."),
        Mistake("fake_quantize(p, (1, BLOCK_KV))", "fake_quantize(p, (BLOCK_Q, BLOCK_KV))",
                "That is a scale per tile. P has one per query and block of keys."),
        Mistake("fake_quantize(p, (1, BLOCK_KV))", "fake_quantize(p, (None, BLOCK_KV))",
                "None lets all queries share a scale. P has one per query and block of keys."),
        Mistake("fake_quantize(v, (BLOCK_KV, None))", "fake_quantize(v - v.mean(-2, keepdim=True), (BLOCK_KV, None))",
                "Only K is smoothed: a constant in V would have to be added to O again."),
        Mistake("fake_quantize(v, (BLOCK_KV, None))", "fake_quantize(v, (None, None))",
                "One scale for each block of values, not one for all."),
        Mistake("+ c * q @ k_mean.mT", "- c * q @ k_mean.mT", "Smoothing took it away: L gets it back."),
        Mistake("+ c * q @ k_mean.mT", "+ c * q_hat @ k_mean.mT",
                "L gets back c Q mean(K) with Q itself, not with the rounded one. The library does the same."),
        Mistake(" + c * q @ k_mean.mT", "",
                "The backward pass wants L of c Q K^T; smoothing took c Q mean(K) from it."),
    ), right=(
        ("c * q_hat @ k_hat.mT", "q_hat @ k_hat.mT * c"),
        ("fake_quantize(p, (1, BLOCK_KV)) @ v_hat / l", "(fake_quantize(p, (1, BLOCK_KV)) / l) @ v_hat"),
    )),
    "straight_through": Gap(straight_through, _outputs, (
        Mistake("exact + (quantized - exact).detach()", "quantized",
                "The value is right, but the gradient is that of rounding."),
        Mistake("exact + (quantized - exact).detach()", "quantized.detach()",
                "The value is right, but there is no gradient at all."),
        Mistake("exact + (quantized - exact).detach()", "quantized + exact - exact.detach()",
                "The value is right, but the gradient of rounding comes along: detach it."),
        Mistake("exact + (quantized - exact).detach()", "exact", "The gradient is right, but nothing is rounded."),
        Mistake("exact + (quantized - exact).detach()", "exact.detach() + (quantized - exact)",
                "The value is right. But the gradient comes from what is not detached: that should be exact alone."),
        Mistake("exact + (quantized - exact).detach()", "exact + quantized - quantized.detach()",
                "That has the value of the exact function: detach the whole correction, quantized - exact."),
        Mistake("exact + (quantized - exact).detach()", "quantized.detach() + exact",
                "The gradient is right, the value is a sum of both: take the exact one out again, detached."),
        Mistake("exact + (quantized - exact).detach()", "quantized + (exact - quantized).detach()",
                "The other way round: this has the value of the exact function and the gradient of rounding."),
    ), value_and_gradients, right=(
        ("exact + (quantized - exact).detach()", "exact - (exact - quantized).detach()"),
        ("exact + (quantized - exact).detach()", "quantized.detach() + (exact - exact.detach())"),
    )),
    "attention_backward": Gap(attention_backward, _handed_in, (
        Mistake("torch.exp(c * q @ k.mT - log_sum_exp).masked_fill(hidden, 0)",
                "torch.softmax((c * q @ k.mT).masked_fill(hidden, -math.inf), -1)",
                "A kernel does not see the whole row again: P = exp(S - L), with the L that is given."),
        Mistake(".masked_fill(hidden, 0)", "", "Keys that are not selected have P = 0."),
        Mistake("delta = (do * o).sum(-1, keepdim=True)", "delta = (p * (do @ v.mT)).sum(-1, keepdim=True)",
                "delta = rowsum(dO * O), with the O that is given."),
        Mistake(".masked_fill(hidden, 0)", ".masked_fill(hidden, -math.inf)",
                "-infinity belongs into scores. This is P already: hidden keys have 0."),
        Mistake("torch.exp(c * q @ k.mT - log_sum_exp)", "(torch.exp(c * q @ k.mT) / log_sum_exp)",
                "L is the logarithm of the sum: exp(S) / exp(L) = exp(S - L)."),
        Mistake("delta = (do * o).sum(-1, keepdim=True)", "delta = (p * o).sum(-1, keepdim=True)",
                "delta = rowsum(dO * O): entry by entry, then summed over the features, axis -1."),
        Mistake(".masked_fill(hidden, 0)", " * hidden", "hidden is True where a key is not selected."),
        Mistake("p = torch.exp(c * q @ k.mT - log_sum_exp).masked_fill(hidden, 0)\n"
                "    delta = (do * o).sum(-1, keepdim=True)",
                "p = torch.softmax((c * q @ k.mT).masked_fill(hidden, -math.inf), -1)\n"
                "    delta = (p * (do @ v.mT)).sum(-1, keepdim=True)",
                "Use the O and L that are given: P = exp(S - L), delta = rowsum(dO * O)."),
        Mistake("p * (dp - delta)", "p * dp - delta", "dS = P (dP - delta): first subtract, then multiply."),
        Mistake("c * ds @ k, c * ds.mT @ q", "c * ds @ q, c * ds.mT @ k", "dQ = c dS K, and dK = c dS^T Q."),
        Mistake("c * ds @ k, c * ds.mT @ q", "ds @ k, ds.mT @ q", "c is missing in dQ and dK."),
        Mistake("p.mT @ do", "ds.mT @ do", "dV = P^T dO: the values are weighed by P, not by dS."),
    ), right=(
        ("p * (dp - delta)", "p * dp - p * delta"),
        ("c * ds @ k, c * ds.mT @ q, p.mT @ do", "ds @ (c * k), (q.mT @ ds).mT * c, (do.mT @ p).mT"),
    )),
    "paired_effect": Gap(paired_effect, lambda: [([0.31, 0.35, 0.42], [0.3, 0.36, 0.4])], (
        Mistake("[x - y for x, y in zip(trained, baseline, strict=True)]", "trained - baseline",
                "Python does not subtract lists: take one difference for each seed."),
        Mistake("x - y for", "y - x for", "Below zero should mean that training helped: trained minus baseline."),
        Mistake("stdev(differences)", "math.hypot(stdev(trained), stdev(baseline))",
                "That is right for two groups that have nothing in common. Here take the spread of the differences."),
        Mistake("stdev(differences)", "stdev(differences) / math.sqrt(len(differences))",
                "That is the standard error of the mean. The standard deviation is wanted: stdev as it is."),
        Mistake("stdev(differences)", "stdev(differences) * math.sqrt(1 - 1 / len(differences))",
                "That divides by n. With few seeds, divide by n - 1, as stdev does."),
        Mistake("stdev(differences)", "(stdev(trained) + stdev(baseline)) / 2",
                "Take the spread of the differences: what both have in common then cancels out."),
        Mistake("x - y for", "x / y - 1 for", "Take differences, not ratios."),
        Mistake("stdev(differences)", "stdev(trained) - stdev(baseline)",
                "Take the spread of the differences: what both have in common then cancels."),
        Mistake("mean(differences), stdev(differences)", "mean(differences)", "Return mean and standard deviation."),
    ), right=(
        ("mean(differences), stdev(differences)",
         "sum(differences) / len(differences), torch.tensor(differences).double().std()"),
        ("mean(differences), stdev(differences)",
         "torch.tensor(differences).mean(), torch.tensor(differences).std()"),
    )),
}  # fmt: skip
