HINT = "bypass"

import math

import torch


def tiles(length, block):
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def fake_quantize(x):
    scale = x.abs().amax() / 127
    return scale * torch.round(x / scale) if scale > 0 else x


def smooth_query(query, block):
    q_mean = torch.stack([query[rows].mean(0) for rows in tiles(query.shape[0], block)])
    return (query - q_mean.repeat_interleave(block, 0)[: query.shape[0]], q_mean)


def scores(query, key, block):
    c = 1 / math.sqrt(query.shape[-1])
    s = torch.empty(query.shape[0], key.shape[0])
    q_smooth, q_mean = smooth_query(query, block)
    for i, rows in enumerate(tiles(query.shape[0], block)):
        for columns in tiles(key.shape[0], block):
            k_j = key[columns]
            s[rows, columns] = c * query[rows] @ k_j.mT
    return s


def grad_key(grad_scores, query, block):
    c = 1 / math.sqrt(query.shape[-1])
    dk = torch.zeros(grad_scores.shape[1], query.shape[1])
    q_smooth, q_mean = smooth_query(query, block)
    for i, rows in enumerate(tiles(query.shape[0], block)):
        for columns in tiles(grad_scores.shape[1], block):
            ds_ij = grad_scores[rows, columns]
            dk[columns] += c * fake_quantize(ds_ij).mT @ fake_quantize(q_smooth[rows])
            dk[columns] += c * torch.outer(ds_ij.sum(0), q_mean[i])
    return dk
