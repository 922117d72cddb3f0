"""Solutions of the cells to fill in: a module per notebook, with its functions and GAPS, {name: Gap}."""

import torch
from torch import Tensor


def draw(seed: int, *shape: int) -> Tensor:
    """Return normally distributed float32 numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draws(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return a tensor of each shape, drawn one after the other from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
