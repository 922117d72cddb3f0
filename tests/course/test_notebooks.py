"""The notebooks as committed: run once from top to bottom, outputs kept, nothing of the machine that ran them inside.

nbval runs them again and compares, but it passes a notebook whose outputs were cleared and ignores misspelt tags.
"""

import copy
import inspect
import json
import re
from itertools import chain

import pytest
from matplotlib.figure import Figure
from sage_course import figures
from sage_course.outline import INSTALL, NOT_COMPARED, load, outputs_not_compared
from sage_course.teaching import REASONS
from sage_lab.records import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
METADATA = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
LAST_SECTIONS = ["What to remember", "Exercises", "Where the papers say more"]
LARGEST = 1_500_000  # bytes
MOST = {"minutes": 75, "homework": 75, "lines": 150, "numbers": 150}  # that a notebook asks of its reader
# Notebooks that still ask more. Take yours out when it asks for less: the list never grows.
TOO_MUCH = {}
MOST_CELLS, LEAST_FILL_INS = 61, 3  # one of them for a widget
LONGEST, LONGEST_PROGRAM = 20, 40  # lines of a code cell; the second if it holds a whole Triton or Gluon program
LEAST_COMPARED = 0.85  # of all notebooks' outputs that are text
FOLD = "hide-input"  # the book's name for a cell whose code is folded; JupyterLab's is in the metadata
TERMS = {  # of the glossary, as the ids that Sphinx gives them
    f"term-{re.sub(r'[^a-zA-Z0-9]+', '-', line).strip('-')}"
    for line in (REPOSITORY / "notebooks" / "book" / "glossary.md").read_text().splitlines()
    if re.match(r"[^\s#`]", line)
}
PRINTS = {"print", "compare", "fill_in", "yours"}
DRAWS = {"subplots", "panels"} | {
    name
    for name, function in inspect.getmembers(figures, inspect.isfunction)
    if inspect.signature(function).return_annotation is Figure
}
OF_THIS_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users)\b|\bC:\\|ipykernel_|\bat 0x[0-9a-f]{9,}")


def text_of(cell):
    return "".join(cell["source"])


def problems(name, notebook, size):
    """Return what is wrong with a notebook, one line each."""
    cells = notebook["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    metadata = copy.deepcopy(notebook["metadata"])
    metadata.get("kernelspec", {}).update(display_name="Python 3")  # JupyterLab's is "Python 3 (ipykernel)"
    counts = [cell["execution_count"] for cell in code]
    found = [f"size: expected at most {LARGEST} bytes, got {size}"] * (size > LARGEST)
    found += [f"metadata: expected what `make notebooks` leaves, got {notebook['metadata']}"] * (metadata != METADATA)
    found += ["execution counts: expected 1 to the last in order"] * (counts != list(range(1, len(counts) + 1)))
    found += ["outputs: expected some, got none in any cell"] * (not any(cell["outputs"] for cell in code))
    count = sum(cell.get("id") != INSTALL for cell in cells)
    found += [f"cells: expected at most {MOST_CELLS}, got {count}"] * (count > MOST_CELLS)
    count = sum(text_of(cell).count("= fill_in(") for cell in code)
    found += [f"cells to fill in: expected at least {LEAST_FILL_INS}, got {count}"] * (count < LEAST_FILL_INS)
    found += text_problems(name.partition("_")[0], [text_of(cell) for cell in cells if cell["cell_type"] == "markdown"])
    for number, cell in enumerate(cells):
        complaints = chain(machine_problems(cell), code_problems(cell) if cell["cell_type"] == "code" else ())
        found += [f"cell {number}: {complaint}" for complaint in complaints]
    return found


def text_problems(number, texts):
    """Yield what is wrong with the title, with links and with the sections that every notebook ends with."""
    title, text = texts[0], "\n".join(texts)
    if not re.match(rf"# {number} · \w", title) or not re.search(r"\*\*Homework\*\* about \d+ minutes", title):
        yield f"first cell: expected the title '# {number} · ...' and the minutes of its homework"
    modules = re.findall(r"`((?:sage_ref|kernels|lab)/[\w/]+\.py)`", title)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text)
    files = [REPOSITORY / target for target in modules] + [REPOSITORY / "notebooks" / target for target in links]
    yield from (f"link: expected a file, found none at {path}" for path in files if not path.exists())
    terms = re.findall(r"\]\(book/glossary\.md#([^)]*)\)", text)
    yield from (f"link: expected a term of the glossary, got {term}" for term in terms if term not in TERMS)
    if not modules:
        yield "first cell: expected the module it pairs with, as in `sage_ref/attention.py`"
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[-3:]
    if [section.partition("\n")[0].strip() for section in sections] != LAST_SECTIONS:
        yield f"last sections: expected {LAST_SECTIONS}"
    elif len(re.findall(r"^\d+\. ", sections[1], flags=re.MULTILINE)) < 2:
        yield "exercises: expected at least two"


