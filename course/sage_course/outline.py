"""What the course consists of, from the notebooks' first cells, and where it lies in public, from pyproject.toml."""

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from sage_lab.records import REPOSITORY

BRANCH = "main"


class Notebook(NamedTuple):
    """What a notebook's file name and first cell say."""

    path: Path  # from the repository's root, as in notebooks/01_attention.ipynb
    number: str  # as in "01"
    title: str
    minutes: int


def notebook_facts(path: Path) -> Notebook:
    """The facts of notebook `path`, which lies in the repository. ValueError if its first cell lacks one."""
    first_cell = "".join(json.loads(path.read_text())["cells"][0]["source"])
    title = re.search(r"# (\w+) · (.+)", first_cell)
    minutes = re.search(r"\*\*Time\*\* about (\d+) minutes", first_cell)
    if not (title and minutes):
        raise ValueError(f"{path.name}: expected '# NN · Title' and '**Time** about N minutes' in the first cell")
    return Notebook(path.relative_to(REPOSITORY), title[1], title[2], int(minutes[1]))


def notebooks() -> list[Notebook]:
    """All notebooks, in the order of the course."""
    return [notebook_facts(path) for path in sorted((REPOSITORY / "notebooks").glob("[0-9][0-9]*_*.ipynb"))]


def public_address() -> str:
    """The address of the repository in public: project.urls in pyproject.toml, the one place that holds it."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def file_address(path: Path) -> str:
    """Where the repository's file or folder `path`, given from the root, can be read in public."""
    kind = "tree" if (REPOSITORY / path).is_dir() else "blob"
    return f"{public_address()}/{kind}/{BRANCH}/{path.as_posix()}"


def colab_address(path: Path) -> str:
    """Where Colab opens the notebook `path`, given from the root. Colab reads it from the public repository."""
    github = public_address().replace("https://github.com", "https://colab.research.google.com/github")
    return f"{github}/blob/{BRANCH}/{path.as_posix()}"
