"""Words for a reader whose answer is not right: a known mistake's hint, the wrong lines, or what the results show.

A small change of the text is named only if with it the answer is the solution, word for word, or the solution is the
answer. So no sentence is a guess.
"""

import ast
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_course import mutants
from sage_course.gaps import (
    Gap,
    Raised,
    Report,
    close_entries,
    defined,
    examine,
    has_gap,
    have_the_same_parts,
    is_right,
    parts_of,
    plain,
    same,
    source,
)

IN_PLACE = "Hint: It changes an input in place, as `x += y` does. `x = x + y` makes a new tensor."


class Fact(NamedTuple):
    """A hint from results or an error alone, without knowledge of the task."""

    text: str
    is_sure: bool = False


# Part of an error: hint. Each of these has one reason.
CERTAIN = {
    r"must be int, not tuple|(max|min)\(\) received": "`max` takes a single axis, `amax` also several of them.",
    "return_types.max": "`max` along an axis returns values and places, `amax` the values alone.",
    "is ambiguous": "Python's `max`, `if` and `and` take a single number. `amax` and `torch.where` take tensors.",
    "not defined|local variable": "This name has no value here. Is it spelt as in the function's first line?",
    "floats were multiplied": "Round first. Let integer_matmul take the integers, and multiply by the scales after it.",
    "integers were multiplied": "Multiply floats alone: `.float()` on both factors, and `.int()` on their product.",
    "NaN was made": "NaN comes from 0 / 0. Which divisor may be 0?",
}
LIKELY = {
    "type pointer": "That is an address, not a number: is a `tl.load` missing?",
    "outside all": "Is a mask missing? Or is a row, a block's number or a stride wrong?",
    "reduction dimensions": "The inner sizes differ. Is a `tl.trans` missing, or one too many?",
    "operands must be same dtype": "A matmul wants both operands in one dtype.",
    "cannot be multiplied|size mismatch|two dimensions|expected .* rows": (
        "The inner sizes differ. Is a `.mT` missing, or one too many?"
    ),
    "match|broadcast|compatible|matrices": (
        "These shapes do not fit together. Is a `keepdim=True` or a `[:, None]` missing?"
    ),
    "NoneType": "Something here is None. Does every function end with a `return`?",
    "unpack": "There are not as many results on the right as names on the left.",
    "can't be cast": "`x += y` keeps the dtype of x. `x = x + y` makes a new tensor.",
    "dtype torch.int8": "integer_matmul takes two int8 tensors: no scales, and nothing that is not yet rounded.",
    "dtype": "Two dtypes do not fit together. `.float()` makes floats of integers.",
}


def hint(gap: Gap, report: Report, by_line: bool = True) -> str:
    """Return what helps most with an answer that is not right, "" if nothing is known.

    by_line: whether its lines may be tried one by one.
    """
    if report.number is None:
        return IN_PLACE
    if report.explains_all and fails_in_the_same_lines(report):
        return f"Hint: {report.mistake.hint}"
    found, expected = report.found[report.number], report.expected[report.number]
    if by_line and (wrong := try_lines(gap, report.answer).wrong):
        return about_lines(gap, wrong, failed=getattr(found, "line", ""))
    if report.overwritten:
        return IN_PLACE
    if report.text and (names := names_of_the_notebook(gap, report)):
        return f"Hint: {names}"
    fact = about_result(found, expected)
    if report.mistake and not isinstance(found, Raised):
        fact = Fact(report.mistake.hint)
    change = small_change(gap, report)
    text = change.text or fact.text
    if fact.is_sure and change.kind in ("operator", "exchange"):  # which say where alone
        text = f"{change.text} {fact.text}"
    return text and f"Hint: {text}"


def fails_in_the_same_lines(report: Report) -> bool:
    """Return whether an answer fails where its mistake fails: one error has many reasons."""
    pairs = zip(report.found, report.given, strict=True)
    return all(own.line == given.line for own, given in pairs if isinstance(own, Raised))


