"""Notebook 05b: how small dS is, a scale per row of dS, and rounding that is right on average."""

import math

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draws, watched, with_mistakes
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


GAPS = with_mistakes(
    __file__,
    {
        "ds_bound": Gap(ds_bound, _rows_of_dp),
        "dq_dk_by_row": Gap(dq_dk_by_row, _tiles_of_ds, run=watched),
        "round_up_or_down": Gap(round_up_or_down, _numbers_to_round),
    },
)
