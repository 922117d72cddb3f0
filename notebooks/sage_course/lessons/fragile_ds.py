"""Notebook 05b: how small dS is, a scale per row of dS, and rounding that is right on average."""

import math

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws, watched
from sage_ref.quantization import integer_matmul
from sage_ref.sagebwd.algorithm import psi

TILE, HEAD_DIM = 64, 64
C = 1 / math.sqrt(HEAD_DIM)


def ds_bound(dp, delta):
    return (dp - delta).abs().max().item() / math.sqrt(dp.shape[-1])


def dq_dk_by_row(s_q, q_hat, s_k, k_hat, ds_ij, c):
    s_query, ds_by_query = psi(ds_ij, (1, None))
    s_key, ds_by_key = psi(ds_ij, (None, 1))
    dq_part = integer_matmul(ds_by_query, k_hat) * s_query * s_k
    dk_part = integer_matmul(ds_by_key.mT, q_hat) * s_key.mT * s_q
    return c * dq_part, c * dk_part


def round_up_or_down(x, scale, noise):
    return torch.floor(x / scale + noise)


def _rows_of_dp() -> list[tuple]:
    dp = torch.tensor([[1.0, 2.0, 3.0, -9.0], [0.5, -0.5, 1.5, 2.5]])
    delta = torch.tensor([[2.0], [1.0]])
    return [(dp, delta), (dp.repeat(1, 4), delta - 0.5), (-dp, -delta)]


def _tiles_of_ds() -> list[tuple]:
    q, k, ds = draws(0, (TILE, HEAD_DIM), (TILE, HEAD_DIM), (TILE, TILE))
    sizes = torch.logspace(-3, -1, TILE)
    by_row, by_column = sizes[:, None] * ds, sizes * ds
    trials = [(*psi(3 * q), *psi(k), by_row, C), (*psi(q), *psi(2 * k), by_column, C)]
    return [*trials, *((*psi(q), *psi(k), factor * by_row, C) for factor in (1e-6, 0.0))]


def _numbers_to_round() -> list[tuple]:
    (x,) = draws(1, (TILE, TILE))
    noise = torch.rand(TILE, TILE, generator=torch.Generator().manual_seed(2))
    return [(x, 0.1, noise), (1e-7 * x, 1e-8, noise), (0 * x, 1.0, noise)]


GAPS = {
    "ds_bound": Gap(ds_bound, _rows_of_dp, (
        Mistake("math.sqrt(dp.shape[-1])", "dp.shape[-1]",
                "The rows of P add up to one, so its RMS is at most 1 / sqrt(N)."),
        Mistake(".abs()", "", "The bound needs the largest size: negative differences count, too."),
        Mistake("dp.shape[-1]", "dp.shape[-2]", "N is the number of keys: the length of a row."),
        Mistake("dp.shape[-1]", "dp.numel()", "N is the number of keys: the length of a row."),
        Mistake("(dp - delta).abs().max()", "(dp - delta).square().mean().sqrt()",
                "That is an RMS. A bound on all entries needs the largest."),
        Mistake("(dp - delta).abs().max().item()", "(dp - delta).abs().amax(-1)",
                "One bound for the whole tensor: the largest of all rows, as a float."),
        Mistake("(dp - delta).abs().max()", "(dp.abs().max() - delta.abs().max())",
                "First the difference entry by entry, then its largest size."),
    ), right=(
        ("/ math.sqrt(dp.shape[-1])", "* dp.shape[-1] ** -0.5"),
        (".max().item()", ".max()"),
    )),
    "dq_dk_by_row": Gap(dq_dk_by_row, _tiles_of_ds, (
        Mistake("s_key.mT", "s_key",
                "s_key is a row, [1, keys], but dK has its keys in a column: transpose the scale, too."),
        Mistake("psi(ds_ij, (None, 1))", "psi(ds_ij)", "That is one scale for the tile. dK may have one per key."),
        Mistake("psi(ds_ij, (1, None))", "psi(ds_ij)", "That is one scale for the tile. dQ may have one per query."),
        Mistake("psi(ds_ij, (1, None))", "psi(ds_ij, (None, 1))",
                "dQ sums over keys, so a scale per key can't wait outside. Per query it can."),
        Mistake("c * dq_part, c * dk_part", "dq_part, dk_part", "S = c Q K^T, so both need c."),
        Mistake("psi(ds_ij, (None, 1))", "psi(ds_ij, (1, None))",
                "dK sums over queries, so a scale per query can't wait outside. Per key it can."),
        Mistake("integer_matmul(ds_by_key.mT, q_hat) * s_key.mT", "integer_matmul(ds_by_query.mT, q_hat) * s_query",
                "dK sums over queries, so a scale per query can't wait outside. Per key it can."),
    ), watched, right=(
        ("* s_query * s_k", "* (s_query * s_k)"),
        ("* s_key.mT * s_q", "* s_key.flatten()[:, None] * s_q.double()"),
    )),
    "round_up_or_down": Gap(round_up_or_down, _numbers_to_round, (
        Mistake("torch.floor", "torch.round", "On average that is half an integer step too high, as the noise is."),
        Mistake("torch.floor", "torch.ceil", "On average that is a whole integer step too high."),
        Mistake(" + noise", "", "That always rounds down. The noise decides."),
        Mistake("+ noise", "- noise", "On average that is a whole integer step too low."),
        Mistake("torch.floor(x / scale + noise)", "torch.ceil(x / scale - noise)",
                "Right on average, too, but with other draws than the library's: add the noise, then round down."),
        Mistake("torch.floor", "torch.trunc",
                "trunc rounds towards zero: negative numbers would be too large on average."),
        Mistake("x / scale + noise", "(x + noise) / scale", "The noise is a part of a step, not of x: divide first."),
        Mistake("x / scale + noise", "x / scale + noise * scale",
                "After the division one step is 1, and the noise is a part of one step: add it as it is."),
        Mistake("torch.floor(x / scale + noise)", "torch.floor(x / scale) + noise",
                "The result must be a whole number: add the noise before you round down."),
    ), right=(
        ("torch.floor(x / scale + noise)", "(noise + x / scale).floor()"),
        ("torch.floor(x / scale + noise)", "torch.floor(x / scale + noise).double()"),
    )),
}  # fmt: skip