def machine_problems(cell):
    """Yield paths and process names of the machine that ran the cell."""
    texts = [text_of(cell)]
    for output in cell.get("outputs", []):
        texts += ["".join(output.get("text", "")), "".join(output.get("traceback", ""))]
        texts += ["".join(text) for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    yield from (f"of this machine: {match}" for text in texts for match in OF_THIS_MACHINE.findall(text))


def code_problems(cell):
    """Yield errors, warnings, missing outputs, words and tags, cells that are too long."""
    source, outputs, tags = text_of(cell), cell["outputs"], set(cell["metadata"].get("tags", []))
    yield from (f"tags: expected {NOT_COMPARED} or {FOLD}, got {tag}" for tag in tags - {NOT_COMPARED, FOLD})
    if (FOLD in tags) != cell["metadata"].get("jupyter", {}).get("source_hidden", False):
        yield f"folded: expected both the tag {FOLD} and the metadata jupyter.source_hidden, or neither"
    yield from (f"error output: {output['ename']}" for output in outputs if output["output_type"] == "error")
    yield from (f"stderr: {''.join(output['text'])[:80]}" for output in outputs if output.get("name") == "stderr")
    # Calls in lines that are not indented: these run for certain.
    calls = set(re.findall(r"^(?:\w[\w, ]* = )?(?:\w+\.)*(\w+)\(", source, re.MULTILINE))
    if calls & PRINTS and not any(output.get("name") == "stdout" for output in outputs):
        yield "output: expected text, since the cell prints"
    shown = [output.get("data", {}) for output in outputs]
    if calls & DRAWS and not any("image/png" in data for data in shown):
        yield "output: expected a PNG, since the cell draws a figure"
    if "slider" in calls and not any('<input type="range"' in "".join(data.get("text/html", "")) for data in shown):
        yield "output: expected pictures, since the cell has a slider"
    for output in outputs:
        if "image/png" in output.get("data", {}) and not output["metadata"].get("image/png", {}).get("alt"):
            yield "output: expected an alternative text beside the PNG; import sage_course.figures before"
    longest = LONGEST_PROGRAM if re.search(r"^\s*@(?:triton|gluon)\.jit", source, re.MULTILINE) else LONGEST
    if (lines := len(source.splitlines())) > longest:
        yield f"length: expected at most {longest} lines, got {lines}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    found = problems(path.name, json.loads(path.read_text()), path.stat().st_size)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_asks_no_more_of_its_reader_than_it_may(path):
    asked = load(path)
    too_much = " ".join(name for name, most in MOST.items() if getattr(asked, name) > most)
    assert too_much == TOO_MUCH.get(path.name.partition("_")[0], ""), asked


def texts_of(cell):
    """The outputs of a cell that nbval compares as text: what it printed, and values that are no pictures."""
    return [
        output
        for output in cell["outputs"]
        if output["output_type"] == "stream" or "image/png" not in output.get("data", {"image/png": None})
    ]


def test_an_output_is_compared_unless_a_reason_is_given():
    compared = texts = 0
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        tagged = {cell["id"] for cell in cells if NOT_COMPARED in cell["metadata"].get("tags", [])}
        assert tagged == outputs_not_compared(path.name.partition("_")[0]).keys(), path.name
        texts += sum(len(texts_of(cell)) for cell in cells)
        compared += sum(len(texts_of(cell)) for cell in cells if cell["id"] not in tagged)
    assert compared / texts > LEAST_COMPARED, f"{compared} of {texts}"


def test_every_wrong_choice_has_its_reason():
    for path in NOTEBOOKS:
        code = [text_of(cell) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        for text in code:
            for asked in re.findall(r"^predict\(\s*\"([^\"]+)\",[^)]*?choices=", text, re.MULTILINE):
                assert REASONS.get(asked), f"{path.name}: reasons.toml has none for {asked!r}"
