"""Where transformers or diffusers isn't installed, or can't be imported, register() says why."""

import importlib
import sys

import pytest

from sage_ref.integrations.calls import not_installed


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    integration = importlib.import_module(f"sage_ref.integrations.{package}")
    message = rf"^{package}: expected it to be installed \(pip install 'sage-ref\[{package}\]'\)"
    with pytest.raises(ImportError, match=message):
        integration.register()


def test_a_torchvision_of_a_different_pytorch_is_named():
    """Where transformers is installed, but imports no model: Colab's own torchvision beside the course's PyTorch."""
    error = ModuleNotFoundError("Could not import module 'AttentionInterface'.")
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    found = str(not_installed("transformers", error))
    assert found.startswith("transformers: expected it to be importable, got RuntimeError: operator torchvision::nms")
    assert "install its matching version, or uninstall it" in found
