HINT = "zeros"

import torch


def dequantize_block(values, scale, block_size):
    return values.float() * scale.repeat_interleave(block_size, dim=0)[: len(values)]


def quantize_block(x, block_size):
    values, scales = torch.empty_like(x, dtype=torch.int8), []
    for start in range(0, len(x), block_size):
        block = x[start : start + block_size]
        scales.append(block.abs().amax() / 127)
        values[start : start + block_size] = torch.where(scales[-1] > 0, (block / scales[-1]).round(), -128).to(
            torch.int8
        )
    return values, torch.stack(scales).unsqueeze(1)
