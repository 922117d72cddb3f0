"""Grader of 07_backward_tile."""

import functools
import math

import torch
from torch import Tensor

from exercises.grading import Grader, expect, off_ties, rounding_distance, unlike
from sage_ref.quantization import quantize, quantized_matmul
from sage_ref.sagebwd import SageBwdSettings, sagebwd_backward, sagebwd_forward, tiles

grader = Grader(
    "07_backward_tile",
    {
        "recompute_probabilities": Tensor,
        "backward_tile": (Tensor, Tensor, Tensor),
        "backward": (Tensor, Tensor, Tensor),
    },
)
grader.hint("form", "A result has the wrong shape or dtype, or holds NaN. The docstring says what is expected.")
grader.hint("softmax", "Rows of a tile don't sum to 1: the other keys are elsewhere. L knows the whole row.")
grader.hint("c_scores", "S contains the factor c = 1/sqrt(D). Is it there, and only once?")
grader.hint("exact_scores", "P must belong to the L that is given, and the forward computed that from rounded Q and K.")
grader.hint("p", "P is off. S is c times the scaled INT8 product, P = exp(S - L).")
grader.hint("bypass", "These are the exact gradients. Which matmuls have INT8 operands?")
grader.hint("dv", "dV is off. P^T times dO, both rounded with one scale per block, no factor c.")
grader.hint("dv_rounding", "Are both operands of dV rounded, P and dO?")
grader.hint("int8_dp", "dP keeps 16 bit: dO and V as they came, not their rounded forms.")
grader.hint("half_dp", "dP - delta is a small difference: convert dO and V to float32 before their product.")
grader.hint("rounded_p", "dS takes P before rounding. The rounded one is for dV.")
grader.hint("no_delta", "dS = P * (dP - delta): where is delta, and which sign has it?")
grader.hint("given_delta", "delta belongs to the whole row, of which a tile holds a part. It is given: delta_i.")
grader.hint("ds_rounding", "Are both operands rounded, dS and K for dQ, dS and Q for dK?")
grader.hint("c", "S contains c = 1/sqrt(D). By the chain rule, which gradients do?")
grader.hint("dq", "dQ is off. It is c dS^ K^ with both scales.")
grader.hint("dk", "dK is off. It is c dS^^T Q^ with both scales.")
grader.hint("one_tile", "With a single tile, backward returns what backward_tile does, in the order dQ, dK, dV.")
grader.hint("accumulate", "A gradient holds the share of one tile only. Are the shares of all tiles added?")
grader.hint(
    "tile_size", "Are blocks of queries cut with block_q and blocks of keys with block_kv, and scales taken per block?"
)
grader.hint(
    "partial",
    "Is a last tile that is shorter left out, filled up, or cut elsewhere? (If full tiles fail, too, begin with them.)",
)
NAMES = ("dQ", "dK", "dV")
not_as = functools.partial(unlike, within=1, distance=rounding_distance)


def inputs(draw, n_q, n_k, block_q, block_kv):
    """Q, K, V, dO float16; queries and keys large enough for a softmax with a few large entries."""
    head_dim = draw.choice((16, 32, 64))
    q, k, v, do = (draw.normal(n, head_dim) for n in (n_q, n_k, n_k, n_q))
    v = v + 16 * draw.normal(1, head_dim)  # shared by all values, so that dP - delta is a small difference
    q, k, do = 1.5 * q, 1.5 * (k - k.mean(0)), 0.1 * do
    return [off_ties(q.half(), block_q), off_ties(k.half(), block_kv), v.half(), off_ties(do.half(), block_q)]


def forward(q, k, v, block_q, block_kv):
    """(O float16, L, the settings) of SageBwd on these inputs; the keys are smoothed already."""
    settings = SageBwdSettings.printed(smooth_k=False, block_q=block_q, block_kv=block_kv)
    found = sagebwd_forward(*(x.float() for x in (q, k, v)), settings)
    return found.output.half(), found.log_sum_exp, settings


def one_tile(draw):
    """(Q_i, K_j, V_j, dO_i, L_i, delta_i) of the first tile of a longer sequence."""
    block_q, block_kv = draw.integers(32, 64), draw.integers(32, 64)
    q, k, v, do = inputs(draw, block_q, 2 * block_kv, block_q, block_kv)
    output, log_sum_exp, _ = forward(q, k, v, block_q, block_kv)
    delta = (do.float() * output.float()).sum(-1, keepdim=True)
    return q, k[:block_kv], v[:block_kv], do, log_sum_exp[:, None], delta


def rounded(x):
    return quantize(x.float()).dequantize()


def exact_p(q, k, l):
    return torch.exp(q.float() @ k.float().mT / math.sqrt(q.shape[1]) - l)


def rounded_p(q, k, l):
    return torch.exp(quantized_matmul(quantize(q), quantize(k).mT) / math.sqrt(q.shape[1]) - l)


def check_form(x, like):
    right = x.shape == like.shape and x.dtype == torch.float32 and x.isfinite().all()
    expect(right, "form", found=x, expected=torch.empty(like.shape, device="meta"))


@grader.test("recompute_probabilities: exp(S - L) of rounded scores", points=2)
def probabilities(student, draw):
    q, k, _, _, l, _ = one_tile(draw)
    found, expected = student.recompute_probabilities(q, k, l), rounded_p(q, k, l)
    check_form(found, expected)
    unlike(found, expected / expected.sum(-1, keepdim=True), expected, "softmax", within=1e-3)
    exact = exact_p(q, k, l)
    for wrong in (exact, exact / exact.sum(-1, keepdim=True)):
        unlike(found, wrong, expected, "exact_scores", within=1e-3)
    unlike(found, torch.exp((expected.log() + l) * math.sqrt(q.shape[1]) - l), expected, "c_scores", within=1e-3)
    expect(rounding_distance(found, expected) < 1, "p", found=found, expected=expected)


