"""Grader of 06_ds_and_delta."""

import math

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, unlike
from sage_ref.attention import attention_backward, attention_forward
from sage_ref.quantization import quantize

grader = Grader(
    "06_ds_and_delta", {"delta": Tensor, "matching_delta": Tensor, "grad_scores_tile": (Tensor, Tensor, Tensor)}
)
grader.hint("form", "A result has the wrong shape or dtype, or holds NaN. The docstring says what is expected.")
grader.hint("sum_axis", "delta is one number per query, [N, 1]: the sum of dO * O, over which axis?")
grader.hint(
    "half_product", "Products of float16 tensors are float16: rounded, and 0 below 6e-8. Convert before multiplying."
)
grader.hint("softmax", "A tile doesn't hold the whole row, so its softmax isn't P. L knows the whole row.")
grader.hint("normalised", "P is exp(S - L) with the L that is given, even if its rows don't sum to 1 then.")
grader.hint("c", "Is the factor c = 1/sqrt(D) in the scores?")
grader.hint("half_scores", "Scores, P and dP are float32. A product of float16 tensors is rounded to float16.")
grader.hint("matching", "rowsum(P * dP) is off. Is P exp(S - L), which axes do P and dP have, is every tile added?")
grader.hint("trick", "With exact attention rowsum(P * dP) equals rowsum(dO * O).")
grader.hint("no_delta", "This is P * dP. What is subtracted from every row of dP?")
grader.hint("sign", "The sign: dS = P * (dP - delta).")
grader.hint("no_p", "Is the difference dP - delta multiplied by P?")
grader.hint(
    "half_difference",
    "dP - delta is a small difference of large numbers. Is all of it float32, dO and V before their product?",
)
grader.hint(
    "large",
    "dS is off where dP and delta are large and their difference is small. Is all of it float32, from the inputs on?",
)
grader.hint("rounded_dp", "dO and V are multiplied as they came, in 16 bit, not rounded to INT8.")
grader.hint("ds", "dS is off. It is P * (dP - delta), entry by entry; in dP = dO V^T queries are rows.")
grader.hint("ds_first", "dS itself is off, so its rounding can't be judged: mend the tests above first.")
grader.hint("int8", "psi of a tile: round(dS / scale) in INT8, with one float32 scale, max|dS| / 127.")
grader.hint("round", "The integers are off by a step here and there. A cast cuts towards zero; round first.")
grader.hint("half_scale", "A dS of 1e-7 must survive: dS and its scale in float32, and no lower limit on the scale.")
grader.hint("zero", "A tile of zeros has values 0 and scale 0. What is 0 / 0?")


def inputs(draw, shared=0.0):
    """Q, K, V, dO float16 [N, D]; values share a vector of length `shared` sqrt(D), which dP - delta must cancel."""
    shape = draw.integers(40, 100), draw.choice((16, 32, 64))
    q, k, v, do = (draw.normal(*shape) for _ in range(4))
    return [x.half() for x in (q, k, v + shared * draw.normal(1, shape[1]), do)]


def check_form(x, *shape, dtype=torch.float32):
    like = torch.empty(shape, dtype=dtype, device="meta")
    expect(x.shape == shape and x.dtype == dtype and x.float().isfinite().all(), "form", found=x, expected=like)


@grader.test("delta = rowsum(dO * O), in float32", points=2)
def delta(student, draw):
    _, _, output, do = inputs(draw)
    for size in (1.0, 1e-4):
        x, y = (size * do.float()).half(), (size * output.float()).half()
        found = student.delta(x, y)
        expect(found.shape == (len(x), 1), "sum_axis")
        check_form(found, len(x), 1)
        expected = (x.double() * y.double()).sum(-1, keepdim=True)
        for wrong in ((x * y).sum(-1, keepdim=True), (x * y).float().sum(-1, keepdim=True)):
            unlike(found, wrong, expected, "half_product", within=1e-5 * size)
        close(found, expected, "half_product" if size < 1 else "sum_axis", relative_l2=1e-5)


@grader.test("matching_delta = rowsum(P * dP), tile by tile", points=2)
def matching(student, draw):
    q, k, v, do = inputs(draw, shared=2.0)
    block, n, c = draw.choice((16, 24)), len(q), 1 / math.sqrt(q.shape[1])
    s, dp = c * q.double() @ k.double().mT, do.double() @ v.double().mT
    log_sum_exp = (s.logsumexp(-1) + 0.1 * draw.normal(n)).float()
    p = torch.exp(s - log_sum_exp[:, None])
    found = student.matching_delta(q, k, v, do, log_sum_exp, block)
    check_form(found, n, 1)
    tiles = [slice(start, start + block) for start in range(0, n, block)]
    of_tiles = sum((torch.softmax(s[:, keys], -1) * dp[:, keys]).sum(-1, keepdim=True) for keys in tiles)
    unscaled = torch.exp(s / c - log_sum_exp[:, None].double())
    expected = (p * dp).sum(-1, keepdim=True)
    for hint, wrong in {
        "softmax": of_tiles,
        "normalised": (torch.softmax(s, -1) * dp).sum(-1, keepdim=True),
        "c": (unscaled * dp).sum(-1, keepdim=True),
    }.items():
        unlike(found, wrong, expected, hint, within=1e-4)
    p_half = torch.exp((q @ k.mT).float() * c - log_sum_exp[:, None])
    for one, other in ((p_half, dp), (p, do @ v.mT), (p_half, do @ v.mT), (p.half(), dp)):
        unlike(found, (one * other).sum(-1, keepdim=True), expected, "half_scores", within=2e-5)
    close(found, expected, "matching", relative_l2=1e-5)


