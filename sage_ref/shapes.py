"""Tiles, heads and dtypes, as the references of SageBwd and SLA2 share them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_ref.checks import DTYPES

LONGEST_PADDED = 128  # block, in compiled code


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the reference computes: float64 for float64, float32 for all else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in dtype, or x itself if it has that dtype.

    An autograd.Function needs this for its results: in PyTorch 2.11 torch.compile takes a `to` with nothing to do for a
    view, and the gradient that reaches the function is zero.
    """
    return x if x.dtype == dtype else x.to(dtype)


def tiles(length: int, block: int) -> list[slice]:
    """Return [0, block), [block, 2 block), ... up to length; the last tile may be partial."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def block_that_fits(block: int, length: int) -> int:
    """Return block, or length where that is shorter.

    A compiled or exported program takes any length: there a usual block stays, and the end of a shorter sequence is
    padding, since a branch would fix the length and torch.compile would keep a min as an unknown.
    """
    if torch.compiler.is_compiling() and block <= LONGEST_PADDED:
        return block
    return block if block < length else length


def in_blocks(x: Tensor, axis: int, block: int) -> Tensor:
    """Cut axis -1 or -2 of x into blocks, whose entries are a new axis at the end; zeros fill the last block.

    Compiled code gets one block of zeros more: PyTorch asks whether an axis has one entry, and the answer would fix the
    length. It doesn't ask `unfold` either whether the blocks fit.
    """
    size, more = x.shape[axis], int(torch.compiler.is_compiling())  # no bool: SymPy does not add it
    padding = ((size + block - 1) // block + more) * block - size
    if more or padding:
        x = F.pad(x, (0, padding) if axis == -1 else (0, 0, 0, padding))
    return x.unfold(axis, block, block)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [B, Hkv, Nk, D] for each of `heads` query heads: [B, H, Nk, D]."""
    if x.shape[1] == heads:
        return x
    # Widened first, so that the gradients of a group's heads are summed before they are rounded to 16 bit.
    return x.to(working_dtype(x)).repeat_interleave(heads // x.shape[1], dim=1)


def called(layer: nn.Module, x: Tensor) -> Tensor:
    """Call a layer on x, in the dtype of its weights where that is floating.

    A layer is called, and its weights are not read: offloading loads them, adapters (LoRA) add to them, and quantised
    layers unpack them only then. In a replica of DataParallel it has weights, but no parameters.
    """
    weights = (*layer.parameters(), *getattr(layer, "_former_parameters", {}).values())
    floating = (weight.dtype for weight in weights if weight.dtype in DTYPES)
    return layer(x.to(next(floating, x.dtype)))


def in_working_dtype(query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return query [B, H, Nq, D], and keys or values repeated for its heads, in the working dtype."""
    heads, dtype = query.shape[1], working_dtype(query)
    return query.to(dtype), *(repeat_heads(x.to(dtype), heads) for x in others)
