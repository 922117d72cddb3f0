"""Tiles, heads and dtypes: what the reference of SageBwd and that of SLA2 mean in the same way."""

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """The reference computes in float32 whatever it is given, except float64, which it keeps."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; x itself if it has that dtype.

    For what an autograd.Function returns: in PyTorch 2.11 torch.compile takes `to` with nothing to do for a view, and
    the gradient that reaches the function is zero.
    """
    return x if x.dtype == dtype else x.to(dtype)


def tiles(length: int, block: int) -> list[slice]:
    """[0, block), [block, 2 block), ... up to length; the last tile may be partial."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def block_that_fits(block: int, length: int) -> int:
    """block, or the whole length where that is shorter. A branch: min would stay an unknown for torch.compile."""
    return block if block < length else length


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [B, Hkv, Nk, D] for each of `heads` query heads: [B, H, Nk, D]."""
    if x.shape[1] == heads:
        return x
    # Widened first, so that the gradients of a group's heads are summed before they are rounded to 16 bit.
    return x.to(working_dtype(x)).repeat_interleave(heads // x.shape[1], dim=1)


def in_working_dtype(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """query [B, H, Nq, D], and keys or values [B, Hkv, Nk, D] repeated for its heads, all in the working dtype."""
    heads, dtype = query.shape[1], working_dtype(query)
    return query.to(dtype), *(repeat_heads(x.to(dtype), heads) for x in others)
