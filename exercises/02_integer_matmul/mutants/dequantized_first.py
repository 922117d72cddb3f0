HINT = "zero"

import torch


def integer_matmul(a, b):
    return a.int() @ b.int()


def scaled_matmul(a, a_scale, b, b_scale, block):
    rows, columns = (a.shape[0], b.shape[1])
    s_a = a_scale.repeat_interleave(block)[:rows, None]
    s_b = b_scale.repeat_interleave(block)[None, :columns]
    return a * s_a @ (b * s_b)


def tiled_matmul(a, a_scale, b, b_scale, block):
    result = torch.zeros(a.shape[0], b.shape[1])
    for number, start in enumerate(range(0, a.shape[1], block)):
        keys = slice(start, start + block)
        result += integer_matmul(a[:, keys], b[keys]) * a_scale[:, number, None] * b_scale[number]
    return result
