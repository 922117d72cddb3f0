"""Notebook 01: the backward pass of attention, one matmul after the other."""

from functools import partial

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws


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


GAPS = {
    "through_the_output": Gap(through_the_output, lambda: [(_probabilities(0), *_draw(1, (5, 4), (3, 4)))], (
        Mistake("p.mT @ do", "do.mT @ p", "That is dV transposed. Which product has the shape of V, [Nk, D]?"),
        Mistake("do @ v.mT", "v @ do.mT", "That is dP transposed. Which product has the shape of P, [Nq, Nk]?"),
        Mistake("p.mT @ do", "do @ p", "dV is [Nk, D]: which factor comes first, and which one is transposed?"),
        Mistake("do @ v.mT", "v.mT @ do", "dP is [Nq, Nk]: dO brings the queries, so it comes first."),
        Mistake("do @ v.mT", "p * (do @ v.mT)", "That goes on to dS. The gradient of O = P V has no P in it."),
    ), right=(
        ("p.mT @ do", "torch.einsum('...qk,...qd->...kd', p, do)"),
        ("do @ v.mT", "(v @ do.mT).mT"),
    )),
    "through_the_softmax": Gap(through_the_softmax, lambda: [(_probabilities(2), *_draw(3, (3, 5)))], (
        Mistake("(p * dp).sum(-1, keepdim=True)", "dp.sum(-1, keepdim=True)", "Each dP counts with its weight P."),
        Mistake("(p * dp).sum(-1, keepdim=True)", "dp.mean(-1, keepdim=True)",
                "That is the plain mean. In delta, each dP counts with its weight P."),
        Mistake("(p * dp).sum", "(p @ dp.mT).sum", "Multiply entry by entry, with `*`."),
        Mistake("(p * dp).sum(-1, keepdim=True)", "(p * dp).sum(-2, keepdim=True)",
                "There is one number for each row, not for each column."),
        Mistake("p * (dp - delta)", "p * dp - delta", "P multiplies the whole difference."),
        Mistake("sum(-1, keepdim=True)", "mean(-1, keepdim=True)",
                "delta is a sum, not a mean: the weights P already sum to 1."),
        Mistake("p * (dp - delta)", "p * (1 - p) * dp", "That uses the diagonal of the Jacobian alone."),
    ), right=(
        ("p * (dp - delta)", "p * dp - p * delta"),
        ("(p * dp)", "(p.double() * dp)"),
    )),
    "delta_of": Gap(delta_of, lambda: [_draw(5, (3, 4), (3, 4))], (
        Mistake("(do * o).sum(-1, keepdim=True)", "do @ o.mT",
                "`@` multiplies each row of dO by every row of O. Multiply entry by entry, and sum."),
        Mistake("(do * o).sum(-1, keepdim=True)", "(do @ o.mT).sum(-1, keepdim=True)",
                "Multiply entry by entry: dO * O."),
        Mistake("(do * o).sum(-1, keepdim=True)", "(do.mT @ o).sum(-1, keepdim=True)",
                "Multiply entry by entry: dO * O."),
    ), right=(
        ("(do * o).sum(-1, keepdim=True)", "torch.einsum('...d,...d->...', do, o).unsqueeze(-1)"),
        ("(do * o)", "(do.double() * o)"),
    )),
    "through_the_scores": Gap(through_the_scores, lambda: [(*_draw(6, (3, 5), (3, 4), (5, 4)), 0.5)], (
        Mistake("ds @ k * c\n    dk = ds.mT @ q * c", "ds @ k\n    dk = ds.mT @ q",
                "S = c Q K^T: c is missing from both gradients."),
        Mistake("ds @ k * c\n    dk = ds.mT @ q * c", "ds @ k / c\n    dk = ds.mT @ q / c",
                "Multiply by c. You divided by it."),
        Mistake("ds @ k * c", "ds @ q * c",
                "The sizes of dS and Q don't match: dQ needs the keys, and dK needs dS transposed."),
        Mistake("ds.mT @ q * c", "q.mT @ ds * c", "That is dK transposed."),
    ), right=(
        ("ds @ k * c", "(c * ds) @ k"),
        ("ds.mT @ q * c", "c * (q.mT @ ds).mT"),
    )),
    "probabilities_again": Gap(probabilities_again, _queries_keys_and_l, (
        Mistake("torch.exp(s - log_sum_exp)", "torch.exp(s) / log_sum_exp",
                "L is the logarithm of the sum: subtract it inside the exponential."),
        Mistake("torch.exp(s - log_sum_exp)", "torch.softmax(s, -1)",
                "Wrong for a tile: a softmax divides by the sum over the keys it gets, and L knows the sum over all."),
        Mistake("torch.exp(s - log_sum_exp)", "torch.exp(s - s.amax(-1, keepdim=True))",
                "Subtract L instead of the largest score. Then nothing is left to divide by."),
    ), right=(
        ("q @ k.mT * c", "(c * q) @ k.mT"),
        ("torch.exp(s - log_sum_exp)", "s.sub_(log_sum_exp).exp_()"),
    )),
}  # fmt: skip
