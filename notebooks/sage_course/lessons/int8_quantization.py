"""Notebook 02: psi, blocks of it, and integer matmuls."""

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draw, watched
from sage_ref.quantization import integer_matmul


def psi(x):
    s = x.abs().max() / 127
    x_hat = torch.round(x / torch.where(s > 0, s, 1.0)).to(torch.int8)
    return s, x_hat


def psi_of_blocks(x, block):
    tiles = x.unflatten(0, (-1, block))  # [blocks, block, channels]
    s = tiles.abs().amax((1, 2)) / 127
    divisor = torch.where(s > 0, s, 1.0)[:, None, None]
    x_hat = torch.round(tiles / divisor).to(torch.int8).flatten(0, 1)
    return s, x_hat


def scaled_product(a_hat, s_a, b_hat, s_b):
    return integer_matmul(a_hat, b_hat.mT) * s_a[:, None] * s_b[None, :]


def exact_matmul(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for start in range(0, a.shape[1], 1024):
        piece = slice(start, start + 1024)
        total += (a[:, piece].float() @ b[piece].float()).int()
    return total


def _integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def _long_rows() -> list[tuple]:
    """Return rows whose sums are beyond 2^24: float32 can add the pieces of the first, but not of the second."""
    same = torch.full((2, 3000), 127, dtype=torch.int8), torch.full((3000, 2), 127, dtype=torch.int8)
    return [same, (_integers(10, 2, 5000).clamp(min=100), _integers(11, 5000, 2).clamp(min=100))]


def _matrices() -> list[tuple]:
    tiny = [(size * draw(2, 4, 6),) for size in (1e-7, 1e-15)]
    return [(draw(0, 4, 6),), (-draw(1, 8, 8).abs(),), (torch.zeros(2, 3),), *tiny]


def _blocks() -> list[tuple]:
    sizes = torch.tensor([1.0, 1e-15, 1e-7, 0.0]).repeat_interleave(2)[:, None]  # the last block is all zeros
    return [(draw(2, 8, 6) * torch.arange(1.0, 9.0)[:, None], 4), (draw(3, 8, 4).exp() * sizes, 2)]


TINY = "For a tiny X that is far too much, and the integers come out small. Divide by something else only where s is 0."
ZEROS = "Where all is zero, s is 0 and 0/0 is NaN: divide by something else where s is 0."

GAPS = {
    "psi": Gap(psi, _matrices, (
        Mistake("s = x.abs().max() / 127", "s = 127 / x.abs().max()", "The scale is one integer step: max|X| / 127."),
        Mistake("torch.where(s > 0, s, 1.0)", "s", ZEROS),
        Mistake("torch.where(s > 0, s, 1.0)", "(s + 1e-8)", TINY),
        Mistake("torch.where(s > 0, s, 1.0)", "(s + 1e-12)", TINY),
        Mistake("torch.where(s > 0, s, 1.0)", "s.clamp(min=1e-3)", TINY),
        Mistake("torch.where(s > 0, s, 1.0)", "s.clamp(min=1e-8)", TINY),
        Mistake("x.abs().max() / 127", "x.abs().max().clamp(min=1e-5) / 127", TINY),
        Mistake("x.abs().max()", "x.abs().amax(-1, keepdim=True)", "There is one scale for all of X."),
        Mistake("x.abs().max()", "max(abs(x))", "Python's `max` compares rows: `x.abs().max()` looks at all entries."),
        Mistake("s = x.abs().max() / 127", "s = (x.abs().max() / 127).clamp(min=1e-12)",
                "For X = 0 the scale must stay 0: change the divisor alone."),
        Mistake("/ 127", "/ 127\n    s = torch.where(s > 0, s, 1.0)",
                "For X = 0 the scale must stay 0: change the divisor alone."),
        Mistake("x.abs().max() / 127", "(x.max() - x.min()) / 255",
                "Here 0 stays 0, and the integers go from -127 to 127: s = max|X| / 127."),
    ), watched, right=(
        ("x.abs().max() / 127", "torch.maximum(x.max(), -x.min()) / 127"),
        ("torch.round(x /", "torch.round(x.double() /"),
    )),
    "psi_of_blocks": Gap(psi_of_blocks, _blocks, (
        Mistake("tiles.abs().amax((1, 2))", "tiles.abs().amax((1, 2)) * 0 + x.abs().max()",
                "That is one scale in all. Each block has its own."),
        Mistake("tiles.abs().amax((1, 2))", "tiles.abs().amax((0, 1))[:1].expand(len(tiles))",
                "Take the maximum over the tokens and channels of a block: the last two dimensions."),
        Mistake("amax((1, 2))", "amax(1)", "That is a scale per channel: take the maximum over the channels, too.",
                (("[:, None, None]", "[:, None]"),)),
        Mistake("amax((1, 2))", "amax(2)", "That is a scale per token: take the maximum over the tokens, too.",
                (("[:, None, None]", "[:, :, None]"),)),
        Mistake("torch.where(s > 0, s, 1.0)", "s", ZEROS),
        Mistake("torch.where(s > 0, s, 1.0)", "(s + 1e-8)", TINY),
        Mistake("torch.where(s > 0, s, 1.0)", "(s + 1e-12)", TINY),
        Mistake("torch.where(s > 0, s, 1.0)", "s.clamp(min=1e-8)", TINY),
        Mistake("x.unflatten(0, (-1, block))", "x.unflatten(0, (block, -1))",
                "That makes `block` blocks. There are tokens / block of them, with `block` tokens each."),
    ), watched, right=(
        ("tiles.abs().amax((1, 2)) / 127", "tiles.flatten(1).abs().amax(1) / 127"),
        ("tiles.abs().amax((1, 2)) / 127",
         "torch.stack([rows.abs().max() for rows in x.split(block)]).double() / 127"),
    )),
    "scaled_product": Gap(scaled_product,
        lambda: [(_integers(4, 3, 5), draw(5, 3).abs(), _integers(6, 3, 5), draw(7, 3).abs()),
                 (_integers(4, 2, 5), draw(5, 2).abs(), _integers(6, 3, 5), draw(7, 3).abs())], (
        Mistake(" * s_a[:, None] * s_b[None, :]", " * s_a[None, :] * s_b[:, None]",
                "The scales are swapped: s_a belongs to the rows of the result, and s_b to its columns."),
        Mistake("s_a[:, None]", "s_a", "s_a has to be a column, [M, 1]: as it is, it lies along the columns."),
        Mistake("integer_matmul(a_hat, b_hat.mT)", "(a_hat @ b_hat.mT)", "Sums in int8 wrap around."),
        Mistake("integer_matmul(a_hat, b_hat.mT)", "(a_hat.float() @ b_hat.float().mT)",
                "You multiplied floats, which is exact for up to 1024 terms only: use `integer_matmul`."),
        Mistake("s_a[:, None] * s_b[None, :]", "(s_a[:, None] + s_b[None, :])", "The scales are factors."),
        Mistake(" * s_a[:, None] * s_b[None, :]", " / (s_a[:, None] * s_b[None, :])", "The scales are factors."),
        Mistake("integer_matmul(a_hat, b_hat.mT) * s_a[:, None] * s_b[None, :]",
                "integer_matmul(a_hat * s_a[:, None], b_hat.mT * s_b)",
                "With their scales these are no integers: multiply by the scales after the product."),
        Mistake("s_b[None, :]", "s_b[:, None]", "A row of B is a column of the result: s_b has to be a row, [1, N]."),
        Mistake("s_a[:, None] * s_b[None, :]", "(s_a @ s_b)", "Entry (i, j) has the scales s_a[i] and s_b[j] alone."),
        Mistake("s_a[:, None] * s_b[None, :]", "s_a.mean() * s_b.mean()", "Each row has a scale of its own."),
    ), watched, right=(
        ("s_a[:, None] * s_b[None, :]", "torch.outer(s_a, s_b)"),
        ("* s_a[:, None]", "* s_a.double()[:, None]"),
    )),
    "exact_matmul": Gap(exact_matmul, lambda: [(_integers(8, 2, 2500), _integers(9, 2500, 3)), *_long_rows()], (
        Mistake("for start in range(0, a.shape[1], 1024):\n        piece = slice(start, start + 1024)",
                "for piece in (slice(0, None),):",
                "float32 holds every integer up to 2^24 only: multiply 1024 terms at once."),
        Mistake("a[:, piece]", "a[piece]", "The sum runs along the columns of a: `a[:, piece]`."),
        Mistake("b[piece]", "b[:, piece]", "The sum runs along the rows of b: `b[piece]`."),
        Mistake("total += (a[:, piece].float() @ b[piece].float()).int()",
                "total = (total.float() + a[:, piece].float() @ b[piece].float()).int()",
                "The pieces are exact, but adding them in float32 is not: make each an integer first."),
        Mistake("(a[:, piece].float() @ b[piece].float()).int()", "(a[:, piece] @ b[piece]).int()",
                "Sums in int8 wrap around: use `.float()` on both pieces, and `.int()` on their product."),
        Mistake("(a[:, piece].float() @ b[piece].float())", "(a[:, piece].half() @ b[piece].half())",
                "float16 holds every integer up to 2048 only: use `.float()`."),
        Mistake("(a[:, piece].float() @ b[piece].float()).int()", "(a.float() @ b.float()).int()",
                "Those are all terms at once: take the piece of both."),
    ), right=(
        ("(a[:, piece].float() @ b[piece].float())", "(a[:, piece].double() @ b[piece].double())"),
        ("dtype=torch.int32", "dtype=torch.int64"),
    )),
}  # fmt: skip
