"""Tests of 03_key_smoothing."""

import math

import torch

from exercises.task import Call, Task

task = Task(agree=0.0001)


def inputs(draw, heads=None):
    """Draw Q, K, V [heads, N, D] with N != D; the keys share an offset of their own in every head."""
    shape = heads or draw.integers(2, 4), draw.integers(70, 110), draw.choice((16, 32, 64))
    q, k, v = (draw.normal(*shape) for _ in range(3))
    return q, k + 8 * draw.normal(shape[0], 1, shape[2]), v


@task.test("smooth_key subtracts the mean over tokens", agree=1e-05)
def keys(draw):
    """Over which axis is the mean?"""
    for heads in (1, 3):
        yield Call("smooth_key", (inputs(draw, heads)[1],))


@task.test("attention: INT8 scores from smoothed keys", points=2, parts=(0,), agree=0.003)
@task.test("attention: the log-sum-exp of the unsmoothed scores", points=2, parts=(1,))
def attention(draw):
    """Are the scores c Q^ K_sm^T of the rounded tensors? What is added to L is c q . mu_K, with q not rounded."""
    yield Call("attention", inputs(draw))


@task.test("grad_query: rounded dS, smoothed keys, no correction", points=2, agree=0.003)
def grad_query(draw):
    """dQ is off. It is one product of two rounded matrices, times c."""
    q, k, v = inputs(draw)
    p, dp = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1), draw.normal(*q.shape) @ v.mT
    yield Call("grad_query", (p * (dp - (p * dp).sum(-1, keepdim=True)), k))


@task.test("grad_through_mean is what autograd sends through the mean", points=2)
def through_mean(draw):
    """The gradient through the mean is off. Which axis of dS are the queries?"""
    q, k, _ = inputs(draw)
    yield Call("grad_through_mean", (draw.normal(q.shape[0], q.shape[1], k.shape[1]), q))


@task.test("the identity: of dS + 1 only the 1 counts, where rows of dS sum to 0", agree=0.001)
def identity(draw):
    """Rows of dS that sum to 0 send nothing through the mean. These are such rows plus 1: what does the 1 send?"""
    q, k, _ = inputs(draw)
    ds = draw.integers(-64, 65, q.shape[0], q.shape[1], k.shape[1]).float()
    ds[..., -1] -= ds.sum(-1)
    yield Call("grad_through_mean", (ds + 1, q))
