"""Grader of 14_router_top_k."""

import torch
from torch import Tensor

from exercises.grading import Draw, Grader, close, expect
from sage_ref.sla2 import branches as sla

grader = Grader("14_router_top_k", {"block_means": Tensor, "router_scores": Tensor, "select_blocks": Tensor})
grader.hint("means", "One mean per block and head, over the tokens of that block.")
grader.hint("ragged", "The last block may hold fewer tokens: is its mean a mean over the tokens that exist?")
grader.hint(
    "scores", "softmax over the key blocks of c Qbar Kbar^T: blocks of 128 queries and of 64 keys, each head by itself."
)
grader.hint("c", "Are the scores multiplied by c = 1/sqrt(D) before the softmax?")
grader.hint(
    "smoothing",
    "The keys share a large offset. Is their mean over the sequence subtracted first, before digits are lost?",
)
grader.hint("dtype", "The mask is a bool tensor in the shape of the scores.")
grader.hint("row", "The choice is made in each row (query block) of each head by itself.")
grader.hint("count", "k is (1 - sparsity) Tn, rounded to the nearest integer. Converting to int cuts the fraction off.")
grader.hint("at_least_one", "With few key blocks, k rounds to 0. A query block has to see something.")
grader.hint("largest", "The k largest scores of a row are kept.")
grader.hint(
    "ties", "Among equal scores the first block wins: every row keeps exactly k, and the same ones on every machine."
)

TOLERANCE = 1e-5


def mask_of(student, scores: Tensor, sparsity: float) -> Tensor:
    mask = student.select_blocks(scores, sparsity)
    expect(mask.dtype == torch.bool and mask.shape == scores.shape, "dtype")
    return mask


def draw_tokens(draw: Draw, n: int) -> Tensor:
    """Heads of n tokens; neighbours resemble each other, so block means differ."""
    heads, head_dim = draw.integers(2, 4), draw.choice((16, 32))
    steps = draw.normal(heads, n, head_dim).cumsum(1) / 8
    return draw.normal(heads, n, head_dim) + steps


def expected_scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    return sla.heuristic_scores(q.double(), k.double(), sla.BlockSettings(scale=scale))


@grader.test("block means")
def means(student, draw):
    block = draw.choice((4, 16))
    x = draw_tokens(draw, block * draw.integers(3, 6))
    close(student.block_means(x, block), sla.block_mean(x.double(), block), "means", relative_l2=TOLERANCE)


@grader.test("the mean of a last block with fewer tokens")
def ragged(student, draw):
    for _ in range(2):
        block = draw.choice((8, 16))
        x = draw_tokens(draw, block * draw.integers(0, 4) + draw.integers(1, block))
        close(student.block_means(x, block), sla.block_mean(x.double(), block), "ragged", relative_l2=TOLERANCE)


@grader.test("scores of key blocks", points=2)
def scores(student, draw):
    n = 128 * draw.integers(2, 4) + draw.integers(1, 128)
    k = draw_tokens(draw, n)
    q = k.flip(1) + draw.normal(*k.shape)
    found = student.router_scores(q, k)
    expect(found.shape == (len(q), -(-n // 128), -(-n // 64)), "scores")
    without_c = expected_scores(q, k, scale=1.0)
    expect((found - without_c).norm() > 1e-3 * without_c.norm(), "c")
    close(found, expected_scores(q, k), "scores", relative_l2=TOLERANCE)
    narrow = student.router_scores(q, k, 32, 16)
    expected = sla.heuristic_scores(q.double(), k.double(), sla.BlockSettings(32, 16))
    close(narrow, expected, "scores", relative_l2=TOLERANCE)


@grader.test("keys with a large offset", points=2)
def offset(student, draw):
    k = draw_tokens(draw, 64 * draw.integers(4, 8))
    q = k.flip(1) + 3 * draw.normal(len(k), 1, k.shape[-1])
    k = k + 1e5 * draw.normal(len(k), 1, k.shape[-1])
    close(student.router_scores(q, k), expected_scores(q, k), "smoothing", relative_l2=1e-4)


@grader.test("the k largest of each row", points=2)
def largest(student, draw):
    for blocks, sparsity in ((10, 0.7), (16, 0.75), (9, 0.7), (11, 0.6)):  # k = 3, 4, 2.7, 4.4
        order = torch.stack([draw.permutation(blocks) for _ in range(draw.integers(6, 15))])
        p = order.float().unflatten(0, (1, -1)).expand(2, -1, -1).clone()
        p[1] = p[1].flip(-1)
        mask = mask_of(student, p.softmax(-1), sparsity)
        expected = sla.top_blocks(p, sla.selected_count(sparsity, blocks))
        expect(
            mask.sum() != int((1 - sparsity) * blocks) * expected[..., 0].numel() or mask.sum() == expected.sum(),
            "count",
        )
        expect((mask.sum(-1) == expected.sum(-1)).all(), "count" if mask.sum(-1).unique().numel() == 1 else "row")
        expect((mask == expected).all(), "largest")


@grader.test("at least one block")
def at_least_one(student, draw):
    p = draw.normal(2, draw.integers(2, 5), draw.integers(2, 14)).softmax(-1)
    expect((mask_of(student, p, 0.97) == sla.top_blocks(p, 1)).all(), "at_least_one")


@grader.test("equal scores", points=2)
def ties(student, draw):
    blocks = draw.choice((8, 40, 200))
    p = draw.integers(0, 3, 2, draw.integers(3, 9), blocks).float() / blocks
    p[0, 0] = 1 / blocks
    mask = mask_of(student, p, 0.75)
    expect((mask == sla.top_blocks(p, sla.selected_count(0.75, blocks))).all(), "ties")
