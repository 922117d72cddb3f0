HINT = "softmax"

import math

import torch


def delta(grad_output, output):
    return (grad_output.float() * output.float()).sum(-1, keepdim=True)


def matching_delta(query, key, value, grad_output, log_sum_exp, block):
    c = 1 / math.sqrt(query.shape[-1])
    total = torch.zeros(query.shape[0], 1)
    for start in range(0, key.shape[0], block):
        k_j, v_j = (key[start : start + block], value[start : start + block])
        p = torch.softmax(query.float() @ k_j.float().mT * c, -1)
        dp = grad_output.float() @ v_j.float().mT
        total += (p * dp).sum(-1, keepdim=True)
    return total


def grad_scores_tile(p_ij, v_j, do_i, delta_i):
    dp = do_i.float() @ v_j.float().mT
    ds = p_ij * (dp - delta_i)
    scale = ds.abs().amax() / 127
    return (ds, torch.round(ds / torch.where(scale > 0, scale, 1)).to(torch.int8), scale)
