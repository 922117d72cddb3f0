"""Where Triton runs: on a GPU, in the interpreter, or nowhere."""

import importlib.util
import os
import sys
import types

import pytest
import torch
from sage_kernels.common.device import triton_device


@pytest.fixture
def machine(monkeypatch):
    """machine(triton=..., cuda=..., imported=...) makes this machine look like a different one."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def pretend(*, triton, cuda=False, imported=False):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if triton else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        if imported:
            monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))

    return pretend


def test_the_interpreter_is_turned_on_before_triton_is_imported(machine):
    machine(triton=True, imported=True)
    with pytest.raises(RuntimeError, match="triton_device: expected to run before triton is imported"):
        triton_device()
    for imported in (False, True):  # the second call: triton was imported with the interpreter on
        machine(triton=True, imported=imported)
        assert triton_device() == "cpu"
        assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(
    ("triton", "cuda", "expected"), [(True, True, "cuda"), (False, True, None), (False, False, None)]
)
def test_the_interpreter_is_left_off_elsewhere(machine, triton, cuda, expected):
    machine(triton=triton, cuda=cuda)
    assert triton_device() == expected
    assert os.environ["TRITON_INTERPRET"] == "0"
