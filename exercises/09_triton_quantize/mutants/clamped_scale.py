HINT = "small"

import torch
import triton
import triton.language as tl


@triton.jit
def quantize_kernel(x_ptr, values_ptr, scale_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    offsets = row[:, None] * D + d[None, :]
    inside = row[:, None] < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-5) / 127
    ratio = x / scale
    tl.store(values_ptr + offsets, tl.floor(ratio + 0.5).to(tl.int8), mask=inside)
    tl.store(scale_ptr + i, scale)


def quantize_blocks(x: torch.Tensor, block: int, values: torch.Tensor, scale: torch.Tensor) -> None:
    n, head_dim = x.shape
    quantize_kernel[(triton.cdiv(n, block),)](x, values, scale, n, D=head_dim, BLOCK=block)
