"""A former module name raises an error that names the new place, and nothing else is touched."""

import importlib
import re
import sys
from importlib.util import find_spec

import pytest

import sage_ref
from sage_ref import moved
from sage_ref.moved import MOVED, MovedModules


@pytest.mark.parametrize("name", MOVED)
def test_a_former_name_says_where_the_module_is_now(name):
    with pytest.raises(ModuleNotFoundError, match=f"^{name} has moved: it is now ") as error:
        importlib.import_module(name)
    assert error.value.name == name
    places = re.findall(r"sage_\w+(?:\.\w+)+", MOVED[name])
    assert places
    for place in places:
        assert find_spec(place), place


def test_all_other_names_are_found_or_not_as_ever():
    assert find_spec("sage_ref.sagebwd").name == "sage_ref.sagebwd"
    assert find_spec("sage_ref.no_such_module") is None
    assert find_spec("no_such_package") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'sage_ref.no_such_module'"):
        importlib.import_module("sage_ref.no_such_module")


def test_what_an_old_checkout_leaves_is_not_mistaken_for_a_module(tmp_path, monkeypatch):
    (tmp_path / "plotting" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(sage_ref, "__path__", [*sage_ref.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="sage_ref.plotting has moved"):
        importlib.import_module("sage_ref.plotting")


def test_the_finder_is_there_once():
    moved.install()
    assert [isinstance(finder, MovedModules) for finder in sys.meta_path].count(True) == 1
