"""Notebook 04: one tile of the INT8 forward pass, and the loop over tiles. Steps are those of Algorithm 1."""

import math

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws, watched
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


GAPS = {
    "score_tile": Gap(score_tile, _scores_to_multiply, (
        Mistake(" * c", "", "c = 1 / sqrt(D) is missing. The paper's line lacks it, too."),
        Mistake(" * s_q * s_k", "", "The integers stand for numbers s times as large: both scales are missing."),
        Mistake("integer_matmul(q_hat, k_hat.mT)", "(q_hat @ k_hat.mT)",
                "A product of int8 tensors is int8 and overflows: integer_matmul sums in 32 bits."),
        Mistake("integer_matmul(q_hat, k_hat.mT)", "integer_matmul(k_hat, q_hat.mT)",
                "A row per query, a column per key."),
    ), watched, right=(
        ("* s_q * s_k * c", "* (s_q * s_k * c)"),
        ("integer_matmul(q_hat, k_hat.mT) * s_q * s_k * c",
         "c * s_k.double() * s_q * integer_matmul(k_hat, q_hat.mT).mT"),
    )),
    "update_sum": Gap(update_sum, _sums_to_update, (
        Mistake("m - m_new", "m_new - m", "That factor grows. What was summed before must shrink."),
        Mistake(" * l", "", "The old sum is forgotten. The paper prints it like this; it can't be meant."),
        Mistake("torch.exp(m - m_new) * ", "", "The old sum belongs to the old maximum: it must shrink."),
        Mistake("torch.exp(m - m_new) * l + p.sum(-1, keepdim=True)",
                "torch.exp(m - m_new) * (l + p.sum(-1, keepdim=True))",
                "p is relative to m_new already: only the old l shrinks."),
        Mistake("torch.exp(m - m_new) * l + p.sum", "l + torch.exp(m - m_new) * p.sum",
                "The wrong one of the two shrinks: the old l does, p belongs to m_new already."),
    ), right=(
        ("torch.exp(m - m_new) * l + p.sum(-1, keepdim=True)", "p.sum(-1, keepdim=True).add_(l * (m - m_new).exp())"),
        ("p.sum(", "p.double().sum("),
    )),
    "scale_of_p": Gap(scale_of_p, _scores_and_maxima, (
        Mistake("s_ij.amax(-1, keepdim=True) - m_new", "0 * m_new", "That is the constant 1/127."),
        Mistake(" - m_new) / 127", " - m_new) / 127)", "Divide the exponential by 127, not its exponent.",
                (("return torch.exp(", "return torch.exp(("),)),
        Mistake("s_ij.amax(-1, keepdim=True)", "s_ij.amax()", "One scale per query: the largest of its row."),
        Mistake("torch.exp(s_ij.amax(-1, keepdim=True) - m_new)", "torch.exp(s_ij - m_new).amax()",
                "One scale per query: the largest of its row."),
        Mistake("torch.exp(s_ij.amax(-1, keepdim=True) - m_new)", "(s_ij.amax(-1, keepdim=True) - m_new)",
                "That is a score. The entry of P~ is its exponential."),
        Mistake("torch.exp(s_ij.amax(-1, keepdim=True) - m_new) / 127",
                "127 / torch.exp(s_ij.amax(-1, keepdim=True) - m_new)",
                "The other way round: the integer 127 times s_P is the largest entry."),
    ), right=(
        ("torch.exp(s_ij.amax(-1, keepdim=True) - m_new)", "torch.exp(s_ij - m_new).amax(-1, keepdim=True)"),
        ("/ 127", "* (1 / 127)"),
    )),
    "forward_tile": Gap(forward_tile, _states, (
        Mistake("torch.maximum(m, s_ij.amax(-1, keepdim=True))", "s_ij.amax(-1, keepdim=True)", "m never falls."),
        Mistake("torch.exp(m - m_new) * o", "torch.exp(m_new - m) * o", "O must shrink, not grow: as l does."),
        Mistake("torch.exp(m - m_new) * o", "o", "O belongs to the old maximum: it shrinks as l does."),
        Mistake("p = torch.exp(s_ij - m_new)", "p = torch.exp(s_ij - m)", "P~ is relative to the new maximum."),
        Mistake("update_sum(l, m, m_new, p)", "update_sum(l, m, m_new, p_hat * s_p)",
                "l is the sum of P~ before rounding."),
        Mistake("torch.exp(m - m_new) * o + integer_matmul(p_hat, v_hat) * s_p * s_v",
                "torch.exp(m - m_new) * (o + integer_matmul(p_hat, v_hat) * s_p * s_v)",
                "The new tile belongs to m_new already: only the old O shrinks."),
        Mistake("p = torch.exp(s_ij - m_new)", "p = torch.softmax(s_ij, -1)",
                "softmax divides by the sum of this tile. P~ is e^(s - m_new) alone; the division by l comes last."),
        Mistake("torch.round(p / s_p", "(p / s_p", "A cast alone cuts towards zero: round first."),
        Mistake("p / s_p.clamp(min=torch.finfo(s_p.dtype).tiny)", "127 * p",
                "Divide by s_p of each query. 127 P~, or psi of the whole tile, is the constant 1/127."),
        Mistake("torch.exp(m - m_new) * o + ", "", "The output of the earlier tiles is forgotten."),
        Mistake(".clamp(min=torch.finfo(s_p.dtype).tiny)", "",
                "0 / 0 is NaN, where a whole tile is far below m. Keep the divisor above zero: s_p.clamp(min=...)."),
    ), watched, right=(
        ("integer_matmul(p_hat, v_hat) * s_p * s_v", "integer_matmul(p_hat, v_hat) * (s_p * s_v)"),
        ("s_p = scale_of_p(s_ij, m_new)", "s_p = p.amax(-1, keepdim=True) / 127"),
    )),
    "query_tile": Gap(query_tile, _whole_rows, (
        Mistake("-math.inf", "0.0", "m starts below every score that can come: at minus infinity."),
        Mistake("full_like(q_i[:, :1]", "full_like(q_i", "m has one number per query: the shape of q_i[:, :1]."),
        Mistake("m + torch.log(l)", "m + l", "L = m + log l."),
        Mistake("m + torch.log(l)", "l", "L is a logarithm: m + log l."),
        Mistake("m + torch.log(l)", "torch.log(m + l)", "Take the logarithm of l alone, then add m."),
    ), right=(
        ("m + torch.log(l)", "l.log().add_(m)"),
        ("torch.full_like(q_i[:, :1], -math.inf)", "q_i.new_full((len(q_i), 1), -math.inf)"),
    )),
}  # fmt: skip
