HINT = "count"

import torch
import torch.nn.functional as F


def block_means(x, block):
    n = x.shape[1]
    blocks = F.pad(x, (0, 0, 0, -n % block)).unflatten(1, (-1, block))
    tokens = (n - block * torch.arange(blocks.shape[1])).clamp(max=block)
    return blocks.sum(2) / tokens[:, None]


def router_scores(query, key, block_q=128, block_kv=64):
    q_bar = block_means(query, block_q)
    k_bar = block_means(key - key.mean(1, keepdim=True), block_kv)
    return (q_bar @ k_bar.mT * query.shape[-1] ** -0.5).softmax(-1)


def select_blocks(scores, sparsity):
    count = max(1, int((1 - sparsity) * scores.shape[-1]))
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)
