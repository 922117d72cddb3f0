"""Which blocks get softmax attention: the heuristic router."""

import torch
import torch.nn.functional as F
from torch import Tensor


def block_means(x: Tensor, block: int) -> Tensor:
    """Mean over the tokens of each block, [H, N, D] -> [H, ceil(N / block), D]. The last block may hold fewer tokens.

    >>> block_means(torch.tensor([[[1.0], [3.0], [5.0]]]), 2).flatten()
    tensor([2., 5.])
    """
    ### SOLUTION: the mean of each block's own tokens
    n = x.shape[1]
    blocks = F.pad(x, (0, 0, 0, -n % block)).unflatten(1, (-1, block))  # [H, T, block, D]
    tokens = (n - block * torch.arange(blocks.shape[1])).clamp(max=block)
    return blocks.sum(2) / tokens[:, None]


def router_scores(query: Tensor, key: Tensor, block_q: int = 128, block_kv: int = 64) -> Tensor:
    """softmax(c Qbar Kbar^T) with c = 1/sqrt(D), K smoothed first: [H, Tm, Tn], rows sum to 1.

    query, key [H, N, D], float32. Keys can share a large offset; smoothing makes sure that it costs no digits.

    >>> key = torch.tensor([[[1.0], [1.0], [3.0], [3.0]]])
    >>> router_scores(torch.full((1, 2, 1), 0.5), key, 2, 2)  # smoothed means -1 and 1: softmax([-0.5, 0.5])
    tensor([[[0.2689, 0.7311]]])
    """
    ### SOLUTION: smooth K, average blocks, multiply, scale, softmax
    q_bar = block_means(query, block_q)
    k_bar = block_means(key - key.mean(1, keepdim=True), block_kv)
    return (q_bar @ k_bar.mT * query.shape[-1] ** -0.5).softmax(-1)


def select_blocks(scores: Tensor, sparsity: float) -> Tensor:
    """The hard Top-k: bool [H, Tm, Tn], True for the k largest scores of each row.

    k is (1 - sparsity) Tn rounded to the nearest integer, and at least 1. Among equal scores the block that comes first
    wins, so every row selects exactly k.

    >>> select_blocks(torch.tensor([[[0.1, 0.3, 0.3, 0.3]]]), 0.5)
    tensor([[[False,  True,  True, False]]])
    """
    ### SOLUTION: k from the sparsity, then the k first of a stable sort
    count = max(1, round((1 - sparsity) * scores.shape[-1]))
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)
