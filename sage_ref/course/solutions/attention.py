"""Notebook 01: the backward pass of attention, one matmul after the other."""

import torch

from sage_ref.course.fill_in import Gap, Mistake


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


def _draw(seed: int, *shapes: tuple[int, ...]) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def _probabilities(seed: int) -> torch.Tensor:
    return torch.softmax(_draw(seed, (3, 5))[0], -1)


def _of_a_product() -> list[tuple]:
    return [(_probabilities(0), *_draw(1, (5, 4), (3, 4)))]


def _queries_keys_and_l() -> list[tuple]:
    q, k = _draw(4, (3, 4), (5, 4))
    return [(q, k, (0.5 * q @ k.mT).logsumexp(-1, keepdim=True), 0.5)]


GAPS = {
    "through_the_output": Gap(
        through_the_output,
        _of_a_product,
        (
            Mistake("p.mT @ do", "torch.softmax(p, 0).mT @ do", "dV = P^T dO: P as it is."),
            Mistake("do @ v.mT", "-do @ v.mT", "dP = dO V^T, without a sign."),
            Mistake("return dv, dp", "return dp, dv", "dV first, then dP."),
        ),
    ),
    "through_the_softmax": Gap(
        through_the_softmax,
        lambda: [(_probabilities(2), *_draw(3, (3, 5)))],
        (
            Mistake("(p * dp).sum(-1, keepdim=True)", "dp.sum(-1, keepdim=True)", "Each dP counts with its P."),
            Mistake(
                "(p * dp).sum(-1, keepdim=True)",
                "(p * dp).sum(-2, keepdim=True)",
                "One number per row, not per column.",
            ),
            Mistake("p * (dp - delta)", "p * dp - delta", "P multiplies the whole difference."),
            Mistake("(dp - delta)", "(delta - dp)", "The sign is the other way round."),
            Mistake("p * (dp - delta)", "p * dp", "delta is missing: rows would not sum to zero."),
        ),
    ),
    "delta_of": Gap(
        delta_of,
        lambda: [_draw(5, (3, 4), (3, 4))],
        (
            Mistake("sum(-1, keepdim=True)", "sum(-1)", "Keep the dimension: [queries, 1]."),
            Mistake("sum(-1, keepdim=True)", "mean(-1, keepdim=True)", "It is a sum."),
            Mistake("(do * o).sum(-1, keepdim=True)", "(do @ o.mT).sum(-1, keepdim=True)", "Entry by entry: dO * O."),
        ),
    ),
    "through_the_scores": Gap(
        through_the_scores,
        lambda: [(*_draw(6, (3, 5), (3, 4), (5, 4)), 0.5)],
        (
            Mistake("ds @ k * c", "ds @ k", "c is missing from dQ, as in the paper's Algorithm 2."),
            Mistake("ds.mT @ q * c", "ds.mT @ q", "c is missing from dK, as in the paper's Algorithm 2."),
            Mistake("return dq, dk", "return dk, dq", "dQ first, then dK."),
        ),
    ),
    "probabilities_again": Gap(
        probabilities_again,
        _queries_keys_and_l,
        (
            Mistake("q @ k.mT * c", "q @ k.mT", "c is missing from S."),
            Mistake("torch.exp(s - log_sum_exp)", "torch.exp(s)", "Divide by the row's sum: subtract L."),
            Mistake("torch.exp(s - log_sum_exp)", "torch.exp(s) / log_sum_exp", "L is the logarithm of the sum."),
        ),
    ),
}
