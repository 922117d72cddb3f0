"""Grader of 05_online_softmax."""

import math

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, off_ties, rounding_distance, unlike
from sage_ref.quantization import fake_quantize, quantize

grader = Grader(
    "05_online_softmax",
    {
        "probabilities": (Tensor, Tensor, Tensor),
        "online_step": (Tensor, Tensor, Tensor),
        "online_softmax": (Tensor, Tensor),
    },
)
grader.hint(
    "form", "A result has the wrong shape or dtype, or ordinary scores give NaN. The docstring says what is expected."
)
grader.hint("constant_scale", "A constant scale 1/127 sends small rows to 0. What is the largest entry of each row?")
grader.hint("one_scale", "Is the scale one per row, or one for the whole tile?")
grader.hint("scale", "The scale of a row is its largest entry of P~, divided by 127.")
grader.hint("round", "The integers are off by a step here and there. A cast cuts towards zero; round first.")
grader.hint("values", "The integers of P are off. They are P~ / scale, rounded.")
grader.hint("row_sum", "The row sums are those of P~ before rounding.")
grader.hint("masked", "A row that is masked or tiny throughout gives NaN or infinity. What is 0 / 0 here?")
grader.hint(
    "masked_row", "A row without a visible key, or far below m_new, has values 0; scale and row sum are 0, too."
)
grader.hint("maximum", "The new maximum is the larger of the old one and the row's maximum in this tile.")
grader.hint("forgets", "l forgets the tiles before. (Algorithm 1 as printed does so, too.)")
grader.hint(
    "rescale", "l and O are sums of exp(s - m) with the old m and must become sums with the new one: by which factor?"
)
grader.hint("v_scale", "The integer product of P and V needs both scales.")
grader.hint("not_rounded", "This is the product of P before rounding. The INT8 values of P belong in it.")
grader.hint("step", "O after a step is off: rescaled O, plus the integer product of P and V times both scales.")
grader.hint(
    "first_tile",
    "NaN or infinity for ordinary scores. m starts at -inf: what is your rescaling factor in the first tile?",
)
grader.hint(
    "start", "Scores far below zero give NaN or a wrong output. From which value must the running maximum start?"
)
grader.hint(
    "masked_tile",
    "NaN or infinity where whole tiles are masked or far below the others. Is there a 0 / 0 or an inf - inf?",
)
grader.hint("v_blocks", "V has one scale per block of keys.")
grader.hint("bypass", "This is exact attention. Are P and V multiplied as INT8?")
grader.hint("divide", "The output isn't normalised. What is O divided by, and when?")
grader.hint(
    "output",
    "The output is off. Is every block visited once, the last too, and rounded by itself, and is O divided by l?",
)
grader.hint("log_sum_exp", "L = m + log(l), with both after the last tile.")
TOLERANCE = 2e-3  # within this of a known wrong output: leaving out a rounding changes it by 5e-3


def scores(draw, rows, columns, sigma=2.0):
    return sigma * draw.normal(rows, columns)


def state(draw, rows, head_dim):
    """(m, l, O) after a first tile of 16 keys, and how far its maximum is from that of standard normal scores."""
    s, v = draw.normal(rows, 16), draw.normal(16, head_dim)
    s += draw.uniform(rows, 1, low=-2.5, high=1.5)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    return m, p.sum(-1, keepdim=True), p @ v


def check_form(x, shape, dtype=torch.float32):
    expect(
        x.shape == shape and x.dtype == dtype, "form", found=x, expected=torch.empty(shape, dtype=dtype, device="meta")
    )


@grader.test("probabilities: shapes and dtypes")
def form(student, draw):
    rows, columns = draw.integers(5, 40), draw.integers(5, 40)
    s = scores(draw, rows, columns)
    values, scale, row_sum = student.probabilities(s, s.amax(-1, keepdim=True))
    check_form(values, (rows, columns), torch.int8)
    check_form(scale, (rows, 1))
    check_form(row_sum, (rows, 1))


