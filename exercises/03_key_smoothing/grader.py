"""Grader of 03_key_smoothing."""

import math

import torch
from torch import Tensor

from exercises.grading import Grader, close, expect, unlike
from sage_ref.attention import attention_backward, attention_forward
from sage_ref.quantization import fake_quantize
from sage_ref.sagebwd import MATMULS, SageBwdSettings, sagebwd_forward
from sage_ref.smoothing import key_mean_scores, smooth_key

grader = Grader(
    "03_key_smoothing",
    {
        "smooth_key": (Tensor, Tensor),
        "attention": (Tensor, Tensor),
        "grad_query": Tensor,
        "grad_through_mean": Tensor,
    },
)
grader.hint("form", "A result has the wrong shape or dtype, or holds NaN. The docstring says what is expected.")
grader.hint("mean_axis", "Over which axis is the mean? Every head has its own, over its tokens.")
grader.hint("smoothing", "The error is that of keys with their offset. Which keys are rounded: K, or K_sm?")
grader.hint("bypass", "This is exact attention. Where are Q and K rounded to INT8?")
grader.hint(
    "output", "The output is off. Are the scores c Q^ K_sm^T of the rounded tensors, and the softmax over keys?"
)
grader.hint("log_sum_exp", "This is the log-sum-exp of the smoothed scores. What did smoothing take from row i?")
grader.hint("offset", "What is added back is c q . mu_K: with the factor c, and with the query as it is, not rounded.")
grader.hint("c", "Is the factor c = 1/sqrt(D) there?")
grader.hint("correction", "The right row sum of dS is 0. Does the term with rowsum(dS^) repair an error or add one?")
grader.hint("rounding", "Are both operands of dQ rounded, dS and the smoothed keys?")
grader.hint("grad_query", "dQ is off. It is one product of two rounded matrices, times c.")
grader.hint("share", "Key j has a share of 1/N in the mean, and the mean is subtracted: is 1/N there, and the sign?")
grader.hint("nonzero", "The rows of this dS don't sum to 0, so something reaches the keys through the mean.")
grader.hint("grad_through_mean", "The gradient through the mean is off. Which axis of dS are the queries?")
grader.hint("identity", "If rows of dS sum to 0, the gradient through the mean is 0.")
TOLERANCE = 3e-3  # one key's rounding that flips moves a whole head, by up to 2e-3; a missing rounding is 6e-3


def inputs(draw, heads=None):
    """Q, K, V, dO [heads, N, D] with N != D; the keys share an offset of their own in every head."""
    shape = heads or draw.integers(2, 4), draw.integers(70, 110), draw.choice((16, 32, 64))
    q, k, v, do = (draw.normal(*shape) for _ in range(4))
    return q, k + 8 * draw.normal(shape[0], 1, shape[2]), v, do


def check_form(x, *shape):
    like = torch.empty(shape, device="meta")
    expect(x.dtype == torch.float32 and x.shape == shape and x.isfinite().all(), "form", found=x, expected=like)


@grader.test("smooth_key subtracts the mean over tokens")
def smooths(student, draw):
    for heads in (1, 3):
        _, k, _, _ = inputs(draw, heads)
        k_smooth, k_mean = student.smooth_key(k)
        expect(k_mean.shape == (heads, 1, k.shape[-1]), "mean_axis")
        check_form(k_mean, heads, 1, k.shape[-1])
        check_form(k_smooth, *k.shape)
        expected, mean = smooth_key(k.double())
        close(k_mean, mean, "mean_axis", relative_l2=1e-6)
        close(k_smooth, expected, "mean_axis", relative_l2=1e-5)


@grader.test("attention: INT8 scores from smoothed keys", points=2)
def output(student, draw):
    q, k, v, _ = inputs(draw)
    found, _ = student.attention(q, k, v)
    check_form(found, *q.shape)
    n = q.shape[1]
    settings = {"block_q": n, "block_kv": n, "exact_matmuls": tuple(x for x in MATMULS if x != "S")}
    unsmoothed = sagebwd_forward(q, k, v, SageBwdSettings(smooth_k=False, **settings)).output
    expected = sagebwd_forward(q, k, v, SageBwdSettings(**settings)).output
    unlike(found, unsmoothed, expected, "smoothing", within=TOLERANCE)
    unlike(found, attention_forward(q, k, v).output, expected, "bypass", within=TOLERANCE)
    close(found, expected, "output", relative_l2=TOLERANCE)


