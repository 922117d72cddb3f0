"""Solutions of the cells to fill in: a module per notebook, with its functions and GAPS, {name: Gap}.

What readers get wrong stands beside it, in a TOML file of the same name.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sage_course.gaps import Gap, Mistake, plain
from sage_ref.quantization import integer_matmul


def with_mistakes(file: str, gaps: dict[str, Gap]) -> dict[str, Gap]:
    """Return a lesson's gaps with their likely mistakes and other right forms, which its TOML file has.

    file: the lesson's module.
    """
    path = Path(file).with_suffix(".toml")
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if data.keys() != gaps.keys():
        raise ValueError(f"{path.name}: expected the gaps {list(gaps)}, got {list(data)}")
    found = {}
    for name, gap in gaps.items():
        mistakes = tuple(mistake(*row) for row in data[name]["mistakes"])
        found[name] = replace(gap, mistakes=mistakes, right=tuple(map(tuple, data[name].get("right", ()))))
    return found


def mistake(old: str, new: str, hint: str, more: Sequence[Sequence[str]] = ()) -> Mistake:
    return Mistake(old, new, hint, tuple(map(tuple, more)))


def draw(seed: int, *shape: int) -> Tensor:
    """Return normally distributed float32 numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draws(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return a tensor of each shape, drawn one after the other from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


class _Watch(TorchDispatchMode):
    """Fails at what may give the right numbers on this machine, and still is wrong."""

    def __init__(self, matmuls_of: str):
        super().__init__()
        self.refused = matmuls_of

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: tuple = (), named: dict | None = None) -> Any:
        to = (named or {}).get("dtype")
        given = [x for x in inputs[:1] if isinstance(x, Tensor)]
        if to is not None and not to.is_floating_point and any(x.isnan().any() for x in given):
            raise ArithmeticError("a NaN was made an integer")
        if operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            factors = "floats" if inputs[0].is_floating_point() else "integers"
            if factors == self.refused:
                raise ArithmeticError(f"{factors} were multiplied")
        return operation(*inputs, **(named or {}))


def _unwatched_matmul(a: Tensor, b: Tensor) -> Tensor:
    with _disable_current_modes():
        return integer_matmul(a, b)


def watched(function: Callable, *inputs: Any) -> Any:
    """Return the function's results; it fails where it rounds a NaN or multiplies matrices of floats.

    The library's `integer_matmul` may: it adds up exact integers in float32.
    """
    names = getattr(plain(function), "__globals__", {})
    with patch.dict(names, integer_matmul=_unwatched_matmul), _Watch("floats"):
        return function(*inputs)


def in_floats(function: Callable, *inputs: Any) -> Any:
    """Return the function's results; it fails where it rounds a NaN or multiplies matrices of integers."""
    with _Watch("integers"):
        return function(*inputs)
