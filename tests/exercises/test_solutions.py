"""The worked solutions of the notebooks' open questions: their code runs and asserts what their text says."""

import json
import re

import pytest
import torch

from sage_ref.records import REPOSITORY

PAGES = sorted((REPOSITORY / "exercises" / "solutions").glob("[0-9][0-9]*.md"))


def questions(number):
    """The titles of a notebook's three open questions, as "1. Title"."""
    (notebook,) = (REPOSITORY / "notebooks").glob(f"{number}_*.ipynb")
    cells = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    exercises = re.search(r"^## Exercises$(.*?)(^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]
    return [f"{i}. {title.rstrip('?.')}" for i, title in re.findall(r"^(\d)\. \*\*(.+?)\*\*", exercises, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_solutions_hold(page):
    text = page.read_text()
    titles = [title.rstrip("?.") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)]
    assert titles
    assert set(titles) <= set(questions(page.stem))
    assert len(text.splitlines()) <= 140
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) > len(titles), "expected code before the first question and for each"
    assert all("assert" in block for block in blocks[1:])
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    try:
        exec(compile("\n\n".join(blocks), page.name, "exec"), {"__name__": page.stem})
    finally:
        torch.set_num_threads(threads)
