"""Grading: calls are made with the submission and with the master, and what comes is compared.

Each test runs on the visible seed and then on hidden ones. It earns its points if it holds on all. A failed test shows
one hint; on visible inputs also what was expected and found. A mistake costs its points once: further tests that give
what the master with this mistake gives count as passed. An error in the master or in task.py is not the student's: the
test is "broken" and the exercise has no score.
"""

import dataclasses
import importlib.util
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sage_course.gaps import Mistake, compare

from exercises.answers import NONE, Error, Exercise, Wrong, holds_none, load_exercise, wrong_part
from exercises.handing_in import FILE_LIMIT, VISIBLE_SEED, read_submission
from exercises.isolation import Failure, Outcome, Sandbox, SandboxError
from exercises.task import NO_LAUNCH, Call, Test

FEEDBACK_LIMIT = 500  # characters of one test's feedback
RETURNED_NONE = "returned None, or something without a gradient: is there a `return`, and no `detach`?"
CRASHED = "grading this exercise crashed twice; tell your instructor, who has the reason in the log"
HINTS = {
    "launched": NO_LAUNCH,
    "spoiled": "Something was written outside of an output: which rows of the last tile exist?",
    "undefined": "NaN, infinity or too large a number became an integer, and C doesn't say which. Is there a 0 / 0?",
    "form": "The docstring says which shapes and dtypes are expected.",
}


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


@dataclasses.dataclass(frozen=True)
class ExerciseResult:
    """The results of all tests; score is None if the grader broke, and error says why, for the instructor."""

    exercise: str
    tests: list[TestResult]
    seconds: float = 0.0
    printed: str = ""
    error: str | None = None

    @property
    def broken(self) -> bool:
        return any(test.status == "broken" for test in self.tests)

    @property
    def score(self) -> float | None:
        return None if self.broken else sum(test.score for test in self.tests)

    @property
    def max_score(self) -> float:
        return sum(test.max_score for test in self.tests if test.status != "skipped")

    def as_json(self) -> dict[str, Any]:
        """Return what --json writes: nothing that the submission printed."""
        tests = [dataclasses.asdict(test) | {"score": test.score} for test in self.tests]
        scores = {"score": self.score, "max_score": self.max_score}
        return {"exercise": self.exercise, **scores, "seconds": round(self.seconds), "tests": tests}


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
        if self.made and same(found, self.given(test, seed, self.made), differ):
            return TestResult(test.name, test.points, "passed", "as a mistake above makes it")
        report = compare(found, expected, self.exercise.mistakes, partial(self.given_beside, test, seed), differ)
        if report.mistake is not None:
            self.made.append(report.mistake)
            hint = report.mistake.hint or test.hint
        else:
            hint = self.hint(test, calls[report.number], found[report.number], report.difference)
        self.paid |= {report.difference.kind} & {"changed", "undefined"}
        shown = report.difference.words if test.shows and not fixed else ""
        return failed(test, hint, f"{hint} ({shown})" if shown else hint, fixed)

    def without_an_answer(self, test: Test, seed: Any, function: str, failure: Failure, fixed: bool) -> TestResult:
        """Return the result of a test in which a call gave nothing: the hint of the mistake that raises the same."""
        mistakes = () if self.exercise.capstone or not failure.raised else self.exercise.mistakes
        for mistake in mistakes:
            hint = mistake.hint or test.hint
            if failure.raised in self.given(test, seed, [mistake]):
                return failed(test, hint, hint, fixed)
        said = failure.shown if fixed else failure.said
        return failed(test, f"{function} {failure.shown}", f"{function} {said}", fixed)

    def given(self, test: Test, seed: Any, mistakes: Sequence[Mistake]) -> list[Outcome | Error]:
        """Return what the master gives with these mistakes; nothing if they can't be made together."""
        try:
            return self.exercise.expected(test, seed, mistakes)
        except (ValueError, SyntaxError):
            return []

    def given_beside(self, test: Test, seed: Any, mistake: Mistake) -> list[Outcome | Error]:
        """Return what the master gives with a mistake, beside those made before if they can be made together."""
        both = self.given(test, seed, [*self.made, mistake]) if self.made and mistake not in self.made else []
        return both or self.given(test, seed, [mistake])

    def hint(self, test: Test, call: Call, found: Outcome, wrong: Wrong) -> str:
        """Return the hint for what no known mistake explains."""
        if wrong.kind == "changed":
            numbers = [x for x in found["changed"] if type(x) is int and 0 <= x < len(call.arguments)]
            names = " and ".join(self.exercise.parameter(call.function, x) for x in numbers) or "its arguments"
            return f"{call.function} overwrites {names}, which its caller still needs. Work on a copy."
        return HINTS.get(wrong.kind, test.hint)


