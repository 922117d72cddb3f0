"""Notebook 02: psi, blocks of it, and integer matmuls."""

import torch

from sage_ref.course.fill_in import Gap, Mistake
from sage_ref.quantization import integer_matmul


def psi(x):
    s = x.abs().max() / 127
    x_hat = torch.round(x / torch.where(s > 0, s, 1.0)).to(torch.int8)
    return s, x_hat


def psi_of_blocks(x, block):
    tiles = x.unflatten(0, (-1, block))
    s = tiles.abs().amax((1, 2)) / 127
    x_hat = torch.round(tiles / s[:, None, None]).to(torch.int8)
    return s, x_hat.flatten(0, 1)


def scaled_product(a_hat, s_a, b_hat, s_b):
    return integer_matmul(a_hat, b_hat.mT) * s_a[:, None] * s_b[None, :]


def exact_matmul(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for start in range(0, a.shape[1], 1024):
        piece = slice(start, start + 1024)
        total += (a[:, piece].float() @ b[piece].float()).int()
    return total


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def _long_rows() -> tuple:
    return torch.full((2, 3000), 127, dtype=torch.int8), torch.full((3000, 2), 127, dtype=torch.int8)


GAPS = {
    "psi": Gap(
        psi,
        lambda: [(_draw(0, 4, 6),), (-_draw(1, 8, 8).abs(),), (torch.zeros(2, 3),)],
        (
            Mistake("x.abs().max()", "x.max()", "The largest number may be negative."),
            Mistake(
                "torch.round(x / torch.where(s > 0, s, 1.0))", "(x / torch.where(s > 0, s, 1.0))", "A cast cuts off."
            ),
            Mistake(" / 127", " / 128", "The integers are -127 to 127."),
            Mistake("x / torch.where", "x * torch.where", "X^ = X / s, rounded."),
            Mistake("s = x.abs().max() / 127", "s = 127 / x.abs().max()", "s is the size of one step: max|X| / 127."),
        ),
    ),
    "psi_of_blocks": Gap(
        psi_of_blocks,
        lambda: [(_draw(2, 8, 6) * torch.arange(1.0, 9.0)[:, None], 4), (_draw(3, 12, 4).exp(), 2)],
        (
            Mistake(
                "tiles.abs().amax((1, 2))", "tiles.abs().amax((1, 2)) * 0 + x.abs().max()", "That is one scale in all."
            ),
            Mistake(
                "tiles.abs().amax((1, 2))",
                "tiles.abs().amax((0, 1))[:1].expand(len(tiles))",
                "One per block of tokens.",
            ),
            Mistake("x_hat.flatten(0, 1)", "x_hat", "X^ has the shape of X: [tokens, channels]."),
        ),
    ),
    "scaled_product": Gap(
        scaled_product,
        lambda: [(_integers(4, 3, 5), _draw(5, 3).abs(), _integers(6, 3, 5), _draw(7, 3).abs())],
        (
            Mistake(" * s_a[:, None] * s_b[None, :]", " * s_a[None, :] * s_b[:, None]", "s_a belongs to the rows."),
            Mistake(" * s_b[None, :]", "", "The scale of B is missing."),
            Mistake("b_hat.mT", "b_hat.mT.flip(1)", "A B^T: row i of A times row j of B."),
            Mistake("s_a[:, None] * s_b[None, :]", "s_a.mean() * s_b.mean()", "Each row has a scale of its own."),
        ),
    ),
    "exact_matmul": Gap(
        exact_matmul,
        lambda: [(_integers(8, 2, 2500), _integers(9, 2500, 3)), _long_rows()],
        (
            Mistake("1024):", "1024):\n        total *= 0", "Add the pieces up."),
            Mistake(
                "(a[:, piece].float() @ b[piece].float()).int()",
                "(a[:, piece] @ b[piece]).int()",
                "Sums in int8 wrap around.",
            ),
            Mistake(
                "for start in range(0, a.shape[1], 1024):\n        piece = slice(start, start + 1024)",
                "for piece in (slice(0, None),):",
                "float32 holds every integer up to 2^24 only: 1024 terms at once.",
            ),
        ),
    ),
}
