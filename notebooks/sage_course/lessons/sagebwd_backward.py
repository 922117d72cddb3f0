"""Notebook 05: one tile of the INT8 backward pass, and the loop over tiles. Steps are those of Algorithm 2."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_course.gaps import Gap
from sage_course.lessons import draws, watched, with_mistakes
from sage_course.lessons.sagebwd_forward import score_tile
from sage_ref.quantization import integer_matmul
from sage_ref.sagebwd.algorithm import psi

TILE, HEAD_DIM = 64, 64
C = 1 / math.sqrt(HEAD_DIM)


class QueryTile(NamedTuple):
    """The tensors of 64 queries that the backward pass reads."""

    s_q: Tensor  # [1, 1]
    q_hat: Tensor  # int8 [64, D]
    s_do: Tensor  # [1, 1]
    do_hat: Tensor  # int8 [64, D]
    do_i: Tensor  # [64, D], not rounded
    l_i: Tensor  # [64, 1], of the smoothed scores
    delta_i: Tensor  # [64, 1]


def rebuild_p(s_q, q_hat, s_k, k_hat, l_i, c):
    return torch.exp(score_tile(s_q, q_hat, s_k, k_hat, c) - l_i)


def dv_part(p_ij, s_do, do_hat):
    s_p, p_hat = psi(p_ij)
    return integer_matmul(p_hat.mT, do_hat) * s_p * s_do


def row_delta(do, o):
    return (do * o).sum(-1, keepdim=True)


def ds_tile(p_ij, do_i, v_j, delta_i):
    dp_ij = do_i @ v_j.mT
    return p_ij * (dp_ij - delta_i)


def dq_dk_parts(s_q, q_hat, s_k, k_hat, ds_ij, c):
    s_ds, ds_hat = psi(ds_ij)
    dq_part = integer_matmul(ds_hat, k_hat) * s_ds * s_k
    dk_part = integer_matmul(ds_hat.mT, q_hat) * s_ds * s_q
    return c * dq_part, c * dk_part


def backward_column(s_k, k_hat, v_j, query_tiles, dq_tiles, c):
    dk_j, dv_j = torch.zeros_like(v_j), torch.zeros_like(v_j)
    for query_tile, dq_i in zip(query_tiles, dq_tiles, strict=True):
        s_q, q_hat, s_do, do_hat, do_i, l_i, delta_i = query_tile
        p_ij = rebuild_p(s_q, q_hat, s_k, k_hat, l_i, c)
        dv_j += dv_part(p_ij, s_do, do_hat)
        ds_ij = ds_tile(p_ij, do_i, v_j, delta_i)
        dq_part, dk_part = dq_dk_parts(s_q, q_hat, s_k, k_hat, ds_ij, c)
        dk_j += dk_part
        dq_i += dq_part
    return dk_j, dv_j


def matching_delta(p, dp_hat):
    return (p * dp_hat).sum(-1, keepdim=True)


def _probabilities(seed: int) -> Tensor:
    (scores,) = draws(seed, (TILE, 4 * TILE))
    return torch.softmax(2 * scores, -1)


def _scores_and_log_sums() -> list[tuple]:
    q, k = draws(0, (TILE, HEAD_DIM), (TILE, HEAD_DIM))
    trials = [(*psi(q), *psi(k), C), (*psi(3 * q), *psi(k), C)]
    l_i = torch.linspace(3, 6, TILE)[:, None]
    return [(s_q, q_hat, s_k, k_hat, l_i, c) for s_q, q_hat, s_k, k_hat, c in trials]


def _probabilities_and_gradients() -> list[tuple]:
    (do,) = draws(1, (TILE, HEAD_DIM))
    trials = [(_probabilities(2)[:, tile], *psi(do)) for tile in (slice(0, TILE), slice(TILE, 2 * TILE))]
    return [*trials, *((factor * trials[0][0], *psi(do)) for factor in (1e-7, 0.0))]  # a tile far below its row's rest


def _gradients_and_outputs() -> list[tuple]:
    do, o = draws(3, (TILE, HEAD_DIM), (TILE, HEAD_DIM))
    return [(do, o), (do[:, :32], o[:, :32])]


def _tiles_of_dp() -> list[tuple]:
    do, v, delta = draws(4, (TILE, HEAD_DIM), (TILE, HEAD_DIM), (TILE, 1))
    return [(_probabilities(5)[:, :TILE], do, v, delta)]


def _tiles_of_ds() -> list[tuple]:
    q, k, ds = draws(6, (TILE, HEAD_DIM), (TILE, HEAD_DIM), (TILE, TILE))
    sizes = torch.logspace(-3, -1, TILE)[:, None]  # rows of different sizes, as they are in dS
    return [(*psi(3 * q), *psi(k), factor * sizes * ds, C) for factor in (1.0, 1e-6, 0.0)]


def _columns() -> list[tuple]:
    k, v, dq = draws(7, (TILE, HEAD_DIM), (TILE, HEAD_DIM), (3 * TILE, HEAD_DIM))
    query_tiles = []
    for seed in (8, 9, 10):
        q, do, delta = draws(seed, (TILE, HEAD_DIM), (TILE, HEAD_DIM), (TILE, 1))
        query_tiles.append(QueryTile(*psi(q), *psi(do), do, torch.full((TILE, 1), 4.5), delta))
    return [(*psi(k), v, query_tiles, list(dq.split(TILE)), C)]  # dQ is not zero: other columns have added to it


def _run_column(function: Callable, *inputs) -> dict:
    """Return the function's result, and every dQ_i that it has added to."""
    dq_tiles = inputs[4]
    return {"dK_j and dV_j": function(*inputs), **{f"dQ_{i}": dq_i for i, dq_i in enumerate(dq_tiles)}}


def _rows() -> list[tuple]:
    (dp,) = draws(11, (TILE, 4 * TILE))
    return [(_probabilities(12), 3 + dp)]


GAPS = with_mistakes(
    __file__,
    {
        "rebuild_p": Gap(rebuild_p, _scores_and_log_sums),
        "dv_part": Gap(dv_part, _probabilities_and_gradients, run=watched),
        "row_delta": Gap(row_delta, _gradients_and_outputs),
        "ds_tile": Gap(ds_tile, _tiles_of_dp),
        "dq_dk_parts": Gap(dq_dk_parts, _tiles_of_ds, run=watched),
        "backward_column": Gap(backward_column, _columns, run=_run_column),
        "matching_delta": Gap(matching_delta, _rows),
    },
)
