"""Notebooks and exercises name each other: a README's "pairs with" and the links below a notebook's exercises."""

import json
import re

import pytest
from sage_lab.records import REPOSITORY

READMES = sorted((REPOSITORY / "exercises").glob("[0-9][0-9]_*/README.md"))
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def graded_links(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    (exercises,) = re.findall(r"^## Exercises$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"\[([^\]]+)\]\(\.\./exercises/(\w+)/README\.md\)", exercises), exercises


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_links_the_exercises_that_name_it(notebook):
    links, text = graded_links(notebook)
    paired = [path for path in READMES if f"notebooks/{notebook.name}" in path.read_text()]
    expected = [(path.read_text().splitlines()[0][5:], path.parent.name) for path in paired]
    assert links == expected, f"under '## Exercises' of {notebook.name}, link in this order: " + ", ".join(
        f"[{title}](../exercises/{name}/README.md)" for title, name in expected
    )
    if links:
        assert f'grade("{links[0][1]}")' in text


def test_every_exercise_names_a_notebook_that_exists():
    assert READMES
    for path in READMES:
        named = re.findall(r"\((?:\.\./)+notebooks/(\w+\.ipynb)\)", path.read_text().replace("\n", " "))
        assert named, path
        assert set(named) <= {notebook.name for notebook in NOTEBOOKS}
