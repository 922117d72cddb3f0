"""What a test expects: what the master gives on its inputs, perhaps with mistakes made, and how answers differ."""

import ast
import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sage_course.gaps import Difference, Mistake, defined, difference, edited, have_the_same_parts
from sage_lab.climb.observe import observe
from torch import Tensor

from exercises import ROOT, exercise_names
from exercises.handing_in import VISIBLE_SEED
from exercises.perform import perform
from exercises.stubs import stub_of
from exercises.task import Call, Draw, Test, agreement, capstone
from exercises.worker import load


class Correct(NamedTuple):
    """Functions of the master that take the place of a submission's, and the code that defines them."""

    names: tuple[str, ...]
    source: str


class Exercise:
    """One exercise: its tests, and what the master gives, perhaps with mistakes made."""

    capstone = ""  # its name in `sage_lab.climb.trials`, if it is one

    def __init__(self, name: str):
        if name not in exercise_names():
            raise ValueError(f"name: expected one of {exercise_names()}, got {name!r}")
        self.name = name
        self.master = (ROOT / name / "master.py").read_text(encoding="utf-8")
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        task = load(f"task_{name}", ROOT / name / "task.py").task
        self.tests, self.mistakes, self.triton = tuple(task.tests), task.mistakes, task.triton
        self.capstone = task.capstone
        self.stub = stub_of(self.master, f"{name}/master.py")[0]
        self.given = {}

    @property
    def points(self) -> float:
        return sum(test.points for test in self.tests)

    def calls(self, test: Test, seed: Any) -> list[Call]:
        """Return the calls that a test makes on this seed."""
        return list(test.calls(Draw(seed, self.name, test.name)))

    def observed(self, test: Test, seed: Any, mistakes: Sequence[Mistake] = ()) -> list[dict[str, Any]]:
        """Return what the master gives in each call of a test, with these mistakes made."""
        key = test.name, seed, tuple(mistakes)
        if key not in self.given:
            functions, run = self.functions(tuple(mistakes)), attempt if mistakes else make
            self.given[key] = [run(functions[call.function], call) for call in self.calls(test, seed)]
        return self.given[key]

    @functools.lru_cache(maxsize=64)  # noqa: B019, an exercise lives as long as its command
    def functions(self, mistakes: tuple[Mistake, ...] = ()) -> dict[str, Any]:
        """Return the master's names, with these mistakes made."""
        text = edited(self.master, mistakes)
        return defined(text, f"<master of {self.name}: {hash(text)}>", {"__name__": self.name})

    def parameter(self, function: str, number: int) -> str:
        """Return the name of a function's argument."""
        return list(inspect.signature(self.functions()[function]).parameters)[number]

    def correct(self, function: str) -> Correct | None:
        """Return what a function uses of the others, as the master has it."""
        body = ast.parse(self.master).body
        nodes = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        tested = {call.function for test in self.tests for call in self.calls(test, VISIBLE_SEED)}
        used, front = set(), {function}
        while front:
            words = {x.id for name in front for x in ast.walk(nodes[name]) if isinstance(x, ast.Name)}
            front = (words & nodes.keys()) - used
            used |= front
        names = tuple(sorted((used & tested) - {function}))
        # The submission must not meet the rest of the solution.
        kept = [node for node in body if getattr(node, "name", None) not in tested - set(names)]
        return Correct(names, ast.unparse(ast.Module(kept, []))) if names else None


