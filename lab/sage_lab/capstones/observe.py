"""Call a kernel's function, and watch every address that its Triton programs touch.

A grader loads this file by its path in the process of a submission, so it imports nothing of the package.
"""

import ast
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

MARGIN = 1 << 14  # elements around a tensor, more than any tile
ORDERS = {"transposed": (0, 2, 1, 3), "columns": (0, 1, 3, 2)}  # of the four axes in memory
DOT = re.compile(r"tt\.dot .*tensor<\d+x\d+x(\w+)> \* tensor<\d+x\d+x(\w+)> -> tensor<\d+x\d+x(\w+)>")
NAMES = {"int8": "i8", "int32": "i32", "fp16": "f16", "fp32": "f32"}
GAP = 3  # elements that a "sliced" tensor lacks at both ends of every axis


class OutsideError(Exception):
    """A program reads or writes what belongs to no tensor."""


def observe(
    function: Callable, arguments: dict[str, Any], layouts: dict[str, str], device: str = "cpu"
) -> dict[str, Any]:
    """Call a function and return all that a verdict needs.

    Args:
        function: What the reader wrote.
        arguments: Its arguments by name.
        layouts: How a tensor lies in memory, by its argument's name: see `laid_out`. The others are contiguous.
        device: Where the tensors are. Addresses are watched in Triton's interpreter alone.

    Returns:
        "result"; "launched", whether a Triton kernel was; "outside", in words, what was read or written outside of
        all tensors, or NaN that was read of an argument; "changed", the arguments that are not what they were;
        "copied", those that no kernel got, as it got copies or nothing; "given", the name of a tensor of int8 that
        programs read and none has written; "undefined", whether NaN became an integer; "dots", the types of all
        products, as MLIR names them: "i8 x i8 -> i32"; "jump", a line that Triton's interpreter takes and its compiler
        doesn't.
    """
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    given = {
        name: laid_out(x, layouts.get(name, "")) if isinstance(x, Tensor) else (x, None)
        for name, x in arguments.items()
    }
    kept = {name: whole.clone() for name, (_, whole) in given.items() if whole is not None}
    filled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is then full of NaN
    result = None
    try:
        wholes = {x.data_ptr() for _, x in given.values() if x is not None}
        with warnings.catch_warnings(record=True) as caught, Watch(wholes) as watch:
            warnings.simplefilter("always")
            try:
                result = function(**{name: x for name, (x, _) in given.items()})
            except Exception:
                if not watch.outside:
                    raise
    finally:
        torch.use_deterministic_algorithms(filled)
    return {
        "result": result,
        "launched": watch.launches > 0,
        "outside": watch.outside,
        "changed": tuple(name for name, x in kept.items() if not same_bits(x, given[name][1])),
        "copied": tuple(name for name in kept if given[name][1].data_ptr() not in watch.met),
        "given": watch.given,
        "undefined": any("invalid value encountered in cast" in str(x.message) for x in caught),
        "dots": tuple(sorted(watch.dots)),
        "jump": watch.jump,
    }


