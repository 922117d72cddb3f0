"""What a test expects, how answers differ from it, and which tests of an exercise an answer passes.

What the master gives on a test's inputs is compared with what came of the submission's calls. Each test runs on the
visible seed and then on hidden ones. It earns its points if it holds on all. A failed test shows one hint; on visible
inputs also what was expected and found. A mistake costs its points once: further tests that give what the master with
this mistake gives count as passed.
"""

import ast
import dataclasses
import functools
import os
import tomllib
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from sage_course.gaps import Difference, Mistake, compare, defined, difference, edited, have_the_same_parts
from sage_lab.capstones import trials
from sage_lab.capstones.observe import observe
from torch import Tensor
from torch.utils._pytree import tree_leaves

from exercises import ROOT
from exercises.handing_in import VISIBLE_SEED
from exercises.isolation import IMPORTING, Failure, Outcome, SandboxError
from exercises.perform import perform
from exercises.stubs import stub_of
from exercises.task import NO_LAUNCH, Call, Draw, Test, agreement
from exercises.variants import read_text
from exercises.worker import TEXT_LIMIT, define

FEEDBACK_LIMIT = 500  # characters of one test's feedback
RETURNED_NONE = "returned None, or something without a gradient: is there a `return`, and no `detach`?"
Error = str  # what comes of a call of the master instead of an outcome: it never counts as right
NONE = "there is None where a result or a gradient should be"
HINTS = {
    "changed": "It overwrites an argument, which its caller still needs. Work on a copy.",
    "launched": NO_LAUNCH,
    "spoiled": "Something was written outside of an output: which rows of the last tile exist?",
    "undefined": "NaN, infinity or too large a number became an integer, and C doesn't say which. Is there a 0 / 0?",
    "form": "The docstring says which shapes and dtypes are expected.",
}


class Exercise:
    """One exercise: its tests, and what the master gives, perhaps with mistakes made."""

    def __init__(self, name: str, variant: int = 1):
        self.name, self.variant = name, variant
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
        self.master = read_source(name, "master.py", variant)
        task = define(f"task_{name}", read_source(name, "task.py", variant).encode(), f"{name}/task.py").task
        self.tests, self.triton, self.capstone = tuple(task.tests), task.triton, task.capstone
        self.mistakes = () if self.capstone else read_mistakes(name, variant)
        self.stub = stub_of(self.master, f"{name}/master.py")[0]

    @property
    def title(self) -> str:
        return self.name if self.variant == 1 else f"{self.name}, variant {self.variant}"

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

    @functools.cache  # noqa: B019, as above
    def expected(self, test: Test, seed: Any, mistakes: tuple[Mistake, ...] = ()) -> list[Outcome | Error]:
        """Return what the master gives in each call of a test, with these mistakes made.

        ValueError or SyntaxError if the mistakes can't be made together.
        """
        functions, run = self.functions(mistakes), attempt if mistakes else make
        return [run(functions[call.function], call) for call in self.calls(test, seed)]

    @functools.lru_cache(maxsize=64)  # noqa: B019, as above
    def functions(self, mistakes: tuple[Mistake, ...] = ()) -> dict[str, Any]:
        """Return the master's names, with these mistakes made."""
        text = edited(self.master, mistakes)
        return defined(text, f"<master of {self.name}: {hash(text)}>", {"__name__": self.name})

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


def read_source(name: str, file: str, variant: int = 1) -> str:
    """Return a file that tells the solution. Students have it packed, so that nobody reads it by accident."""
    packed = (ROOT / name / file).with_suffix(".z")
    return zlib.decompress(packed.read_bytes()).decode() if packed.exists() else read_text(name, file, variant)


def read_mistakes(name: str, variant: int = 1) -> tuple[Mistake, ...]:
    """Return the mistakes of an exercise; a capstone's hint may be a name in `sage_lab.capstones.trials`."""
    mistakes = []
    for facts in tomllib.loads(read_source(name, "mistakes.toml", variant))["mistake"]:
        (old, new), *more = facts["edits"]
        hint = facts.get("hint", "")
        hint = getattr(trials, hint, hint)
        mistakes.append(Mistake(old, new, hint, tuple(map(tuple, more)), facts.get("test", "")))
    return tuple(mistakes)


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


@dataclasses.dataclass(frozen=True)
class TestResult:
    """status: passed, failed, skipped (not on this machine; counts for nothing) or broken (the grader's fault)."""

    name: str
    max_score: float
    status: str
    feedback: str = ""
    hint: str = ""  # what of the feedback is the same for all inputs

    @property
    def score(self) -> float:
        return self.max_score if self.status == "passed" else 0.0