@grader.test("probabilities: one scale per row", points=2)
def row_scales(student, draw):
    s = scores(draw, draw.integers(20, 50), draw.integers(20, 50))
    m_new = s.amax(-1, keepdim=True) + draw.uniform(len(s), 1, low=0, high=6)
    values, scale, row_sum = student.probabilities(s, m_new)
    check_form(values, s.shape, torch.int8)
    for x in (scale, row_sum):
        check_form(x, (len(s), 1))
        expect(x.isfinite().all(), "scale")
    p = torch.exp(s - m_new)
    expected = quantize(p, (1, None))
    unlike(scale, torch.full_like(scale, 1 / 127), expected.scale, "constant_scale", within=1e-3)
    expect(not torch.equal(values, torch.round(127 * p).to(torch.int8)), "constant_scale")
    expect((scale != scale[0]).any(), "one_scale")
    close(scale, expected.scale, "scale", relative_l2=1e-5)
    difference = (values.int() - expected.values).abs()
    expect(difference.max() <= 1, "values")
    expect((difference > 0).float().mean() < 0.01, "round")
    expected_sum = p.double().sum(-1, keepdim=True)
    unlike(row_sum, (values * scale).sum(-1, keepdim=True), expected_sum, "row_sum", within=1e-4)
    close(row_sum, expected_sum, "row_sum", relative_l2=1e-5)


@grader.test("probabilities: rows without a visible key")
def masked_rows(student, draw):
    s = scores(draw, draw.integers(8, 20), draw.integers(8, 20))
    s[::3] = -math.inf
    s[1::3] -= 200  # e^-200 is 0 in float32
    s[2::6] -= 97  # and e^-97 has no precision left
    (values, scale, row_sum), undefined = student.probabilities.casts(s, torch.full((len(s), 1), 10.0))
    check_form(values, s.shape, torch.int8)
    for x in (scale, row_sum):
        check_form(x, (len(s), 1))
        expect(x.isfinite().all(), "masked")
    expect(not undefined, "masked")  # 0 / 0 as an integer is 0 on some machines, by luck
    expect((values[::3] == 0).all() and (values[1::3] == 0).all(), "masked_row")
    expect((scale[::3] == 0).all() and (row_sum[::3] == 0).all(), "masked_row")
    expect((values >= 0).all(), "values")


@grader.test("online_step: maximum and sum", points=2)
def maximum_and_sum(student, draw):
    rows, columns, head_dim = draw.integers(20, 40), draw.integers(10, 40), draw.choice((8, 16))
    m, l, o = state(draw, rows, head_dim)
    s, v = draw.normal(rows, columns), quantize(draw.normal(columns, head_dim))
    m_found, l_found, _ = student.online_step(m, l, o, s, v.values, v.scale.squeeze())
    check_form(m_found, (rows, 1))
    check_form(l_found, (rows, 1))
    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
    expect(torch.equal(m_found, m_new), "maximum", found=m_found, expected=m_new)
    expect(l_found.isfinite().all(), "form")
    row_sum, old = torch.exp(s - m_new).double().sum(-1, keepdim=True), torch.exp(m - m_new)
    expected = old * l + row_sum
    for wrong in (row_sum, row_sum + old):
        unlike(l_found, wrong, expected, "forgets", within=1e-4)
    for wrong in (1, 1 / old):
        unlike(l_found, wrong * l + row_sum, expected, "rescale", within=1e-4)
    close(l_found, expected, "row_sum", relative_l2=1e-5)


@grader.test("online_step: O from integers", points=2)
def step(student, draw):
    rows, columns, head_dim = draw.integers(20, 40), draw.integers(30, 60), draw.choice((8, 16))
    m, l, o = state(draw, rows, head_dim)
    s, v = draw.normal(rows, columns), quantize(3 * draw.normal(columns, head_dim))
    _, _, found = student.online_step(m, l, o, s, v.values, v.scale.squeeze())
    check_form(found, (rows, head_dim))
    expect(found.isfinite().all(), "form")
    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
    p, old = torch.exp(s - m_new), torch.exp(m - m_new)
    p_hat, values = fake_quantize(p, (1, None)), v.dequantize()
    expected = old * o + p_hat @ values
    for wrong in (0, 1, 1 / old):
        unlike(found, wrong * o + p_hat @ values, expected, "rescale", within=TOLERANCE)
    for wrong in (p_hat @ (values / v.scale), p_hat @ values / quantize(p, (1, None)).scale):
        unlike(found, old * o + wrong, expected, "v_scale", within=TOLERANCE)
    unlike(found, old * o + p @ values, expected, "not_rounded", within=TOLERANCE)
    expect(rounding_distance(found, expected) <= 1, "step", found=found, expected=expected)


