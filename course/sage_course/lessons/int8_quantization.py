"""Notebook 02: psi, blocks of it, and integer matmuls."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_course.check import Gap, Mistake
from sage_course.lessons import draw
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


def _integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def _long_rows() -> list[tuple]:
    """Return rows whose sums are beyond 2^24: float32 can add the pieces of the first, but not of the second."""
    same = torch.full((2, 3000), 127, dtype=torch.int8), torch.full((3000, 2), 127, dtype=torch.int8)
    return [same, (_integers(10, 2, 5000).clamp(min=100), _integers(11, 5000, 2).clamp(min=100))]


class _Casts(TorchDispatchMode):
    """A watch for a NaN that is made an integer: the result depends on the machine, and may be right on this one."""

    seen = "only numbers were made integers"

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: tuple = (), named: dict | None = None) -> Any:
        to = (named or {}).get("dtype")
        if to is not None and not to.is_floating_point and any(x.isnan().any() for x in inputs[:1]):
            self.seen = "a NaN was made an integer"
        return operation(*inputs, **(named or {}))


def _watched(function: Callable, *inputs: Any) -> Any:
    with _Casts() as casts:
        results = function(*inputs)
    return (*results, casts.seen) if isinstance(results, tuple) else results


GAPS = {
    "psi": Gap(psi, lambda: [(draw(0, 4, 6),), (-draw(1, 8, 8).abs(),), (torch.zeros(2, 3),)], (
        Mistake("x.abs().max()", "x.max()", "The largest number may be negative."),
        Mistake("torch.round(x / torch.where(s > 0, s, 1.0))", "(x / torch.where(s > 0, s, 1.0))", "A cast cuts off."),
        Mistake(" / 127", " / 128", "The integers are -127 to 127."),
        Mistake("x / torch.where", "x * torch.where", "X^ = X / s, rounded."),
        Mistake("s = x.abs().max() / 127", "s = 127 / x.abs().max()", "s is the size of one step: max|X| / 127."),
        Mistake("torch.where(s > 0, s, 1.0)", "s", "For X = 0 that is 0/0: divide by something else where s is 0."),
        Mistake("x.abs().max()", "x.abs().amax(-1, keepdim=True)", "One scale for all of X."),
        Mistake(".to(torch.int8)", "", "Rounded, but still floats: `.to(torch.int8)`."),
    ), _watched),
    "psi_of_blocks": Gap(psi_of_blocks,
        lambda: [(draw(2, 8, 6) * torch.arange(1.0, 9.0)[:, None], 4), (draw(3, 12, 4).exp(), 2)], (
        Mistake("tiles.abs().amax((1, 2))", "tiles.abs().amax((1, 2)) * 0 + x.abs().max()",
                "That is one scale in all."),
        Mistake("tiles.abs().amax((1, 2))", "tiles.abs().amax((0, 1))[:1].expand(len(tiles))",
                "One per block of tokens."),
        Mistake("x_hat.flatten(0, 1)", "x_hat", "X^ has the shape of X: [tokens, channels]."),
        Mistake("return s,", "return s[:, None, None],", "The scales have the shape [blocks]."),
        Mistake("x.unflatten(0, (-1, block))", "x.unflatten(0, (block, -1))",
                "That makes `block` blocks. There are tokens / block, of `block` tokens each."),
    )),
    "scaled_product": Gap(scaled_product,
        lambda: [(_integers(4, 3, 5), draw(5, 3).abs(), _integers(6, 3, 5), draw(7, 3).abs())], (
        Mistake(" * s_a[:, None] * s_b[None, :]", " * s_a[None, :] * s_b[:, None]", "s_a belongs to the rows."),
        Mistake(" * s_b[None, :]", "", "The scale of B is missing."),
        Mistake("s_a[:, None]", "s_a", "s_a has to be a column, [M, 1]: as it is, it lies along the columns."),
        Mistake("integer_matmul(a_hat, b_hat.mT)", "(a_hat @ b_hat.mT)", "Sums in int8 wrap around."),
        Mistake("s_a[:, None] * s_b[None, :]", "(s_a[:, None] + s_b[None, :])", "The scales are factors."),
        Mistake("s_a[:, None] * s_b[None, :]", "s_a.mean() * s_b.mean()", "Each row has a scale of its own."),
    )),
    "exact_matmul": Gap(exact_matmul, lambda: [(_integers(8, 2, 2500), _integers(9, 2500, 3)), *_long_rows()], (
        Mistake("1024):", "1024):\n        total *= 0", "Add the pieces up."),
        Mistake("a.shape[1], 1024):", "a.shape[1] // 1024 * 1024, 1024):", "The last, shorter piece is missing."),
        Mistake("start + 1024)", "start + 1023)", "Every piece lacks its last term: a slice ends before its end."),
        Mistake("total += (a[:, piece].float() @ b[piece].float()).int()",
                "total = (total.float() + a[:, piece].float() @ b[piece].float()).int()",
                "The pieces are exact, but adding them in float32 is not: make each an integer first."),
        Mistake("return total", "return total.float()", "The result is int32."),
        Mistake("(a[:, piece].float() @ b[piece].float()).int()", "(a[:, piece] @ b[piece]).int()",
                "Sums in int8 wrap around."),
        Mistake("for start in range(0, a.shape[1], 1024):\n        piece = slice(start, start + 1024)",
                "for piece in (slice(0, None),):",
                "float32 holds every integer up to 2^24 only: 1024 terms at once."),
    )),
}  # fmt: skip