def names_of_the_notebook(gap: Gap, report: Report) -> str:
    """Return a sentence about the notebook's numbers that an answer reads and the solution doesn't; "" for none."""
    found = plain(report.answer).__globals__
    values = int | float | Tensor | tuple | list | dict
    names = names_read(report.text) - names_read(gap.text)
    named = [f"`{name}`" for name in sorted(names) if isinstance(found.get(name), values)]
    if not named:
        return ""
    named = " and ".join(named)
    return f"It reads {named} of the notebook, the same for all inputs. Take what changes from its arguments."


def names_read(text: str) -> set[str]:
    """Return the names that a program reads and nowhere sets."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    return {node.id for node in names} - own


def unfinished(gap: Gap, answer: Callable) -> str:
    """Return what is missing in a function with `...` in it, what is used instead, and what else is wrong."""
    lines = try_lines(gap, answer)
    text = "still to fill in"
    if lines.missing:
        text += f": {', '.join(lines.missing)}"
    if lines.missing and lines.are_written and not lines.wrong:
        text += "; the rest is right"
    text += ". From here on the course's solution is used."
    return f"{text}\n{about_lines(gap, lines.wrong)}" if lines.wrong else text


# Line by line


@dataclass
class Lines:
    """The lines of an answer, each tried alone."""

    missing: list[str] = field(default_factory=list)  # what the lines with `...` set
    wrong: dict[str, Callable] = field(default_factory=dict)  # a wrong line: the function in which it was tried
    are_written: bool = False  # whether the reader surely wrote a line: other right ones may stand in the notebook


def try_lines(gap: Gap, answer: Callable) -> Lines:
    """Try each line of an answer alone, with the solution's lines in place of all others that differ.

    Nothing is known of a function that is a single line, or too different from the solution.
    """
    with suppress(Exception):  # what cannot be tried is not told, and stops no notebook
        own, right = rows(source(answer)), rows(gap.text)
        differ = [x for x in own if x in right and "def " not in x[0] and own[x].strip() != right[x].strip()]
        missing = [x for x in differ if has_gap(own[x].strip() + " pass" * own[x].endswith(":"))]
        written = [x for x in differ if x not in missing]

        def with_lines(kept: Collection) -> Callable:
            """Return the answer with these of its lines and the solution's in place of the others that differ."""
            changed = {x: own[x].replace(own[x].strip(), right[x].strip()) for x in differ if x not in kept}
            names = {**plain(gap.solution).__globals__, **plain(answer).__globals__}
            text = "\n".join((own | changed).values())
            return defined(text, f"<{kept}>", names)[plain(answer).__name__]

        is_single = sum(not x[0].startswith(("@", "def ")) for x in own) == 1
        if is_single or not is_right(gap, with_lines([])):
            return Lines()
        names = [what for what, _ in missing]
        if is_right(gap, with_lines(written)):
            return Lines(names, {}, bool(written))
        alone = {own[x].strip(): with_lines([x]) for x in written}
        wrong = {line: function for line, function in alone.items() if not is_right(gap, function)}
        if wrong:  # else the lines are wrong together
            return Lines(names, wrong, True)
    return Lines()


def rows(text: str) -> dict[tuple[str, int], str]:
    """Return a program's lines, by what each sets or calls and by how often that came before."""
    found = {}
    for row in ast.unparse(ast.parse(text)).splitlines():
        what = re.match(r"(?:return|if|while)\b|.*?(?= [-+*/@]?= |\(| in |$)", row.strip())[0]
        found[what, sum(what == other for other, _ in found)] = row
    return found


def about_lines(gap: Gap, wrong: dict[str, Callable], failed: str = "") -> str:
    """Name the wrong lines, unless it is the one known to have failed, and give the hint for the first."""
    named = [] if list(wrong) == [failed] else [f"Not right yet: {line}" for line in wrong]
    first = next(iter(wrong.values()))
    return "\n".join([*named, hint(gap, examine(gap, first), by_line=False)]).rstrip()


# What the results show


