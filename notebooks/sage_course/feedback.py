"""Tell a reader which lines of a function are missing or wrong, and the likely reason."""

import ast
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sage_course import check, mutants
from sage_course.check import Gap, plain

ERRORS = {  # part of an error: hint
    "type pointer": "That is an address, not a number: is a `tl.load` missing?",
    "outside all": "Is a mask missing? Or is a row, a block's number or a stride wrong?",
    "reduction dimensions": "The inner sizes differ. Is a `tl.trans` missing, or one too many?",
    "operands must be same dtype": "A matmul wants both operands in one dtype.",
    r"must be int, not tuple|(max|min)\(\) received": "`max` takes a single axis, `amax` also several of them.",
    "cannot be multiplied|size mismatch|two dimensions|expected .* rows": (
        "The inner sizes differ. Is a `.mT` missing, or one too many?"
    ),
    "match|broadcast|compatible|matrices": (
        "These shapes do not fit together. Is a `keepdim=True` or a `[:, None]` missing?"
    ),
    "return_types.max": "`max` along an axis returns values and places, `amax` the values alone.",
    "is ambiguous": "Python's `max`, `if` and `and` take a single number. `amax` and `torch.where` take tensors.",
    "NoneType": "Something here is None. Does every function end with a `return`?",
    "unpack": "There are not as many results on the right as names on the left.",
    "not defined|local variable": "This name has no value here. Is it spelt as in the function's first line?",
    "can't be cast": "`x += y` keeps the dtype of x. `x = x + y` makes a new tensor.",
    "dtype torch.int8": "integer_matmul takes two int8 tensors: no scales, and nothing that is not yet rounded.",
    "floats were multiplied": "Round first. Let integer_matmul take the integers, and multiply by the scales after it.",
    "NaN was made": "NaN comes from 0 / 0. Which divisor may be 0?",
    "dtype": "Two dtypes do not fit together. `.float()` makes floats of integers.",
}
TENSORS: tuple[tuple[Callable[[Tensor, Tensor], Any], str], ...] = (  # what holds of found x and expected y: hint
    (lambda x, y: without_axis(x, y), "An axis of size 1 is lost. `keepdim=True` keeps it, `[:, None]` makes one."),
    (lambda x, y: without_axis(y, x), "There is an axis of size 1 too many. Is a `keepdim=True` not needed?"),
    (lambda x, y: x.dim() == y.dim() > 1 and near(x.mT, y), "Rows and columns are exchanged: `.mT`."),
    (lambda x, y: x.dim() < y.dim(), "An axis is lost. Along which one is the sum, the mean or the maximum?"),
    (lambda x, y: x.shape == 2 * (y.numel(),) != y.shape, "A row and a column made a matrix: is one to be turned?"),
    (lambda x, y: x.dim() > y.dim(), "There are too many axes. Is a `[:, None]` not needed?"),
    (lambda x, y: x.dtype == torch.int8 != y.dtype, "An int8 ends at 127 and then wraps around. Convert it first."),
    (lambda x, y: x.is_floating_point() > y.is_floating_point(), "These are floats: round, then convert to integers."),
    (lambda x, y: x.is_floating_point() < y.is_floating_point(), "These are integers where floats belong."),
    (lambda x, y: x.shape != y.shape, "The shape is wrong. Which axes does the result have, in which order?"),
    (lambda x, y: torch.bool in (x.dtype, y.dtype), ""),
    (lambda x, y: (x.isnan() & ~y.isnan()).any(), "NaN comes from 0 / 0 or inf - inf. Which divisor may be 0?"),
    (lambda x, y: (x.isinf() & ~y.isinf()).any(), "Infinity comes from a division by 0 or a large exponent."),
    (lambda x, y: near(x, -y.double()), "The sign is wrong."),
    (lambda x, y: not y.is_floating_point() and (x.double() - y).abs().max() == 1, "Only the rounding differs."),
)


# Beginnings of hints that are no guesses
SURE = (
    "The results are in", "Rows and col", "The sign", "Round first", "NaN comes from 0 / 0. Which", "This name",
    "`max`", "Python's `max`",
)  # fmt: skip


def same(x: Any, y: Any) -> bool:
    return check.first_difference(x, y) is None


def surely_same(x: Any, y: Any) -> bool:
    """Whether two results agree; two failures only in the same line, as one error has many reasons."""
    return same(x, y) and (not isinstance(x, check.Raised) or x.line == y.line)


