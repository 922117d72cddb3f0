HINT = "renormalise"

import torch
import torch.nn.functional as F


def spread_blocks(selected, n, block_q, block_kv):
    rows = selected.repeat_interleave(block_q, 1)[:, :n]
    return rows.repeat_interleave(block_kv, 2)[:, :, :n]


def selected_mass(query, key, selected, block_q, block_kv):
    p = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    return (p * spread_blocks(selected, query.shape[1], block_q, block_kv)).sum(-1)


def sparse_attention(query, key, value, selected, block_q, block_kv):
    mask = spread_blocks(selected, query.shape[1], block_q, block_kv)
    p = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    return (p * mask) @ value


def mix(sparse, rest, alpha):
    return alpha[..., None] * sparse + (1 - alpha[..., None]) * rest


def initial_alpha_logit(mass, block_q):
    n = mass.shape[1]
    blocks = F.pad(mass, (0, -n % block_q)).unflatten(1, (-1, block_q))
    queries = (n - block_q * torch.arange(blocks.shape[1])).clamp(max=block_q)
    return (blocks.sum(2) / queries).logit(eps=1e-4)