@grader.test("attention: the log-sum-exp of the unsmoothed scores", points=2)
def log_sum_exp(student, draw):
    q, k, v, _ = inputs(draw)
    _, found = student.attention(q, k, v)
    check_form(found, *q.shape[:2])
    n, c = q.shape[1], 1 / math.sqrt(q.shape[2])
    expected = sagebwd_forward(q, k, v, SageBwdSettings(block_q=n, block_kv=n)).log_sum_exp
    _, k_mean = smooth_key(k)
    removed = key_mean_scores(q, k_mean, c).squeeze(-1)
    smoothed = expected - removed
    unlike(found, smoothed, expected, "log_sum_exp", within=1e-3)
    exact = attention_forward(q, k, v).log_sum_exp
    unlike(found - removed, exact - removed, smoothed, "bypass", within=1e-4)
    for wrong in (key_mean_scores(q, k_mean, 1.0), key_mean_scores(fake_quantize(q), k_mean, c)):
        unlike(found - removed, smoothed + wrong.squeeze(-1) - removed, smoothed, "offset", within=1e-3)
    close(found - removed, smoothed, "offset", relative_l2=4e-4)


@grader.test("grad_query: rounded dS, smoothed keys, no correction", points=2)
def gradient_of_query(student, draw):
    q, k, v, do = inputs(draw)
    forward = attention_forward(q.double(), k.double(), v.double())
    exact = attention_backward(
        *(x.double() for x in (do, q, k, v)), output=forward.output, log_sum_exp=forward.log_sum_exp
    )
    ds = exact.grad_scores.float()
    found = student.grad_query(ds, k)
    check_form(found, *q.shape)
    c = 1 / math.sqrt(q.shape[2])
    k_smooth, k_mean = smooth_key(k)
    ds_hat, k_hat = fake_quantize(ds), fake_quantize(k_smooth)
    expected = c * ds_hat @ k_hat
    for hint, wrong in {
        "c": expected / c,
        "correction": expected + c * ds_hat.sum(-1, keepdim=True) * k_mean,
        "smoothing": c * ds_hat @ fake_quantize(k),
    }.items():
        unlike(found, wrong, expected, hint, within=TOLERANCE)
    for wrong in (exact.grad_query, c * ds @ k_hat, c * ds_hat @ k_smooth):
        unlike(found, wrong, expected, "rounding", within=TOLERANCE)
    close(found, expected, "grad_query", relative_l2=TOLERANCE)


@grader.test("grad_through_mean is what autograd sends through the mean", points=2)
def through_mean(student, draw):
    q, k, _, _ = inputs(draw)
    ds, c = draw.normal(q.shape[0], q.shape[1], k.shape[1]), 1 / math.sqrt(q.shape[2])
    found = student.grad_through_mean(ds, q)
    check_form(found, q.shape[0], 1, q.shape[2])
    leaf = k.double().requires_grad_()
    dk_smooth = c * ds.double().mT @ q.double()
    scores = c * q.double() @ smooth_key(leaf)[0].mT
    (dk,) = torch.autograd.grad(scores, leaf, ds.double())
    expected = (dk - dk_smooth).mean(-2, keepdim=True)
    expect(found.norm() > 1e-3 * expected.norm(), "nonzero")
    for wrong in (-expected, k.shape[1] * expected, -k.shape[1] * expected):
        unlike(found, wrong, expected, "share", within=1e-3)
    unlike(found, expected / c, expected, "c", within=1e-3)
    close(found, expected, "grad_through_mean", relative_l2=1e-4)


@grader.test("the identity: rows of dS that sum to 0 send nothing through the mean")
def identity(student, draw):
    q, k, _, _ = inputs(draw)
    ds = draw.integers(-64, 65, q.shape[0], q.shape[1], k.shape[1]).float()
    ds[..., -1] -= ds.sum(-1)
    found = student.grad_through_mean(ds, q)
    check_form(found, q.shape[0], 1, q.shape[2])
    expect(found.norm() < 1e-4 * (ds.mT @ q).norm(), "identity")
    other = student.grad_through_mean(ds + 1, q)
    check_form(other, q.shape[0], 1, q.shape[2])
    close(other, -q.double().sum(-2, keepdim=True) / math.sqrt(q.shape[2]), "grad_through_mean", relative_l2=1e-3)
