"""What a test looks at when a function is called: the same for the master and for a submission.

The submission's process loads this file by its path, so it imports nothing of the package.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MARGIN = 1 << 14  # elements around a kernel's tensors, more than any tile
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def perform(
    function: Callable, arguments: tuple, outputs: int = 0, upstream: Tensor | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Call a function and return all that a test looks at; the grader does it with masters, the child with submissions.

    Args:
        function: What is called.
        arguments: Its arguments.
        outputs: How many of the last ones are written to, by a Triton kernel. All tensors have margins then: +inf
            (integers: 77) stands before and after them.
        upstream: The gradient of the result, if the arguments' gradients are wanted.
        device: Where the tensors are.

    Returns:
        "result"; "outputs", as the call left them; "gradients"; "changed", the numbers of the other arguments that are
        not what they were; "undefined", whether NaN or too large a number was converted to an integer, of which C says
        nothing; "launched", whether a Triton kernel was; "spoiled", whether anything was written to margins.
    """
    arguments = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    margins = {}
    if outputs:
        for number, x in enumerate(arguments):
            if isinstance(x, Tensor):
                arguments[number], margins[number] = with_margins(x)
    kept = {
        number: x.clone() for number, x in enumerate(arguments[: len(arguments) - outputs]) if isinstance(x, Tensor)
    }
    if upstream is not None:
        inputs = [x.requires_grad_() for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
    launches, casts = Launches(), UndefinedCasts()
    with warnings.catch_warnings(record=True) as caught, launches, contextlib.nullcontext() if outputs else casts:
        warnings.simplefilter("always")
        result = function(*arguments)
        gradients = None
        if upstream is not None:
            gradients = (None,) * len(inputs)
            if isinstance(result, Tensor) and result.requires_grad:
                gradients = torch.autograd.grad(result, inputs, upstream, allow_unused=True)
                result = result.detach()
    if device != "cpu":
        torch.cuda.synchronize()
    return {
        "result": result,
        "outputs": tuple(arguments[len(arguments) - outputs :]),
        "gradients": gradients,
        "changed": tuple(number for number, x in kept.items() if not same_bits(arguments[number], x)),
        "undefined": casts.found or any("invalid value encountered in cast" in str(x.message) for x in caught),
        "launched": launches.count > 0,
        "spoiled": any(not (margin == mark_of(margin)).all() for pair in margins.values() for margin in pair),
    }


def with_margins(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return x inside a larger buffer, and what of that is before and after it."""
    whole = torch.empty(x.numel() + 2 * MARGIN, dtype=x.dtype, device=x.device)
    whole.fill_(mark_of(whole))
    inside = whole[MARGIN : MARGIN + x.numel()].view(x.shape)
    return inside.copy_(x), (whole[:MARGIN], whole[MARGIN + x.numel() :])


def mark_of(x: Tensor) -> float:
    """Return what stands in margins. A maximum would pass over NaN."""
    return float("inf") if x.is_floating_point() else 77


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(*(z.detach().reshape(-1).view(torch.uint8) if z.numel() else z for z in (x, y)))


class Launches:
    """Counts launches of Triton kernels inside `with`."""

    def __enter__(self) -> "Launches":
        self.count, self.originals = 0, {}
        with contextlib.suppress(ImportError):  # there is no Triton on some systems
            from triton.runtime.interpreter import InterpretedFunction
            from triton.runtime.jit import JITFunction

            self.originals = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
        for kind, run in self.originals.items():
            kind.run = self.counted(run)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, run in self.originals.items():
            kind.run = run

    def counted(self, run: Callable) -> Callable:
        def counted_run(kernel, *arguments, **keywords):
            self.count += 1
            return run(kernel, *arguments, **keywords)

        return counted_run


class UndefinedCasts(TorchFunctionMode):
    """Finds NaN, infinity and too large numbers that PyTorch converts to integers inside `with`.

    It looks at functions as Python calls them, which costs a tiny operation half its time again. Below, in PyTorch's
    dispatcher, it would be four times its time.
    """

    CASTS = (Tensor.to, Tensor.type, Tensor.int, Tensor.long, Tensor.short, Tensor.char, Tensor.byte)
    CASTS += (Tensor.type_as, Tensor.copy_, Tensor.__setitem__, torch.as_tensor)

    def __init__(self):
        super().__init__()
        self.found = False

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function in self.CASTS:
            with contextlib.suppress(Exception):  # a tensor without numbers, as in torch.vmap
                whole = arguments[0] if result is None else result
                self.found |= any(is_undefined(x, whole.dtype) for x in arguments)
        return result


def is_undefined(x: Any, dtype: torch.dtype) -> bool:
    """Return whether x holds a float that no integer of this dtype stands for."""
    if dtype not in INTEGERS or not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    low, high = float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
    with torch._C.DisableTorchFunction():
        x = x.detach().double()
        return not ((x > low - 1) & (x < high + 1) | (x == low)).all()  # false for NaN