def same(found: Sequence[Outcome], expected: Sequence[Outcome | Error], differ: Callable) -> bool:
    """Return whether as many calls gave the same."""
    return len(found) == len(expected) and all(differ(*pair) is None for pair in zip(found, expected, strict=True))


def failed(test: Test, hint: str, feedback: str, fixed: bool) -> TestResult:
    feedback = " ".join(feedback.split())[:FEEDBACK_LIMIT] + (" (on hidden inputs)" if fixed else "")
    return TestResult(test.name, test.points, "failed", feedback, hint)


def grade(exercise: Exercise, source: bytes, seeds: Sequence[Any], sandbox: Sandbox) -> ExerciseResult:
    """Grade one submission on all seeds, the visible one first."""
    if len(source) > FILE_LIMIT:
        return unable(exercise, "exercise.py is larger than 1 MiB")
    if exercise.triton and importlib.util.find_spec("triton") is None:
        return unable(exercise, "needs Triton: Linux, or WSL on Windows", "skipped")
    sandbox.open()  # it may take a while, which is not the submission's
    start = time.monotonic()
    answers = partial(sandbox.answers, deadline=start + sandbox.limits.exercise_seconds)
    try:
        results, printed = graded(exercise, exercise.tests, seeds, partial(answers, source))
        results = with_correct_functions(exercise, source, seeds, answers, results)
    except SandboxError:
        raise
    except Exception as error:
        return unable(exercise, "the grader broke", "broken", "".join(traceback.format_exception(error)))
    return ExerciseResult(exercise.name, results, time.monotonic() - start, printed)


def graded(
    exercise: Exercise, tests: Sequence[Test], seeds: Sequence[Any], answers: Callable
) -> tuple[list[TestResult], str]:
    """Return the result of each test on all seeds, up to the first that fails, and what was printed on the first.

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
        printed = printed or text
    return list(results.values()), printed


def with_correct_functions(
    exercise: Exercise, source: bytes, seeds: Sequence[Any], answers: Callable, results: list[TestResult]
) -> list[TestResult]:
    """Grade tests again whose function uses others that are wrong, with correct ones in their place."""
    failing = {test: result for test, result in zip(exercise.tests, results, strict=True) if result.status == "failed"}
    if exercise.capstone or not failing:  # a capstone is one function
        return results
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


def unable(exercise: Exercise, reason: str, status: str = "failed", error: str | None = None) -> ExerciseResult:
    """Return the result of an exercise that can't be graded, with the same reason for each test."""
    tests = [TestResult(test.name, test.points, status, reason, reason) for test in exercise.tests]
    return ExerciseResult(exercise.name, tests, error=error)


def grade_folder(folder: Path, name: str, seeds: Sequence[Any], sandbox: Sandbox, *, alone: bool) -> ExerciseResult:
    """Grade one exercise of a submission; whatever goes wrong with it costs no other exercise its score."""
    try:
        exercise = load_exercise(name)
    except Exception as error:
        broken = TestResult("the exercise can be loaded", 1, "broken", "the grader broke")
        return ExerciseResult(name, [broken], error="".join(traceback.format_exception(error)))
    source, reason = read_submission(folder, name, alone=alone, stub=exercise.stub)
    if source is None:
        return unable(exercise, reason)
    for _ in range(2):
        try:
            return grade(exercise, source, seeds, sandbox)
        except Exception as error:  # outside of a test: no error of a grader
            crash = "".join(traceback.format_exception(error))
            sandbox.close()
    return unable(exercise, CRASHED, error=crash)


def table(result: ExerciseResult) -> str:
    """Return the result as a student reads it: the score first; a hint that was shown already isn't shown again."""
    marks = {"passed": "ok", "failed": "FAIL", "skipped": "skipped", "broken": "BROKEN"}
    width, shown = max(len(test.name) for test in result.tests), set()
    total = "no score: the grader broke" if result.score is None else f"{result.score:g} of {result.max_score:g} points"
    lines = [f"{result.exercise}: {total}, {result.seconds:.1f} s"]
    for test in result.tests:
        lines.append(f"  {marks[test.status]:7} {test.name:{width}}  {test.score:g}/{test.max_score:g}")
        if test.feedback:
            lines.append(f"          {'as above' if test.feedback in shown else test.feedback}")
        shown.add(test.feedback)
    return "\n".join(lines)
