"""Notebooks, exercises and solutions name each other, and the solutions' code runs and asserts what their text says."""

import json
import linecache
import re

import pytest
import torch
from sage_lab.records import REPOSITORY

PAGES = sorted((REPOSITORY / "exercises" / "solutions").glob("[0-9][0-9]*.md"))
READMES = sorted((REPOSITORY / "exercises").glob("[0-9][0-9]_*/README.md"))
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def section_exercises(path):
    """Return the text of a notebook's section "Exercises"."""
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    (section,) = re.findall(r"^## Exercises$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return section


def answers(page):
    """The titles of a page's answers, in the same form."""
    return [title.rstrip("?.") for title in re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_open_question_has_its_answer(path):
    page = REPOSITORY / "exercises" / "solutions" / f"{path.name.partition('_')[0]}.md"
    questions = re.findall(r"^(\d)\. \*\*(.+?)\*\*", section_exercises(path), re.MULTILINE)
    asked = [f"{number}. {title.rstrip('?.')}" for number, title in questions]
    assert (answers(page) if page.exists() else []) == asked, f"{page.name}: expected an answer to each of {asked}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_links_the_exercises_that_name_it(path):
    text = section_exercises(path)
    links = re.findall(r"\[([^\]]+)\]\(\.\./exercises/(\w+)/README\.md\)", text)
    paired = [page for page in READMES if f"notebooks/{path.name}" in page.read_text()]
    expected = [(page.read_text().splitlines()[0][5:], page.parent.name) for page in paired]
    assert links == expected, f"under '## Exercises' of {path.name}, link in this order: " + ", ".join(
        f"[{title}](../exercises/{name}/README.md)" for title, name in expected
    )
    assert not links or f'grade("{links[0][1]}")' in text


def test_every_exercise_names_a_notebook_that_exists():
    assert READMES
    for path in READMES:
        named = re.findall(r"\((?:\.\./)+notebooks/(\w+\.ipynb)\)", path.read_text().replace("\n", " "))
        assert named, path
        assert set(named) <= {notebook.name for notebook in NOTEBOOKS}


def test_every_page_belongs_to_a_notebook():
    numbers = {path.name.partition("_")[0] for path in NOTEBOOKS}
    assert {page.stem for page in PAGES} <= numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_solutions_hold(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 200
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) > len(answers(page)) > 0, "expected code before the first question and for each"
    assert all("assert" in block for block in blocks[1:])
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    try:
        program = "\n\n".join(blocks)
        lines = program.splitlines(keepends=True)
        linecache.cache[page.name] = len(program), None, lines, page.name  # Triton reads the source of its functions
        exec(compile(program, page.name, "exec"), {"__name__": page.stem})
    finally:
        torch.set_num_threads(threads)
