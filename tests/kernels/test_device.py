"""Where Triton runs: on a GPU, in the interpreter, or nowhere."""

import importlib.util
import os
import sys
import types

import pytest
import torch
from sage_kernels.common.device import triton_device


def test_the_interpreter_is_turned_on_before_triton_is_imported(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    with pytest.raises(RuntimeError, match="triton_device: expected to run before triton is imported"):
        triton_device()
    monkeypatch.delitem(sys.modules, "triton")
    assert triton_device() == "cpu"
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert triton_device() == "cpu"  # triton was imported with the interpreter on