@grader.test("backward_tile: dV", points=2)
def grad_value(student, draw):
    q, k, v, do, l, delta = one_tile(draw)
    _, _, dv = student.backward_tile(q, k, v, do, l, delta)
    check_form(dv, v)
    p = rounded_p(q, k, l)
    expected = quantized_matmul(quantize(p).mT, quantize(do))
    not_as(dv, exact_p(q, k, l).mT @ do.float(), expected, "bypass")
    for wrong in (p.mT @ do.float(), rounded(p).mT @ do.float(), p.mT @ rounded(do)):
        not_as(dv, wrong, expected, "dv_rounding")
    expect(rounding_distance(dv, expected) < 1, "dv", found=dv, expected=expected)


@grader.test("backward_tile: dQ and dK from dP in 16 bit", points=4)
def grad_query_and_key(student, draw):
    q, k, v, do, l, delta = one_tile(draw)
    dq, dk, _ = student.backward_tile(q, k, v, do, l, delta)
    check_form(dq, q)
    check_form(dk, k)
    c, p, dp = 1 / math.sqrt(q.shape[1]), rounded_p(q, k, l), do.float() @ v.float().mT
    ds = p * (dp - delta)
    expected = gradients(ds, q, k)
    for hint, wrong in {
        "int8_dp": p * (rounded(do) @ rounded(v).mT - delta),
        "half_dp": p * ((do @ v.mT).float() - delta),
        "rounded_p": rounded(p) * (dp - delta),
        "no_delta": p * dp,
        "given_delta": p * (dp - (p * dp).sum(-1, keepdim=True)),
        "exact_scores": exact_p(q, k, l) * (dp - delta),
    }.items():
        not_as(dq, gradients(wrong, q, k)[0], expected[0], hint)
    for wrong in (-expected[0], gradients(p * (dp + delta), q, k)[0]):
        not_as(dq, wrong, expected[0], "no_delta")
    exact_ds = exact_p(q, k, l) * (dp - delta)
    for found, x, other, right in ((dq, ds, k, expected[0]), (dk, ds.mT, q, expected[1])):
        not_as(found, right / c, right, "c")
        not_as(found, c * (exact_ds if x is ds else exact_ds.mT) @ other.float(), right, "bypass")
        for left, right_factor in ((x, other.float()), (rounded(x), other.float()), (x, rounded(other))):
            not_as(found, c * left @ right_factor, right, "ds_rounding")
    expect(rounding_distance(dq, expected[0]) < 1, "dq", found=dq, expected=expected[0])
    expect(rounding_distance(dk, expected[1]) < 1, "dk", found=dk, expected=expected[1])


def gradients(ds, q, k):
    """(dQ, dK) of one tile of dS, which is rounded here."""
    c, ds_hat = 1 / math.sqrt(q.shape[1]), quantize(ds)
    return quantized_matmul(ds_hat, quantize(k)) * c, quantized_matmul(ds_hat.mT, quantize(q)) * c


def check_backward(student, draw, n_q, n_k, block_q, block_kv, hint):
    q, k, v, do = inputs(draw, n_q, n_k, block_q, block_kv)
    output, log_sum_exp, settings = forward(q, k, v, block_q, block_kv)
    found = dict(zip(NAMES, student.backward(do, q, k, v, output, log_sum_exp, block_q, block_kv), strict=True))
    for name, like in zip(NAMES, (q, k, v), strict=True):
        check_form(found[name], like)
    arguments = [x.float() for x in (do, q, k, v, output, log_sum_exp)]
    expected = dict(zip(NAMES, sagebwd_backward(*arguments, settings)[:3], strict=True))
    unrounded = SageBwdSettings(smooth_k=False, exact_matmuls=("S_backward", "dV", "dP", "dQ", "dK"))
    exact = dict(zip(NAMES, sagebwd_backward(*arguments, unrounded)[:3], strict=True))
    last_rows, last_columns = tiles(n_q, block_q)[-1], tiles(n_k, block_kv)[-1]
    for name in NAMES:
        if name == "dQ":
            single = arguments[0], arguments[1], *(x[last_columns] for x in arguments[2:4]), *arguments[4:]
        else:
            single = [x if x is arguments[2] or x is arguments[3] else x[last_rows] for x in arguments]
        last = dict(zip(NAMES, sagebwd_backward(*single, settings)[:3], strict=True))[name]
        not_as(found[name], exact[name], expected[name], "bypass")
        if last.shape == found[name].shape and (n_k > block_kv if name == "dQ" else n_q > block_q):
            not_as(found[name], last, expected[name], "accumulate")
    for name in NAMES:
        expect(rounding_distance(found[name], expected[name]) < 1, hint, found=found[name], expected=expected[name])


@grader.test("backward: one tile")
def single_tile(student, draw):
    n = draw.integers(32, 60)
    check_backward(student, draw, n, n, n, n, "one_tile")


@grader.test("backward: all tiles, added up", points=3)
def all_tiles(student, draw):
    block_q, block_kv = draw.choice(((32, 16), (16, 32), (32, 48)))
    check_backward(student, draw, 2 * block_q, 3 * block_kv, block_q, block_kv, "tile_size")


@grader.test("backward: a partial last tile")
def partial_tiles(student, draw):
    block_q, block_kv = draw.choice(((32, 24), (24, 32)))
    n_q, n_k = 2 * block_q + draw.integers(5, 16), block_kv + draw.integers(5, 16)
    check_backward(student, draw, n_q, n_k, block_q, block_kv, "partial")
