HINT = "complement"

import torch
import torch.nn.functional as F


def key_block_sums(key, value, block_kv):
    missing = -key.shape[1] % block_kv
    k_phi, v = (F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, block_kv)) for x in (key.softmax(-1), value))
    return k_phi.mT @ v, k_phi.sum(2)


def complement_sums(selected, h, z):
    weights = torch.ones_like(selected, dtype=h.dtype)
    return (weights @ h.flatten(2)).unflatten(2, h.shape[2:]), weights @ z


def linear_branch(query, key, value, selected, block_q, block_kv):
    n = query.shape[1]
    h_i, z_i = complement_sums(selected, *key_block_sums(key, value, block_kv))
    q_i = F.pad(query.softmax(-1), (0, 0, 0, -n % block_q)).unflatten(1, (-1, block_q))
    weight_sum = q_i @ z_i[..., None]
    o_l = q_i @ h_i / weight_sum.masked_fill(weight_sum == 0, 1)
    return o_l.flatten(1, 2)[:, :n]
