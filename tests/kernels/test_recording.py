"""A recorded call does for other tensors what the function would do. The GPU here is Python, on the CPU's memory."""

import ctypes
import weakref

import numpy
import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from sage_kernels.common import recording
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.memory import empty_in_layout_of
from sage_kernels.common.recording import kept, kind_of, recorded
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def numbers(pointer) -> numpy.ndarray:
    """64 float32 at a tensor, a descriptor or an address; not by PyTorch, whose operations are recorded."""
    pointer = getattr(pointer, "base", pointer)
    address = pointer if isinstance(pointer, int) else pointer.data_ptr()
    return numpy.frombuffer((ctypes.c_float * 64).from_address(address), numpy.float32)


class Program:
    """z = x y + constant, 64 numbers each; x may be missing. Compiled, it takes addresses, as Triton's programs do."""

    arg_names = ("x_ptr", "y_ptr", "z_ptr", "factor", "ADDED")

    def __init__(self):
        self.compilations, self.grids = 0, []

    def __getitem__(self, grid):
        def compile_and_start(x, y, z, factor, ADDED, num_warps):
            self.compilations += 1
            self.compute(x, y, z, factor, ADDED)
            return self.compiled

        return compile_and_start

    @property
    def compiled(self):
        program = self

        class Compiled:
            def __getitem__(self, grid):
                program.grids.append(grid)
                return lambda *arguments, stream: program.compute(*arguments)

        return Compiled()

    @staticmethod
    def compute(x, y, z, factor, added):
        numbers(z)[:] = (1 if x is None else numbers(x)) * numbers(y) * factor + added


class Descriptor:
    def __init__(self, base):
        self.base, self.shape = base, [64]


class Launcher:
    """As Triton's: its `launch` takes descriptors apart, if there are any, and hands on what the program takes."""

    def __init__(self, noting, source, metadata):
        def launch(*arguments):
            noting.launches.append((*arguments[:-1], *arguments[-1]))

        self.launch = wrap_handle_tensordesc(launch, source.signature, metadata.tensordesc_meta)

    def __call__(self, *arguments):
        self.launch(*arguments[:9], arguments[9:])


class Driver:
    """Triton compiles for a Hopper GPU; a launch is noted and not made."""

    def __init__(self):
        self.launches, self.maps, self.utils = [], [], self

    def launcher_cls(self, source, metadata):
        return Launcher(self, source, metadata)

    def fill_tma_descriptor_tiled(self, address, *_):
        self.maps.append(address)
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
    return noting


@pytest.fixture
def program(noting):
    kept.cache_clear()
    return Program()


def start_program(start, program, x, y, z, factor=1.0):
    start(program, (2,), (x, y, z, factor), {"ADDED": 1.0}, {"num_warps": 4})


def draw(count: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 8, 4) for _ in range(count)]


def product(program, inputs, *, key="product"):
    """(x y + 1) y + 1, and the part in brackets, by two programs and memory of their own."""

    def compute(start):
        x, y = inputs
        between, result = x.new_empty(x.shape), torch.empty_like(x)
        start_program(start, program, Descriptor(x), y, between)
        start_program(start, program, between, y, result)
        return (result,)

    return recorded(key, inputs, compute)[0]


def expected(x, y):
    return (x * y + 1) * y + 1


def test_other_tensors_without_triton(program):
    for _ in range(4):
        x, y = draw(2)
        torch.testing.assert_close(product(program, (x, y)), expected(x, y))
    assert program.compilations == 2
    assert program.grids == [(2, 1, 1)] * 2  # the compiled program's own way of being started


def test_results_are_new_memory_each_time(program):
    x, y = draw(2)
    results = [product(program, (x, y)) for _ in range(3)]
    assert len({result.data_ptr() for result in results}) == 3


def test_what_was_one_tensor_may_be_two_later(program):
    x, y = draw(2)
    torch.testing.assert_close(product(program, (x, x)), expected(x, x))
    torch.testing.assert_close(product(program, (x, y)), expected(x, y))
    torch.testing.assert_close(product(program, (y, y)), expected(y, y))


def test_neighbours_in_one_memory_are_told_apart(program):
    for _ in range(2):
        packed = torch.randn(2, 1, 2, 8, 4)
        torch.testing.assert_close(product(program, tuple(packed)), expected(*packed))
    x, y = draw(2)
    torch.testing.assert_close(product(program, (x, y)), expected(x, y))
    assert program.compilations == 2  # all three are of one kind


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
    assert kept(("a key", kind_of((x, None)))) is not kept(("a key", kind_of((x, x))))


