"""Starting a program again without Triton's bookkeeping: it gets what Triton gave it. The driver here does nothing."""

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from sage_kernels.common.launcher import Launcher, kind_of, launcher_of
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Driver:
    """Compiles for a Hopper GPU; a launch is noted and not made."""

    def __init__(self):
        self.launches, self.loaded = [], 0
        self.utils = self

    def launcher_cls(self, source, metadata):
        return lambda *launch: self.launches.append(launch)

    def load_binary(self, *_):
        self.loaded += 1
        return "module", self.loaded, 32, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 77


def scaled_program(x_ptr, missing_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + i, mask=i < n) * factor
    if TWICE:
        y += y
    tl.store(y_ptr + i, y, mask=i < n)


@pytest.fixture
def noted(monkeypatch):
    noting = Driver()
    monkeypatch.setattr(type(driver), "active", property(lambda self: noting))
    return noting.launches


def test_the_second_launch_is_the_first_ones_with_other_tensors(noted, monkeypatch):
    program, start = JITFunction(scaled_program), Launcher()
    x, y, other = (torch.zeros(64) for _ in range(3))
    # In any order: constants are told by their names.
    constants, options = {"TWICE": True, "BLOCK": 32}, {"num_warps": 1}
    start("scale", program, (2,), (x, None, y, 64, 3.0), constants, options)
    monkeypatch.setattr(JITFunction, "run", None)  # Triton's own way is shut
    start("scale", program, (3, 2), (other, None, y, 48, 5.0), constants, options)
    first, second = noted
    assert [*first[:4], *second[:4]] == [2, 1, 1, 77, 3, 2, 1, 77]
    assert first[4:6] == second[4:6]  # the compiled program, and how it is launched
    for launch, arguments in ((first, (x, None, y, 64, 3.0)), (second, (other, None, y, 48, 5.0))):
        found = launch[-7:]
        assert all(a is b or a == b for a, b in zip(found, (*arguments, 32, True), strict=True))


def test_programs_of_one_call_are_told_apart_by_name(noted):
    program, start = JITFunction(scaled_program), Launcher()
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(2):
        for name, twice in (("once", False), ("twice", True)):
            start(name, program, (2,), (x, None, y, 64, 3.0), {"BLOCK": 32, "TWICE": twice}, {})
    assert [launch[-1] for launch in noted] == [False, True, False, True]
    assert [launch[4] for launch in noted] == [1, 2, 1, 2]  # the compiled program


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "alignment"])
def test_calls_that_compile_otherwise_have_launchers_of_their_own(change):
    x = torch.zeros(2, 4, 6, 8)
    other = {
        "shape": x[:, :, :5].contiguous(), "strides": x.transpose(1, 2).contiguous().transpose(1, 2),
        "dtype": x.half(), "alignment": torch.zeros(400)[1:385].view(2, 4, 6, 8),
    }[change]  # fmt: skip
    assert launcher_of(("a call", kind_of(x))) is launcher_of(("a call", kind_of(x.clone())))
    assert launcher_of(("a call", kind_of(x))) is not launcher_of(("a call", kind_of(other)))
    assert launcher_of(("a call", kind_of(x))) is not launcher_of(("another", kind_of(x)))
