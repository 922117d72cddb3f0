"""K-smoothing and its gradient identity."""

import math

import torch
from torch import Tensor


def fake_quantize(x: Tensor) -> Tensor:
    """psi as floats: s round(X / s) with s = max|X| / 127 over the last two axes. (Given: exercise 01.)"""
    scale = x.abs().amax((-2, -1), keepdim=True) / 127
    return scale * torch.round(x / torch.where(scale > 0, scale, 1))


def smooth_key(key: Tensor) -> tuple[Tensor, Tensor]:
    """K_sm = K - mu_K and mu_K, the mean over the tokens of each head.

    key float32 [heads, N, D] -> [heads, N, D], [heads, 1, D].

    >>> k_smooth, k_mean = smooth_key(torch.tensor([[[1.0, 10.0], [3.0, 10.0]]]))
    >>> k_smooth.tolist(), k_mean.tolist()
    ([[[-1.0, 0.0], [1.0, 0.0]]], [[[2.0, 10.0]]])
    """
    ### SOLUTION: subtract the mean of each head's tokens
    k_mean = key.mean(-2, keepdim=True)
    return key - k_mean, k_mean


def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """O = softmax(S) V and L, with S = c Q K^T computed from fake_quantize(Q) and fake_quantize(K_sm).

    query, key, value float32 [heads, N, D] -> output [heads, N, D], log-sum-exp [heads, N]. c = 1/sqrt(D).
    Only Q K^T is quantised; P V stays in float32.

    L is the log-sum-exp of the *unsmoothed* scores: what smoothing took from row i, c q_i . mu_K, is added back,
    from the query as it is. So L can be compared with any other implementation's.

    >>> key = torch.tensor([[[5.0], [7.0]]])  # K_sm is -1, 1 and mu_K 6
    >>> output, log_sum_exp = attention(torch.tensor([[[1.0], [0.0]]]), key, key)
    >>> [round(x, 4) for x in log_sum_exp[0].tolist()]  # row 0: log(e^5 + e^7); row 1: log(2)
    [7.1269, 0.6931]
    """
    c = 1 / math.sqrt(query.shape[-1])
    ### SOLUTION: smooth the keys, compute the rounded scores, and add back what L lost
    k_smooth, k_mean = smooth_key(key)
    s = fake_quantize(query) @ fake_quantize(k_smooth).mT * c  # [heads, N, N]
    removed = query @ k_mean.mT * c  # [heads, N, 1]
    return torch.softmax(s, -1) @ value, s.logsumexp(-1) + removed.squeeze(-1)


def grad_query(grad_scores: Tensor, key: Tensor) -> Tensor:
    """dQ = c dS K as SageBwd computes it: c fake_quantize(dS) fake_quantize(K_sm), and nothing else.

    grad_scores [heads, N, N], key [heads, N, D] (not smoothed yet) -> [heads, N, D].

    Rows of dS sum to 0, so dS K = dS K_sm. Rows of the *rounded* dS don't quite sum to 0. Is it better to add
    rowsum(dS^) mu_K^T then? (Try. The right row sum is 0.)

    >>> key = torch.tensor([[[5.0], [7.0]]])
    >>> grad_query(torch.tensor([[[1.0, -1.0], [0.0, 0.0]]]), key).tolist()
    [[[-2.0], [0.0]]]
    """
    ### SOLUTION: multiply rounded dS and rounded smoothed keys
    k_smooth, _ = smooth_key(key)
    return fake_quantize(grad_scores) @ fake_quantize(k_smooth) / math.sqrt(key.shape[-1])


def grad_through_mean(grad_scores: Tensor, query: Tensor) -> Tensor:
    """The gradient that reaches every key through mu_K, without autograd and without rounding.

    grad_scores [heads, N, N] (queries, keys), query [heads, N, D] -> [heads, 1, D].

    S = c Q K_sm^T gives dK_sm = c dS^T Q. Each row of K_sm is K_j minus the mean of all N keys, so every key gets
    its own row of dK_sm and, through the mean, one more row, the same for all keys: this one.
    If rows of dS sum to 0 it vanishes, which is why no implementation computes it.

    >>> query = torch.tensor([[[1.0], [10.0]]])
    >>> grad_through_mean(torch.tensor([[[1.0, 2.0], [0.0, 4.0]]]), query).tolist()  # rows don't sum to 0
    [[[-21.5]]]
    >>> grad_through_mean(torch.tensor([[[1.0, -1.0], [4.0, -4.0]]]), query).abs().item()
    0.0

    First case: dK_sm = [1, 2 + 40], the mean of its rows is 21.5.
    """
    c = 1 / math.sqrt(query.shape[-1])
    ### SOLUTION: sum what every key sends through the mean
    return -(grad_scores.mT @ query * c).mean(-2, keepdim=True)