class Judge:
    """Judges the tests of one submission, one after the other, and remembers the mistakes it has recognised."""

    def __init__(self, exercise: Exercise):
        self.exercise = exercise
        self.made: list[Mistake] = []
        self.paid: frozenset[str] = frozenset()  # flags that have cost their points

    def judge(self, test: Test, seed: Any, outcomes: Iterable[Outcome | Failure], *, fixed: bool = False) -> TestResult:
        """Return the result of one test on one seed.

        Args:
            test: The test.
            seed: What its inputs are drawn from.
            outcomes: What came of its calls, up to the first Failure at least.
            fixed: Whether only fixed hints are shown, no data and no word of the submission.
        """
        calls, found = self.exercise.calls(test, seed), []
        for call, outcome in zip(calls, outcomes, strict=False):
            if isinstance(outcome, Failure):
                return self.without_an_answer(test, seed, call.function, outcome, fixed)
            found.append(outcome)
            if call.judge and (wrong := call.judge(outcome)).kind:
                said = f"{wrong.hint} ({wrong.found})" if wrong.found and not fixed else wrong.hint
                return failed(test, wrong.hint, said, fixed)
        if len(found) < len(calls):
            raise SandboxError(f"{test.name}: expected {len(calls)} outcomes, got {len(found)}")
        if self.exercise.capstone:
            return TestResult(test.name, test.points, "passed")
        if any(map(holds_none, found)):
            nothing = Failure(RETURNED_NONE, RETURNED_NONE, f"ValueError: {NONE}")
            return self.without_an_answer(test, seed, calls[0].function, nothing, fixed)
        expected, differ = self.exercise.expected(test, seed), partial(wrong_part, test, paid=self.paid)
        if same(found, expected, differ):
            return TestResult(test.name, test.points, "passed")
        if self.made and same(found, self.with_those_made(test, seed), differ):
            return TestResult(test.name, test.points, "passed", "as a mistake above makes it")
        with_mistake = lambda mistake: self.exercise.expected(test, seed, (mistake,))  # noqa: E731
        report = compare(found, expected, self.exercise.mistakes, with_mistake, differ)
        hint = HINTS.get(report.difference.kind, test.hint)
        if report.mistake is not None:
            self.made.append(report.mistake)
            hint = report.mistake.hint or test.hint
        self.paid |= {report.difference.kind} & {"changed", "undefined"}
        shown = report.difference.words if test.shows and not fixed else ""
        return failed(test, hint, f"{hint} ({shown})" if shown else hint, fixed)

    def without_an_answer(self, test: Test, seed: Any, function: str, failure: Failure, fixed: bool) -> TestResult:
        """Return the result of a test in which a call gave nothing: the hint of the mistake that raises the same."""
        for mistake in self.exercise.mistakes if failure.raised else ():
            hint = mistake.hint or test.hint
            if failure.raised in self.exercise.expected(test, seed, (mistake,)):
                return failed(test, hint, hint, fixed)
        said = failure.shown if fixed else failure.said
        return failed(test, f"{function} {failure.shown}", f"{function} {said}", fixed)

    def with_those_made(self, test: Test, seed: Any) -> list[Outcome | Error]:
        """Return what the master gives with the mistakes recognised before; nothing if they can't be made together."""
        try:
            return self.exercise.expected(test, seed, tuple(self.made))
        except (ValueError, SyntaxError):
            return []


def same(found: Sequence[Outcome], expected: Sequence[Outcome | Error], differ: Callable) -> bool:
    """Return whether as many calls gave the same."""
    return len(found) == len(expected) and all(differ(*pair) is None for pair in zip(found, expected, strict=True))


def failed(test: Test, hint: str, feedback: str, fixed: bool) -> TestResult:
    feedback = " ".join(feedback.split())[:FEEDBACK_LIMIT] + (" (on hidden inputs)" if fixed else "")
    return TestResult(test.name, test.points, "failed", feedback, hint)


def graded(
    exercise: Exercise, tests: Sequence[Test], seeds: Sequence[Any], answers: Callable
) -> tuple[list[TestResult], str]:
    """Return the result of each test on all seeds, up to the first that fails, and what was printed on the visible one.

    Each seed has processes of its own, so that feedback on visible inputs holds nothing of hidden ones.
    """
    judge, results, printed = Judge(exercise), {}, ""
    for seed in seeds:
        waiting = [test for test in tests if test not in results or results[test].status == "passed"]
        found, text = answers([exercise.calls(test, seed) for test in waiting])
        for test, outcomes in zip(waiting, found, strict=True):
            result = judge.judge(test, seed, outcomes, fixed=seed != VISIBLE_SEED)
            if test not in results or result.status != "passed":
                results[test] = result
        printed += text if seed == VISIBLE_SEED else ""
    return list(results.values()), printed


def with_correct_functions(
    exercise: Exercise, source: bytes, seeds: Sequence[Any], answers: Callable, results: list[TestResult]
) -> list[TestResult]:
    """Grade tests again whose function uses others that are wrong, with correct ones in their place."""
    pairs = zip(exercise.tests, results, strict=True)
    failing = {test: result for test, result in pairs if result.status == "failed" and IMPORTING not in result.hint}
    functions = {test: {call.function for call in exercise.calls(test, VISIBLE_SEED)} for test in failing}
    wrong = set().union(*functions.values())
    for test, before in failing.items():
        used = set().union(*map(exercise.used, functions[test]))
        if used & wrong:
            corrected = partial(answers, exercise.with_correct(source, used))
            (again,), _ = graded(exercise, [test], seeds, corrected)
            if again.status == "passed" or again.hint != before.hint:
                note = f"(with a correct {' and '.join(sorted(used & wrong))} in the place of yours)"
                failing[test] = dataclasses.replace(again, feedback=f"{again.hint} {note}".strip())
    return [failing.get(test, result) for test, result in zip(exercise.tests, results, strict=True)]
