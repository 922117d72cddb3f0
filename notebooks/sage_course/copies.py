"""The reader's own copies of the notebooks, in `my/`: without outputs, with every gap open, and never overwritten.

The notebooks in `notebooks/` are committed with their outputs, for the book and for GitHub. A reader should guess
before a result appears, so `make lab` opens a copy. A copy notes in its metadata which original it was made from.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sage_lab.command_line import POSITIONAL, Arguments, output_folder
from sage_lab.files import write_file
from sage_lab.records import REPOSITORY, as_json

from sage_course.outline import notebook_files


@dataclass(frozen=True, kw_only=True)
class Start(Arguments):
    """Make the reader's own copies of the notebooks, without outputs. What is there already stays as it is."""

    numbers: Annotated[tuple[str, ...], POSITIONAL, "of notebooks, as in 05; all without"] = ()
    beside: Annotated[bool, "make another copy where there is one"] = False
    folder: Annotated[Path, output_folder, "where the copies are"] = REPOSITORY / "my"

    def run(self, command: str) -> None:
        originals = {path.name.partition("_")[0]: path for path in notebook_files()}
        if unknown := set(self.numbers) - originals.keys():
            raise ValueError(f"numbers: expected some of {' '.join(originals)}, got {' '.join(sorted(unknown))}")
        chosen = [originals[number] for number in self.numbers or originals]
        lines = list(make_copies(chosen, self.folder, self.beside))
        print("\n".join(lines))
        if self.json:
            write_file(self.json, as_json(lines) + "\n")


def make_copies(originals: Sequence[Path], folder: Path, beside: bool = False) -> Iterator[str]:
    """Copy notebooks, and yield what a reader has to know about it, a line each.

    Args:
        originals: The committed notebooks.
        folder: Where the copies are.
        beside: Whether to make another copy next to one that is there.
    """
    kept = 0
    for original in originals:
        copy, number = folder / original.name, original.name.partition("_")[0]
        if copy.exists() and not beside:
            kept += 1
            if version_of(copy) != version(original):
                yield f"{copy}: kept as you left it, but notebook {number} has changed since you began."
                yield f"    `python -m sage_course start {number} --beside` makes a copy of the new one beside yours."
            continue
        tries = 1
        while copy.exists():
            tries += 1
            copy = folder / f"{original.stem}_{tries}.ipynb"
        write_file(copy, json.dumps(fresh(original), indent=1, ensure_ascii=False) + "\n")
        yield f"{copy}: made."
    if kept:
        yield f"{folder}: {kept} of your notebooks kept as they are."


def fresh(original: Path) -> dict:
    """Return a notebook as its reader begins with it, whose links lead from the copy's folder to where they led."""
    notebook = json.loads(original.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
        else:
            cell["source"] = [line.replace("](book/", "](../notebooks/book/") for line in cell["source"]]
    notebook["metadata"]["sage_course"] = {"original": version(original)}
    return notebook


def version(original: Path) -> str:
    """Return a short text that changes with the cells of a notebook, and not with their outputs."""
    cells = json.loads(original.read_text(encoding="utf-8"))["cells"]
    text = json.dumps([(cell["cell_type"], cell["source"]) for cell in cells])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def version_of(copy: Path) -> str | None:
    """Return the version from which a copy was made; None if the copy does not say."""
    try:
        return json.loads(copy.read_text(encoding="utf-8"))["metadata"]["sage_course"]["original"]
    except (ValueError, KeyError, TypeError):
        return None