def check_attention(student, s, v, block):
    """online_softmax(S, V) against softmax with P~ rounded per row and tile and V per block."""
    output, log_sum_exp = student.online_softmax(s, v, block)
    check_form(output, (len(s), v.shape[1]))
    check_form(log_sum_exp, (len(s),))
    exact = torch.softmax(s.double(), -1) @ v.double()
    expected, exact_log_sum_exp = rounded_attention(s.double(), v.double(), block)
    unlike(output.nan_to_num(), exact, expected, "bypass", within=TOLERANCE)
    return output, log_sum_exp, expected, exact_log_sum_exp


def rounded_attention(s, v, block):
    p = torch.exp(s - s.amax(-1, keepdim=True))
    p_hat, l = fake_quantize(p, (1, block)), p.sum(-1, keepdim=True)
    return p_hat @ fake_quantize(v, (block, None)) / l, s.logsumexp(-1)


@grader.test("online_softmax: the output", points=2)
def attention(student, draw):
    block = draw.choice((16, 24, 32))
    for columns in (block, 3 * block, 2 * block + draw.integers(2, block)):
        s, v = scores(draw, draw.integers(30, 60), columns, 1.0), draw.normal(columns, draw.choice((16, 32)))
        v = off_ties(v * draw.uniform(columns, 1, low=0.2, high=2), block)
        output, log_sum_exp, expected, _ = check_attention(student, s, v, block)
        expect(output.isfinite().all(), "first_tile")
        p = torch.softmax(s.double(), -1)
        p_hat, v_hat = fake_quantize(p, (1, block)), fake_quantize(v.double(), (block, None))
        l = torch.exp(s - s.amax(-1, keepdim=True)).sum(-1, keepdim=True)
        unlike(output, expected * l, expected, "divide", within=TOLERANCE)
        for wrong in (p_hat @ v.double(), p @ v_hat):
            unlike(output, wrong, expected, "bypass", within=TOLERANCE)
        if columns > block:
            unlike(output, p_hat @ fake_quantize(v.double()), expected, "v_blocks", within=TOLERANCE)
        expect(rounding_distance(output, expected) <= 1, "output", found=output, expected=expected)


@grader.test("online_softmax: L, and scores far below zero")
def far_below(student, draw):
    block = draw.choice((16, 32))
    for shift in (0, -150, -1000):
        s = scores(draw, draw.integers(20, 40), 3 * block + 3) + shift
        v = off_ties(draw.normal(3 * block + 3, 16), block)
        output, log_sum_exp, expected, exact = check_attention(student, s, v, block)
        expect(output.isfinite().all() and log_sum_exp.isfinite().all(), "start" if shift else "first_tile")
        expect((log_sum_exp - exact).abs().max() < 5e-4, "log_sum_exp")
        expect(
            rounding_distance(output, expected) <= 1, "start" if shift else "output", found=output, expected=expected
        )


@grader.test("online_softmax: causal masks and tiles that don't matter", points=2)
def masked(student, draw):
    block, tiles = draw.choice((16, 24)), draw.integers(3, 5)
    n = block * tiles
    s, v = scores(draw, n, n), off_ties(draw.normal(n, draw.choice((16, 32))), block)
    s[:, block : 2 * block] -= 300
    s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
    output, log_sum_exp, expected, exact = check_attention(student, s, v, block)
    expect(output.isfinite().all() and log_sum_exp.isfinite().all(), "masked_tile")
    expect(rounding_distance(output, expected) <= 1, "output", found=output, expected=expected)
    close(log_sum_exp, exact, "log_sum_exp", relative_l2=1e-5)
