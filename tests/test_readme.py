"""The READMEs say what the records say."""

import re

import pytest

from sage_ref import readme
from sage_ref.readme import SECTIONS, rewritten
from sage_ref.recorded import REPOSITORY


@pytest.mark.parametrize("name", SECTIONS)
def test_measured_parts_are_in_step(name):
    assert rewritten(name) == (REPOSITORY / name).read_text(), "run `python -m sage_ref readme`"


@pytest.mark.parametrize("name", SECTIONS)
def test_a_stale_part_is_noticed(name, monkeypatch):
    sections = {section: lambda: "something else" for section in SECTIONS[name]}
    monkeypatch.setitem(readme.SECTIONS, name, sections)
    assert rewritten(name) != (REPOSITORY / name).read_text()


def test_a_missing_marker_is_an_error(monkeypatch):
    monkeypatch.setitem(readme.SECTIONS, "README.md", {"no such part": lambda: ""})
    with pytest.raises(ValueError, match="no such part"):
        rewritten("README.md")


def test_links_and_pictures_exist():
    for name in SECTIONS:
        folder = (REPOSITORY / name).parent
        for target in re.findall(r"\]\(([^)#]+)\)", (REPOSITORY / name).read_text()):
            assert (folder / target).exists(), f"{name}: {target}"
