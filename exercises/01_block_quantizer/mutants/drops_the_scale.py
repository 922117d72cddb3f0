HINT = "scale"

import torch


def dequantize_block(values, scale, block_size):
    return values.float() * scale[0]


def quantize_block(x, block_size):
    blocks = x.split(block_size)
    scale = torch.stack([block.abs().amax() / 127 for block in blocks]).unsqueeze(1)
    divisor = scale.clamp(min=1e-30).repeat_interleave(block_size, dim=0)[: len(x)]
    return (x / divisor).round().to(torch.int8), scale
