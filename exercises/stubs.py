"""Students' files made from masters: each solution region becomes an error that says what to do.

In a master, the region from `### BEGIN SOLUTION: what to do` to `### END SOLUTION` becomes
`raise NotImplementedError("function: what to do")`. Without "what to do", the function's docstring says it.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from exercises import ROOT, exercise_names

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
MARKER = re.compile(r"(?P<indent> *)### (?P<kind>BEGIN|END) SOLUTION(?:: (?P<task>.+))?")
LINE_LENGTH = 120
DIFFICULTIES = ("easy", "medium", "hard")
IMPORTANCES = ("low", "medium", "high")


class StubError(ValueError):
    """A master or a page that isn't what it should be."""


class Header(NamedTuple):
    """The facts of an exercise, from its page and the first line of its master."""

    title: str
    difficulty: str
    importance: str
    minutes: int


def stub_of(master: str, name: str = "master.py") -> tuple[str, list[str]]:
    """Return the student's file and the solution lines that were cut out.

    StubError: a region is nested, not closed or empty.
    """
    functions = [node for node in ast.walk(ast.parse(master)) if isinstance(node, ast.FunctionDef)]
    kept, solution, region = [], [], None
    for number, line in enumerate(master.splitlines(), 1):
        where = f"{name}, line {number}"
        if "SOLUTION" not in line:
            (kept if region is None else region).append(line)
            continue
        marker = MARKER.fullmatch(line)
        if marker is None:
            raise StubError(f"{where}: expected {BEGIN!r} or {END!r} alone on its line, got {line.strip()!r}")
        if (marker["kind"] == "BEGIN") != (region is None):
            raise StubError(f"{where}: expected regions that begin and end in turn, got {line.strip()!r}")
        if region is None:
            region = []
            kept += _raise(marker["indent"], _message(functions, number, marker["task"], where))
        else:
            if not any(line.strip() for line in region):
                raise StubError(f"{where}: expected a solution, got an empty one")
            solution += region
            region = None
    if region is not None or not solution:
        raise StubError(f"{name}: expected at least one solution, each closed")
    return "\n".join(kept) + "\n", solution


def _message(functions, line, task, where):
    """Return what the stub's error says: the innermost function around it and what to do."""
    around = [node for node in functions if node.lineno < line <= node.end_lineno]
    if not around:
        raise StubError(f"{where}: expected a solution inside of a function")
    function = max(around, key=lambda node: node.lineno)
    task = task or (ast.get_docstring(function) or "").partition("\n")[0]
    if not task:
        raise StubError(f"{where}: expected '{BEGIN}: what to do', or a docstring of {function.name}")
    return f"{function.name}: {task}"


def _raise(indent, message):
    """Return lines of `raise NotImplementedError(message)`, broken as the formatter breaks them."""
    line = f"{indent}raise NotImplementedError({_literal(message)})"
    if len(line) <= LINE_LENGTH:
        return [line]
    pieces = textwrap.wrap(message, LINE_LENGTH - len(indent) - len('    ""'), drop_whitespace=False)
    return [f"{indent}raise NotImplementedError(", *(f"{indent}    {_literal(x)}" for x in pieces), f"{indent})"]


def _literal(text):
    """Return a Python string, in double quotes where that needs no escape."""
    return repr(text) if '"' in text else f'"{text}"'


def leaked(stub: str, solution: list[str]) -> list[str]:
    """Return solution lines that a stub still holds; lines that say nothing, like `)`, don't count."""
    lines = {line.strip() for line in stub.splitlines()}
    return [line for line in solution if len(line.strip()) > 5 and line.strip() in lines]


def read_master(name: str) -> str:
    return (ROOT / name / "master.py").read_text(encoding="utf-8")


def header_of(name: str) -> Header:
    """Return title, difficulty, importance and minutes of an exercise."""
    page = (ROOT / name / "README.md").read_text(encoding="utf-8")
    facts = re.search(r"^(\w+) · (\w+) importance · about (\d+) minutes", page, re.MULTILINE)
    if not facts or facts[1].lower() not in DIFFICULTIES or facts[2] not in IMPORTANCES:
        raise StubError(
            f"{name}/README.md: expected a line like 'Easy · high importance · about 20 minutes', with one of "
            f"{DIFFICULTIES} and one of {IMPORTANCES}"
        )
    title = (ast.get_docstring(ast.parse(read_master(name))) or "").partition("\n")[0].rstrip(".")
    return Header(title, facts[1].lower(), facts[2], int(facts[3]))


def page() -> str:
    """Return exercises/README.md with an up-to-date table of the exercises."""
    from sage_lab.records import markdown_table

    from exercises.answers import load_exercise

    rows = []
    for name in exercise_names():
        header, exercise = header_of(name), load_exercise(name)
        cells = header.difficulty, header.importance, header.minutes, len(exercise.tests), f"{exercise.points:g}"
        rows.append((f"[{name}]({name}/README.md)", header.title, *cells))
    table = markdown_table(("exercise", "title", "difficulty", "importance", "minutes", "tests", "points"), rows)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"(<!-- exercises -->\n)(?:.*\n)*?(<!-- /exercises -->\n)", text)
    if len(parts) != 4:
        raise StubError("README.md: expected the markers <!-- exercises --> and <!-- /exercises --> once")
    before, begin, end, after = parts
    return f"{before}{begin}{table}\n{end}{after}"


def write() -> list[Path]:
    """Make each exercise.py that isn't there and return what was written. No file is overwritten."""
    written = []
    for name in exercise_names():
        path = ROOT / name / "exercise.py"
        if not path.with_name("master.py").exists():  # in the students' package
            continue
        stub, _ = stub_of(read_master(name), f"{name}/master.py")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(stub)
        except FileExistsError:
            continue
        written.append(path)
    return written
