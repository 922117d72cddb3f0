"""Every open question of a notebook has its answer, and the answers' code runs and asserts what their text says."""

import json
import linecache
import re

import pytest
import torch
from sage_lab.records import REPOSITORY

PAGES = sorted((REPOSITORY / "exercises" / "solutions").glob("[0-9][0-9]*.md"))
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
