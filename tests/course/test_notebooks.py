"""The notebooks as committed: run once from top to bottom, outputs kept, nothing of the machine that ran them inside.

nbval runs them again and compares, but it passes a notebook whose outputs were cleared and ignores misspelt tags.
"""

import ast
import copy
import inspect
import json
import re
import textwrap

import pytest
from matplotlib.figure import Figure
from sage_course import figures as plotting
from sage_course.notebook_frame import INSTALL
from sage_lab.records import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
KNOWN_TAGS = {"nbval-ignore-output"}
LAST_SECTIONS = ["What to remember", "Exercises", "Where the papers say more"]
LARGEST = 1_500_000  # bytes
MOST_CELLS, LEAST_FILL_INS = 60, 3
LONGEST, LONGEST_PROGRAM = 20, 40  # lines of a code cell; the second if a whole Triton or Gluon program stands in it
SMALLEST_LETTERS = 9  # points
PRINTS = {"print", "predict", "compare", "fill_in"}
FIGURE_MAKERS = {"subplots", "panels"} | {
    name
    for name, function in inspect.getmembers(plotting, inspect.isfunction)
    if inspect.signature(function).return_annotation is Figure
}
SLIDERS = {"interact", "interact_manual", "interactive", "interactive_output"}
OF_THIS_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users)\b|\bC:\\|ipykernel_|\bat 0x[0-9a-f]{9,}")


def problems(name: str, notebook: dict, size: int) -> list[str]:
    """What is wrong with a notebook, one line each; empty if nothing is."""
    cells = notebook["cells"]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    found = [f"size: expected at most {LARGEST} bytes, got {size}"] if size > LARGEST else []
    metadata = copy.deepcopy(notebook["metadata"])
    metadata.get("kernelspec", {}).update(display_name="Python 3")  # JupyterLab's is "Python 3 (ipykernel)"
    if metadata != METADATA:
        found.append(f"metadata: expected what `make notebooks` leaves, {METADATA}, got {notebook['metadata']}")
    counts = [cell["execution_count"] for cell in code_cells]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"execution counts: expected 1 to {len(counts)} in order, got {counts}")
    if not any(cell["outputs"] for cell in code_cells):
        found.append("outputs: expected some, got none in any cell")
    if (count := sum(cell.get("id") != INSTALL for cell in cells)) > MOST_CELLS:
        found.append(f"cells: expected at most {MOST_CELLS}, got {count}")
    fill_ins = sum(len(re.findall(r"\bfill_in\(", "".join(cell["source"]))) for cell in code_cells)
    if fill_ins < LEAST_FILL_INS:
        found.append(f"cells to fill in: expected at least {LEAST_FILL_INS}, got {fill_ins}")
    found += text_problems(name, cells)
    for number, cell in enumerate(cells):
        complaints = machine_problems(cell)
        if cell["cell_type"] == "code":
            complaints += code_problems(cell) + style_problems("".join(cell["source"]))
        found += [f"cell {number}: {complaint}" for complaint in complaints]
    return found


def number_of(name: str) -> str:
    """ "08" or, of an optional part, "08b"."""
    return name.partition("_")[0]


def text_problems(name: str, cells: list[dict]) -> list[str]:
    """The title, the sections every notebook ends with, and links to files that don't exist."""
    found = []
    title = "".join(cells[0]["source"]) if cells[0]["cell_type"] == "markdown" else ""
    if not re.match(rf"# {number_of(name)} · \w", title) or not re.search(r"\d+ minutes", title):
        found.append(f"first cell: expected the title '# {number_of(name)} · ...' and the minutes it takes")
    modules = re.findall(r"`((?:sage_ref|kernels)/[\w/]+\.py)`", title)
    if not modules:
        found.append("first cell: expected the module it pairs with, as in `sage_ref/attention.py`")
    markdown = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", markdown)
    missing = [target for target in modules if not (REPOSITORY / target).exists()]
    missing += [target for target in linked if not (REPOSITORY / "notebooks" / target).exists()]
    found += [f"link: expected a file, found none at {target}" for target in missing]
    sections = re.split(r"^## ", markdown, flags=re.MULTILINE)[1:]
    headings = [section.splitlines()[0].strip() for section in sections]
    if headings[-3:] != LAST_SECTIONS:
        found.append(f"last sections: expected {LAST_SECTIONS}, got {headings[-3:]}")
    elif (exercises := len(re.findall(r"^\d+\. ", sections[-2], flags=re.MULTILINE))) != 3:
        found.append(f"exercises: expected three, got {exercises}")
    return found


