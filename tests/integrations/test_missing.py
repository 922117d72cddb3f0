"""Where transformers or diffusers isn't installed, register() says what to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    integration = importlib.import_module(f"sage_ref.integrations.{package}")
    with pytest.raises(
        ImportError, match=rf"^{package}: expected it to be installed \(pip install 'sage-ref\[{package}\]'\)"
    ):
        integration.register()
