"""Student stubs and the table of exercises, both made from the masters.

A region of a master from `### BEGIN SOLUTION: what to do` to `### END SOLUTION` becomes
`raise NotImplementedError("function: what to do")`. Without "what to do", the function's docstring says it.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from sage_lab.records import markdown_table, replaced

from exercises import ROOT, exercise_names

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
MARKER = re.compile(r"(?P<indent> *)### (?P<kind>BEGIN|END) SOLUTION(?:: (?P<task>.+))?")
LINE_LENGTH = 120
DIFFICULTIES = ("easy", "medium", "hard")
IMPORTANCES = ("low", "medium", "high")


class StubError(ValueError):
    """A master whose regions or header are not what they should be."""


class Header(NamedTuple):
    """The facts of a master's docstring."""

    title: str
    difficulty: str
    importance: str
    minutes: int


def stub_of(master: str, name: str = "master.py") -> tuple[str, list[str]]:
    """(the student's file, the solution lines that were cut out). StubError for nested, unclosed or empty regions."""
    functions = [node for node in ast.walk(ast.parse(master)) if isinstance(node, ast.FunctionDef)]
    kept, solution, region = [], [], None
    for number, line in enumerate(master.splitlines(), 1):
        where = f"{name}, line {number}"
        if "SOLUTION" not in line:
            if region is None:
                kept.append(line)
            else:
                region.append(line)
            continue
        marker = MARKER.fullmatch(line)
        if marker is None:
            raise StubError(f"{where}: expected {BEGIN!r} or {END!r} alone on its line, got {line.strip()!r}")
        if marker["kind"] == "BEGIN":
            if region is not None:
                raise StubError(f"{where}: a solution begins inside another")
            region = []
            kept += _raise(marker["indent"], _message(functions, number, marker["task"], where))
        else:
            if region is None:
                raise StubError(f"{where}: a solution ends that didn't begin")
            if not any(line.strip() for line in region):
                raise StubError(f"{where}: the solution is empty")
            solution += region
            region = None
    if region is not None:
        raise StubError(f"{name}: a solution isn't closed")
    if not solution:
        raise StubError(f"{name}: there is no solution in it")
    return "\n".join(kept) + "\n", solution


def _message(functions, line, task, where):
    """What the stub's error says: the innermost function around it and what to do."""
    around = [node for node in functions if node.lineno < line <= node.end_lineno]
    if not around:
        raise StubError(f"{where}: a solution stands outside of a function")
    function = max(around, key=lambda node: node.lineno)
    task = task or (ast.get_docstring(function) or "").partition("\n")[0]
    if not task:
        raise StubError(f"{where}: expected '{BEGIN}: what to do', or a docstring of {function.name}")
    return f"{function.name}: {task}"


def _raise(indent, message):
    """Lines of `raise NotImplementedError(message)`, broken as the formatter breaks them."""
    line = f"{indent}raise NotImplementedError({_literal(message)})"
    if len(line) <= LINE_LENGTH:
        return [line]
    width = LINE_LENGTH - len(indent) - len('    ""')
    pieces = textwrap.wrap(message, width, drop_whitespace=False)
    literals = [f"{indent}    {_literal(piece)}" for piece in pieces]
    return [f"{indent}raise NotImplementedError(", *literals, f"{indent})"]


def _literal(text):
    """A Python string, in double quotes where that needs no escape."""
    return repr(text) if '"' in text else f'"{text}"'


def leaked(stub: str, solution: list[str]) -> list[str]:
    """Solution lines that a stub still holds; lines that say nothing, like `)`, don't count."""
    lines = {line.strip() for line in stub.splitlines()}
    return [line for line in solution if len(line.strip()) > 5 and line.strip() in lines]


def header_of(master: str, name: str) -> Header:
    """Title, difficulty, importance and minutes of a master's docstring."""
    docstring = ast.get_docstring(ast.parse(master)) or ""
    facts = dict(re.findall(r"^(Difficulty|Importance|Minutes): (\w+)", docstring, re.MULTILINE))
    for fact, allowed in (("Difficulty", DIFFICULTIES), ("Importance", IMPORTANCES)):
        if facts.get(fact) not in allowed:
            raise StubError(f"{name}: expected '{fact}: ' with one of {allowed}, got {facts.get(fact)!r}")
    if not facts.get("Minutes", "").isdigit():
        raise StubError(f"{name}: expected 'Minutes: ' and a number in the docstring")
    if not re.search(r"^Afterwards you know ", docstring, re.MULTILINE):
        raise StubError(f"{name}: expected a line that starts with 'Afterwards you know' in the docstring")
    title = docstring.partition("\n")[0].rstrip(".")
    return Header(title, facts["Difficulty"], facts["Importance"], int(facts["Minutes"]))


def read_master(name: str) -> str:
    return (ROOT / name / "master.py").read_text()


def exercises_table() -> str:
    """Exercises as instructors and students look for them."""
    from exercises.grading import load_grader

    rows = []
    for name in exercise_names():
        header, grader = header_of(read_master(name), name), load_grader(name)
        cells = header.difficulty, header.importance, header.minutes, len(grader.tests), f"{grader.max_score:g}"
        rows.append((f"[{name}]({name}/README.md)", header.title, *cells))
    return markdown_table(("exercise", "title", "difficulty", "importance", "minutes", "tests", "points"), rows)


def generated() -> dict[Path, str]:
    """Every file that is made from the masters, with the content it should have."""
    files = {}
    for name in exercise_names():
        files[ROOT / name / "exercise.py"] = stub_of(read_master(name), f"{name}/master.py")[0]
    page = ROOT / "README.md"
    if page.exists():
        parts = re.split(r"(<!-- exercises -->\n)(?:.*\n)*?(<!-- /exercises -->\n)", page.read_text())
        if len(parts) != 4:
            raise StubError("README.md: expected the markers <!-- exercises --> and <!-- /exercises --> once")
        before, begin, end, after = parts
        files[page] = f"{before}{begin}{exercises_table()}\n{end}{after}"
    return files


def write() -> list[Path]:
    """Bring generated files up to date; the ones that changed."""
    stale = out_of_date()
    for path, content in generated().items():
        if path in stale:
            with replaced(path) as temporary:
                temporary.write_text(content)
    return stale


def out_of_date() -> list[Path]:
    return [path for path, content in generated().items() if not path.exists() or path.read_text() != content]