def near(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(check.close_entries(x.double(), y.double()).all())


def without_axis(x: Tensor, y: Tensor) -> bool:
    """Whether x has the shape of y without one of its axes of size 1."""
    return x.dim() == y.dim() - 1 and x.shape in [y.squeeze(axis).shape for axis in range(y.dim())]


def reason(found: Any, expected: Any) -> str:
    """Return a hint that needs no knowledge of the task, about the first part of a result that differs; "" for none."""
    if isinstance(found, tuple) and isinstance(expected, tuple) and same(found[1::-1] + found[2:], expected):
        return "The results are in the wrong order."
    while isinstance(expected, tuple | list) and isinstance(found, tuple | list) and len(found) == len(expected):
        found, expected = next(pair for pair in zip(found, expected, strict=True) if not same(*pair))
    if isinstance(found, check.Raised):
        return next((hint for part, hint in ERRORS.items() if re.search(part, found.error)), "")
    if found is None:
        return "It returns None: is there a `return`?"
    if isinstance(found, tuple) or isinstance(expected, tuple):
        return "The number of results is wrong. Which ones are asked for?"
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return ""
    for holds, hint in TENSORS:
        if holds(found, expected):
            return hint
    ratio = (found.double() * expected).sum() / (expected.double() ** 2).sum()
    return (
        f"Everything is {ratio:.4g} times what it should be."
        if found.numel() > 1 and near(found, ratio * expected)
        else ""
    )


def overwrites(gap: Gap, function: Callable) -> bool:
    """Whether a function changes a tensor that it is given, which the solution leaves as it is."""
    mine, courses, given = (deepcopy(gap.inputs()[0]) for _ in range(3))
    for each, inputs in ((function, mine), (gap.solution, courses)):
        with suppress(Exception):
            gap.run(each, *inputs)
    inputs = (x for x in zip(mine, courses, given, strict=True) if isinstance(x[2], Tensor | tuple | list))
    return any(same(y, z) and not same(x, z) for x, y, z in inputs)


def rows(function: Callable) -> dict[tuple[str, int], str]:
    """Return a function's lines, by what each sets or calls and by how often that came before."""
    found = {}
    for row in ast.unparse(ast.parse(check.source(function))).splitlines():
        what = re.match(r"(?:return|if|while)\b|.*?(?= [-+*/@]?= |\(| in |$)", row.strip())[0]
        found[what, sum(what == other for other, _ in found)] = row
    return found


def lines(gap: Gap, function: Callable) -> tuple[list[str], dict[str, Callable], bool]:
    """Try each line of a function alone, with the solution's lines in place of all others that differ.

    Return what the lines with `...` set; the wrong lines, each with the function in which it was tried; and whether the
    reader surely wrote a line: other right lines may stand in the notebook. All three are empty if the function is a
    single line, or too different from the solution.
    """
    own, right = rows(function), rows(gap.solution)
    differ = [x for x in own if x in right and "def " not in x[0] and own[x].strip() != right[x].strip()]

    def completed(keep: Collection) -> Callable:
        replaced = {x: own[x].replace(own[x].strip(), right[x].strip()) for x in differ if x not in keep}
        names = {**plain(gap.solution).__globals__, **plain(function).__globals__}
        return check.defined("\n".join((own | replaced).values()), f"<{keep}>", names)[plain(function).__name__]

    with suppress(Exception):  # what cannot be tried is not told, and stops no notebook
        missing = [x for x in differ if check.has_gap(own[x].strip() + " pass" * own[x].endswith(":"))]
        written = [x for x in differ if x not in missing]
        if len([x for x in own if not x[0].startswith(("@", "def "))]) > 1 and check.is_right(gap, completed([])):
            alone = {} if check.is_right(gap, completed(written)) else {own[x].strip(): completed([x]) for x in written}
            wrong = {line: one for line, one in alone.items() if not check.is_right(gap, one)}
            if wrong or not alone:  # else they are wrong together
                return [what for what, _ in missing], wrong, bool(written)
    return [], {}, False


def unfinished(gap: Gap, function: Callable) -> str:
    """Return what is missing in a function with `...` in it, what is used instead, and what else is wrong."""
    missing, wrong, written = lines(gap, function)
    rest = "; the rest is right" if written and not wrong else ""
    names = f": {', '.join(missing)}{rest}" if missing else ""
    text = f"still to fill in{names}. From here on the course's solution is used."
    return f"{text}\n{about(gap, wrong)}" if wrong else text


def about(gap: Gap, wrong: dict[str, Callable], failed: str = "") -> str:
    """Name the wrong lines, unless it is the one known to have failed, and give the hint for the first."""
    named = [] if list(wrong) == [failed] else [f"Not right yet: {line}" for line in wrong]
    return "\n".join([*named, hint(gap, next(iter(wrong.values())), False)])


def possible(gap: Gap, function: Callable) -> list[check.Mistake]:
    """Return the mistakes that change no line which the reader has as it should be."""
    text = check.source(gap.solution)
    own, right = (mutants.first_lines(check.source(x)) for x in (function, gap.solution))
    return [x for x in gap.mistakes if not (right - mutants.first_lines(check.edited(text, [x]))) & own]


@cache
def results_of(gap: Gap, mistake: check.Mistake) -> list:
    """Return the results of the solution with a mistake made. A reader's next attempt takes them again."""
    return [check.tried(gap, check.mistaken(gap, mistake), trial) for trial in gap.inputs()]


def hint(gap: Gap, function: Callable, by_line: bool = True) -> str:
    """Return the hint of the mistake that gives what a function gives, else one about its lines or its results."""
    trials = gap.inputs()
    found, expected = ([check.tried(gap, x, trial) for trial in trials] for x in (function, gap.solution))
    mistake = check.explained(found, expected, possible(gap, function), partial(results_of, gap), same)
    if mistake and all(surely_same(x, y) for x, y in zip(found, results_of(gap, mistake), strict=True)):
        return f"Hint: {mistake.hint}"
    pair = next(pair for pair in zip(found, expected, strict=True) if not same(*pair))
    if by_line and (wrong := lines(gap, function)[1]):
        return about(gap, wrong, getattr(pair[0], "line", ""))
    if overwrites(gap, function):
        return "Hint: It changes an input in place, as `x += y` does. `x = x + y` makes a new tensor."
    fact = reason(*pair) if isinstance(pair[0], check.Raised) or not mistake else mistake.hint
    text = mutants.explanation(gap, function, found, expected, same, fact if fact.startswith(SURE) else "")
    if not text or text.startswith("All of it is right but") or (text.endswith("belongs.") and fact.startswith(SURE)):
        text = f"{text} {fact}".strip()  # the place alone does not say what is wrong there
    return text and f"Hint: {text}"
