"""Grader of 02_integer_matmul."""

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, unlike
from sage_ref.quantization import integer_matmul

grader = Grader("02_integer_matmul", {"integer_matmul": Tensor, "scaled_matmul": Tensor, "tiled_matmul": Tensor})
grader.hint("integer_form", "integer_matmul returns whole numbers: dtype int32, shape [M, N].")
grader.hint("integers", "Some sums of integers are wrong, even small ones. Is it rows of A times columns of B?")
grader.hint("int8", "Sums beyond 127 wrap around. Convert the operands before the product, not the result after it.")
grader.hint(
    "half", "Sums beyond a few hundred or thousand are off. Which dtype adds up the products, and how many bits has it?"
)
grader.hint("float32", "Very long sums are slightly off. Up to where does float32 hold every whole number?")
grader.hint("float_form", "The scaled products are float32 of shape [M, N], without NaN.")
grader.hint("missing", "Is one of the two scales missing?")
grader.hint("axis", "Which operand's scale runs along the rows of the product, and which along its columns?")
grader.hint("spread", "Neighbouring rows share a scale: 0, 0, 1, 1, not 0, 1, 0, 1.")
grader.hint("scaled", "The scaled product is off. Try one row, one column and block=1 by hand.")
grader.hint("zero", "Integers that cancel must leave exactly 0. Are the scales applied after the integers are summed?")
grader.hint("contraction", "Is every tile multiplied by its own two scales before it is added to the result?")


def random_int8(draw, *shape):
    return draw.integers(-127, 128, *shape, dtype=torch.int8)


def scales(draw, *shape):
    return 10 ** draw.uniform(*shape, low=-2, high=1)


def cancelling(draw, rows, length, columns):
    """A and B, int8 [rows, 2 length] and [2 length, columns], of which every sum is 0 after the products cancel."""
    a, b = random_int8(draw, rows, length), random_int8(draw, length, columns)
    order = draw.permutation(2 * length)
    return torch.cat([a, -a], 1)[:, order], torch.cat([b, b])[order]


def check_float(product, rows, columns):
    expect(product.dtype == torch.float32 and product.shape == (rows, columns), "float_form")
    expect(product.isfinite().all(), "float_form")


@grader.test("integer_matmul returns int32 [M, N]")
def integer_form(student, draw):
    rows, length, columns = (draw.integers(5, 40) for _ in range(3))
    product = student.integer_matmul(random_int8(draw, rows, length), random_int8(draw, length, columns))
    expect(product.dtype == torch.int32 and product.shape == (rows, columns), "integer_form")


@grader.test("integer_matmul is exact", points=2)
def integers(student, draw):
    rows, length, columns = (draw.integers(20, 60) for _ in range(3))
    shapes = ((rows, length), (length, columns))
    # Products of -1, 0 and 1: sums that any type holds. Of 1 to 4: beyond 127, and float16 holds them still.
    for low, high, hint in ((-1, 2, "integers"), (1, 5, "half"), (-127, 128, "half")):
        a, b = (draw.integers(low, high, *shape, dtype=torch.int8) for shape in shapes)
        product, exact = student.integer_matmul(a, b), integer_matmul(a, b)
        expect(low < 0 or not torch.equal(product, exact.to(torch.int8)), "int8")
        expect(torch.equal(product, exact), hint)


@grader.test("integer_matmul is exact for long sums")
def long_sums(student, draw):
    for length in (draw.integers(521, 999) * 2 + 1, 70_001):
        a, b = (draw.integers(125, 128, *shape, dtype=torch.int8) for shape in ((3, length), (length, 4)))
        b[:, 0] = -b[:, 0]
        expect(torch.equal(student.integer_matmul(a, b), integer_matmul(a, b)), "float32")


@grader.test("scaled_matmul: one scale per block of rows and of columns", points=2)
def scaled(student, draw):
    block, length = draw.choice((3, 8, 16)), draw.integers(30, 70)
    size = 3 * block
    for rows, columns in ((size, size), (size + draw.integers(1, block), 2 * block + 1), (block + 2, 4 * block - 1)):
        a, b = random_int8(draw, rows, length), random_int8(draw, length, columns)
        a_scale, b_scale = scales(draw, -(-rows // block)), scales(draw, -(-columns // block))
        product = student.scaled_matmul(a, a_scale, b, b_scale, block)
        check_float(product, rows, columns)
        integer = integer_matmul(a, b).double()
        of_rows = a_scale.repeat_interleave(block)[:rows, None]
        of_columns = b_scale.repeat_interleave(block)[None, :columns]
        expected = integer * of_rows * of_columns
        for forgotten in (integer, integer * of_rows, integer * of_columns):
            unlike(product, forgotten, expected, "missing", within=1e-5)
        if rows == columns:
            unlike(product, integer * of_columns.mT * of_rows.mT, expected, "axis", within=1e-5)
        tiled = a_scale.repeat(block)[:rows, None], b_scale.repeat(block)[None, :columns]
        if rows % block == columns % block == 0:
            unlike(product, integer * tiled[0] * tiled[1], expected, "spread", within=1e-5)
        close(product, expected, "scaled", relative_l2=1e-6)


@grader.test("scaled_matmul sums integers, not rounded floats")
def exact_before_scaling(student, draw):
    rows, columns, block = draw.integers(10, 40), draw.integers(10, 40), 8
    a, b = cancelling(draw, rows, draw.integers(100, 200), columns)
    a_scale, b_scale = scales(draw, -(-rows // block)), scales(draw, -(-columns // block))
    product = student.scaled_matmul(a, a_scale, b, b_scale, block)
    check_float(product, rows, columns)
    expect((product == 0).all(), "zero")


@grader.test("tiled_matmul: scales that change along the contraction", points=3)
def tiled(student, draw):
    block = draw.choice((8, 16, 32))
    for length in (block, 3 * block, 4 * block + draw.integers(1, block)):
        rows, columns, tiles = draw.integers(10, 40), draw.integers(10, 40), -(-length // block)
        a, b = random_int8(draw, rows, length), random_int8(draw, length, columns)
        a_scale, b_scale = scales(draw, rows, tiles), scales(draw, tiles)
        product = student.tiled_matmul(a, a_scale, b, b_scale, block)
        check_float(product, rows, columns)
        of_a, of_b = (scale.double().repeat_interleave(block, -1)[..., :length] for scale in (a_scale, b_scale))
        expected = of_a * a @ (of_b[:, None] * b)
        for forgotten in (a.double() @ b.double(), of_a * a @ b.double(), a.double() @ (of_b[:, None] * b)):
            unlike(product, forgotten, expected, "missing", within=1e-5)
        close(product, expected, "scaled" if tiles == 1 else "contraction", relative_l2=1e-6)


@grader.test("tiled_matmul sums integers within a tile")
def exact_in_tiles(student, draw):
    rows, columns, half = draw.integers(10, 40), draw.integers(10, 40), draw.integers(20, 40)
    pairs = [cancelling(draw, rows, half, columns) for _ in range(3)]
    a, b = torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs])
    product = student.tiled_matmul(a, scales(draw, rows, 3), b, scales(draw, 3), 2 * half)
    check_float(product, rows, columns)
    expect((product == 0).all(), "zero")