def in_parts(program, inputs):
    """Programs write and read parts of two scratch tensors, one of them through descriptors."""

    def compute(start):
        (x,) = inputs
        first, second, result = x.new_empty(2, 64), x.new_empty(200), torch.empty_like(x)
        start_program(start, program, None, x, first[1])
        start_program(start, program, None, x, second[100:], factor=2.0)
        start_program(start, program, None, x, first[0], factor=3.0)
        start_program(start, program, None, x, second, factor=4.0)
        start_program(start, program, Descriptor(first[1]), second[100:], result)
        return (result,)

    return recorded("parts", inputs, compute)[0]


def test_parts_of_scratch_memory_are_told_apart(program):
    for _ in range(3):
        (x,) = draw(1)
        torch.testing.assert_close(in_parts(program, (x,)), (x + 1) * (2 * x + 1) + 1)
    assert program.compilations == 5


def test_views_of_an_input_begin_where_it_does(program):
    for _ in range(3):
        _, x = torch.randn(2, 1, 2, 8, 4)
        (found,) = recorded("views", (x,), lambda start: (x.mT + 1,))  # noqa: B023 (called at once)
        torch.testing.assert_close(found, x.mT + 1)
    assert kept(("views", kind_of((x,)))).recording is not None


def with_torch(program, inputs):
    """PyTorch computes what a program reads, and some of what comes out is a view."""

    def compute(start):
        x, y = inputs
        total = (x + 0.5).transpose(1, 2).contiguous()
        zeros = torch.zeros(64)
        result = empty_in_layout_of(y.transpose(1, 2).contiguous().transpose(1, 2))
        start_program(start, program, None, total, result, factor=2.0)
        start_program(start, program, None, zeros, zeros)
        return result, zeros.view(8, 8)[2:], total.mT

    return recorded("torch", inputs, compute)


def test_operations_and_views_are_repeated(program):
    for _ in range(3):
        x, y = draw(2)
        result, ones, total = with_torch(program, (x, y))
        torch.testing.assert_close(result, 2 * (x + 0.5) + 1)
        assert result.stride() == (64, 4, 8, 1)
        torch.testing.assert_close(ones, torch.ones(6, 8))
        torch.testing.assert_close(total, (x + 0.5).transpose(1, 2).mT)
    assert program.compilations == 2


FOREIGN = torch.ones(64)


def in_place(x, start, program):
    y = torch.empty_like(x)
    y.copy_(x)
    return y


def value_read(x, start, program):
    return x + x.sum().item()


def shape_of_values(x, start, program):
    return x.nonzero()


def tensor_from_elsewhere(x, start, program):
    y = torch.empty_like(x)
    start_program(start, program, x, FOREIGN, y)
    return y


def list_of_tensors(x, start, program):
    return torch.cat([x, x])


def other_type(x, start, program):
    return torch.empty_like(x).view(torch.int32) * 0


def other_type_of_an_input(x, start, program):
    return x.view(torch.int32) * 2


@pytest.mark.parametrize(
    "function",
    [in_place, value_read, shape_of_values, tensor_from_elsewhere, list_of_tensors, other_type, other_type_of_an_input],
    ids=lambda x: x.__name__,
)
def test_what_can_not_be_repeated_runs_as_it_is_written(program, function):
    for _ in range(3):
        (x,) = draw(1)
        (found,) = recorded(function, (x,), lambda start: (function(x, start, program),))  # noqa: B023 (called at once)
        torch.testing.assert_close(found, function(x, start_with_triton, program))
    assert kept((function, kind_of((x,)))).recording is None


def test_the_interpreter_leaves_nothing_to_repeat(program):
    class Interpreted(Program):
        compiled = None

    interpreted = Interpreted()
    for _ in range(2):
        x, y = draw(2)
        torch.testing.assert_close(product(interpreted, (x, y)), expected(x, y))
    assert interpreted.compilations == 4


def test_a_recording_holds_no_memory(program):
    x, y = draw(2)
    alive = [weakref.ref(tensor) for tensor in (x, y, product(program, (x, y)))]
    del x, y
    assert [tensor() for tensor in alive] == [None] * 3


def scaled_program(x_ptr, missing_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + i, mask=i < n) * factor
    if TWICE:
        y += y
    tl.store(y_ptr + i, y, mask=i < n)


