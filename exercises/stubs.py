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

from exercises import ROOT
from exercises.variants import read_text

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


def header_of(name: str) -> Header:
    """Return title, difficulty, importance and minutes of an exercise."""
    facts = re.search(FACTS, read_text(name, "README.md"), re.MULTILINE)
    if not facts:
        raise StubError(f"{name}/README.md: expected a line like 'Easy · high importance · about 20 minutes'")
    title = (ast.get_docstring(ast.parse(read_text(name, "master.py"))) or "").partition("\n")[0].rstrip(".")
    return Header(title, facts[1].lower(), facts[2], int(facts[3]))


def write(names: list[str], variant: int = 1) -> list[Path]:
    """Make each exercise.py that isn't there, and the second variant's page; return what was written.

    No file is overwritten, but for a stub of the first variant in which nothing was written yet.
    """
    written = []
    for name in names:
        if not (ROOT / name / "master.py").exists():  # in the students' package
            continue
        stub, first = (stub_of(read_text(name, "master.py", x), f"{name}/master.py")[0] for x in (variant, 1))
        texts = {"exercise.py": stub}
        if variant != 1:
            texts[f"README_{variant}.md"] = read_text(name, "README.md", variant)
        for file, text in texts.items():
            path = ROOT / name / file
            if variant != 1 and path.exists() and path.read_text(encoding="utf-8") == first:
                path.unlink()
            try:
                with path.open("x", encoding="utf-8") as opened:
                    opened.write(text)
            except FileExistsError:
                continue
            written.append(path)
    return written
