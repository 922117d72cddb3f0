HINT = "forgets"

import math

import torch


def quantize(x):
    scale = x.abs().amax() / 127
    return (torch.round(x / torch.where(scale > 0, scale, 1)).to(torch.int8), scale)


def integer_matmul(a, b):
    return a.int() @ b.int()


def probabilities(s_ij, m_new):
    p = torch.exp(s_ij - m_new)
    scale = torch.exp(s_ij.amax(-1, keepdim=True) - m_new) / 127
    divisor = torch.where(scale < torch.finfo(scale.dtype).tiny, 1, scale)
    return (torch.round(p / divisor).to(torch.int8), scale, p.sum(-1, keepdim=True))


def online_step(m, l, o, s_ij, v_values, v_scale):
    m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
    p_values, p_scale, row_sum = probabilities(s_ij, m_new)
    rescale = torch.exp(m - m_new)
    return (m_new, row_sum, rescale * o + integer_matmul(p_values, v_values) * p_scale * v_scale)


def online_softmax(scores, value, block):
    m = torch.full((scores.shape[0], 1), -math.inf)
    l = torch.zeros(scores.shape[0], 1)
    o = torch.zeros(scores.shape[0], value.shape[1])
    for start in range(0, scores.shape[1], block):
        keys = slice(start, start + block)
        m, l, o = online_step(m, l, o, scores[:, keys], *quantize(value[keys]))
    return (o / l, (m + torch.log(l)).squeeze(-1))
