"""What a test expects: what the master gives on its inputs, perhaps with mistakes made, and how answers differ."""

import ast
import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sage_course.check import Mistake, defined, edited, first_difference
from sage_lab.climb.observe import observe

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
                number: x for number, x in given.items() if any(map(functools.partial(difference, test), x, expected))
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


def difference(
    test: Test, found: dict, expected: dict, ignored: frozenset[str] = frozenset()
) -> tuple[str, str] | None:
    """Return what of a call's outcome is wrong and, in words, how; None if nothing is."""
    if "raised" in found or "raised" in expected:
        same = found.get("raised") == expected.get("raised")
        return None if same else ("raised", f"found {found.get('raised', 'no error')}")
    # A submission's process may answer anything, and tensors that are compared are no bool.
    if expected["launched"] and found.get("launched") is not True:
        return "launched", ""
    if "changed" not in ignored and repr(found.get("changed")) != repr(expected["changed"]):
        return "changed", ""
    kind = "outputs" if expected["outputs"] else "result"
    x, y = found.get(kind), expected[kind]
    if expected["gradients"] is not None:
        x, y = (x, found.get("gradients")), (y, expected["gradients"])
    if test.parts is not None:
        fits = (
            isinstance(x, dict) and x.keys() == y.keys()
            if isinstance(y, dict)
            else isinstance(x, tuple) and len(x) == len(y)
        )
        if not fits:
            return "form", _line(first_difference(x, y, agree=agreement("form")))
        x, y = ([z[part] for part in test.parts] for z in (x, y))
        x, y = (x[0], y[0]) if len(x) == 1 else (tuple(x), tuple(y))
    if text := first_difference(x, y, agree=agreement("form"), same_dtype=True):
        scalars = isinstance(y, int | float | str) and type(x) is type(y)
        return ("value" if scalars else "form"), _line(text)
    if test.listed:
        x, y = ((z[0].masked_fill(torch.arange(z[0].shape[1]) >= y[1][:, None], 0), z[1]) for z in (x, y))
    if text := first_difference(x, y, agree=agreement(test.agree), same_dtype=True):
        return "value", _line(text)
    for flag in ("spoiled", "undefined"):
        if flag not in ignored and found.get(flag) is not expected[flag]:
            return flag, ""
    return None


def _line(text):
    return ", ".join(line.strip() for line in text.splitlines()) if text else ""
