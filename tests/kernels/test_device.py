"""Where Triton runs: on a GPU, in the interpreter, or nowhere; and what importing the packages leaves as it was."""

import importlib.util
import os
import subprocess
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


def test_importing_the_packages_changes_nothing_of_pytorch():
    program = """
import importlib, pkgutil, sys
import torch, triton, torch._dynamo, torch.nn.attention.flex_attention, torch.distributed.tensor

def contents():
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    return {name: dict(vars(x)) for name, x in (modules | {"Tensor": torch.Tensor, "Module": torch.nn.Module}).items()}

before = contents()
import sage_ref, sage_kernels
for package in (sage_ref, sage_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("sage_ref.integrations."):  # they import other libraries
            importlib.import_module(module.name)
after = contents()
print(sorted(after["Tensor"].keys() ^ before["Tensor"].keys()))
print([(m, n) for m, names in before.items() for n, x in names.items() if callable(x) and after[m][n] is not x])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
