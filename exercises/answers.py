"""What a test expects: what the master gives on its inputs, perhaps with mistakes made, and how answers differ."""

import ast
import functools
import inspect
import os
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sage_course.gaps import Difference, Mistake, defined, difference, edited, have_the_same_parts
from sage_lab.capstones.observe import observe
from torch import Tensor
from torch.utils._pytree import tree_leaves

from exercises import ROOT, exercise_names
from exercises.handing_in import VISIBLE_SEED
from exercises.perform import perform
from exercises.stubs import stub_of
from exercises.task import Call, Draw, Test, agreement
from exercises.worker import TEXT_LIMIT, define

Outcome = dict[str, Any]  # what comes of a call, by `perform` or `observe`
Error = str  # what comes of it instead: it never counts as right
NONE = "there is None where a result or a gradient should be"


class Exercise:
    """One exercise: its tests, and what the master gives, perhaps with mistakes made."""

    def __init__(self, name: str):
        if name not in exercise_names():
            raise ValueError(f"name: expected one of {exercise_names()}, got {name!r}")
        self.name = name
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        self.master = read_source(name, "master")
        task = define(f"task_{name}", read_source(name, "task").encode(), f"{name}/task.py").task
        self.tests, self.mistakes, self.triton = tuple(task.tests), task.mistakes, task.triton
        self.capstone = task.capstone
        self.stub = stub_of(self.master, f"{name}/master.py")[0]
        self.given = {}

    @property
    def points(self) -> float:
        return sum(test.points for test in self.tests)

    @property
    def device(self) -> str:
        return "cuda" if self.triton and torch.cuda.is_available() else "cpu"

    @functools.lru_cache(maxsize=256)  # noqa: B019, an exercise lives as long as its command
    def calls(self, test: Test, seed: Any) -> tuple[Call, ...]:
        """Return the calls that a test makes on this seed."""
        drawn = test.calls(Draw(seed, self.name, test.name))
        return tuple(call._replace(device=self.device) for call in drawn)

    def expected(self, test: Test, seed: Any, mistakes: Sequence[Mistake] = ()) -> list[Outcome | Error]:
        """Return what the master gives in each call of a test, with these mistakes made.

        ValueError or SyntaxError if the mistakes can't be made together.
        """
        key = test.name, seed, tuple(mistakes)
        if key not in self.given:
            functions, run = self.functions(tuple(mistakes)), attempt if mistakes else make
            self.given[key] = [run(functions[call.function], call) for call in self.calls(test, seed)]
        return self.given[key]

    @functools.lru_cache(maxsize=64)  # noqa: B019, as above
    def functions(self, mistakes: tuple[Mistake, ...] = ()) -> dict[str, Any]:
        """Return the master's names, with these mistakes made."""
        text = edited(self.master, mistakes)
        return defined(text, f"<master of {self.name}: {hash(text)}>", {"__name__": self.name})

    def parameter(self, function: str, number: int) -> str:
        """Return the name of a function's argument."""
        return list(inspect.signature(self.functions()[function]).parameters)[number]

    def used(self, function: str) -> set[str]:
        """Return the functions with tests of their own that the master's function uses."""
        nodes = {node.name: node for node in ast.parse(self.master).body if isinstance(node, ast.FunctionDef)}
        used, front = set(), {function}
        while front:
            words = {x.id for name in front for x in ast.walk(nodes[name]) if isinstance(x, ast.Name)}
            front = (words & nodes.keys()) - used
            used |= front
        return (used & self.tested) - {function}

    @property
    def tested(self) -> set[str]:
        return {call.function for test in self.tests for call in self.calls(test, VISIBLE_SEED)}

    def with_correct(self, source: bytes, names: set[str]) -> bytes:
        """Return a submission with the master's functions of these names in the place of its own."""
        others = self.tested - names
        kept = [node for node in ast.parse(self.master).body if getattr(node, "name", None) not in others]
        return source + b"\n\n" + ast.unparse(ast.Module(kept, [])).encode("ascii", "backslashreplace")


load_exercise = functools.cache(Exercise)  # a class is graded with what the master has given once


def read_source(name: str, file: str) -> str:
    """Return an exercise's master or task. Students have it packed, so that nobody reads it by accident."""
    plain = ROOT / name / f"{file}.py"
    packed = plain.with_suffix(".z")
    return (zlib.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()).decode()


def make(function: Any, call: Call) -> Outcome:
    """Make a call of the master's function, or of one with a mistake."""
    if call.judge:
        return observe(function, *call.arguments, call.layouts)
    copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in call.arguments)
    outcome = perform(function, copies, call.outputs, call.upstream)
    if holds_none(outcome):
        raise ValueError(NONE)
    return outcome


def holds_none(outcome: Outcome) -> bool:
    """Return whether something is missing of what is compared: a result, a part of it or a gradient."""
    return any(x is None for x in tree_leaves(what_counts(outcome, outcome)))


def attempt(function: Any, call: Call) -> Outcome | Error:
    """Do the same; what it raises is returned as a submission's process would say it."""
    try:
        return make(function, call)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return " ".join(f"{type(error).__name__}: {error}"[:TEXT_LIMIT].split())


class Wrong(NamedTuple):
    """What of a call's outcome is wrong, and how, in words."""

    kind: str  # launched, changed, form, value, spoiled, undefined
    words: str = ""


def wrong_part(
    test: Test, found: Outcome, expected: Outcome | Error, paid: frozenset[str] = frozenset()
) -> Wrong | None:
    """Return what is wrong with a call's outcome, None if nothing is.

    The expected outcome says what is compared. An error, None or what is missing is never right, whatever is expected.

    Args:
        test: Says how results are compared.
        found: What a submission's process has answered, in the form of an outcome, with any values.
        expected: What the master gives, perhaps with a mistake made.
        paid: The kinds that have cost their points before.
    """
    if not isinstance(expected, dict):
        return Wrong("form")
    if expected["launched"] and found["launched"] is not True:
        return Wrong("launched")
    if "changed" not in paid and found["changed"] != expected["changed"]:
        return Wrong("changed")
    x, y = (what_counts(outcome, expected) for outcome in (found, expected))
    if test.parts is not None:
        if not have_the_same_parts(x, y):
            return Wrong("form", in_a_line(difference(x, y)))
        x, y = ([result[part] for part in test.parts] for result in (x, y))
        x, y = (x[0], y[0]) if len(y) == 1 else (x, y)
    if test.listed:
        if form := difference(x, y, agree=agreement("form"), same_dtype=True):
            return Wrong("form", in_a_line(form))
        x, y = (without_the_rest(*result) for result in (x, y))
    if wrong := difference(x, y, agree=agreement(test.agree), same_dtype=True):
        return Wrong("form" if wrong.is_form else "value", in_a_line(wrong))
    flags = [flag for flag in ("spoiled", "undefined") if flag not in paid and found[flag] is not expected[flag]]
    return Wrong(flags[0]) if flags else None


def what_counts(outcome: Outcome, expected: Outcome) -> Any:
    """Return an outcome's result, or what a kernel wrote, with the gradients if there are any."""
    value = outcome["outputs" if expected["outputs"] else "result"]
    return value if expected["gradients"] is None else (value, outcome["gradients"])


def without_the_rest(numbers: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists of numbers with 0 for what follows the first ones that count."""
    return numbers.masked_fill(torch.arange(numbers.shape[1]) >= counts[:, None], 0), counts


def in_a_line(difference: Difference) -> str:
    return ", ".join(line.strip() for line in str(difference).splitlines())