def laid_out(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return a tensor of x's values, and the buffer that holds it; NaN (integers: 2^20) stands around and between them.

    layout: "" for contiguous; "transposed": axes 1 and 2 change places in memory, as tokens and heads do; "columns":
    so do axes 2 and 3; "sliced": a part of something larger along every axis; "expanded": axis 1 has stride 0, and x
    must be the same along it.
    """
    order = ORDERS.get(layout, range(x.dim()))
    source = (x[:, :1] if layout == "expanded" else x).permute(*order)
    gap = GAP if layout == "sliced" else 0
    sizes = [size + 2 * gap for size in source.shape]
    mark = float("nan") if x.is_floating_point() else 1 << 20
    whole = torch.full((int(np.prod(sizes)) + 2 * MARGIN,), mark, dtype=x.dtype, device=x.device)
    inside = whole[MARGIN : len(whole) - MARGIN].view(sizes)[tuple(slice(gap, gap + size) for size in source.shape)]
    inside.copy_(source)
    return inside.permute(*np.argsort(order).tolist()).expand(x.shape), whole


@lru_cache
def jump_of(function: Callable) -> str:
    """Return where a loop of a kernel has a `break`, a `continue` or a `return`; "" if nowhere."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for loop in (x for x in ast.walk(tree) if isinstance(x, ast.For | ast.While)):
        for node in ast.walk(loop):
            if isinstance(node, ast.Break | ast.Continue | ast.Return):
                return f"line {function.__code__.co_firstlineno + node.lineno - 1}: {type(node).__name__.lower()}"
    return ""


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(*(z.view(torch.uint8) for z in (x, y)))


class Watch:
    """Counts launches, and in Triton's interpreter looks at every address and product, inside `with`.

    What a load without `other` gives where its mask is false is undefined: here it is NaN, or the largest integer.
    """

    def __init__(self, given: Collection[int] = ()):
        self.arguments = given  # the first addresses of their memory
        self.launches, self.outside, self.given, self.jump, self.dots = 0, "", "", "", set()
        self.met: dict[int, torch.UntypedStorage] = {}  # the memory that launches got, kept, and so not used twice
        self.written: set[int] = set()  # the first addresses of the memory that programs wrote to
        self.elements: list[Elements] = []
        self.originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Watch":
        from triton.runtime import interpreter
        from triton.runtime.jit import JITFunction

        self.builder, self.compiled = interpreter.interpreter_builder, JITFunction
        for kind in (interpreter.InterpretedFunction, JITFunction):
            self.replace(kind, "run", self.launch)
        self.replace(interpreter.InterpretedFunction, "__call__", self.call)
        builder = interpreter.InterpreterBuilder
        self.replace(builder, "create_masked_load", self.access("reads", 0, 1))
        self.replace(builder, "create_masked_store", self.access("writes", 0, 2))
        self.replace(builder, "create_atomic_rmw", self.access("writes", 1, 3))
        self.replace(builder, "create_dot", self.dot)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self.originals:
            setattr(owner, name, original)

    def replace(self, owner: Any, name: str, wrapped: Callable) -> None:
        original = getattr(owner, name)
        self.originals.append((owner, name, original))
        setattr(owner, name, lambda *arguments, **keywords: wrapped(original, *arguments, **keywords))

    def launch(self, original, kernel, *arguments, **keywords):
        self.launches += 1
        names = getattr(kernel, "arg_names", ())
        named = [*zip(names, arguments, strict=False), *keywords.items()]
        found = [(name, x) for name, value in named for x in tensors_of(value)]
        self.met |= {x.untyped_storage().data_ptr(): x.untyped_storage() for _, x in found}
        if type(kernel) is not self.compiled:
            self.elements = [Elements(name, x) for name, x in found]
            return self.call(original, kernel, *arguments, **keywords)
        result = original(kernel, *arguments, **keywords)
        dots = DOT.findall(getattr(result, "asm", {}).get("ttir", ""))
        self.dots |= {f"{a} x {b} -> {total}" for a, b, total in dots}
        return result

    def call(self, original, function, *arguments, **keywords):
        self.jump = self.jump or jump_of(function.fn)
        return original(function, *arguments, **keywords)

    def dot(self, original, builder, a, b, total, *rest):
        a_type, b_type, sums = (NAMES.get(x.dtype.scalar.name, x.dtype.scalar.name) for x in (a, b, total))
        self.dots.add(f"{a_type} x {b_type} -> {sums}")
        return original(builder, a, b, total, *rest)

    def access(self, verb: str, pointers_at: int, mask_at: int) -> Callable:
        """Return what takes the place of a load or a store. ..._at: which of its arguments these are."""

        def checked(original, builder, *arguments, **keywords):
            pointers = arguments[pointers_at]
            mask = np.asarray(arguments[mask_at].data).astype(bool)  # a block pointer's is an array, not a handle
            addresses, touched = np.broadcast_to(pointers.data, mask.shape)[mask].astype(np.int64), None
            for number, elements in enumerate(self.elements):
                held, size = elements.hold(addresses), addresses.size
                addresses = addresses[~held]
                if addresses.size < size:
                    self.note(verb, touched := elements)
                if not addresses.size:
                    self.elements.insert(0, self.elements.pop(number))  # the next access is likely to the same
                    break
            if addresses.size:
                nearest = min(self.elements, key=lambda elements: elements.distance(addresses[0]))
                self.refuse(f"{verb} {nearest.place(addresses[0])}")
            result = original(builder, *arguments, **keywords)
            if verb == "writes":
                return result
            if touched and touched.storage in self.arguments and (result.data != result.data)[mask].any():
                self.refuse(f"reads NaN of {touched.name}")
            if arguments[2] is None and not mask.all():
                result.data[~mask] = undefined(result.data.dtype)
            return result

        return checked

    def refuse(self, what: str) -> None:
        program = ", ".join(str(x) for x in self.builder.grid_idx)
        self.outside = self.outside or f"program ({program}) {what}"
        raise OutsideError(self.outside)

    def note(self, verb: str, elements: "Elements") -> None:
        """Note that programs wrote to a tensor, or read int8 that none has written."""
        if verb == "writes":
            self.written.add(elements.storage)
        elif elements.is_int8 and elements.storage not in self.written:
            self.given = self.given or elements.name


def undefined(dtype: np.dtype) -> Any:
    """Return the number that stands for one which is undefined."""
    return np.nan if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a kernel's argument: itself, a descriptor's, or those of a tuple."""
    if isinstance(value, tuple):
        return [x for item in value for x in tensors_of(item)]
    value = getattr(value, "base", value) if not isinstance(value, Tensor) else value
    return [value] if isinstance(value, Tensor) and value.numel() else []


class Elements:
    """The addresses of a tensor's elements. What lies between them, in a view with gaps, doesn't belong to it."""

    def __init__(self, name: str, x: Tensor):
        self.name, self.size = name, x.element_size()
        self.storage, self.is_int8 = x.untyped_storage().data_ptr(), x.dtype == torch.int8
        offsets = np.zeros((), np.int64)
        for length, stride in zip(x.shape, x.stride(), strict=True):
            offsets = offsets[..., None] + np.arange(length) * stride
        self.first = x.data_ptr()
        self.known = np.zeros(offsets.max() + 1, bool)
        self.known[offsets] = True

    def hold(self, addresses: np.ndarray) -> np.ndarray:
        """Return which addresses are those of elements."""
        place = (addresses - self.first) // self.size
        inside = (place >= 0) & (place < len(self.known))
        return inside & self.known[np.where(inside, place, 0)]

    def distance(self, address: int) -> int:
        return max(self.first - address, address - self.first - len(self.known) * self.size, 0)

    def place(self, address: int) -> str:
        """Return in words where an address is that is no element's."""
        place = (int(address) - self.first) // self.size
        if 0 <= place < len(self.known):
            return f"between the elements of {self.name}, {place} after the first"
        count = -place if place < 0 else place - len(self.known) + 1
        far = f"{count} element{'s' if count > 1 else ''}"
        return f"{far} before the first of {self.name}" if place < 0 else f"{far} past the last of {self.name}"
