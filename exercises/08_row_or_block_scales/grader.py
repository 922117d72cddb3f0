"""Grader of 08_row_or_block_scales."""

import functools
import math

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, off_ties, rounding_distance, unlike
from sage_ref.quantization import fake_quantize, quantize
from sage_ref.tracing import relative_l2

grader = Grader(
    "08_row_or_block_scales",
    {"quantize": (Tensor, Tensor), "tiled_matmul": Tensor, "gradients": dict, "relative_errors": dict},
)
grader.hint("form", "A result has the wrong shape, dtype or keys, or holds NaN. The docstring says what is expected.")
grader.hint("scale_shape", "The scale is [1, 1] for a block and [R, 1] for rows.")
grader.hint("column", "Is there one scale per row, or one per column?")
grader.hint("scale", "The scale is max|X| / 127, of the whole tile or of each row.")
grader.hint("round", "The integers are off by a step here and there. A cast cuts towards zero; round first.")
grader.hint("zero", "A row or tile of zeros has scale 0 and values 0. What is 0 / 0?")
grader.hint("bypass", "This is the exact product. Where are both operands rounded?")
grader.hint("rounding", "Only one of the two operands is rounded.")
grader.hint("granularity", "This product has the other granularity's scales. Which operand is meant by it?")
grader.hint(
    "right_rows", "The right operand has one scale per block, whatever the granularity: its rows are summed over."
)
grader.hint("whole", "The scales are those of the whole matrix. Every tile has its own.")
grader.hint("product", "The product is off. Each tile is rounded, multiplied, scaled, and then added to its rows.")
grader.hint("names", 'The keys are "dV", "dQ" and "dK", and of the errors "row" and "block".')
grader.hint("c", "S contains c = 1/sqrt(D). By the chain rule, which gradients do?")
grader.hint("contraction", "This scale stays inside the sum. Which rows are rows of the result: transpose, then round.")
grader.hint("gradients", "A gradient is off. Which operand is on the left, and is it transposed?")
grader.hint("denominator", "The error is |x - exact| / |exact|: relative to the exact result, in the L2 norm.")
grader.hint("error_granularity", "Row scales have the smaller errors here. Are the two exchanged?")
grader.hint("operand", "This is the error of P and dS themselves. Measure that of the gradients.")
grader.hint(
    "errors",
    "The errors are off. Each is one number over the whole matrix; exact is the same product without rounding.",
)
GRANULARITIES = ("row", "block")
NAMES = ("dV", "dQ", "dK")
SAME_ERROR = 0.01  # a measured error may be off by this share; a wrong one that near passes as right
not_as = functools.partial(unlike, within=1, distance=rounding_distance)


def uneven(draw, rows, columns):
    """A matrix whose rows differ in size by a factor of up to 300, and its columns by 30."""
    return (
        draw.normal(rows, columns)
        * 10 ** draw.uniform(rows, 1, low=-2, high=0.5)
        * 10 ** draw.uniform(1, columns, low=-1, high=0.5)
    )


def inputs(draw, block):
    """P, dS [Nq, Nk], dO, Q, K; the last tiles are partial."""
    n_q, n_k = 2 * block + draw.integers(4, block), 3 * block + draw.integers(4, block)
    head_dim = draw.choice((16, 32))
    p, ds = uneven(draw, n_q, n_k).abs(), uneven(draw, n_q, n_k)
    return p, ds, *(off_ties(draw.normal(n, head_dim), block) for n in (n_q, n_q, n_k))


def shape_of(granularity, block):
    return (1, block) if granularity == "row" else (block, block)


def product(left, right, granularity, block):
    return fake_quantize(left, shape_of(granularity, block)) @ fake_quantize(right, (block, None))


def factors(p, ds, do, q, k):
    """The two factors of each gradient, c included."""
    c = 1 / math.sqrt(q.shape[1])
    return {"dV": (p.mT, do), "dQ": (ds * c, k), "dK": (ds.mT * c, q)}


