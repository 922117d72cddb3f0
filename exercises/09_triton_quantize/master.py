"""Quantise blocks of rows in a Triton kernel."""

import torch  # noqa: F401, the worked value needs it
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def quantize_kernel(x_ptr, values_ptr, scale_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one block of BLOCK rows of x [n, D]. Element (row, d) is D * row + d numbers after the pointer.

    BLOCK and D are powers of two. n need not be a multiple of BLOCK.
    """
    i = tl.program_id(0)
    row, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    offsets = row[:, None] * D + d[None, :]  # [BLOCK, D]
    ### SOLUTION: load the block, find its scale, store the integers and the scale
    inside = row[:, None] < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x)) / 127
    ratio = x / tl.where(scale == 0, 1.0, scale)  # a block of zeros stays a block of zeros
    tl.store(values_ptr + offsets, tl.floor(ratio + 0.5).to(tl.int8), mask=inside)
    tl.store(scale_ptr + i, scale)


def quantize_blocks(x: Tensor, block: int, values: Tensor, scale: Tensor) -> None:
    """Quantise x with one scale per `block` rows; write the integers into `values` and the scales into `scale`.

    x: float16 or float32 [n, D]. values: int8 [n, D]. scale: float32 [ceil(n / block)]. All contiguous. The last block
    may hold fewer than `block` rows.

    A block of zeros gets zeros and scale 0. Gradients are small: a block whose largest magnitude is 1e-7 has scale
    1e-7 / 127, and its integers use the whole range.

    >>> x = torch.tensor([[127.0, -3.4], [63.6, 0.0], [0.5, -1.0]])
    >>> values, scale = torch.empty(3, 2, dtype=torch.int8), torch.empty(2)
    >>> quantize_blocks(x, 2, values, scale)  # blocks of 2 rows: the second has one
    >>> values, scale
    (tensor([[ 127,   -3],
            [  64,    0],
            [  64, -127]], dtype=torch.int8), tensor([1.0000, 0.0079]))
    """
    ### SOLUTION: launch quantize_kernel with one program per block
    n, head_dim = x.shape
    quantize_kernel[(triton.cdiv(n, block),)](x, values, scale, n, D=head_dim, BLOCK=block)
