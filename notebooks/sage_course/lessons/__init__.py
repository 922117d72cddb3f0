"""Solutions of the cells to fill in: a module per notebook, with its functions and GAPS, {name: Gap}."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sage_ref.quantization import integer_matmul


def draw(seed: int, *shape: int) -> Tensor:
    """Return normally distributed float32 numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draws(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return a tensor of each shape, drawn one after the other from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


class _Watch(TorchDispatchMode):
    """Fails at what may give the right numbers on this machine, and still is wrong."""

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: tuple = (), named: dict | None = None) -> Any:
        to = (named or {}).get("dtype")
        if to is not None and not to.is_floating_point and any(x.isnan().any() for x in inputs[:1]):
            raise ArithmeticError("a NaN was made an integer")
        if operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm) and inputs[0].is_floating_point():
            raise ArithmeticError("floats were multiplied")
        return operation(*inputs, **(named or {}))


def _unwatched_matmul(a: Tensor, b: Tensor) -> Tensor:
    with _disable_current_modes():
        return integer_matmul(a, b)


def watched(function: Callable, *inputs: Any) -> Any:
    """Return the function's results; it fails where it rounds a NaN or multiplies matrices of floats.

    The library's `integer_matmul` may: it adds up exact integers in float32.
    """
    names = getattr(function, "__globals__", {})
    with patch.dict(names, integer_matmul=_unwatched_matmul), _Watch():
        return function(*inputs)
