"""What all notebooks have alike: a link and a cell for Colab at the top, a link to the answers below the exercises.

`python -m sage_lab readme` writes them: the address of the public repository stands in each.
"""

import json
import re
from pathlib import Path

from sage_lab.records import REPOSITORY

from sage_course.colab import install_cell
from sage_course.outline import colab_address, public_address

INSTALL = "install-on-colab"  # the cell's id
ON_COLAB = re.compile(r"\n*\[Open this notebook on Colab\]\(.*\)\.\s*\Z")
ANSWERS = re.compile(r"\n*^Answers to the open questions: \[.*$", re.MULTILINE)
END_OF_EXERCISES = re.compile(r"(^## Exercises$.*?)\s*(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def colab_link(path: Path) -> str:
    """The line that opens notebook `path`, given from the root, on Colab. Text: JupyterLab asks in vain for a badge."""
    return f"[Open this notebook on Colab]({colab_address(path)})."


def answers(path: Path) -> str:
    """The line that leads to the answers of notebook `path`: one link for JupyterLab, the repository and the book."""
    page = f"exercises/solutions/{path.name.partition('_')[0]}.md"
    return f"Answers to the open questions: [{page}](../{page}). Try yourself first."


def framed(path: Path) -> str:
    """The text of the notebook file `path`, given from the root, with install cell and links as they should be.

    Nothing else changes: the cells' other text, their outputs and ids stay. Code cells are counted from 1 again if
    they were counted.
    """
    notebook = json.loads((REPOSITORY / path).read_text())
    first, *cells = notebook["cells"]
    _rewrite(first, ON_COLAB.sub("", "".join(first["source"])) + f"\n\n{colab_link(path)}")
    cells = [cell for cell in cells if cell.get("id") != INSTALL]
    counted = all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    install = {"cell_type": "code", "execution_count": None, "id": INSTALL, "metadata": {}, "outputs": [], "source": []}
    _rewrite(install, install_cell(public_address()).rstrip())
    notebook["cells"] = [first, install, *cells]
    for count, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        for counts in (cell, *(output for output in cell["outputs"] if "execution_count" in output)):
            counts["execution_count"] = count if counted else None
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and END_OF_EXERCISES.search(text):
            text = END_OF_EXERCISES.sub(rf"\1\n\n{answers(path)}\n\n", ANSWERS.sub("", text))
            _rewrite(cell, text.rstrip())
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _rewrite(cell: dict, text: str) -> None:
    cell["source"] = text.splitlines(keepends=True)


def rewrite_notebooks() -> list[Path]:
    """Bring every notebook's frame up to date; returns those that changed."""
    changed = []
    for file in sorted((REPOSITORY / "notebooks").glob("[0-9][0-9]*_*.ipynb")):
        text = framed(file.relative_to(REPOSITORY))
        if text != file.read_text():
            file.write_text(text)
            changed.append(file)
    return changed
