"""One scale per row or per tile?"""

import math

import torch
from torch import Tensor


def tiles(length: int, block: int) -> list[slice]:
    """[0, block), [block, 2 block), ... up to length; the last may be partial. (Given.)"""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def quantize(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """psi of one tile x float32 [R, C]: int8 values [R, C] and the scale, max|X| / 127.

    granularity "block": one scale, float32 [1, 1]. "row": one for each row, float32 [R, 1].
    A block or row of zeros has scale 0 and values 0. (dS has rows of zeros where causal attention masks them.)

    >>> x = torch.tensor([[1.27, 0.3], [0.0127, -0.01], [0.0, 0.0]])
    >>> [quantize(x, granularity)[0].tolist() for granularity in ("block", "row")]
    [[[127, 30], [1, -1], [0, 0]], [[127, 30], [127, -100], [0, 0]]]
    """
    ### SOLUTION: find the scale of the tile or of each row, and round
    axes = (-2, -1) if granularity == "block" else -1
    scale = x.abs().amax(axes, keepdim=True) / 127
    return torch.round(x / torch.where(scale > 0, scale, 1)).to(torch.int8), scale


def tiled_matmul(left: Tensor, right: Tensor, granularity: str, block: int) -> Tensor:
    """left @ right in INT8, tile by tile, float32 [M, N]: the left operand with row or block scales.

    left float32 [M, K]: P^T for dV, dS for dQ, dS^T for dK. It is cut into tiles of block x block; a row of a tile
    is part of a row of the *result*, so its scale can leave the sum over K.
    right float32 [K, N]: dO, K or Q, always one scale per block of its rows.
    The last tile of each axis may be partial. Products of integers are summed in int32 within a tile.

    >>> left, right = torch.tensor([[1.0, 100.0], [0.0, 1.0]]), torch.tensor([[1.0], [2.0]])
    >>> tiled_matmul(left, right, "row", block=1).tolist()
    [[201.0], [2.0]]
    """
    result = torch.zeros(left.shape[0], right.shape[1])
    for rows in tiles(left.shape[0], block):
        for inner in tiles(left.shape[1], block):
            ### SOLUTION: round both operands of this tile, multiply, scale and add
            left_values, left_scale = quantize(left[rows, inner], granularity)
            right_values, right_scale = quantize(right[inner], "block")
            result[rows] += (left_values.int() @ right_values.int()) * left_scale * right_scale
    return result


def gradients(
    p: Tensor, ds: Tensor, grad_output: Tensor, query: Tensor, key: Tensor, granularity: str, block: int
) -> dict[str, Tensor]:
    """{"dV": P^T dO, "dQ": c dS K, "dK": c dS^T Q}, each by `tiled_matmul`. c = 1/sqrt(D).

    p, ds float32 [Nq, Nk], grad_output, query float32 [Nq, D], key float32 [Nk, D]. granularity "row" or "block".

    >>> p, ds = torch.tensor([[0.25, 0.75]]), torch.tensor([[1.0, -1.0]])
    >>> do, q, k = torch.tensor([[4.0]]), torch.tensor([[2.0]]), torch.tensor([[1.0], [5.0]])
    >>> {name: x.tolist() for name, x in gradients(p, ds, do, q, k, "row", block=1).items()}
    {'dV': [[1.0], [3.0]], 'dQ': [[-4.0]], 'dK': [[2.0], [-2.0]]}
    """
    ### SOLUTION: choose left and right operand of each gradient
    c = 1 / math.sqrt(query.shape[-1])
    return {
        "dV": tiled_matmul(p.mT, grad_output, granularity, block),
        "dQ": tiled_matmul(ds, key, granularity, block) * c,
        "dK": tiled_matmul(ds.mT, query, granularity, block) * c,
    }


def relative_errors(
    p: Tensor, ds: Tensor, grad_output: Tensor, query: Tensor, key: Tensor, block: int
) -> dict[str, dict[str, float]]:
    """{"row": {"dV": e, "dQ": e, "dK": e}, "block": {...}} with e = ||x - exact|| / ||exact||, over the whole matrix.

    The exact gradients are the same products of the unrounded matrices. Arguments as for `gradients`.

    >>> p, ds = torch.ones(1, 2), torch.tensor([[1.27, 0.104]])  # dS is 127 and 10.4 steps, rounded to 127 and 10
    >>> do, q, k = torch.ones(1, 1), torch.ones(1, 1), torch.tensor([[0.0], [1.27]])
    >>> round(relative_errors(p, ds, do, q, k, block=2)["row"]["dQ"], 4)  # 0.4 / 10.4
    0.0385
    """
    ### SOLUTION: compute the exact gradients and the error of each, both ways
    c = 1 / math.sqrt(query.shape[-1])
    exact = {"dV": p.mT @ grad_output, "dQ": ds @ key * c, "dK": ds.mT @ query * c}
    errors = {}
    for granularity in ("row", "block"):
        found = gradients(p, ds, grad_output, query, key, granularity, block)
        errors[granularity] = {name: ((found[name] - x).norm() / x.norm()).item() for name, x in exact.items()}
    return errors