def check_form(x, *shape):
    right = isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape == shape and x.isfinite().all()
    expect(right, "form", found=x, expected=torch.empty(shape, device="meta"))


def check_errors(found):
    expect(set(found) == set(GRANULARITIES), "names")
    for errors_of in found.values():
        expect(isinstance(errors_of, dict) and set(errors_of) == set(NAMES), "names")
        expect(all(isinstance(x, float) and math.isfinite(x) for x in errors_of.values()), "form")
        expect(all(x > 1e-6 for x in errors_of.values()), "bypass")


@grader.test("quantize: one scale per tile or per row", points=2)
def scales(student, draw):
    rows, columns = draw.integers(20, 50), draw.integers(20, 50)
    for n_rows, n_columns in ((rows, rows), (rows, columns)):
        x = uneven(draw, n_rows, n_columns)
        for granularity in GRANULARITIES:
            values, scale = student.quantize(x, granularity)
            expect(values.dtype == torch.int8 and values.shape == x.shape and scale.dtype == torch.float32, "form")
            if granularity == "row":
                expect(scale.shape != (1, n_columns), "column")
            expect(scale.shape == ((n_rows, 1) if granularity == "row" else (1, 1)), "scale_shape")
            expected = quantize(x, (1 if granularity == "row" else None, None))
            close(scale, expected.scale, "scale", relative_l2=1e-6)
            difference = (values.int() - expected.values).abs()
            expect(difference.max() <= 1, "scale")
            expect((difference > 0).float().mean() < 0.01, "round")


@grader.test("quantize: zeros")
def zeros(student, draw):
    x = uneven(draw, draw.integers(8, 20), draw.integers(8, 20))
    x[::2] = 0
    for tile, granularity in ((x, "row"), (0 * x, "row"), (0 * x, "block")):
        (values, scale), undefined = student.quantize.casts(tile, granularity)
        expect(values.shape == x.shape and scale.ndim == 2, "form")
        expect(scale.isfinite().all() and (values[::2] == 0).all(), "zero")
        expect((scale[::2] == 0).all(), "zero")
        expect(not undefined, "zero")  # 0 / 0 as an integer is 0 on some machines, by luck


@grader.test("tiled_matmul: a tile at a time", points=3)
def products(student, draw):
    block = draw.choice((16, 24))
    for extra in (0, draw.integers(3, block)):
        left = uneven(draw, 2 * block + extra, 3 * block + extra)
        right = off_ties(uneven(draw, left.shape[1], draw.choice((16, 32))), block)
        for granularity, other in zip(GRANULARITIES, GRANULARITIES[::-1], strict=True):
            found = student.tiled_matmul(left, right, granularity, block)
            check_form(found, left.shape[0], right.shape[1])
            left_hat, right_hat = fake_quantize(left, shape_of(granularity, block)), fake_quantize(right, (block, None))
            expected = left_hat @ right_hat
            whole_rows = (1, None) if granularity == "row" else (None, None)
            for hint, wrong in {
                "bypass": left @ right,
                "granularity": product(left, right, other, block),
                "right_rows": left_hat @ fake_quantize(right, (1, None)),
                "whole": fake_quantize(left, whole_rows) @ fake_quantize(right),
            }.items():
                not_as(found, wrong, expected, hint)
            for wrong in (left_hat @ right, left @ right_hat):
                not_as(found, wrong, expected, "rounding")
            for shape in (whole_rows, (None, None)):
                not_as(found, fake_quantize(left, shape) @ right_hat, expected, "whole")
            not_as(found, left_hat @ fake_quantize(right), expected, "whole")
            expect(rounding_distance(found, expected) <= 1, "product", found=found, expected=expected)