def about_result(found: Any, expected: Any) -> Fact:
    """Return a hint about the first part of a result that differs."""
    if isinstance(found, tuple) and isinstance(expected, tuple) and same(found[1::-1] + found[2:], expected):
        return Fact("The results are in the wrong order.", is_sure=True)
    if have_the_same_parts(found, expected):
        own, parts = parts_of(found), parts_of(expected)
        return about_result(*next((own[x], parts[x]) for x in parts if not same(own[x], parts[x])))
    if isinstance(found, Raised):
        return about_error(found.error)
    if found is None:
        return Fact("It returns None: is there a `return`?")
    if isinstance(found, tuple) or isinstance(expected, tuple):
        return Fact("The number of results is wrong. Which ones are asked for?")
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        with suppress(Exception):  # of a tensor without numbers
            return about_tensors(found, expected)
    return Fact("")


def about_error(error: str) -> Fact:
    for hints in (CERTAIN, LIKELY):
        for part, text in hints.items():
            if re.search(part, error):
                return Fact(text, is_sure=hints is CERTAIN)
    return Fact("")


def about_tensors(x: Tensor, y: Tensor) -> Fact:
    """Return what a tensor x, in which y is expected, shows."""
    if lacks_an_axis(x, y):
        return Fact("An axis of size 1 is lost. `keepdim=True` keeps it, `[:, None]` makes one.")
    if lacks_an_axis(y, x):
        return Fact("There is an axis of size 1 too many. Is a `keepdim=True` not needed?")
    if x.dim() == y.dim() > 1 and near(x.mT, y):
        return Fact("Rows and columns are exchanged: `.mT`.", is_sure=True)
    if x.dim() < y.dim():
        return Fact("An axis is lost. Along which one is the sum, the mean or the maximum?")
    if x.shape == 2 * (y.numel(),) != y.shape:
        return Fact("A row and a column made a matrix: is one to be turned?")
    if x.dim() > y.dim():
        return Fact("There are too many axes. Is a `[:, None]` not needed?")
    if x.dtype == torch.int8 != y.dtype:
        return Fact("An int8 ends at 127 and then wraps around. Convert it first.")
    if x.is_floating_point() > y.is_floating_point():
        return Fact("These are floats: round, then convert to integers.")
    if x.is_floating_point() < y.is_floating_point():
        return Fact("These are integers where floats belong.")
    if x.shape != y.shape:
        return Fact("The shape is wrong. Which axes does the result have, in which order?")
    if torch.bool in (x.dtype, y.dtype):
        return Fact("")
    if (x.isnan() & ~y.isnan()).any():
        return Fact("NaN comes from 0 / 0 or inf - inf. Which divisor may be 0?")
    if (x.isinf() & ~y.isinf()).any():
        return Fact("Infinity comes from a division by 0, the logarithm of 0 or a large exponent.")
    if near(x, -y.double()):
        return Fact("The sign is wrong.", is_sure=True)
    if not y.is_floating_point() and (x.double() - y).abs().max() == 1:
        return Fact("Only the rounding differs.")
    ratio = (x.double() * y).sum() / (y.double() ** 2).sum()
    if x.numel() > 1 and near(x, ratio * y):
        return Fact(f"Everything is {ratio:.4g} times what it should be.")
    return Fact("")


def near(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool(close_entries(x.double(), y.double()).all())


def lacks_an_axis(x: Tensor, y: Tensor) -> bool:
    """Whether x has the shape of y without one of its axes of size 1."""
    return x.dim() == y.dim() - 1 and x.shape in [y.squeeze(axis).shape for axis in range(y.dim())]


# Small changes of the text


class Change(NamedTuple):
    """A sentence about a small change, and the change's kind."""

    text: str
    kind: str = ""


def small_change(gap: Gap, report: Report) -> Change:
    """Return the small change that makes the answer the solution, or the solution the answer; "" for none."""
    if report.text is None:
        return Change("")
    own, right = (ast.unparse(ast.parse(text)) for text in (report.text, gap.text))
    made, to_be_made = mutants.mutants(right, own), mutants.mutants(own, right)

    for change in made:
        if change.text == own:
            return Change(change.if_made, change.kind)
    for change in to_be_made:
        if change.text == right:
            return Change(change.if_to_be_made, change.kind)
    return Change("")
