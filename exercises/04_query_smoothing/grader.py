"""Grader of 04_query_smoothing."""

import math

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, unlike
from sage_ref.quantization import fake_quantize
from sage_ref.sagebwd import SageBwdSettings, whole_scores
from sage_ref.smoothing import query_mean_grad_key, smooth_query

grader = Grader("04_query_smoothing", {"smooth_query": (Tensor, Tensor), "scores": Tensor, "grad_key": Tensor})
grader.hint("form", "A result has the wrong shape or dtype, or holds NaN. The docstring says what is expected.")
grader.hint("global_mean", "Is the mean that of the block, or of the whole sequence?")
grader.hint("block_mean", "The block means are off. Is the mean over tokens, and is the last block shorter?")
grader.hint("restore", "The softmax doesn't cancel mu_Q K^T: it differs from key to key. Where is it put back?")
grader.hint("smoothing", "The error is that of queries with their offset. Which queries are rounded: Q, or Q_sm?")
grader.hint("rounded_keys", "The product with mu_Q takes the keys as they are. Only the INT8 product rounds them.")
grader.hint("bypass", "This is the exact product. Which operands are rounded to INT8?")
grader.hint("c", "Is the factor c = 1/sqrt(D) there, in both products?")
grader.hint("scores", "The scores are off. Every block of queries has its own mean, every tile its own scales.")
grader.hint("one_branch", "dK = c dS^T Q has two parts, because Q = Q_sm + 1 mu_Q^T. Where is the second?")
grader.hint("row_sums", "The branch through mu_Q needs one number per key: the sum of dS over which axis?")
grader.hint("own_block", "Each block of queries has its own column sums of dS and its own mean.")
grader.hint("rounded_branch", "The second branch takes dS as it is, before rounding.")
grader.hint("dk", "dK is off. Add both branches for every tile of dS.")
SIZES = ((16, 0), (16, 5), (32, 11))  # block, and how many tokens stand in the last, partial block


def inputs(draw, block, partial):
    """Q whose offset changes from block to block, K, and a dS whose columns don't sum to 0."""
    blocks = draw.integers(3, 5)
    n, head_dim = blocks * block + partial, draw.choice((24, 48, 64))
    offset = 3 * draw.normal(1, head_dim) + 2 * draw.normal(blocks + 1, head_dim)
    q = draw.normal(n, head_dim) + offset.repeat_interleave(block, 0)[:n]
    k = draw.normal(n, head_dim)
    return q, k, 0.1 * torch.softmax(2 * draw.normal(n, n), -1) * draw.normal(n, n)


def check_form(x, *shape):
    like = torch.empty(shape, device="meta")
    expect(x.dtype == torch.float32 and x.shape == shape and x.isfinite().all(), "form", found=x, expected=like)


@grader.test("smooth_query: one mean per block")
def means(student, draw):
    for block, partial in SIZES:
        q, _, _ = inputs(draw, block, partial)
        q_smooth, q_mean = student.smooth_query(q, block)
        check_form(q_smooth, *q.shape)
        expected, mean = smooth_query(q, block)
        unlike(q_smooth, q - q.mean(0), expected, "global_mean", within=1e-3)
        check_form(q_mean, -(-q.shape[0] // block), q.shape[1])
        close(q_mean, mean[::block], "block_mean", relative_l2=1e-5)
        close(q_smooth, expected, "block_mean", relative_l2=1e-5)


@grader.test("scores: the INT8 product, and mu_Q K^T put back", points=3)
def restored(student, draw):
    for block, partial in SIZES:
        q, k, _ = inputs(draw, block, partial)
        found = student.scores(q, k, block)
        check_form(found, q.shape[0], k.shape[0])
        c = 1 / math.sqrt(q.shape[1])
        q_smooth, q_mean = smooth_query(q, block)
        settings = SageBwdSettings(smooth_k=False, smooth_q=True, block_q=block, block_kv=block)
        expected = whole_scores("S", q_smooth, k, q_mean, settings)
        second = c * q_mean @ k.mT
        k_hat = fake_quantize(k, (block, None))
        for hint, wrong in {
            "restore": expected - second,
            "c": expected / c,
            "smoothing": c * fake_quantize(q, (block, None)) @ k_hat.mT,
            "rounded_keys": expected - second + c * q_mean @ k_hat.mT,
            "bypass": c * q @ k.mT,
        }.items():
            unlike(found, wrong, expected, hint, within=1e-3)
        unlike(found, expected - second + second / c, expected, "c", within=1e-3)
        close(found, expected, "scores", relative_l2=7e-4)


@grader.test("grad_key: both branches", points=3)
def both_branches(student, draw):
    for block, partial in SIZES:
        q, _, ds = inputs(draw, block, partial)
        found = student.grad_key(ds, q, block)
        check_form(found, *q.shape)
        c = 1 / math.sqrt(q.shape[1])
        q_smooth, q_mean = smooth_query(q, block)
        ds_hat = fake_quantize(ds, (block, block))
        first = c * ds_hat.mT @ fake_quantize(q_smooth, (block, None))
        second = query_mean_grad_key(ds, q_mean, c)
        expected = first + second
        for hint, wrong in {
            "one_branch": first,
            "c": expected / c,
            "smoothing": c * ds_hat.mT @ fake_quantize(q, (block, None)),
            "own_block": first + query_mean_grad_key(ds, q.mean(0).expand_as(q), c),
            "rounded_branch": first + query_mean_grad_key(ds_hat, q_mean, c),
            "bypass": c * ds.mT @ q,
        }.items():
            unlike(found, wrong, expected, hint, within=2e-3)
        for wrong in (first + second / c, first / c + second):
            unlike(found, wrong, expected, "c", within=2e-3)
        if not partial:
            swapped = ds.unflatten(0, (-1, block)).unflatten(-1, (-1, block)).transpose(1, 3).reshape(ds.shape)
            unlike(found, first + query_mean_grad_key(swapped, q_mean, c), expected, "row_sums", within=2e-3)
        close(found, expected, "dk", relative_l2=1e-3)


@grader.test("without INT8's share both are exact")
def exact_parts(student, draw):
    """Operands that lie on their INT8 grid: nothing is lost, so the sums must agree to float32."""
    block, head_dim = 16, draw.choice((8, 24))
    n = 3 * block
    q, k, ds = (draw.integers(-63, 64, *shape).float() for shape in ((n, head_dim), (n, head_dim), (n, n)))
    for rows in range(0, n, block):
        # Every block of Q and of K and every tile of dS has the maximum 127, every block of Q a mean of whole numbers.
        tile = q[rows : rows + block]
        tile[1::2] = -tile[::2]
        tile[0, 0], tile[1, 0] = 127, -127
        tile += 10 * draw.integers(-5, 6, 1, head_dim)
        k[rows, 0] = 127
        ds[rows, ::block] = 127
    c = 1 / math.sqrt(head_dim)
    found = student.scores(q, k, block)
    check_form(found, n, n)
    close(found, c * q.double() @ k.double().mT, "scores", relative_l2=1e-5)
    found = student.grad_key(ds, q, block)
    check_form(found, n, head_dim)
    close(found, c * ds.double().mT @ q.double(), "dk", relative_l2=1e-5)
