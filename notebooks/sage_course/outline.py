"""The course's notebooks: what their first cells say, where they lie in public, and the frame that they all have.

The frame is a link and a cell for Colab at the top, the minutes of the exercises at the end, which are homework, a link
to their answers, and the tags of outputs that nbval doesn't compare. The address of the public repository stands in
pyproject.toml alone, and the outputs with their reasons in notebooks/not_compared.toml; `python -m sage_course` writes
all of it into every notebook.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from sage_lab.records import REPOSITORY

from sage_course.colab import install_cell

BRANCH = "main"
COPIES = "reader"  # the branch of the reader's copies, in my/; .github/workflows/reader.yml pushes it
INSTALL = "install-on-colab"  # the cell's id
ON_COLAB = re.compile(r"\n*\[Open this notebook on Colab\]\(.*\)\.\s*\Z")
HOMEWORK = re.compile(r"(?<=\*\*Homework\*\* about )\d+")  # minutes, in the first cell
ANSWERS = re.compile(r"\n*^Answers to the open questions: \[.*$", re.MULTILINE)
UNSEEN_CODE = {"hide-input", "hide-cell", "remove-cell"}  # tags
NOT_COMPARED = "nbval-ignore-output"
CONTROLS = "application/vnd.jupyter.widget-view+json"
UNSEEN_OUTPUT = {"hide-output", "hide-cell", "remove-cell"}
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
END_OF_EXERCISES = re.compile(r"(^## Exercises$.*?)\s*(?=^## |\Z)", re.DOTALL | re.MULTILINE)


class Notebook(NamedTuple):
    """A notebook's file, and what its name and its first cell say."""

    path: Path  # from the repository's root, as in notebooks/01_attention.ipynb
    number: str  # as in "01"
    title: str
    minutes: int


class Load(NamedTuple):
    """The work that a notebook asks of its reader."""

    minutes: int  # as its first cell says, in one sitting
    homework: int  # minutes of the exercises at its end, in a second sitting
    lines: int  # of code that is not folded
    numbers: int  # in its outputs
    gaps: int


def notebook_files() -> list[Path]:
    return sorted((REPOSITORY / "notebooks").glob("[0-9][0-9]*_*.ipynb"))


def notebook_facts(path: Path, first_cell: str) -> Notebook:
    """Read title and minutes from a notebook's first cell.

    Raises:
        ValueError: the cell lacks one of them.
    """
    title = re.search(r"# (\w+) · (.+)", first_cell)
    minutes = re.search(r"\*\*Time\*\* about (\d+) minutes", first_cell)
    if not (title and minutes):
        raise ValueError(f"{path.name}: expected '# NN · Title' and '**Time** about N minutes' in the first cell")
    return Notebook(path, title[1], title[2], int(minutes[1]))


def notebooks() -> list[Notebook]:
    """Return all notebooks, in the order of the course."""
    cells = {path: json.loads(path.read_text(encoding="utf-8"))["cells"] for path in notebook_files()}
    return [notebook_facts(path.relative_to(REPOSITORY), "".join(x[0]["source"])) for path, x in cells.items()]


def homework_minutes(path: Path) -> int:
    """Add up the minutes of the exercises at a notebook's end."""
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    return sum(int(minutes) for minutes in re.findall(r"\*\* \((?:easy|medium|hard), (\d+) minutes\)", text))


def load(path: Path) -> Load:
    """Count what a notebook asks of its reader."""
    lines = numbers = gaps = 0
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] != "code" or cell.get("id") == INSTALL:
            continue
        text, tags = "".join(cell["source"]), set(cell["metadata"].get("tags", []))
        gaps += text.count("= fill_in(")
        lines += 0 if tags & UNSEEN_CODE else sum(bool(line.strip()) for line in text.splitlines())
        for output in () if tags & UNSEEN_OUTPUT else cell["outputs"]:
            data = output.get("data", {})
            if "image/png" not in data:  # its text is as in "Figure(640x480)"
                shown = output.get("text") or data.get("text/markdown") or data.get("text/plain", "")
                numbers += len(NUMBER.findall("".join(shown)))
    minutes = notebook_facts(path, "".join(cells[0]["source"])).minutes
    return Load(minutes, homework_minutes(path), lines, numbers, gaps)


def project() -> dict[str, Any]:
    """Return what pyproject.toml says about the library."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def public_address() -> str:
    """Return the repository's public address."""
    return project()["urls"]["Repository"]


def file_address(path: Path) -> str:
    """Return the public address of a file or folder, given from the repository's root."""
    kind = "tree" if (REPOSITORY / path).is_dir() else "blob"
    return f"{public_address()}/{kind}/{BRANCH}/{path.as_posix()}"


def colab_address(path: Path, repository: str | None = None) -> str:
    """Return the address at which Colab opens the reader's copy of a notebook, which has no outputs."""
    github = (repository or public_address()).replace("https://github.com", "https://colab.research.google.com/github")
    return f"{github}/blob/{COPIES}/my/{path.name}"


def framed(text: str, path: Path, repository: str) -> str:
    """Return a notebook's text with the frame as it should be, and everything else as it is.

    Code cells are counted from 1 again if they were counted. Controls of widgets go, since no kernel answers them any
    more: what was drawn beforehand stays.

    Args:
        text: the file's content.
        path: the file, from the repository's root.
        repository: the public address.
    """
    notebook = json.loads(text)
    first, *cells = notebook["cells"]
    link = f"\n\n[Open this notebook on Colab]({colab_address(path, repository)})."  # JupyterLab can't show a badge
    _rewrite(first, ON_COLAB.sub("", HOMEWORK.sub(str(homework_minutes(path)), "".join(first["source"]))) + link)
    cells = [cell for cell in cells if cell.get("id") != INSTALL]
    counted = all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    install = {"cell_type": "code", "execution_count": None, "id": INSTALL, "metadata": {}, "outputs": [], "source": []}
    _rewrite(install, install_cell(repository).rstrip())
    notebook["cells"] = [first, install, *cells]
    not_compared = outputs_not_compared(path.name.partition("_")[0])
    for count, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        for counts in (cell, *(output for output in cell["outputs"] if "execution_count" in output)):
            counts["execution_count"] = count if counted else None
        for output in cell["outputs"]:
            output.get("data", {}).pop(CONTROLS, None)
        _tag(cell, cell.get("id") in not_compared)
    notebook["metadata"].pop("widgets", None)
    page = f"exercises/solutions/{path.name.partition('_')[0]}.md"
    answers = f"Answers to the open questions: [{page}](../{page}). Try yourself first."
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and END_OF_EXERCISES.search(source):
            _rewrite(cell, END_OF_EXERCISES.sub(rf"\1\n\n{answers}\n\n", ANSWERS.sub("", source)).rstrip())
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def outputs_not_compared(number: str) -> dict[str, str]:
    """Return why an output is not compared, by the cells' ids, in the notebook of this number."""
    reasons = tomllib.loads((REPOSITORY / "notebooks" / "not_compared.toml").read_text(encoding="utf-8"))
    return {cell: why for why, cells in reasons.items() for of in ("*", number) for cell in cells.get(of, [])}


def _tag(cell: dict, not_compared: bool) -> None:
    """Give a cell the tag that nbval reads, or take it away."""
    tags = [tag for tag in cell["metadata"].pop("tags", []) if tag != NOT_COMPARED]
    tags = [NOT_COMPARED] * not_compared + tags
    cell["metadata"] |= {"tags": tags} if tags else {}


def _rewrite(cell: dict, text: str) -> None:
    cell["source"] = text.splitlines(keepends=True)
