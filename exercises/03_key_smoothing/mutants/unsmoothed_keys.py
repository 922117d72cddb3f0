HINT = "smoothing"

import math

import torch


def fake_quantize(x):
    scale = x.abs().amax((-2, -1), keepdim=True) / 127
    return scale * torch.round(x / torch.where(scale > 0, scale, 1))


def smooth_key(key):
    k_mean = key.mean(-2, keepdim=True)
    return (key - k_mean, k_mean)


def attention(query, key, value):
    c = 1 / math.sqrt(query.shape[-1])
    k_smooth, k_mean = smooth_key(key)
    s = fake_quantize(query) @ fake_quantize(key).mT * c
    removed = 0 * query @ k_mean.mT
    return (torch.softmax(s, -1) @ value, s.logsumexp(-1) + removed.squeeze(-1))


def grad_query(grad_scores, key):
    k_smooth, _ = smooth_key(key)
    return fake_quantize(grad_scores) @ fake_quantize(k_smooth) / math.sqrt(key.shape[-1])


def grad_through_mean(grad_scores, query):
    c = 1 / math.sqrt(query.shape[-1])
    return -(grad_scores.mT @ query * c).mean(-2, keepdim=True)
