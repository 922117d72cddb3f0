"""A recorded call does for other tensors what the function would do. The GPU here is Python, on the CPU's memory."""

import ctypes
import weakref
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.memory import empty_in_layout_of, strided
from sage_kernels.common.recording import kept, kind_of, recorded
from triton import knobs
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime import driver, interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


def numbers(pointer) -> numpy.ndarray:
    """64 float32 at a tensor, a descriptor or an address; not by PyTorch, whose operations are recorded."""
    pointer = pointer[0] if isinstance(pointer, tuple) else getattr(pointer, "base", pointer)
    address = pointer if isinstance(pointer, int) else pointer.data_ptr()
    return numpy.frombuffer((ctypes.c_float * 64).from_address(address), numpy.float32)


class Program:
    """z = x y factor TIMES + ADDED, 64 numbers each; x may be missing, or a descriptor.

    Compiled, it takes addresses, and a descriptor's shape and strides, as Triton's programs do.
    """

    arg_names = ("x_ptr", "y_ptr", "z_ptr", "factor", "ADDED", "TIMES")
    is_interpreted = False

    def __init__(self):
        self.compilations, self.calls = 0, []

    def __getitem__(self, grid):
        def compile_and_start(x, y, z, factor, ADDED, TIMES, num_warps):
            self.compilations += 1
            self.compute(x, y, z, factor, ADDED, TIMES)
            return None if self.is_interpreted else Compiled(self, isinstance(x, TensorDescriptor))

        return compile_and_start

    @staticmethod
    def compute(x, *others):
        *_, y, z, factor, added, times = others
        numbers(z)[:] = (1 if x is None else numbers(x)) * numbers(y) * factor * times + added


