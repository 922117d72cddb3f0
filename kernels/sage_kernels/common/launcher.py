"""The start of a program. Code that starts programs takes a `Start`: Triton's way, or one that takes notes."""

import copy
import inspect
from collections.abc import Callable
from functools import partial

# (program, grid, arguments, constants, options)
Start = Callable[[object, tuple[int, ...], tuple, dict, dict], object]


def start_with_triton(program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict):
    """Return what Triton compiled for program[grid](*arguments, **constants, **options); None if it interprets."""
    return program[grid](*arguments, **constants, **options)


def direct_launch(compiled, grid: tuple[int, int, int]) -> Callable[[int, list], None] | None:
    """Return launch(stream, arguments), which starts a compiled program; None if Triton hides how.

    At every launch Triton looks for hooks and takes descriptors apart: [the copy engine's map, *shape, *strides]. Only
    the map depends on where the tensor begins. So descriptors come taken apart already, and no hooks are called. What
    Triton hands to its function in C, beside stream and arguments, is the same every time: it is asked for it once.
    """
    run = getattr(compiled, "run", None)
    launch = getattr(run, "launch", None)
    if inspect.isfunction(launch):  # takes descriptors apart, then calls the function in C
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    if launch is None or getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0):
        return None
    asking, asked = copy.copy(run), []
    asking.launch = lambda *call: asked.extend(call)
    stream, argument = object(), object()
    asking(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, argument)
    at = asked.index(stream)
    before, after, last = asked[:at], asked[at + 1 : -1], asked[-1]
    if last is argument:
        return lambda stream, arguments: launch(*before, stream, *after, *arguments)
    return lambda stream, arguments: launch(*before, stream, *after, arguments)  # Triton 3.7


def map_makers(compiled) -> list[Callable]:
    """Return, for each descriptor of a compiled program, a function that takes one apart: [map, *shape, *strides]."""
    if not compiled.metadata.tensordesc_meta:
        return []
    from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415 (NVIDIA's alone)

    return [partial(make_tensordesc_arg, metadata=x) for x in compiled.metadata.tensordesc_meta]