@grader.test("the trick: both are the same number for exact attention")
def trick(student, draw):
    q, k, v, do = inputs(draw)
    forward = attention_forward(*(x.double() for x in (q, k, v)))
    found = student.matching_delta(q, k, v, do, forward.log_sum_exp.float(), draw.choice((17, 32, 200)))
    check_form(found, len(q), 1)
    close(found, (do.double() * forward.output).sum(-1, keepdim=True), "trick", relative_l2=1e-4)


def tile(draw, shared=0.0):
    """(P, V, dO, delta) of one tile [Bq, Bkv] and its dS in float64; delta is exact to float32."""
    q, k, v, do = inputs(draw, shared)
    forward = attention_forward(*(x.double() for x in (q, k, v)))
    backward = attention_backward(*(x.double() for x in (do, q, k, v)), forward.output, forward.log_sum_exp)
    rows, columns = slice(draw.integers(0, 10), 37), slice(draw.integers(0, 10), 30)
    p, d = backward.probabilities[rows, columns].float(), backward.delta[rows].float()
    return p, v[columns], do[rows], d, p.double() * (do[rows].double() @ v[columns].double().mT - d)


def expect_no_formula_error(found, p, dp, d, expected):
    for hint, wrong in {"no_delta": p * dp, "sign": -expected, "no_p": dp - d}.items():
        unlike(found, wrong, expected, hint, within=1e-5)
    unlike(found, p * (dp + d), expected, "sign", within=1e-5)


@grader.test("grad_scores_tile: dS = P * (dP - delta)", points=2)
def grad_scores(student, draw):
    p, v, do, d, expected = tile(draw)
    found, _, _ = student.grad_scores_tile(p, v, do, d)
    check_form(found, *p.shape)
    dp = do.double() @ v.double().mT
    rounded_dp = quantize(do.float()).dequantize() @ quantize(v.float()).dequantize().mT
    expect_no_formula_error(found, p, dp, d, expected)
    for hint, wrong in {
        "rounded_dp": p * (rounded_dp - d),
        "half_difference": p * (do @ v.mT - d),
        "half_scale": expected.half(),
    }.items():
        unlike(found, wrong, expected, hint, within=1e-5)
    unlike(found, p * (dp - d.half()), expected, "half_difference", within=1e-5)
    close(found, expected, "ds", relative_l2=1e-5)


@grader.test("grad_scores_tile: the difference in float32")
def difference(student, draw):
    p, v, do, d, expected = tile(draw, shared=20.0)
    found, _, _ = student.grad_scores_tile(p, v, do, d)
    check_form(found, *p.shape)
    expect_no_formula_error(found, p, do.double() @ v.double().mT, d, expected)
    close(found, expected, "large", relative_l2=1e-4)


@grader.test("grad_scores_tile: psi(dS), however small", points=2)
def rounding(student, draw):
    for power in (0, -10, -16):
        p, v, do, d, _ = tile(draw)
        p, v, do, d = p * 2.0**power, v, do * 2.0 ** (power // 2), d * 2.0 ** (power // 2)
        ds, values, scale = student.grad_scores_tile(p, v, do, d)
        check_form(ds, *p.shape)
        expect(scale.isfinite().all() and scale.dtype == torch.float32, "half_scale" if power else "int8")
        expect(values.dtype == torch.int8 and values.shape == p.shape and scale.shape == (), "int8")
        exact = p * (do.float() @ v.float().mT - d)
        close(ds, exact, "half_scale" if power else "ds_first", relative_l2=1e-2)
        expected = quantize(exact)
        unlike(scale, exact.amax() / 127, expected.scale.squeeze(), "int8", within=1e-4)
        close(scale, expected.scale.squeeze(), "half_scale" if power else "int8", relative_l2=1e-3)
        close(scale, expected.scale.squeeze(), "half_scale", relative_l2=1e-4)
        off = (values.int() - expected.values).abs()
        expect(off.max() <= 1, "half_scale" if power else "int8")
        expect((off > 0).float().mean() < 0.01, "half_scale" if power else "round")


@grader.test("grad_scores_tile: a tile of zeros")
def zeros(student, draw):
    p, v, do, d, _ = tile(draw)
    (ds, values, scale), undefined = student.grad_scores_tile.casts(0 * p, v, do, d)
    expect((ds == 0).all(), "no_p")
    expect(values.dtype == torch.int8 and (values == 0).all() and (scale == 0).all(), "zero")
    expect(not undefined, "zero")  # 0 / 0 as an integer is 0 on some machines, by luck
