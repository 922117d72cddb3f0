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
LAYOUT = {"COMMENT", "DEDENT", "ENDMARKER", "INDENT", "NEWLINE", "NL", "FSTRING_START"}


def files(folder):
    """Return the Python files in a folder of the repository, without those that a student writes."""
    return sorted(path for path in (REPOSITORY / folder).rglob("*.py") if path.name != "exercise.py")


def tokens_of(text):
    """Return how many tokens a program has, without comments and layout: joining lines doesn't change it.

    An f-string is one token, as it was before Python 3.12.
    """
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        count += not depth and kind not in LAYOUT
        depth += kind == "FSTRING_START"
    return count


def tokens_in(room):
    return sum(tokens_of(path.read_text(encoding="utf-8")) for path in files(ROOMS[room]))