class Recorded(Exercise):
    """An exercise without its master, as students have it: what that gives on the visible inputs was recorded."""

    def __init__(self, name: str):
        self.name, self.stub = name, ""
        content = torch.load(ROOT / name / "answers.pt", weights_only=True)
        self.triton, self.parameters = content["triton"], content["parameters"]
        self.mistakes = tuple(Mistake(str(number), "", hint) for number, hint in enumerate(content["hints"]))
        self.tests = tuple(Test(calls=None, **test["facts"]) for test in content["tests"])
        self.answers = {test["facts"]["name"]: test for test in content["tests"]}
        self.capstone = content["capstone"]
        if self.capstone:  # its trials need no master
            self.tests = tuple(capstone(self.capstone).tests)

    @classmethod
    def content(cls, exercise: Exercise) -> dict[str, Any]:
        """Return what `torch.save` writes to answers.pt."""
        tests, seed = [], VISIBLE_SEED
        for test in () if exercise.capstone else exercise.tests:
            expected = exercise.observed(test, seed)
            given = {number: exercise.observed(test, seed, [x]) for number, x in enumerate(exercise.mistakes)}
            differ = {
                number: x for number, x in given.items() if any(map(functools.partial(wrong_part, test), x, expected))
            }
            facts = {key: value for key, value in test._asdict().items() if key != "calls"}
            calls = [tuple(call) for call in exercise.calls(test, seed)]
            tests.append({"facts": facts, "calls": calls, "expected": expected, "mistakes": differ})
        functions = {name: exercise.functions()[name] for name in {call[0] for test in tests for call in test["calls"]}}
        parameters = {name: list(inspect.signature(function).parameters) for name, function in functions.items()}
        hints = [mistake.hint for mistake in exercise.mistakes if not exercise.capstone]
        facts = {"triton": exercise.triton, "capstone": exercise.capstone}
        return facts | {"parameters": parameters, "hints": hints, "tests": tests}

    def calls(self, test: Test, seed: Any) -> list[Call]:
        if self.capstone:
            return super().calls(test, seed)
        return [Call(*call) for call in self.answers[test.name]["calls"]]

    def observed(self, test: Test, seed: Any, mistakes: Sequence[Mistake] = ()) -> list[dict[str, Any]]:
        if not mistakes:
            return self.answers[test.name]["expected"]
        if len(mistakes) > 1:
            raise ValueError("mistakes: expected one, since none was recorded together with another")
        return self.answers[test.name]["mistakes"].get(int(mistakes[0].old), self.answers[test.name]["expected"])

    def parameter(self, function: str, number: int) -> str:
        return self.parameters[function][number]

    def correct(self, function: str) -> None:
        return None


def make(function: Any, call: Call) -> dict[str, Any]:
    """Make a call of the master's function, or of one with a mistake."""
    if call.judge:
        return observe(function, *call.arguments, call.layouts)
    copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in call.arguments)
    return perform(function, copies, call.outputs, call.upstream)


def attempt(function: Any, call: Call) -> dict[str, Any]:
    """Do the same; what it raises is returned as a submission's process would say it."""
    try:
        return make(function, call)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return {"raised": f"{type(error).__name__}: {error}"[:300]}


def load_exercise(name: str) -> Exercise:
    """Return an exercise with its master, or what is recorded of it in students' packages."""
    return Recorded(name) if (ROOT / name / "answers.pt").exists() else Exercise(name)


class Wrong(NamedTuple):
    """What of a call's outcome is wrong, and how, in words."""

    kind: str  # raised, launched, changed, form, value, spoiled, undefined
    words: str = ""


def wrong_part(test: Test, found: dict, expected: dict, paid: frozenset[str] = frozenset()) -> Wrong | None:
    """Return what is wrong with a call's outcome, None if nothing is.

    found: a submission's process may have answered anything. paid: kinds that have cost their points before.
    """
    if "raised" in found or "raised" in expected:
        said = found.get("raised", "no error")
        is_same = isinstance(said, str) and said == expected.get("raised")  # no error equals no result
        return None if is_same else Wrong("raised", f"found {said}")
    if expected["launched"] and found.get("launched") is not True:
        return Wrong("launched")
    if "changed" not in paid and repr(found.get("changed")) != repr(expected["changed"]):
        return Wrong("changed")

    x, y = what_counts(found, expected), what_counts(expected, expected)
    if test.parts is not None:
        if not have_the_same_parts(x, y):
            return Wrong("form", words(difference(x, y)))
        x, y = ([result[part] for part in test.parts] for result in (x, y))
        x, y = (x[0], y[0]) if len(y) == 1 else (x, y)
    if test.listed:
        if form := difference(x, y, agree=agreement("form"), same_dtype=True):
            return Wrong("form", words(form))
        x, y = (without_the_rest(*result) for result in (x, y))
    if wrong := difference(x, y, agree=agreement(test.agree), same_dtype=True):
        return Wrong("form" if wrong.is_form else "value", words(wrong))

    for flag in ("spoiled", "undefined"):
        if flag not in paid and found.get(flag) is not expected[flag]:
            return Wrong(flag)
    return None


def what_counts(outcome: dict, expected: dict) -> Any:
    """Return an outcome's result, or what a kernel wrote, with the gradients if there are any."""
    value = outcome.get("outputs" if expected["outputs"] else "result")
    return value if expected["gradients"] is None else (value, outcome.get("gradients"))


def without_the_rest(numbers: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return lists of numbers with 0 for what follows the first ones that count."""
    return numbers.masked_fill(torch.arange(numbers.shape[1]) >= counts[:, None], 0), counts


def words(difference: Difference) -> str:
    return ", ".join(line.strip() for line in str(difference).splitlines())
