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
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def numbers(pointer) -> numpy.ndarray:
    """64 float32 at a tensor or an address; not by PyTorch, whose operations are recorded."""
    pointer = pointer[0] if isinstance(pointer, tuple) else pointer
    address = pointer if isinstance(pointer, int) else pointer.data_ptr()
    return numpy.frombuffer((ctypes.c_float * 64).from_address(address), numpy.float32)


class Program:
    """z = x y + constant, 64 numbers each; x may be missing. Compiled, it takes addresses, as Triton's programs do."""

    arg_names = ("x_ptr", "y_ptr", "z_ptr", "factor", "ADDED")
    is_interpreted = False

    def __init__(self):
        self.compilations, self.grids = 0, []

    def __getitem__(self, grid):
        def compile_and_start(x, y, z, factor, ADDED, num_warps):
            self.compilations += 1
            self.compute(x, y, z, factor, ADDED)
            return None if self.is_interpreted else Compiled(self)

        return compile_and_start

    @staticmethod
    def compute(x, y, z, factor, added):
        numbers(z)[:] = (1 if x is None else numbers(x)) * numbers(y) * factor + added


class Compiled:
    """What Triton keeps of a program: `run` gives `launch` grid, stream, function and the program's arguments."""

    function, packed_metadata, metadata = "function", "metadata", SimpleNamespace(tensordesc_meta=[])

    def __init__(self, program):
        def launch(*call):
            program.grids.append(call[:3])
            program.compute(*call[-1] if Launcher.is_packed else call[9:])

        self.run = Launcher(partial(launch))


class Launcher:
    """As Triton's. Its `launch` takes descriptors apart, if there are any, and hands on what the program takes.

    is_packed: the program's arguments are one of launch's, as in Triton 3.7.
    """

    is_packed = True

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, *arguments):
        self.launch(*arguments[:9], *((arguments[9:],) if self.is_packed else arguments[9:]))


class Driver:
    """Triton compiles for a Hopper GPU; a launch is noted and not made."""

    def __init__(self):
        self.launches, self.utils = [], self

    def note(self, *arguments):
        self.launches.append((*arguments[:-1], *arguments[-1]))

    def launcher_cls(self, source, metadata):
        return Launcher(wrap_handle_tensordesc(self.note, source.signature, metadata.tensordesc_meta))

    def fill_tma_descriptor_tiled(self, address, *_):
        return f"map of {address}"

    def load_binary(self, *_):
        return "module", "function", 32, 0, 1024  # registers, spills, most threads

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 77


@pytest.fixture
def noting(monkeypatch):
    noting = Driver()
    monkeypatch.setattr(type(driver), "active", property(lambda self: noting))
    kept.cache_clear()
    return noting


@pytest.fixture
def program(noting):
    return Program()


def start_program(start, program, x, y, z, factor=1.0):
    start(program, (2,), (x, y, z, factor), {"ADDED": 1.0}, {"num_warps": 4})


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
    assert program.grids == [(2, 1, 1)] * 10  # five calls after the first, without Triton
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


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "alignment", "key"])
def test_another_kind_is_another_recording(program, change):
    x = torch.zeros(2, 4, 6, 8)
    other = {
        "shape": x[:, :, :5].contiguous(), "strides": x.transpose(1, 2).contiguous().transpose(1, 2),
        "dtype": x.half(), "alignment": torch.zeros(400)[1:385].view(2, 4, 6, 8), "key": x,
    }[change]  # fmt: skip
    assert kept(("a key", kind_of((x, None)))) is kept(("a key", kind_of((x.clone(), None))))
    key = "another key" if change == "key" else "a key"
    assert kept(("a key", kind_of((x, None)))) is not kept((key, kind_of((other, None))))


def test_parts_of_scratch_memory_are_told_apart(program):
    """Programs write and read parts of scratch tensors: by pointers, through descriptors, and with strides alone."""

    def compute(start):
        second, first, third, result = (
            x.new_empty(257),
            x.new_empty(2, 64),
            x.new_empty(1, 2, 8, 8),
            torch.empty_like(x),
        )
        start_program(start, program, None, x, first[1])
        start_program(start, program, None, x, second[193:], factor=2.0)
        start_program(start, program, None, x, first[0], factor=3.0)
        start_program(start, program, None, x, second, factor=4.0)
        start_program(start, program, None, x, strided(third[:, 1:]), factor=5.0)
        start_program(start, program, None, x, strided(third), factor=6.0)
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


def test_the_interpreter_puts_triton_s_language_back():
    """A function that no program calls left it replaced: nothing could be compiled any more."""
    language = {(part, name): x for part in (tl, tl.core, tl.tensor) for name, x in vars(part).items()}
    assert interpreter.InterpretedFunction(alone)(2) == 3
    assert all(vars(part)[name] is x for (part, name), x in language.items())


# Programs of Triton's own kind


def copying_program(x_descriptor, factor, y_descriptor, missing_ptr, y_ptr, x, ROWS: tl.constexpr, TWICE: tl.constexpr):
    y = x_descriptor.load([0, 0]) * factor
    if TWICE:
        y += y
    y_descriptor.store([0, 0], y)
    tl.store(y_ptr + tl.arange(0, ROWS), tl.load(x.pointer + tl.arange(0, ROWS) * x.stride_b))


@pytest.fixture
def copied(noting):
    """copied(x) -> a result of a program that takes descriptors, of an input and of the result, and their addresses."""
    program = JITFunction(copying_program)

    def copied(x):
        def compute(start):
            y = torch.empty(2, *x.shape)[1]
            of_x, of_y = (TensorDescriptor.from_tensor(z, [16, 32]) for z in (x, y))
            arguments = of_x, 2.0, of_y, None, y, strided(x[None, None])
            # In any order: constants are told by their names.
            start(program, (2,), arguments, {"TWICE": True, "ROWS": 16}, {"num_warps": 1})
            return (y,)

        return recorded(program, (x,), compute)[0]

    return copied


def test_programs_get_what_triton_gave_them(noting, copied, monkeypatch):
    x, other = torch.zeros(64, 32), torch.zeros(64, 32)
    result = copied(x)
    monkeypatch.setattr(JITFunction, "run", None)  # Triton's own way is shut
    repeated = copied(other)
    first, second = noting.launches
    assert first[:6] == second[:6] == (2, 1, 1, 77, "function", first[5])
    for launch, of_x, y in ((first, x, result), (second, other, repeated)):
        expected = [f"map of {of_x.data_ptr()}", 64, 32, 32, 1, 2.0, f"map of {y.data_ptr()}", 64, 32, 32, 1, None]
        assert list(launch[-16:-4]) == expected
        assert launch[-2:] == (16, True)
    assert second[6:9] == (None, None, None)  # no hooks
    assert second[-4:-2] == (repeated.data_ptr(), (other.data_ptr(), 2048, 2048, 32))


def test_a_recording_holds_no_memory(noting, copied, program):
    x, (a, b) = torch.zeros(64, 32), draw(2)
    alive = [weakref.ref(tensor) for tensor in (x, copied(x), copied(x), a, b, product(program, a, b))]
    del x, a, b
    noting.launches.clear()
    assert [tensor() for tensor in alive] == [None] * 6


def test_hooks_of_a_profiler_see_every_launch(noting, copied):
    seen = []
    x = torch.zeros(64, 32)
    copied(x), copied(x)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        copied(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    copied(x)
    *_, watched, after = noting.launches
    assert (watched[7] is knobs.runtime.launch_enter_hook, after[7]) == (True, None)
