"""The rooms of the house, and how many tokens of Python each has."""

import io
import tokenize
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ROOMS = {
    "sage_ref": "sage_ref",
    "kernels": "kernels/sage_kernels",
    "lab": "lab/sage_lab",
    "course": "notebooks/sage_course",
    "exercises": "exercises",
    "tests": "tests",
}
BUDGETS = tomllib.loads((REPOSITORY / "tests/token_budgets.toml").read_text(encoding="utf-8"))
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def files(folder):
    """Return the Python files in a folder of the repository, without those that a student writes."""
    return sorted(path for path in (REPOSITORY / folder).rglob("*.py") if path.name != "exercise.py")


def tokens_of(text):
    """Return how many tokens a program has, without comments and layout: joining lines doesn't change it."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT for token in tokens)


def tokens_in(room):
    return sum(tokens_of(path.read_text(encoding="utf-8")) for path in files(ROOMS[room]))
