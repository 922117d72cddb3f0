"""What the book is made from: outline, addresses, Colab's cell, and the tables that Sphinx builds."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from sage_course import colab, notebook_frame, outline
from sage_course.notebook_frame import INSTALL, framed, rewrite_notebooks
from sage_course.outline import colab_address, file_address, notebooks, public_address
from sage_lab.records import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.fixture
def course_pages(monkeypatch):
    """The Sphinx extension book/course_pages.py."""
    pytest.importorskip("sphinx", reason="needs the extra book: make .venv/book")
    monkeypatch.syspath_prepend(REPOSITORY / "book")
    import course_pages

    yield course_pages
    sys.modules.pop("course_pages")


def test_addresses_lead_to_the_public_repository():
    address = public_address()
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", address)
    assert file_address(Path("README.md")) == f"{address}/blob/main/README.md"
    assert file_address(Path("notebooks/recorded")) == f"{address}/tree/main/notebooks/recorded"
    owner = address.removeprefix("https://github.com/")
    opened = colab_address(Path("notebooks/x.ipynb"))
    assert opened == f"https://colab.research.google.com/github/{owner}/blob/main/notebooks/x.ipynb"


def test_no_other_file_names_the_public_address():
    """A second copy would stay behind when the project moves."""
    address = public_address().removeprefix("https://")
    folders = ("sage_ref", "kernels", "exercises", "book", "tests", ".ci")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    files = [path for path in files if path.suffix in {".py", ".md", ""}]
    files += [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("*.txt"), REPOSITORY / "Makefile"]
    assert [path for path in files if path.is_file() and address in path.read_text()] == []


def test_colab_installs_the_pinned_versions_of_what_notebooks_import():
    pins = colab.pinned()
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(pins)
    assert set(pins) <= set((REPOSITORY / "constraints.txt").read_text().splitlines())
    assert {pin.partition("==")[0] for pin in pins} >= {"matplotlib", "numpy", "safetensors", "scipy", "tokenizers"}
    assert not {pin.partition("==")[0] for pin in pins} & colab.FROM_COLAB


def test_a_requirement_without_a_pin_is_named(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((REPOSITORY / name).read_text().replace("scipy==", "other=="))
    monkeypatch.setattr(colab, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"constraints\.txt: expected a version of each of \['scipy'\]"):
        colab.pinned()


def test_colabs_cell_does_nothing_elsewhere_and_there_fetches_installs_and_moves(monkeypatch):
    cell = colab.install_cell("https://example.org/owner/name")
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
        "test -d name || git clone --quiet --depth 1 https://example.org/owner/name",
        "{sys.executable} name/course/sage_course/colab.py",
        "cd -q name/notebooks",
    ]
    assert sys.path == ["/content/name", "/content/name/kernels", *before]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_what_colab_needs_and_a_link_to_its_answers(path):
    up_to_date = path.read_text() == framed(path.relative_to(REPOSITORY))
    assert up_to_date, "run `python -m sage_lab readme`"


def test_a_frame_is_written_once_and_follows_the_address(tmp_path, monkeypatch):
    cells = [
        {"cell_type": "markdown", "source": ["# 01 · Title"]},
        {"cell_type": "code", "execution_count": 1, "outputs": [{"execution_count": 1, "data": {}}], "source": ["1"]},
        {"cell_type": "markdown", "source": ["## Exercises\n", "\n", "1. One\n", "\n", "## Where the papers say more"]},
    ]
    path = Path("notebooks", "01_title.ipynb")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / path).write_text(json.dumps({"cells": cells}))
    for module in (notebook_frame, outline):
        monkeypatch.setattr(module, "repository", lambda: tmp_path)
    found = []
    for name in ("first", "first", "second"):
        urls = f'[project.urls]\nRepository = "https://github.com/{name}/course"\n'
        (tmp_path / "pyproject.toml").write_text(urls)
        found.append(rewrite_notebooks())
        title, install, code, exercises = json.loads((tmp_path / path).read_text())["cells"]
        assert title["source"][0] == "# 01 · Title\n"
        assert "".join(title["source"]).count("on Colab") == 1
        assert f"github/{name}/course/blob/main/notebooks/01_title.ipynb" in title["source"][-1]
        assert "".join(install["source"]) == colab.install_cell(f"https://github.com/{name}/course").rstrip()
        assert (install["execution_count"], code["execution_count"], code["outputs"][0]["execution_count"]) == (1, 2, 2)
        link = "Answers to the open questions: [exercises/solutions/01.md](../exercises/solutions/01.md)"
        assert re.findall(r"1\. One\n\n(.*\))\. .*\n\n## Where", "".join(exercises["source"])) == [link]
    assert found == [[tmp_path / path], [], [tmp_path / path]]


def test_steps_have_the_minutes_of_the_notebooks_themselves(course_pages):
    first = notebooks()[0]
    ((link, minutes),) = course_pages.steps(["notebook 00"])
    assert minutes == first.minutes
    assert link == f"[{first.title}](/notebooks/00_start_here.ipynb)"
    (_, minutes), _ = course_pages.steps(["exercise 01", "notebook 00"])
    assert f"Minutes: {minutes}\n" in (REPOSITORY / "exercises/01_block_quantizer/master.py").read_text()
    with pytest.raises(ValueError, match=r"way: expected lines among .*'notebook 00'.*, got 'notebook 99'"):
        course_pages.steps(["notebook 99"])


def ways():
    """The title, the prose and the days, a list of steps each, of every way."""
    text = (REPOSITORY / "book" / "ways.md").read_text()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        days = re.findall(r"^```\{way\}\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
        yield part.partition(":")[0], part.partition("```")[0], [day.splitlines() for day in days]


def needs(notebook):
    """Those that a first cell asks for: "01 to 03 and 05b" are 01, 02, 03 and 05b. What only helps is left out."""
    first_cell = "".join(json.loads((REPOSITORY / notebook.path).read_text())["cells"][0]["source"])
    text = re.search(r"\*\*Needs\*\* (.*)", first_cell)[1].partition(";")[0]
    for first, last in re.findall(r"(\d\d) to (\d\d)", text):
        yield from (f"{number:02d}" for number in range(int(first), int(last) + 1))
    yield from re.findall(r"\d\d[a-c]?", text)


def test_ways_fit_into_their_time_and_four_days_hold_every_notebook(course_pages):
    minutes = {}
    for title, _, days in ways():
        minutes.setdefault(title, []).extend(sum(time for _, time in course_pages.steps(day)) for day in days)
    lengths = {"Half a day": 1, "One day": 2, "Two days": 2, "Four days": 4}
    assert {title: len(found) for title, found in minutes.items()} == lengths
    assert max(minutes["Half a day"]) <= 5 * 60
    assert max(minutes["One day"] + minutes["Two days"] + minutes["Four days"]) <= 8 * 60
    (four_days,) = ([line for day in days for line in day] for title, _, days in ways() if title == "Four days")
    needed = [f"notebook {number}" for _, number, title, _ in notebooks() if "optional" not in title.lower()]
    assert [line for line in four_days if line.startswith("notebook")] == needed


def test_a_way_holds_what_its_notebooks_need_or_says_what_to_do_without():
    course = {f"notebook {notebook.number}": notebook for notebook in notebooks()}
    for title, prose, days in ways():
        lines = [line for day in days for line in day]
        for place, line in enumerate(lines):
            if line in course:
                missing = {f"notebook {number}" for number in needs(course[line])} - set(lines[:place])
                assert all(name in prose.lower() for name in missing), f"{title}: {line} needs {sorted(missing)}"


def test_a_notebooks_page_has_badges_in_place_of_colabs_cell_and_says_where_a_slider_stands(course_pages):
    path = Path("notebooks/00_start_here.ipynb")
    text = framed(path)
    content = [text]
    course_pages.with_head_and_notes(None, "notebooks/00_start_here", content)
    before, after = json.loads(text)["cells"], json.loads(content[0])["cells"]
    assert after[0]["source"] == "".join(before[0]["source"][:-2]).rstrip()
    assert colab_address(path) in before[0]["source"][-1]
    assert before[1]["id"] == INSTALL
    assert after[1]["source"].count(colab_address(path)) == after[1]["source"].count(file_address(path)) == 1
    assert [cell["source"] for cell in after[2:]] == [cell["source"] for cell in before[2:]]
    sliders = text.count(course_pages.WIDGET)
    assert sliders > 0
    assert content[0].count("Here the notebook has a slider") == sliders
    assert course_pages.WIDGET not in content[0]


def test_every_glossary_entry_has_two_sentences():
    entries = re.findall(r"\n((?:  \S.*\n)+)", (REPOSITORY / "book" / "glossary.md").read_text())
    assert len(entries) > 60
    for entry in entries:
        text = re.sub(r"\$[^$]*\$|`[^`]*`", "x", " ".join(entry.split()))
        assert len(re.findall(r"[^.]\.(?= [A-Zx0-9]|$)", text)) == 2, entry