def alone(x: tl.constexpr):
    return x + 1


def test_the_interpreter_puts_triton_s_language_back():
    """A function that no program calls left it replaced: nothing could be compiled any more."""
    language = {(part, name): x for part in (tl, tl.core, tl.tensor) for name, x in vars(part).items()}
    assert interpreter.InterpretedFunction(alone)(2) == 3
    assert all(vars(part)[name] is x for (part, name), x in language.items())


def test_triton_s_programs_get_what_triton_gave_them(noting, monkeypatch):
    program = JITFunction(scaled_program)

    def scaled(x):
        def compute(start):
            y = torch.empty_like(x)
            # In any order: constants are told by their names.
            start(program, (2,), (x, None, y, 64, 3.0), {"TWICE": True, "BLOCK": 32}, {"num_warps": 1})
            return (y,)

        return recorded(program, (x,), compute)[0]

    x, other = torch.zeros(64), torch.zeros(64)
    y = scaled(x)
    monkeypatch.setattr(JITFunction, "run", None)  # Triton's own way is shut
    other_y = scaled(other)
    first, second = noting.launches
    assert first[:6] == second[:6] == (2, 1, 1, 77, "function", first[5])
    assert [first[-7] is x, first[-5] is y, *first[-4:]] == [True, True, 64, 3.0, 32, True]
    assert second[-7:] == (other.data_ptr(), None, other_y.data_ptr(), 64, 3.0, 32, True)


def copying_program(x_descriptor, factor, y_descriptor, y_ptr, ROWS: tl.constexpr):
    x = x_descriptor.load([0, 0])
    y_descriptor.store([0, 0], x * factor)
    tl.store(y_ptr + tl.arange(0, ROWS), 0.0)


@pytest.fixture
def copied(noting):
    """copied(x) -> twice x, by a program that takes descriptors, of an input and of a result, and its address."""
    kept.cache_clear()
    program = JITFunction(copying_program)

    def copied(x):
        def compute(start):
            y = torch.empty_like(x)
            descriptors = [TensorDescriptor.from_tensor(z, [16, 32]) for z in (x, y)]
            start(program, (1,), (descriptors[0], 2.0, descriptors[1], y), {"ROWS": 16}, {"num_warps": 1})
            return (y,)

        return recorded(program, (x,), compute)[0]

    return copied


def test_descriptors_are_what_triton_makes_of_them(noting, copied):
    tensors = [torch.zeros(64, 32) for _ in range(2)]
    results = [copied(x) for x in tensors]
    first, second = noting.launches
    for launch, x, y in zip(noting.launches, tensors, results, strict=True):
        expected = [f"map of {x.data_ptr()}", 64, 32, 32, 1, 2.0, f"map of {y.data_ptr()}", 64, 32, 32, 1]
        assert list(launch[-13:-2]) == expected
    assert (first[-2] is results[0], second[-2], second[-1]) == (True, results[1].data_ptr(), 16)
    assert first[:6] == second[:6]
    assert second[6:9] == (None, None, None)  # no hooks


def test_maps_of_known_addresses_are_not_made_again(noting, copied):
    x, other = torch.zeros(64, 32), torch.zeros(64, 32)
    copied(x)
    results = [copied(z) for z in (other, x, other)]
    made = noting.maps.copy()
    for number, result in enumerate(results):
        assert noting.launches[1 + number][-2] == result.data_ptr()
    del results, result
    copied(x), copied(other)
    assert noting.maps.count(x.data_ptr()) <= 3  # by Triton, to learn the rest, once more for the first repetition
    assert noting.maps.count(other.data_ptr()) == made.count(other.data_ptr()) == 1


def test_a_recording_with_descriptors_holds_no_memory(noting, copied):
    x = torch.zeros(64, 32)
    alive = [weakref.ref(tensor) for tensor in (x, copied(x), copied(x))]
    del x
    noting.launches.clear()
    assert [tensor() for tensor in alive] == [None] * 3


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


def test_a_triton_that_is_built_otherwise_is_asked_itself(noting, copied, monkeypatch):
    monkeypatch.setattr(recording, "direct_start", lambda compiled, grid: None)
    x = torch.zeros(64, 32)
    copied(x)
    y = copied(x)
    launch = noting.launches[1]
    assert list(launch[-13:-8]) == [f"map of {x.data_ptr()}", 64, 32, 32, 1]
    assert launch[-7] == f"map of {y.data_ptr()}"
