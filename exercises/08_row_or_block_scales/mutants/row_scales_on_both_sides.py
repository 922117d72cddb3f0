HINT = "right_rows"

import math

import torch


def tiles(length, block):
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def quantize(x, granularity):
    axes = (-2, -1) if granularity == "block" else -1
    scale = x.abs().amax(axes, keepdim=True) / 127
    return (torch.round(x / torch.where(scale > 0, scale, 1)).to(torch.int8), scale)


def tiled_matmul(left, right, granularity, block):
    result = torch.zeros(left.shape[0], right.shape[1])
    for rows in tiles(left.shape[0], block):
        for inner in tiles(left.shape[1], block):
            left_values, left_scale = quantize(left[rows, inner], granularity)
            right_values, right_scale = quantize(right[inner], granularity)
            result[rows] += left_values * left_scale @ (right_values * right_scale)
    return result


def gradients(p, ds, grad_output, query, key, granularity, block):
    c = 1 / math.sqrt(query.shape[-1])
    return {
        "dV": tiled_matmul(p.mT, grad_output, granularity, block),
        "dQ": tiled_matmul(ds, key, granularity, block) * c,
        "dK": tiled_matmul(ds.mT, query, granularity, block) * c,
    }


def relative_errors(p, ds, grad_output, query, key, block):
    c = 1 / math.sqrt(query.shape[-1])
    exact = {"dV": p.mT @ grad_output, "dQ": ds @ key * c, "dK": ds.mT @ query * c}
    errors = {}
    for granularity in ("row", "block"):
        found = gradients(p, ds, grad_output, query, key, granularity, block)
        errors[granularity] = {name: ((found[name] - x).norm() / x.norm()).item() for name, x in exact.items()}
    return errors
