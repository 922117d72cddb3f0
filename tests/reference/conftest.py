"""What the tests of the reference share: a stand-in for the Triton kernels."""

import sys
import types

import pytest

from sage_ref import backend


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in("sagebwd" or "sla2"): a package that records calls of its kernels, and refuses what `refusal` names."""

    def installed(family):
        package = types.ModuleType(f"sage_kernels.{family}.ops")
        package.calls, package.refusal = [], lambda query, about: None
        package.obstacle = lambda query, about: package.refusal(query, about)
        package.attention = lambda *tensors, **options: package.calls.append((*tensors, options)) or tensors[0]
        package.sagebwd_attention = package.attention
        for name in ("sage_kernels", f"sage_kernels.{family}"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setattr(backend, "MISSING_PACKAGE", None)
        return package

    backend._said.clear()
    yield installed
    backend._said.clear()
