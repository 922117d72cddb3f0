"""Notebook 02: psi, blocks of it, and integer matmuls."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draw, in_floats, watched, with_mistakes
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


GAPS = with_mistakes(
    __file__,
    {
        "psi": Gap(psi, _matrices, run=watched),
        "psi_of_blocks": Gap(psi_of_blocks, _blocks, run=watched),
        "scaled_product": Gap(
            scaled_product,
            lambda: [
                (_integers(4, 3, 5), draw(5, 3).abs(), _integers(6, 3, 5), draw(7, 3).abs()),
                (_integers(4, 2, 5), draw(5, 2).abs(), _integers(6, 3, 5), draw(7, 3).abs()),
            ],
            run=watched,
        ),
        "exact_matmul": Gap(
            exact_matmul, lambda: [(_integers(8, 2, 2500), _integers(9, 2500, 3)), *_long_rows()], run=in_floats
        ),
    },
)