@grader.test("gradients: scales that may leave the sum", points=3)
def all_gradients(student, draw):
    block = draw.choice((16, 24))
    tensors = inputs(draw, block)
    c = 1 / math.sqrt(tensors[3].shape[1])
    for granularity, other in zip(GRANULARITIES, GRANULARITIES[::-1], strict=True):
        found = student.gradients(*tensors, granularity, block)
        expect(set(found) == set(NAMES), "names")
        for name, (left, right) in factors(*tensors).items():
            x, expected = found[name], product(left, right, granularity, block)
            check_form(x, *expected.shape)
            not_as(x, left @ right, expected, "bypass")
            not_as(x, expected * c if name == "dV" else expected / c, expected, "c")
            if granularity == "row":
                along_the_sum = fake_quantize(left, (block, 1)) @ fake_quantize(right, (block, None))
                not_as(x, along_the_sum, expected, "contraction")
            not_as(x, product(left, right, other, block), expected, "granularity")
            expect(rounding_distance(x, expected) <= 1, "gradients", found=x, expected=expected)


@grader.test("gradients: causal dS")
def causal(student, draw):
    block, n, head_dim = 16, 16 * draw.integers(2, 4), draw.choice((8, 16))
    mask = torch.ones(n, n).tril()
    p, ds = (mask * uneven(draw, n, n) for _ in range(2))
    ds[0] = 0
    do, q, k = (off_ties(draw.normal(n, head_dim), block) for _ in range(3))
    for granularity in GRANULARITIES:
        found = student.gradients(p.abs(), ds, do, q, k, granularity, block)
        expect(set(found) == set(NAMES), "names")
        for name, (left, right) in factors(p.abs(), ds, do, q, k).items():
            expect(isinstance(found[name], Tensor) and found[name].isfinite().all(), "zero")
            expected = product(left, right, granularity, block)
            expect(found[name].shape == expected.shape, "form")
            not_as(found[name], left @ right, expected, "bypass")
            expect(rounding_distance(found[name], expected) <= 1, "gradients", found=found[name], expected=expected)


@grader.test("relative_errors: row scales against block scales", points=3)
def errors(student, draw):
    block = draw.choice((16, 24))
    tensors = inputs(draw, block)
    found = student.relative_errors(*tensors, block)
    check_errors(found)
    expected = {granularity: {} for granularity in GRANULARITIES}
    for granularity in GRANULARITIES:
        for name, (left, right) in factors(*tensors).items():
            expected[granularity][name] = relative_l2(product(left, right, granularity, block), left @ right)
    for name, (left, right) in factors(*tensors).items():
        for granularity, other in zip(GRANULARITIES, GRANULARITIES[::-1], strict=True):
            if abs(expected[other][name] / expected[granularity][name] - 1) > SAME_ERROR:
                expect(abs(found[granularity][name] / expected[other][name] - 1) > 1e-3, "error_granularity")
        for granularity in GRANULARITIES:
            operand = relative_l2(fake_quantize(left, shape_of(granularity, block)), left)
            error, right_one = found[granularity][name], expected[granularity][name]
            if abs(operand / right_one - 1) > SAME_ERROR:
                expect(abs(error / operand - 1) > 1e-3, "operand")
            difference = product(left, right, granularity, block) - left @ right
            for wrong in (
                difference.abs().max() / (left @ right).abs().max(),
                difference.norm(),
                right_one**2,
            ):
                if abs(wrong / right_one - 1) > SAME_ERROR:
                    expect(abs(error / wrong - 1) > 1e-3, "denominator")
            expect(abs(error / right_one - 1) <= SAME_ERROR, "errors")


@grader.test("relative_errors: rows that are alike gain little")
def alike(student, draw):
    block = 16
    p, ds, do, q, k = inputs(draw, block)
    p, ds = draw.uniform(*p.shape, low=0.5), draw.normal(*ds.shape).sign() * draw.uniform(*ds.shape, low=0.9)
    found = student.relative_errors(p, ds, do, q, k, block)
    check_errors(found)
    for name, (left, right) in factors(p, ds, do, q, k).items():
        for granularity in GRANULARITIES:
            expected = relative_l2(product(left, right, granularity, block), left @ right)
            expect(abs(found[granularity][name] / expected - 1) < 0.02, "errors")
