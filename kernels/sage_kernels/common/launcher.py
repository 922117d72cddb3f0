"""How a program is started: by Triton, or, for calls like an earlier one, without Triton's bookkeeping.

program[grid](...) looks at every argument to find the compiled program for it, which takes the CPU longer than many a
kernel takes the GPU. A `Launcher` remembers what Triton found. It belongs to one kind of call: whatever decides how its
programs are compiled must be part of the key that `launcher_of` was given.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache

from torch import Tensor

# (name, program, grid, arguments, constants, options); the name tells the programs of one call apart.
Start = Callable[[str, object, tuple[int, ...], tuple, dict, dict], None]


def start_with_triton(name: str, program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict):
    """program[grid](*arguments, **constants, **options)"""
    return program[grid](*arguments, **constants, **options)


class Launcher:
    """A `Start` for calls that differ in nothing but the addresses of their tensors and in their numbers' values."""

    def __init__(self):
        self.started = {}  # name -> (Triton's compiled program, the constants that follow the arguments)

    def __call__(self, name: str, program, grid: tuple[int, ...], arguments: tuple, constants: dict, options: dict):
        if name in self.started:
            compiled, following = self.started[name]
            compiled[(*grid, 1, 1)[:3]](*arguments, *following)
            return
        following = tuple(constants[x] for x in program.arg_names[len(arguments) :])
        compiled = start_with_triton(name, program, grid, arguments, constants, options)
        if compiled is not None:  # the interpreter has none
            self.started[name] = compiled, following


@lru_cache(maxsize=1024)
def launcher_of(key: Hashable) -> Launcher:
    """The launcher of all calls with this key."""
    return Launcher()


def kind_of(*tensors: Tensor) -> tuple:
    """What of tensors decides how a program that reads them is compiled; part of a key."""
    return tensors[0].device, *((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)
