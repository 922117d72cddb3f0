"""Notebook 03b: Q-smoothing, the scores it leaves to a second product, and the second branch of dK."""

import torch

from sage_course.gaps import Gap, Mistake
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


GAPS = {
    "smooth_query": Gap(smooth_query, lambda: [(_draw(0, 8, HEAD_DIM), BLOCK), (_draw(1, 2, 6, 5), 2)], (
        Mistake("tiles.mean(-2)", "tiles.mean((-3, -2))[..., None, :] + 0 * tiles.mean(-2)",
                "That is one mean for all. Each tile has its own."),
        Mistake("tiles.mean(-2)", "tiles[..., 0, :]", "That is the first query of each tile, not the mean."),
        Mistake("tiles.mean(-2)\n    return (tiles - q_mean[..., None, :])",
                "tiles.mean(-1)\n    return (tiles - q_mean[..., None])",
                "That is the mean of each query's channels. The mean query is a mean over the queries of a tile."),
        Mistake("(-1, block)", "(block, -1)", "That makes `block` tiles. There are tokens / block of them."),
        Mistake("tiles.mean(-2)\n    return (tiles - q_mean[..., None, :])",
                "tiles.mean(-3)\n    return (tiles - q_mean[..., None, :, :])",
                "That is a mean over tiles. Each tile has its own, over its queries: dimension -2 of `tiles`."),
        Mistake("(tiles - q_mean[..., None, :]).flatten(-3, -2)", "q - q_mean.repeat(*(1,) * (q.dim() - 2), block, 1)",
                "Row 0 of the means belongs to the first `block` queries: `repeat_interleave` repeats each row."),
    ), right=(
        ("(tiles - q_mean[..., None, :]).flatten(-3, -2)", "q - q_mean.repeat_interleave(block, -2)"),
        ("tiles.mean(-2)", "tiles.sum(-2) / block"),
    )),
    "int8_scores": Gap(int8_scores, _scores, (
        Mistake("(in_int8 + of_the_mean.repeat_interleave(block, -2))", "in_int8",
                "The scores of the mean query are missing. The softmax does not cancel them: add them."),
        Mistake("c * (in_int8 +", "(c * in_int8 +", "Both products need the factor c."),
        Mistake("c * (in_int8 +", "(in_int8 + c *", "Both products need the factor c."),
        Mistake("q_mean @ k.mT", "fake_quantize(q_mean, (1, None)) @ fake_quantize(k, (block, None)).mT",
                "This product stays in 16 bit: nothing in it is rounded to INT8."),
        Mistake("of_the_mean.repeat_interleave(block, -2)", "of_the_mean.repeat(block, 1)",
                "Row 0 belongs to the first `block` queries: `repeat_interleave` repeats each row."),
        Mistake("of_the_mean.repeat_interleave(block, -2)", "of_the_mean",
                "It has one row per tile, and the scores have one per query: `repeat_interleave` repeats each row."),
        Mistake("(block, -2)", "(block, -1)", "That repeats columns. Rows are the dimension -2."),
        Mistake("q_mean @ k.mT", "q_mean @ fake_quantize(k, (block, None)).mT",
                "The mean is large: with rounded keys it would enlarge their errors."),
        Mistake("q_mean @ k.mT", "fake_quantize(q_mean, (1, None)) @ k.mT",
                "This product stays in 16 bit: the mean is not rounded to INT8."),
        Mistake("q_mean @ k.mT", "fake_quantize(q_mean) @ k.mT",
                "This product stays in 16 bit: the mean is not rounded to INT8."),
    ), right=(
        ("c * (in_int8 + of_the_mean.repeat_interleave(block, -2))",
         "c * in_int8 + c * of_the_mean.repeat_interleave(block, -2)"),
        ("of_the_mean.repeat_interleave(block, -2)", "q_mean.repeat_interleave(block, -2) @ k.mT"),
    )),
    "mean_branch": Gap(mean_branch,
        lambda: [(_draw(5, 8, 10), _draw(6, 2, HEAD_DIM), C, BLOCK), (_draw(7, 6, 5), _draw(8, 3, HEAD_DIM), C, 2)], (
        Mistake(".sum(-2)", ".sum(-1)", "These are row sums. dK_j gets something from every query: sum the columns."),
        Mistake("ds.unflatten(-2, (-1, block)).sum(-2)", "ds.sum(-2).expand(len(q_mean), -1) / len(q_mean)",
                "Each tile has its own mean, so sum the columns of each tile separately."),
        Mistake("ds.unflatten(-2, (-1, block)).sum(-2)", "ds.sum(-2, keepdim=True)",
                "Each tile has its own mean, so sum the columns of each tile separately."),
        Mistake(".sum(-2)", ".sum(-3)", "One row of sums per tile: unflatten to `(-1, block)`, and sum over -2."),
        Mistake("ds.unflatten(-2, (-1, block)).sum(-2)", "ds.unflatten(-1, (-1, block)).sum(-1)",
                "Those are tiles of keys. The queries are the dimension -2."),
    ), right=(
        ("c * column_sums.mT @ q_mean", "c * (q_mean.mT @ column_sums).mT"),
        ("c * column_sums.mT @ q_mean", "c * ds.mT @ q_mean.repeat_interleave(block, -2)"),
    )),
}  # fmt: skip
