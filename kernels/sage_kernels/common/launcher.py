"""How a program is started. Who starts programs is handed a `Start`: Triton's way, or one that takes notes."""

import copy
import inspect
from collections.abc import Callable
from functools import partial

# (program, grid, arguments, constants, options)
Start = Callable[[object, tuple[int, ...], tuple, dict, dict], object]


def start_with_triton(program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict):
    """program[grid](*arguments, **constants, **options). Returns what Triton compiled; its interpreter has nothing."""
    return program[grid](*arguments, **constants, **options)


def direct_start(compiled, grid: tuple[int, int, int]) -> tuple[Callable[..., None], list[Callable]] | None:
    """(run(*arguments, stream=...), for each descriptor what takes it apart); None if Triton is built otherwise.

    At every launch Triton looks for hooks and takes descriptors apart: [the copy engine's map, *shape, *strides]. Only
    the map depends on where the tensor begins. So `run` wants descriptors taken apart already, and calls no hooks.
    """
    launcher = getattr(compiled, "run", None)
    launch, take_apart = getattr(launcher, "launch", None), []
    if inspect.isfunction(launch):  # around the launcher of a program that takes descriptors
        inside = inspect.getclosurevars(launch)
        bare, function = inside.nonlocals.get("launcher"), inside.globals.get("make_tensordesc_arg")
        facts = inside.nonlocals.get("tensordesc_meta") or [None]
        if bare is None or function is None or None in facts:
            return None
        launcher = copy.copy(launcher)
        launcher.launch = bare
        take_apart = [partial(function, metadata=x) for x in facts]
    elif launch is None:
        return None
    function, metadata = compiled.function, compiled.packed_metadata

    def run(*arguments, stream: int) -> None:
        launcher(*grid, stream, function, metadata, None, None, None, *arguments)

    return run, take_apart
