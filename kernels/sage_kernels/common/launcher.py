"""How a program is started. Who starts programs is handed a `Start`: Triton's way, or one that takes notes."""

from collections.abc import Callable

# (program, grid, arguments, constants, options)
Start = Callable[[object, tuple[int, ...], tuple, dict, dict], object]


def start_with_triton(program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict):
    """program[grid](*arguments, **constants, **options). Returns what Triton compiled; its interpreter has nothing."""
    return program[grid](*arguments, **constants, **options)