def machine_problems(cell: dict) -> list[str]:
    """Paths and process names of the machine that ran the cell."""
    texts = ["".join(cell["source"])]
    for output in cell.get("outputs", []):
        texts += ["".join(output.get("text", "")), "".join(output.get("traceback", ""))]
        texts += ["".join(text) for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return [f"of this machine: {match}" for text in texts for match in OF_THIS_MACHINE.findall(text)]


def code_problems(cell: dict) -> list[str]:
    """Errors, warnings, tags, and outputs that should be there."""
    found = []
    tags = set(cell["metadata"].get("tags", []))
    if unknown := tags - KNOWN_TAGS:
        found.append(f"tags: expected {sorted(KNOWN_TAGS)}, got {sorted(unknown)}")
    outputs = cell["outputs"]
    found += [f"error output: {output['ename']}" for output in outputs if output["output_type"] == "error"]
    found += [f"stderr: {''.join(output['text'])[:80]}" for output in outputs if output.get("name") == "stderr"]
    # Of the lines that are not indented: they run for certain.
    calls = set(re.findall(r"^(?:\w[\w, ]* = )?(?:\w+\.)*(\w+)\(", "".join(cell["source"]), re.MULTILINE))
    if calls & PRINTS and not any(output.get("name") == "stdout" for output in outputs):
        found.append("output: expected text, since the cell prints")
    if calls & FIGURE_MAKERS and not any("image/png" in output.get("data", {}) for output in outputs):
        found.append("output: expected a PNG, since the cell draws a figure")
    if "fill_in" in calls and "nbval-ignore-output" not in tags:
        found.append("tags: expected nbval-ignore-output, since a reader fills the cell in")
    if calls & SLIDERS and not outputs:
        found.append("output: expected some, since the cell has a slider")
    if calls & SLIDERS and "nbval-ignore-output" not in tags:
        found.append("tags: expected nbval-ignore-output, since the cell has a slider")
    return found


def style_problems(source: str) -> list[str]:
    """Cells too long, questions without a name, sliders that redraw while they are dragged, small letters."""
    found = []
    longest = LONGEST_PROGRAM if re.search(r"^\s*@(?:triton|gluon)\.jit", source, re.MULTILINE) else LONGEST
    if (lines := len(source.splitlines())) > longest:
        found.append(f"length: expected at most {longest} lines, got {lines}")
    unnamed = re.findall(r"\b(?:predict|compare)\(\s*\"(q\d\w*)\"", source)
    found += [f"question: expected a name that says what is asked, got {name}" for name in unnamed]
    sizes = re.findall(r"\b(?:fontsize|labelsize)=(\d+(?:\.\d+)?)", source)
    small = [size for size in sizes if float(size) < SMALLEST_LETTERS]
    found += [f"letters: expected at least {SMALLEST_LETTERS} points, got {size}" for size in small]
    return found + [complaint for call in calls_in(source) for complaint in slider_problems(call)]


def calls_in(source: str) -> list[ast.Call]:
    source = re.sub(r"^ *[%!].*", "", source, flags=re.MULTILINE)  # commands to IPython and the shell
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def slider_problems(call: ast.Call) -> list[str]:
    """A slider in `call`, or a tuple that ipywidgets makes one of, that isn't told to wait until it is let go."""
    name = ast.unparse(call.func).rpartition(".")[-1]
    options = {option.arg: option.value for option in call.keywords}
    if name.endswith("Slider") and ast.unparse(options.get("continuous_update", call.func)) != "False":
        return [f"slider: expected {name}(..., continuous_update=False), got {ast.unparse(call)}"]
    tuples = [option for option, value in options.items() if name in SLIDERS and isinstance(value, ast.Tuple)]
    return [f"slider: expected {option}=IntSlider(..., continuous_update=False), got a tuple" for option in tuples]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    found = problems(path.name, json.loads(path.read_text()), path.stat().st_size)
    assert not found, "\n".join([path.name, *found])


def test_the_course_map_lists_every_notebook_with_its_minutes():
    cells = json.loads(NOTEBOOKS[0].read_text())["cells"]
    (course,) = [text for cell in cells if (text := "".join(cell["source"])).startswith("## The course")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in course.splitlines() if line[2:4].isdigit()]
    assert sorted({number[:2] for number, *_ in rows}) == [f"{number:02}" for number in range(16)]
    assert NOTEBOOKS[0].name == "00_start_here.ipynb"
    assert [number for number, *_ in rows] == [number_of(path.name) for path in NOTEBOOKS], (
        "00_start_here.ipynb, 'The course': the lines of the notebooks that exist, and no others, end with 'ready'"
    )
    for path, (_, title, _, minutes, state) in zip(NOTEBOOKS, rows, strict=True):
        assert minutes.isdigit()
        assert re.search(rf"\b{minutes} minutes", "".join(json.loads(path.read_text())["cells"][0]["source"]))
        assert state == ("you are here" if path == NOTEBOOKS[0] else "ready")
        assert path == NOTEBOOKS[0] or title.endswith(f"({path.name})")


def code(source: str, count: int, outputs: list[dict], *tags: str) -> dict:
    facts = {"execution_count": count, "outputs": outputs, "metadata": {"tags": list(tags)} if tags else {}}
    return {"cell_type": "code", "source": source} | facts


def stdout(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


def notebook_without_problems() -> dict:
    data = {"image/png": "iVBOR/tmp/w0KGgo=", "text/plain": ""}
    image = {"output_type": "display_data", "metadata": {}, "data": data}
    title = "# 00 · A title\n\n**Pairs with** `sage_ref/attention.py` · **Time** 5 minutes"
    end = "## What to remember\n\n## Exercises\n\n1. One\n2. Two\n3. Three\n\n## Where the papers say more\n"
    markdown = [{"cell_type": "markdown", "source": text, "metadata": {}} for text in (title, end)]
    cells = [
        code("print(1)", 1, [stdout("1\n")]),
        code("def draw():\n    return panels(1)", 2, []),
        code("_ = panels(1)", 3, [image]),
        code("_ = interact(draw, x=IntSlider(1, continuous_update=False))", 4, [image], "nbval-ignore-output"),
        code("if device is None:\n    print('none')", 5, []),
        *(
            code(f"{name} = fill_in('{name}', {name})", count, [stdout(f"{name}: right.")], "nbval-ignore-output")
            for count, name in enumerate(("psi", "phi", "chi"), 6)
        ),
    ]
    return {"cells": [markdown[0], *cells, markdown[1]], "metadata": copy.deepcopy(METADATA)}


BREAKS = {  # what is done to it, and what the lint then reports
    "for cell in code_cells: cell.update(outputs=[], execution_count=None)": "outputs: expected some, got none",
    "cells[1]['outputs'] = []": "cell 1: output: expected text",
    "cells[3]['outputs'] = []": "cell 3: output: expected a PNG",
    "cells[4]['outputs'] = []": "cell 4: output: expected some",
    "for cell in code_cells: cell['execution_count'] += 5": "execution counts: expected 1 to 8 in order",
    "cells[1]['metadata'] = {'tags': ['nbval-ignore-outputs']}": "cell 1: tags: expected ['nbval-ignore-output'], got",
    "cells[4]['metadata'] = {}": "cell 4: tags: expected nbval-ignore-output",
    "cells[6]['metadata'] = {}": "cell 6: tags: expected nbval-ignore-output",
    "notebook['metadata']['widgets'] = {}": "metadata: expected",
    "notebook['metadata']['kernelspec']['name'] = 'venv'": "metadata: expected",
    "cells[1]['outputs'][0]['text'] = 'saved /home/me/x\\n'": "cell 1: of this machine: /home",
    "cells[1]['outputs'][0]['text'] = 'saved C:\\\\x\\n'": "cell 1: of this machine: C:\\",
    "cells[1]['source'] = 'print(open(\"/tmp/x\").read())'": "cell 1: of this machine: /tmp",
    "cells[1]['outputs'].append(stdout('ipykernel_4711/1.py'))": "cell 1: of this machine: ipykernel_",
    "cells[1]['outputs'].append(stdout('<Line2D at 0x7f4039b9c810>'))": "cell 1: of this machine: at 0x7f4039b9c810",
    "cells[2]['outputs'] = [{'output_type': 'error', 'ename': 'KeyError'}]": "cell 2: error output: KeyError",
    "cells[1]['outputs'].append(stdout('UserWarning') | {'name': 'stderr'})": "cell 1: stderr: UserWarning",
    "cells[9:9] = [cells[9]] * 51": "cells: expected at most 60, got 61",
    "cells[8]['source'] = 'psi(x)'": "cells to fill in: expected at least 3, got 2",
    "cells[2]['source'] += '\\n    pass' * 19": "cell 2: length: expected at most 20 lines, got 21",
    "cells[2]['source'] = '@gluon.jit\\ndef f():\\n' + '    pass\\n' * 39": "cell 2: length: expected at most 40",
    "cells[1]['source'] += '\\npredict(\\n    \"q1\", ...)'": "cell 1: question: expected a name",
    "cells[3]['source'] += '\\n_ = ax.legend(fontsize=8.5)'": "cell 3: letters: expected at least 9 points, got 8.5",
    "cells[4]['source'] = cells[4]['source'].replace('False', 'True')": "cell 4: slider: expected IntSlider(...",
    "cells[4]['source'] = '_ = interact(draw, x=IntSlider(1))'": "cell 4: slider: expected IntSlider(...",
    "cells[4]['source'] = '_ = interact(draw, x=(1, 2))'": "cell 4: slider: expected x=IntSlider(",
    "cells[0]['source'] = '# 00 · A title\\n\\n`sage_ref/attention.py`'": "first cell: expected the title",
    "cells[0]['source'] = cells[0]['source'].replace('# 00', '# 01')": "first cell: expected the title",
    "cells[0]['source'] = '# 00 · A title\\n\\n5 minutes'": "first cell: expected the module",
    "cells[0]['source'] = cells[0]['source'].replace('att', 'at')": "link: expected a file, found none at sage_ref/at",
    "cells[0]['source'] += '\\n\\n[next](99_nothing.ipynb)'": "link: expected a file, found none at 99_nothing.ipynb",
    "cells[-1]['source'] = '## What to remember\\n\\n## Exercises\\n'": "last sections: expected",
    "cells[-1]['source'] = cells[-1]['source'].replace('3. Three\\n', '')": "exercises: expected three, got 2",
}


@pytest.mark.parametrize("statement", BREAKS)
def test_the_lint_reports(statement):
    notebook = notebook_without_problems()
    cells = notebook["cells"]
    exec(statement, {"notebook": notebook, "cells": cells, "code_cells": cells[1:-1], "stdout": stdout})
    found = problems("00_title.ipynb", notebook, LARGEST)
    assert any(line.startswith(BREAKS[statement]) for line in found), found


def test_only_a_cell_with_a_whole_program_may_have_forty_lines():
    function = "def add(x_ptr):\n" + "    pass\n" * 37
    assert style_problems("@triton.jit\n" + function) == []
    assert style_problems("if device:\n" + textwrap.indent("@gluon.jit\n" + function, "    ")) == []
    assert style_problems("@cache\n" + function) == ["length: expected at most 20 lines, got 39"]


def test_the_lint_accepts_a_notebook_without_problems_unless_it_is_too_large():
    for kernel in ("Python 3", "Python 3 (ipykernel)"):  # the second is JupyterLab's
        notebook = notebook_without_problems()
        notebook["metadata"]["kernelspec"]["display_name"] = kernel
        assert problems("00_title.ipynb", notebook, LARGEST) == []
    too_large = f"size: expected at most {LARGEST} bytes, got {LARGEST + 1}"
    assert problems("00_title.ipynb", notebook_without_problems(), LARGEST + 1) == [too_large]
