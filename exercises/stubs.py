"""Students' files made from masters: each solution region becomes an error that says what to do.

In a master, the lines after `### SOLUTION: what to do`, up to one that is blank or indented less, become
`raise NotImplementedError("function: what to do")`. Without "what to do", the function's docstring says it.
A capstone's stub is nearly blank: what stands between the lines `### BLANK PAGE` and `### END` isn't there.
"""

import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

from exercises import ROOT, exercise_names

REGION = re.compile(r"^( *)### SOLUTION(?:: (.+))?\n((?:\1(?! *### ).*\S.*\n)*)", re.MULTILINE)
BLANK = re.compile(r"^### BLANK PAGE\n(.*?)^### END$", re.MULTILINE | re.DOTALL)
FACTS = r"^(Easy|Medium|Hard) · (low|medium|high) importance · about (\d+) minutes"


class StubError(ValueError):
    """A master or a page that isn't what it should be."""


class Header(NamedTuple):
    """The facts of an exercise, from its page and the first line of its master."""

    title: str
    difficulty: str
    importance: str
    minutes: int


def stub_of(master: str, name: str = "master.py") -> tuple[str, list[str]]:
    """Return the student's file and the solution lines that were cut out. StubError: a region isn't as it should be."""
    solution = [line for part in BLANK.findall(master) for line in part.splitlines()]
    master = BLANK.sub("", master)
    functions = [node for node in ast.walk(ast.parse(master)) if isinstance(node, ast.FunctionDef)]

    def error(region):
        indent, task, lines = region.groups()
        number = master.count("\n", 0, region.start()) + 1
        around = [node for node in functions if node.lineno < number <= node.end_lineno]
        if not around or not lines:
            raise StubError(f"{name}, line {number}: expected a solution inside of a function, got none")
        function = max(around, key=lambda node: node.lineno)  # the innermost
        task = task or (ast.get_docstring(function) or "").partition("\n")[0]
        if not task:
            raise StubError(f"{name}, line {number}: expected what to do, or a docstring of {function.name}")
        solution.extend(lines.splitlines())
        message = json.dumps(f"{function.name}: {task}", ensure_ascii=False)
        return f"{indent}raise NotImplementedError({message})\n"

    stub = REGION.sub(error, master)
    if "SOLUTION" in stub or not solution:
        raise StubError(f"{name}: expected '### SOLUTION: what to do' alone on its line, at least once")
    return stub, solution


def leaked(stub: str, solution: list[str]) -> list[str]:
    """Return solution lines that a stub still holds; lines that say nothing, like `)`, don't count."""
    lines = {line.strip() for line in stub.splitlines()}
    return [line for line in solution if len(line.strip()) > 5 and line.strip() in lines]


def read_master(name: str) -> str:
    return (ROOT / name / "master.py").read_text(encoding="utf-8")


def header_of(name: str) -> Header:
    """Return title, difficulty, importance and minutes of an exercise."""
    facts = re.search(FACTS, (ROOT / name / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    if not facts:
        raise StubError(f"{name}/README.md: expected a line like 'Easy · high importance · about 20 minutes'")
    title = (ast.get_docstring(ast.parse(read_master(name))) or "").partition("\n")[0].rstrip(".")
    return Header(title, facts[1].lower(), facts[2], int(facts[3]))


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
