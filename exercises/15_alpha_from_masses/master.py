"""alpha, the share of the mass that the selected blocks hold."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def spread_blocks(selected: Tensor, n: int, block_q: int, block_kv: int) -> Tensor:
    """The mask of every (query, key) pair: bool [H, Tm, Tn] -> [H, N, N]. The last blocks may be partial."""
    rows = selected.repeat_interleave(block_q, 1)[:, :n]
    return rows.repeat_interleave(block_kv, 2)[:, :, :n]


def selected_mass(query: Tensor, key: Tensor, selected: Tensor, block_q: int, block_kv: int) -> Tensor:
    """rowsum(P1): how much of each query's softmax(c Q K^T), c = 1/sqrt(D), lies in its selected blocks. [H, N].

    query, key [H, N, D]; selected: bool [H, Tm, Tn] of blocks of block_q queries and block_kv keys.

    >>> selected = torch.tensor([[[True, False], [True, True]]])
    >>> selected_mass(torch.zeros(1, 3, 4), torch.ones(1, 3, 4), selected, 2, 2)  # equal scores: 2 of 3 keys, then all
    tensor([[0.6667, 0.6667, 1.0000]])
    """
    ### SOLUTION: P over all keys, summed over the selected ones
    p = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    return (p * spread_blocks(selected, query.shape[1], block_q, block_kv)).sum(-1)


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, selected: Tensor, block_q: int, block_kv: int
) -> Tensor:
    """O_s [H, N, D]: attention over the selected blocks only, its weights sum to 1. With ~selected it gives O_rest.

    A query whose block has selected nothing has O_s = 0.

    >>> value = torch.tensor([[[1.0], [2.0], [6.0]]])
    >>> selected = torch.tensor([[[True, False], [False, False]]])
    >>> sparse_attention(torch.zeros(1, 3, 1), torch.zeros(1, 3, 1), value, selected, 2, 2).flatten()
    tensor([1.5000, 1.5000, 0.0000])
    """
    ### SOLUTION: softmax of the scores with -inf where nothing is selected, times V
    mask = spread_blocks(selected, query.shape[1], block_q, block_kv)
    s = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -math.inf)
    p = s.softmax(-1).masked_fill(~mask, 0)  # a row of -inf has softmax NaN
    return p @ value


def mix(sparse: Tensor, rest: Tensor, alpha: Tensor) -> Tensor:
    """alpha O_s + (1 - alpha) O_rest for sparse, rest [H, N, D] and alpha [H, N], one per query.

    >>> mix(torch.tensor([[[8.0]]]), torch.tensor([[[4.0]]]), torch.tensor([[0.25]]))
    tensor([[[5.]]])
    """
    ### SOLUTION: the weighted sum of the two branches
    return alpha[..., None] * sparse + (1 - alpha[..., None]) * rest


def initial_alpha_logit(mass: Tensor, block_q: int) -> Tensor:
    """Where SLA2's alpha starts: the logit, log(alpha / (1 - alpha)), of each query block's mean mass. [H, Tm].

    mass [H, N], in [0, 1]. The last block may hold fewer queries. alpha is kept in [1e-4, 1 - 1e-4], where its logit
    is finite and can still learn.

    >>> initial_alpha_logit(torch.tensor([[0.5, 0.9, 0.5]]), 2)  # means 0.7 and 0.5
    tensor([[0.8473, 0.0000]])
    """
    ### SOLUTION: mean over each block's queries, kept inside (0, 1), then the logit
    n = mass.shape[1]
    blocks = F.pad(mass, (0, -n % block_q)).unflatten(1, (-1, block_q))  # [H, Tm, Bq]
    queries = (n - block_q * torch.arange(blocks.shape[1])).clamp(max=block_q)
    return (blocks.sum(2) / queries).logit(eps=1e-4)
