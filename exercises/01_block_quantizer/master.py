"""Block quantiser: numbers to INT8, one scale per block."""

import torch
from torch import Tensor

INT8_MAX = 127


def quantize_block(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """x [N, D] float32 -> (values int8 [N, D], scale float32 [ceil(N / block_size), 1]).

    Rows 0 .. block_size - 1 are the first block, and so on; the last block may have fewer rows.
    Rounding is to the nearest integer, ties to the even one, as torch.round does. A block of zeros becomes zeros.

    >>> values, scale = quantize_block(torch.tensor([[1.0, -2.54], [0.0, 10.0], [127.0, 0.5]]), 2)
    >>> values.tolist(), [round(s, 4) for s in scale.flatten().tolist()]
    ([[13, -32], [0, 127], [127, 0]], [0.0787, 1.0])
    """
    values, scales = torch.empty_like(x, dtype=torch.int8), []
    for start in range(0, len(x), block_size):
        block = x[start : start + block_size]  # [block_size or fewer, D]
        ### SOLUTION: append the block's scale to scales, and store the rounded block
        scale = block.abs().amax() / INT8_MAX
        divisor = torch.where(scale > 0, scale, 1.0)  # zeros stay zeros: 0 / 1
        values[start : start + block_size] = torch.round(block / divisor).to(torch.int8)
        scales.append(scale)
    return values, torch.stack(scales).unsqueeze(1)


def dequantize_block(values: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """values int8 [N, D], scale [ceil(N / block_size), 1] -> s * X^, float32 [N, D].

    >>> dequantize_block(torch.tensor([[2, -4], [1, 0]], dtype=torch.int8), torch.tensor([[0.5], [3.0]]), 1).tolist()
    [[1.0, -2.0], [3.0, 0.0]]
    """
    ### SOLUTION: give every row the scale of its block, then multiply
    scale_of_row = scale.repeat_interleave(block_size, dim=0)[: len(values)]  # [N, 1]
    return values.float() * scale_of_row
