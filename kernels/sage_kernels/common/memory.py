"""Layouts of tensors [B, H, N, D] in memory: those that kernels can read, and those of their results.

Two layouts are read as they are: contiguous ([B, H, N, D] in memory), and heads last ([B, N, H, D] in memory), which is
what a model's projections give after a transpose.
"""

from torch import Tensor

from sage_kernels.common.tiles import Strided


def last_axis_contiguous(x: Tensor) -> Tensor:
    """Return x, or a copy if a token's D numbers are not side by side, as every kernel expects them to be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strided(x: Tensor) -> Strided:
    """Return x [B, H, N, D] with its strides, as one argument of a program."""
    stride_b, stride_h, stride_n, _ = x.stride()
    return Strided(x, stride_b, stride_h, stride_n)


def is_heads_last(x: Tensor) -> bool:
    """Return whether the heads of a token are nearer to one another in memory than the tokens of a head."""
    return x.shape[1] > 1 and x.stride(1) < x.stride(2)


def heads_per_row(x: Tensor) -> int:
    """Return how many heads are side by side in x [B, H, N, D]: one if it is contiguous, all if it is heads last."""
    return x.shape[1] if is_heads_last(x) else 1


def empty_in_layout_of(x: Tensor) -> Tensor:
    """Allocate a result like x [B, H, N, D]: heads last if x is, else contiguous."""
    batch, heads, n, head_dim = x.shape
    if is_heads_last(x):
        return x.new_empty(batch, n, heads, head_dim).transpose(1, 2)
    return x.new_empty(x.shape)
