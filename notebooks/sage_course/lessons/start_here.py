"""Notebook 00: eight bits, scores on integers, and the mean key."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draw, watched, with_mistakes


def to_int8(x, dim):
    scale = x.abs().amax(dim, keepdim=True) / 127
    divisor = torch.where(scale > 0, scale, 1.0)
    integers = torch.round(x / divisor).to(torch.int8)
    return scale, integers


def integer_product(a, b):
    return a.int() @ b.int()  # 8-bit factors, 32-bit sums


def int8_scores(q, k):
    s_q, q_hat = to_int8(q, (-2, -1))
    s_k, k_hat = to_int8(k, (-2, -1))
    return integer_product(q_hat, k_hat.mT) * s_q * s_k / q.shape[-1] ** 0.5


def without_mean_key(k):
    return k - k.mean(dim=-2, keepdim=True)


def _tensors() -> list[tuple]:
    return [
        *[(draw(0, 4, 6), -1), (-draw(1, 3, 5).abs(), 0), (draw(2, 2, 3, 4), (-2, -1))],
        *[(1e-7 * draw(3, 4, 6), -1), (1e-15 * draw(3, 4, 6), 0)],
        (draw(4, 4, 6) * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), -1),  # a row of 0
    ]


GAPS = with_mistakes(
    __file__,
    {
        "to_int8": Gap(to_int8, _tensors, run=watched),
        "int8_scores": Gap(
            int8_scores,
            lambda: [(draw(3, 5, 16), 4 * draw(4, 7, 16)), (draw(5, 1, 2, 6, 4), draw(6, 1, 2, 6, 4))],
            run=watched,
        ),
        "without_mean_key": Gap(without_mean_key, lambda: [(3 + draw(7, 2, 1, 5, 4),)]),
    },
)
