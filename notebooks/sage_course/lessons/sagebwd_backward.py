"""Notebook 05: one tile of the INT8 backward pass, and the loop over tiles. Steps are those of Algorithm 2."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws, watched
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


def _run_column(function: Callable, *inputs) -> tuple:
    """Return the function's result, and every dQ_i that it has added to."""
    dq_tiles = inputs[4]
    return function(*inputs), dq_tiles


def _rows() -> list[tuple]:
    (dp,) = draws(11, (TILE, 4 * TILE))
    return [(_probabilities(12), 3 + dp)]


GAPS = {
    "rebuild_p": Gap(rebuild_p, _scores_and_log_sums, (
        Mistake(" - l_i", "", "That is e^S. Its rows don't add up to one: L_i is missing."),
        Mistake("torch.exp(score_tile(s_q, q_hat, s_k, k_hat, c) - l_i)",
                "torch.softmax(score_tile(s_q, q_hat, s_k, k_hat, c), -1)",
                "The sum of a tile is not the sum of the whole row. L_i holds the whole row."),
        Mistake("k_hat, c) - l_i", "k_hat, 1) - l_i", "c = 1 / sqrt(D) is missing. The paper's line lacks it, too."),
        Mistake("- l_i", "- l_i.mT", "L_i has one number per query: [queries, 1] is right without a transpose."),
        Mistake("- l_i", "/ l_i", "e^L is the sum of the row: P = e^S / e^L."),
        Mistake("k_hat, c) - l_i)", "k_hat, c)) / l_i", "L is a logarithm: subtract it inside the exponential."),
    ), right=(
        ("score_tile(s_q, q_hat, s_k, k_hat, c)", "integer_matmul(q_hat, k_hat.mT) * (c * s_q * s_k)"),
        ("torch.exp(score_tile(s_q, q_hat, s_k, k_hat, c) - l_i)",
         "score_tile(s_q, q_hat, s_k, k_hat, c).sub_(l_i).exp_()"),
    )),
    "dv_part": Gap(dv_part, _probabilities_and_gradients, (
        Mistake("p_hat.mT", "p_hat", "dV_j has a row per key, and the sum runs over queries: P transposed."),
        Mistake("psi(p_ij)", "psi(p_ij, (1, None))", "A scale per query varies along this sum: it can't wait outside."),
        Mistake("psi(p_ij)", "1 / 127, torch.round(127 * p_ij).to(torch.int8)",
                "That is the constant 1/127. Let psi find the scale."),
        Mistake("integer_matmul(p_hat.mT, do_hat)", "(p_hat.mT @ do_hat)",
                "A product of int8 tensors is int8 and overflows: integer_matmul sums in 32 bits."),
        Mistake("psi(p_ij)", "psi(p_ij, (None, 1))",
                "A scale per key would have to be a column, [keys, 1]. Algorithm 2 takes one for the tile: psi(p_ij)."),
        Mistake("psi(p_ij)\n", "psi(p_ij, (None, 1))\n    s_p = s_p.mT\n",
                "A scale per key may wait outside, too. Algorithm 2 takes one for the tile: psi(p_ij)."),
    ), watched, right=(
        ("* s_p * s_do", "* (s_p * s_do)"),
        ("integer_matmul(p_hat.mT, do_hat) * s_p", "s_p.double() * integer_matmul(do_hat.mT, p_hat).mT"),
    )),
    "row_delta": Gap(row_delta, _gradients_and_outputs, (
        Mistake("-1", "-2", "One number per query: the sum runs over the channels."),
        Mistake("do * o", "do @ o.mT", "Entry by entry: a query's dO meets its own O only."),
        Mistake("(do * o).sum(-1, keepdim=True)", "do.sum(-1, keepdim=True) * o.sum(-1, keepdim=True)",
                "First multiply entry by entry, then add up. A product of two sums is a different number."),
        Mistake("(do * o).sum(-1, keepdim=True)", "do @ o", "Entry by entry, then the sum of each row: [queries, 1]."),
        Mistake("(do * o).sum(-1, keepdim=True)", "do @ o.mT",
                "Entry by entry, then the sum of each row: [queries, 1]."),
    ), right=(
        ("(do * o).sum(-1, keepdim=True)", "torch.einsum('...d,...d->...', do, o)[..., None]"),
        ("(do * o)", "(do.double() * o)"),
    )),
    "ds_tile": Gap(ds_tile, _tiles_of_dp, (
        Mistake("dp_ij - delta_i", "dp_ij + delta_i", "Minus delta: rows of dS add up to zero."),
        Mistake("dp_ij = do_i @ v_j.mT", "dp_ij = p_ij * (do_i @ v_j.mT)", "dP has no factor P. dS has it."),
        Mistake("do_i @ v_j.mT", "v_j @ do_i.mT", "dP has a row per query and a column per key: dO_i comes first."),
        Mistake("do_i @ v_j.mT", "integer_matmul(psi(do_i)[1], psi(v_j)[1].mT) * psi(do_i)[0] * psi(v_j)[0]",
                "This matmul stays in 16 bit: neither dO nor V is rounded."),
        Mistake("- delta_i", "- delta_i.mT",
                "delta has one number per query: [queries, 1] is right without a transpose."),
        Mistake("p_ij * (", "p_ij @ (", "Entry by entry, not a matmul."),
        Mistake("- delta_i", "- (p_ij * dp_ij).sum(-1, keepdim=True)",
                "That sum has only the keys of this tile. delta_i belongs to the whole row."),
    ), right=(
        ("p_ij * (dp_ij - delta_i)", "p_ij * dp_ij - p_ij * delta_i"),
        ("do_i @ v_j.mT", "(v_j @ do_i.mT).mT"),
    )),
    "dq_dk_parts": Gap(dq_dk_parts, _tiles_of_ds, (
        Mistake("c * dq_part, c * dk_part", "dq_part, dk_part",
                "S = c Q K^T, so both need c. The paper's lines lack it."),
        Mistake("integer_matmul(ds_hat, k_hat) * s_ds * s_k", "integer_matmul(ds_hat, k_hat) * s_ds * s_q",
                "The scales are swapped: dQ meets K^ and its s_K, dK meets Q^ and its s_Q.",
                (("q_hat) * s_ds * s_q", "q_hat) * s_ds * s_k"),)),
        Mistake("psi(ds_ij)", "psi(ds_ij, (1, None))",
                "A scale per query may wait outside dQ, but not outside dK: there the sum runs over queries."),
        Mistake("= psi(ds_ij)", "= 1, psi(ds_ij)[1]", "dS^ stands for s_dS dS^, in both."),
    ), watched, right=(
        ("integer_matmul(ds_hat, k_hat) * s_ds * s_k", "integer_matmul(ds_hat, k_hat) * (s_ds * s_k)"),
        ("c * dq_part, c * dk_part", "dq_part.mul_(c), dk_part.double() * c"),
    )),
    "backward_column": Gap(backward_column, _columns, (
        Mistake("dq_i += dq_part", "dq_i[:] = dq_part", "dQ_i holds what other tiles of keys have added: add to it."),
        Mistake("dq_i += dq_part", "dq_i = dq_i + dq_part",
                "Nothing was added to dq_tiles. += adds in place; dq_i = dq_i + ... makes a new tensor."),
        Mistake("dv_j += ", "dv_j = ", "Keep each +=: dV_j, dK_j and dQ_i are sums, and = forgets the earlier parts.",
                (("dk_j += ", "dk_j = "), ("dq_i += ", "dq_i = "))),
        Mistake("ds_tile(p_ij, do_i", "ds_tile(p_ij, s_do * do_hat",
                "dP takes dO_i as it is. s_dO times its integers is a rounded dO."),
        Mistake("dq_dk_parts(s_q, q_hat, s_k, k_hat", "dq_dk_parts(s_k, k_hat, s_q, q_hat",
                "dq_dk_parts takes the scale and integers of Q first, then those of K."),
        Mistake("k_hat, ds_ij, c", "k_hat, p_ij, c", "dQ and dK are made of dS, not of P."),
        Mistake("dv_part(p_ij, s_do, do_hat)", "dv_part(ds_tile(p_ij, do_i, v_j, delta_i), s_do, do_hat)",
                "dV is made of P, not of dS."),
        Mistake("ds_tile(p_ij, do_i", "ds_tile(p_ij, do_hat.float()", "dP takes dO_i itself, not its integers."),
    ), _run_column, right=(
        ("dk_j += dk_part", "dk_j = dk_j + dk_part"),
        ("torch.zeros_like(v_j), torch.zeros_like(v_j)", "0, 0"),
    )),
    "matching_delta": Gap(matching_delta, _rows, (
        Mistake(".sum(", ".mean(", "P is a weight already, its rows add up to one: a sum."),
        Mistake("(p * dp_hat).sum(", "dp_hat.mean(", "The mean is weighted: with P."),
        Mistake("-1", "-2", "One number per query: the sum runs over the keys."),
        Mistake("(p * dp_hat).sum", "(p @ dp_hat.mT).sum", "Entry by entry, not a matmul."),
        Mistake("(p * dp_hat).sum(-1, keepdim=True)", "p * (dp_hat - (p * dp_hat).sum(-1, keepdim=True))",
                "That is dS. Return delta alone."),
    ), right=(
        ("(p * dp_hat).sum(-1, keepdim=True)", "torch.einsum('...k,...k->...', p, dp_hat)[..., None]"),
        ("(p * dp_hat)", "(p.double() * dp_hat)"),
    )),
}  # fmt: skip
