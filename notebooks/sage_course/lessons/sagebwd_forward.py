"""Notebook 04: one tile of the INT8 forward pass, and the loop over tiles. Steps are those of Algorithm 1."""

import math

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draws, watched, with_mistakes
from sage_ref.quantization import integer_matmul
from sage_ref.sagebwd.algorithm import psi

TILE, HEAD_DIM = 64, 64
C = 1 / math.sqrt(HEAD_DIM)


def score_tile(s_q, q_hat, s_k, k_hat, c):
    return integer_matmul(q_hat, k_hat.mT) * s_q * s_k * c


def update_sum(l, m, m_new, p):
    return torch.exp(m - m_new) * l + p.sum(-1, keepdim=True)


def scale_of_p(s_ij, m_new):
    return torch.exp(s_ij.amax(-1, keepdim=True) - m_new) / 127


def forward_tile(s_ij, s_v, v_hat, m, l, o):
    m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
    p = torch.exp(s_ij - m_new)
    s_p = scale_of_p(s_ij, m_new)
    p_hat = torch.round(p / s_p.clamp(min=torch.finfo(s_p.dtype).tiny)).to(torch.int8)
    o = torch.exp(m - m_new) * o + integer_matmul(p_hat, v_hat) * s_p * s_v
    return m_new, update_sum(l, m, m_new, p), o


def query_tile(q_i, keys, values, c):
    s_q, q_hat = psi(q_i)
    m, l, o = torch.full_like(q_i[:, :1], -math.inf), torch.zeros_like(q_i[:, :1]), torch.zeros_like(q_i)
    for (s_k, k_hat), (s_v, v_hat) in zip(keys, values, strict=True):
        s_ij = score_tile(s_q, q_hat, s_k, k_hat, c)
        m, l, o = forward_tile(s_ij, s_v, v_hat, m, l, o)
    return o / l, m + torch.log(l)


def _scores_to_multiply() -> list[tuple]:
    q, k = draws(0, (TILE, HEAD_DIM), (TILE, HEAD_DIM))
    trials = [(*psi(q), *psi(k), C), (*psi(3 * q[:, :32]), *psi(k[:48, :32]), 1 / math.sqrt(32))]
    return [*trials, (*psi(1e-7 * q), *psi(k), C), (*psi(0 * q), *psi(k), C)]


def _sums_to_update() -> list[tuple]:
    l, m = torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0], [0.0]])
    p = torch.tensor([[1.0, 0.5], [0.25, 0.125]])
    return [(l, m, m + torch.tensor([[2.0], [0.0]]), p), (torch.zeros(2, 1), torch.full((2, 1), -math.inf), m, p)]


def _scores_and_maxima() -> list[tuple]:
    (s_ij,) = draws(1, (TILE, TILE))
    largest = s_ij.amax(-1, keepdim=True)
    return [(s_ij, largest + torch.arange(TILE)[:, None] / 16), (s_ij, largest + 200), (0 * s_ij, 0 * largest)]


def _states() -> list[tuple]:
    s_ij, v, o = draws(2, (TILE, TILE), (TILE, HEAD_DIM), (TILE, HEAD_DIM))
    s_v, v_hat = psi(v)
    m, l = torch.linspace(-1, 5, TILE)[:, None], torch.linspace(1, 9, TILE)[:, None]
    start = (torch.full_like(m, -math.inf), torch.zeros_like(l), torch.zeros_like(o))
    far_below = s_ij - 200  # P~ and its scale are zero
    return [(s_ij, s_v, v_hat, m, l, o), (s_ij, s_v, v_hat, *start), (far_below, s_v, v_hat, m, l, o)]


def _whole_rows() -> list[tuple]:
    q, k, v = draws(3, (TILE, HEAD_DIM), (3 * TILE, HEAD_DIM), (3 * TILE, HEAD_DIM))
    k[TILE:] *= 3  # so that later tiles hold the largest scores
    trials = [(q, k), (q + 10, k - 10)]  # the second one: every score is far below zero
    return [(x, *([psi(tile) for tile in y.split(TILE)] for y in (z, v)), C) for x, z in trials]


GAPS = with_mistakes(
    __file__,
    {
        "score_tile": Gap(score_tile, _scores_to_multiply, run=watched),
        "update_sum": Gap(update_sum, _sums_to_update),
        "scale_of_p": Gap(scale_of_p, _scores_and_maxima),
        "forward_tile": Gap(forward_tile, _states, run=watched),
        "query_tile": Gap(query_tile, _whole_rows),
    },
)
