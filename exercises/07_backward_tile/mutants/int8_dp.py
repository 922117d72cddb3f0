HINT = "int8_dp"

import math

import torch


def tiles(length, block):
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def quantize(x):
    x = x.float()
    scale = x.abs().amax() / 127
    return (torch.round(x / torch.where(scale > 0, scale, 1)).to(torch.int8), scale)


def scaled_matmul(a, b):
    (a_values, a_scale), (b_values, b_scale) = (a, b)
    return a_values.int() @ b_values.int() * a_scale * b_scale


def transposed(a):
    values, scale = a
    return (values.mT, scale)


def recompute_probabilities(q_i, k_j, l_i):
    s_ij = scaled_matmul(quantize(q_i), transposed(quantize(k_j))) / math.sqrt(q_i.shape[-1])
    return torch.exp(s_ij - l_i)


def backward_tile(q_i, k_j, v_j, do_i, l_i, delta_i):
    c = 1 / math.sqrt(q_i.shape[-1])
    p_ij = recompute_probabilities(q_i, k_j, l_i)
    dv = scaled_matmul(transposed(quantize(p_ij)), quantize(do_i))
    dp_ij = scaled_matmul(quantize(do_i), transposed(quantize(v_j)))
    ds_hat = quantize(p_ij * (dp_ij - delta_i))
    dq = scaled_matmul(ds_hat, quantize(k_j)) * c
    dk = scaled_matmul(transposed(ds_hat), quantize(q_i)) * c
    return (dq, dk, dv)


def backward(grad_output, query, key, value, output, log_sum_exp, block_q, block_kv):
    delta = (grad_output.float() * output.float()).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros(x.shape) for x in (query, key, value))
    for columns in tiles(key.shape[0], block_kv):
        for rows in tiles(query.shape[0], block_q):
            dq_i, dk_j, dv_j = backward_tile(
                query[rows], key[columns], value[columns], grad_output[rows], log_sum_exp[rows, None], delta[rows]
            )
            dq[rows] += dq_i
            dk[columns] += dk_j
            dv[columns] += dv_j
    return (dq, dk, dv)
