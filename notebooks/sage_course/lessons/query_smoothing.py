"""Notebook 03b: Q-smoothing, the scores it leaves to a second product, and the second branch of dK."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes
from sage_ref.quantization import fake_quantize

HEAD_DIM, BLOCK = 6, 4
C = HEAD_DIM**-0.5


def smooth_query(q, block):
    tiles = q.unflatten(-2, (-1, block))
    q_mean = tiles.mean(-2)
    return (tiles - q_mean[..., None, :]).flatten(-3, -2), q_mean


def int8_scores(q_smooth, q_mean, k, c, block):
    in_int8 = fake_quantize(q_smooth, (block, None)) @ fake_quantize(k, (block, None)).mT
    of_the_mean = q_mean @ k.mT  # [..., tiles, keys]
    return c * (in_int8 + of_the_mean.repeat_interleave(block, -2))


def mean_branch(ds, q_mean, c, block):
    column_sums = ds.unflatten(-2, (-1, block)).sum(-2)  # [..., tiles, keys]
    return c * column_sums.mT @ q_mean


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 1


def _scores() -> list[tuple]:
    q_smooth, k = _draw(2, 8, HEAD_DIM) - 1, _draw(3, 8, HEAD_DIM)
    return [(q_smooth, 3 * _draw(4, 2, HEAD_DIM), k, C, BLOCK)]


GAPS = with_mistakes(
    __file__,
    {
        "smooth_query": Gap(smooth_query, lambda: [(_draw(0, 8, HEAD_DIM), BLOCK), (_draw(1, 2, 6, 5), 2)]),
        "int8_scores": Gap(int8_scores, _scores),
        "mean_branch": Gap(
            mean_branch,
            lambda: [(_draw(5, 8, 10), _draw(6, 2, HEAD_DIM), C, BLOCK), (_draw(7, 6, 5), _draw(8, 3, HEAD_DIM), C, 2)],
        ),
    },
)
