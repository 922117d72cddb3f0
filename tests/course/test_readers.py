"""Whole notebooks as a reader runs them: each gap filled in right, but not as the course does it, each cell run twice.

By default with the first right form of each gap, without the two notebooks that train for a minute, and a cell that
took long once is not run again. `SAGE_REF_VARIANTS=all` runs everything with every form.
"""

import ast
import importlib
import json
import os
import re
import textwrap
import time
import warnings

import pytest
from matplotlib import pyplot
from sage_course.gaps import Mistake, defined, edited, plain
from sage_course.outline import INSTALL, notebook_files
from sage_lab.records import REPOSITORY

ALL = os.environ.get("SAGE_REF_VARIANTS") == "all"
LONG = float("inf") if ALL else 0.1  # seconds of a processor
TRAIN = () if ALL else ("12c", "13")
NOTEBOOKS = [path for path in notebook_files() if path.name.partition("_")[0] not in TRAIN]


def filled_in(text, gap, number):
    """Return a cell's text with a right form of the solution in the place of the function with `...` in it."""
    pair = gap.right[min(number, len(gap.right) - 1)]
    name, lines = plain(gap.solution).__name__, text.splitlines(keepends=True)
    (node,) = (x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef) and x.name == name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    function = textwrap.indent(edited(gap.text, [Mistake(*pair)]), node.col_offset * " ")
    return "".join(lines[:first]) + function + "".join(lines[node.end_lineno :])


@pytest.mark.parametrize("number", (0, 1) if ALL else (0,))
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_however_its_gaps_are_filled_in_and_if_cells_are_run_twice(
    path, number, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("SAGE_REF_YOURS", str(tmp_path))
    monkeypatch.chdir(REPOSITORY / "notebooks")
    pyplot.switch_backend("agg")
    names, gaps = {"__name__": "__main__", "display": lambda *shown: None}, {}
    for place, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code" or cell.get("id") == INSTALL:
            continue
        text = "".join(cell["source"])
        if found := re.search(r'lesson\("(\w+)"\)', text):
            gaps = importlib.import_module(f"sage_course.lessons.{found[1]}").GAPS
        gap = re.search(r'= fill_in\("(\w+)"', text)
        if gap and gaps[gap[1]].right:
            text = filled_in(text, gaps[gap[1]], number)
        start = time.process_time()
        run(text, f"<{path.stem}, cell {place}>", names)
        if time.process_time() - start < LONG:
            run(text, f"<{path.stem}, cell {place}>", names)
        printed = capsys.readouterr().out
        if gap and gaps[gap[1]].right:
            assert f"{gap[1]}: right." in printed, printed


def run(text, file, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        defined(text, file, names)
    pyplot.close("all")
