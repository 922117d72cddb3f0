"""The worked solutions of the notebooks' open questions: their code runs and asserts what their text says."""

import json
import linecache
import re

import pytest
import torch
from sage_lab.records import REPOSITORY

PAGES = sorted((REPOSITORY / "exercises" / "solutions").glob("[0-9][0-9]*.md"))
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("[0-9][0-9]*.ipynb"))


def questions(path):
    """The titles of a notebook's open questions, as "1. Title". Empty if it has no section "Exercises"."""
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    exercises = re.search(r"^## Exercises$(.*?)(^## |\Z)", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^(\d)\. \*\*(.+?)\*\*", exercises[1], re.MULTILINE) if exercises else []
    return [f"{number}. {title.rstrip('?.')}" for number, title in found]


def answers(page):
    """The titles of a page's answers, in the same form."""
    return [title.rstrip("?.") for title in re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_open_question_has_its_answer(path):
    page = REPOSITORY / "exercises" / "solutions" / f"{path.name.partition('_')[0]}.md"
    asked = questions(path)
    assert (answers(page) if page.exists() else []) == asked, f"{page.name}: expected an answer to each of {asked}"


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
