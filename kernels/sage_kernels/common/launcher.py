"""The start of a program. Code that starts programs takes a `Start`: Triton's way, or one that takes notes."""

import copy
import inspect
from collections.abc import Callable
from functools import partial

from triton.runtime import driver

# (program, grid, arguments, constants, options)
Start = Callable[[object, tuple[int, ...], tuple, dict, dict], object]


def start_with_triton(program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict):
    """Return what Triton compiled for program[grid](*arguments, **constants, **options); None if it interprets."""
    return program[grid](*arguments, **constants, **options)


def direct_start(compiled, grid: tuple[int, int, int]) -> tuple[Callable[..., None], list[Callable]] | None:
    """Return (run(*arguments, stream=...), for each descriptor what takes it apart); None if Triton hides it.

    At every launch Triton looks for hooks and takes descriptors apart: [the copy engine's map, *shape, *strides]. Only
    the map depends on where the tensor begins. So `run` wants descriptors taken apart already, and calls no hooks.
    Triton 3.6 hides the launch of a program with descriptors in a closure.
    """
    # Triton 3.7 has one launch for all programs, 3.6 one for each, in C as well.
    launch = getattr(driver.active.utils, "launch", None) or getattr(getattr(compiled, "run", None), "launch", None)
    if launch is None or not hasattr(compiled, "run") or inspect.isfunction(launch):
        return None
    take_apart = []
    if facts := compiled.metadata.tensordesc_meta:
        from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415 (NVIDIA's alone)

        take_apart = [partial(make_tensordesc_arg, metadata=x) for x in facts]
    launcher, function, metadata = copy.copy(compiled.run), compiled.function, compiled.packed_metadata
    launcher.launch = launch

    def run(*arguments, stream: int) -> None:
        launcher(*grid, stream, function, metadata, None, None, None, *arguments)

    return run, take_apart
