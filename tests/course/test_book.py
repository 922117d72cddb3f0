"""Pages: their measured parts, Colab's cell, the notebooks' frame, and the tables that the book builds."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from sage_course import colab
from sage_course.outline import (
    INSTALL,
    colab_address,
    file_address,
    notebooks,
)
from sage_course.readme import SECTIONS, texts
from sage_lab.records import REPOSITORY

ADDRESS = "https://github.com/owner/name"


@pytest.fixture
def course_pages(monkeypatch):
    """The Sphinx extension book/course_pages.py."""
    pytest.importorskip("sphinx", reason="needs the extra book: make .venv/book")
    monkeypatch.syspath_prepend(REPOSITORY / "notebooks" / "book")
    import course_pages

    yield course_pages
    sys.modules.pop("course_pages")


def test_every_written_file_is_up_to_date():
    """Stale are the names of files in which a measured part, a link or the cell for Colab is not as it should be."""
    stale = [path.name for path, text in texts() if text != path.read_text()]
    assert stale == [], "run `python -m sage_course`"


def test_links_and_pictures_exist():
    for name in SECTIONS:
        text = (REPOSITORY / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text) + re.findall(r"src(?:set)?=\"([^\"]+)\"", text):
            assert ((REPOSITORY / name).parent / target).exists(), f"{name}: {target}"


def test_colab_installs_the_pinned_versions_of_what_notebooks_import(tmp_path):
    pins = {pin.partition("==")[0] for pin in colab.pinned()}
    assert pins >= {"torch", "triton", "matplotlib", "numpy", "safetensors", "scipy"}
    assert not pins & colab.FROM_COLAB
    for name in ("pyproject.toml", "lab/pyproject.toml", "notebooks/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    text = (REPOSITORY / "constraints.txt").read_text()
    (tmp_path / "constraints.txt").write_text(text.replace("scipy==", "other=="))
    with pytest.raises(ValueError, match=r"constraints\.txt: expected a version of each of \['scipy'\]"):
        colab.pinned(tmp_path)


def test_colabs_cell_does_nothing_elsewhere_and_there_fetches_installs_and_moves(monkeypatch):
    cell = colab.install_cell(ADDRESS)
    program = TransformerManager().transform_cell(cell)
    (script,) = re.findall(r"name/(\S+\.py)", cell)
    assert REPOSITORY / script == Path(colab.__file__)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, done = list(sys.path), []
    shell = SimpleNamespace(system=done.append, run_line_magic=lambda *words: done.append(" ".join(words)))
    exec(program, {"get_ipython": lambda: shell})
    assert (done, sys.path) == ([], before)
    monkeypatch.setitem(sys.modules, "google.colab", None)
    exec(program, {"get_ipython": lambda: shell})
    assert done == [
        "cd -q /content",
        f"test -d name || git clone --quiet --depth 1 {ADDRESS}",
        "{sys.executable} name/notebooks/sage_course/colab.py",
        "cd -q name/notebooks",
    ]
    assert sys.path == [f"/content/name/{part}" for part in ("", "kernels", "lab", "notebooks")] + before


def ways():
    """Yield the title, the prose and the days, a list of steps each, of every way through the course."""
    text = (REPOSITORY / "notebooks" / "book" / "ways.md").read_text()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        days = re.findall(r"^```\{way\}\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
        yield part.partition(":")[0], part.partition("```")[0], [day.splitlines() for day in days]


def test_ways_fit_into_their_time_are_those_of_notebook_00_and_five_days_hold_every_notebook(course_pages):
    days = {title: found for title, _, found in ways()}
    most = {"Half a day": 300, "One day": 480, "Three days": 480, "Five days": 480}
    assert set(days) == set(most)
    for title, found in days.items():
        assert max(sum(minutes for _, minutes in course_pages.steps(day)) for day in found) <= most[title]
    start = (REPOSITORY / "notebooks" / "00_start_here.ipynb").read_text()
    for title, _, found in list(ways())[:-1]:  # notebook 00 lists the shorter ways, too
        _, *others = (line.split()[1] for day in found for line in day if line.startswith("notebook"))
        assert re.search(rf"\({title}[^)]*\): {', '.join(others)}\\n", start, re.IGNORECASE), title
    needed = [f"notebook {number}" for _, number, title, _ in notebooks() if "optional" not in title.lower()]
    lines = [line for day in days["Five days"] for line in day]
    assert [line for line in lines if line.startswith("notebook")] == needed
    with pytest.raises(ValueError, match=r"way: expected lines among .*'notebook 00'.*, got 'notebook 99'"):
        course_pages.steps(["notebook 99"])


def test_a_notebooks_page_has_badges_in_place_of_colabs_cell(course_pages):
    path = Path("notebooks/00_start_here.ipynb")
    content = [text := (REPOSITORY / path).read_text()]
    course_pages.with_head_and_descriptions(None, "notebooks/00_start_here", content)
    before, after = json.loads(text)["cells"], json.loads(content[0])["cells"]
    assert after[0]["source"] == "".join(before[0]["source"][:-2]).rstrip()
    assert before[1]["id"] == INSTALL
    assert after[1]["source"].count(colab_address(path)) == after[1]["source"].count(file_address(path)) == 1
    assert [cell["source"] for cell in after[2:]] == [cell["source"] for cell in before[2:]]
    alts = [cell["metadata"].get("mystnb", {}).get("image", {}).get("alt") for cell in after]
    assert any("sigma = 3" in alt for alt in alts if alt)