class Compiled:
    """What Triton keeps of a program: `run` gives `launch` grid, stream, function and the program's arguments."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, program, with_descriptor):
        def launch(*call):
            program.calls.append(call[:9])
            program.compute(*call[-1] if Launcher.is_packed else call[9:])

        self.metadata = SimpleNamespace(tensordesc_meta=[None] * with_descriptor)
        self.run = Launcher(wrap_handle_tensordesc(partial(launch), {0: "tensordesc"} if with_descriptor else {}, None))


class Launcher:
    """As Triton's. Its `launch` takes descriptors apart, if there are any, and hands on what the program takes.

    is_packed: the program's arguments are one of launch's, as in Triton 3.7.
    """

    is_packed = True

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, *arguments):
        self.launch(*arguments[:9], *((arguments[9:],) if self.is_packed else arguments[9:]))


@pytest.fixture
def program(monkeypatch):
    here = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    monkeypatch.setattr(type(driver), "active", property(lambda self: here))
    kept.cache_clear()
    return Program()


def start_program(start, program, x, y, z, factor=1.0):
    constants = {"TIMES": 2.0, "ADDED": 1.0}  # told by their names, in any order
    start(program, (2,), (x, y, z, factor / 2), constants, {"num_warps": 4})


def draw(count: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 8, 4) for _ in range(count)]


def product(program, x, y):
    """(x y + 1) y + 1, and the part in brackets, by two programs and memory of their own."""

    def compute(start):
        between, result = x.new_empty(x.shape), torch.empty_like(x)
        start_program(start, program, x, strided(y), between)
        start_program(start, program, between, y, strided(result))
        return (result,)

    (found,) = recorded("product", (x, y), compute)
    torch.testing.assert_close(found, (x * y + 1) * y + 1)
    return found


@pytest.mark.parametrize("is_packed", [True, False])
def test_other_tensors_without_triton(program, monkeypatch, is_packed):
    monkeypatch.setattr(Launcher, "is_packed", is_packed)
    tensors = [draw(2) for _ in range(3)]
    results = [product(program, *pair) for pair in (*tensors, tensors[0], tensors[0], torch.randn(2, 1, 2, 8, 4))]
    assert program.compilations == 2
    # Five calls after the first, without Triton and its hooks.
    assert program.calls == [(2, 1, 1, 77, "function", "metadata", None, None, None)] * 10
    assert len({result.data_ptr() for result in results}) == len(results)  # each in new memory
    program.is_interpreted = True
    x = torch.randn(1, 2, 8, 5)[..., :4]
    for _ in range(2):  # the interpreter leaves nothing to repeat
        product(program, x.contiguous().mT.contiguous(), x.contiguous().mT.contiguous())
    assert program.compilations == 6


def test_tensors_in_the_same_memory_are_one_to_a_recording(program):
    x, y = draw(2)
    for pair in ((x, x), (x, y), (y, y)):
        product(program, *pair)
    assert program.compilations == 4


def test_another_kind_is_another_recording():
    x = torch.zeros(2, 4, 6, 8)
    shape, strides = x[:, :, :5].contiguous(), x.transpose(1, 2).contiguous().transpose(1, 2)
    others = shape, strides, x.half(), torch.zeros(400)[1:385].view(2, 4, 6, 8)
    assert kind_of((x, None)) == kind_of((x.clone(), None))
    assert len({kind_of((y, None)) for y in (x, *others)}) == 5


def test_parts_of_scratch_memory_are_told_apart(program):
    """Programs write and read parts of scratch tensors: by pointers, through descriptors, and with strides alone."""

    def compute(start):
        second, first, third = x.new_empty(257), x.new_empty(2, 64), x.new_empty(1, 2, 8, 8)
        result = torch.empty_like(x)
        parts = first[1], second[193:], first[0], second, strided(third[:, 1:]), strided(third)
        for factor, part in enumerate(parts, 1):
            start_program(start, program, None, x, part, factor=factor)
        start_program(start, program, first[1], second[193:], result)
        start_program(start, program, result, strided(third[:, 1:]), result)
        return (result,)

    for _ in range(3):
        (x,) = draw(1)
        (found,) = recorded("parts", (x,), compute)
        torch.testing.assert_close(found, ((x + 1) * (2 * x + 1) + 1) * (5 * x + 1) + 1)
    assert program.compilations == 8


def test_operations_and_views_are_repeated(program):
    """PyTorch computes what a program reads; some of what comes out is a view, of an input that is one, too."""

    def compute(start):
        total = (x + 0.5).transpose(1, 2).contiguous()
        zeros = torch.zeros(64)
        result = empty_in_layout_of(x.transpose(1, 2).contiguous().transpose(1, 2))
        start_program(start, program, None, total, result, factor=2.0)
        start_program(start, program, None, zeros, zeros)
        return result, zeros.view(8, 8)[2:], total.mT[..., 1:], x.mT + 1

    for _ in range(3):
        _, x = torch.randn(2, 1, 2, 8, 4)
        result, ones, total, more = recorded("torch", (x,), compute)
        torch.testing.assert_close(result, 2 * (x + 0.5) + 1)
        assert result.stride() == (64, 4, 8, 1)
        torch.testing.assert_close(ones, torch.ones(6, 8))
        torch.testing.assert_close(total, (x + 0.5).transpose(1, 2).mT[..., 1:])
        torch.testing.assert_close(more, x.mT + 1)
    assert program.compilations == 2


FOREIGN = torch.ones(64)


def tensor_from_elsewhere(x, start, program):
    y = torch.empty_like(x)
    start_program(start, program, x, FOREIGN, y)
    return y


UNREPEATABLE = {
    "in place": lambda x, start, program: torch.empty_like(x).copy_(x),
    "a value read": lambda x, start, program: x + x.sum().item(),
    "a shape made of values": lambda x, start, program: x.nonzero(),
    "a tensor from elsewhere": tensor_from_elsewhere,
    "a list of tensors": lambda x, start, program: torch.cat([x, x]),
    "a different type": lambda x, start, program: torch.empty_like(x).view(torch.int32) * 0,
    "a different type of an input": lambda x, start, program: x.view(torch.int32) * 2,
}


@pytest.mark.parametrize("function", UNREPEATABLE.values(), ids=UNREPEATABLE.keys())
def test_what_can_not_be_repeated_runs_as_it_is_written(program, function):
    for _ in range(3):
        (x,) = draw(1)
        (found,) = recorded(function, (x,), lambda start: (function(x, start, program),))  # noqa: B023 (called at once)
        torch.testing.assert_close(found, function(x, start_with_triton, program))
    assert kept((function, kind_of((x,)))).recording is None


def alone(x: tl.constexpr):
    return x + 1


@pytest.mark.no_gpu
def test_the_interpreter_puts_triton_s_language_back():
    """A function that no program calls left it replaced: nothing could be compiled any more."""
    language = {(part, name): x for part in (tl, tl.core, tl.tensor) for name, x in vars(part).items()}
    assert interpreter.InterpretedFunction(alone)(2) == 3
    assert all(vars(part)[name] is x for (part, name), x in language.items())


def test_descriptors_are_of_the_tensors_of_the_call(program):
    def compute(start):
        between, result = x.new_empty(2, 64), torch.empty_like(x)
        of_x, of_part = (TensorDescriptor.from_tensor(y.view(16, 4), [16, 4]) for y in (x, between[1]))
        start_program(start, program, of_x, x, between[1])
        start_program(start, program, of_part, x, result)
        return (result,)

    for x in (first := draw(2)) + first:
        (found,) = recorded("descriptors", (x,), compute)
        torch.testing.assert_close(found, (x * x + 1) * x + 1)
    assert program.compilations == 2


def test_a_recording_holds_no_memory(program):
    a, b = draw(2)
    alive = [weakref.ref(tensor) for tensor in (a, b, product(program, a, b))]
    del a, b
    assert [tensor() for tensor in alive] == [None] * 3


def test_hooks_of_a_profiler_see_every_launch(program):
    pair = draw(2)
    product(program, *pair)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        product(program, *pair)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    product(program, *pair)
    assert program.compilations == 4  # two by Triton at first, and two while somebody watches
