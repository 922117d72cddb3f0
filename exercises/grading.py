"""Grading: calls are made with the submission and with the master, and what comes is compared.

Each test runs on the visible seed and then, in a fresh process, on hidden ones. It earns its points if it holds on all.
A failed test shows one hint; on visible inputs also what was expected and found. A mistake costs its points once:
further tests that give what the master with this mistake gives count as passed. An error in the master or in task.py is
not the student's: the test is "broken" and the exercise has no score.
"""

import contextlib
import dataclasses
import importlib.util
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sage_course.gaps import Mistake, compare

from exercises.answers import Correct, Exercise, load_exercise, wrong_part
from exercises.handing_in import FILE_LIMIT, VISIBLE_SEED, read_submission
from exercises.isolation import DEFAULT_LIMITS, ChildError, Limits, Sandbox, SandboxError, have_walls
from exercises.task import NO_LAUNCH, Call, Test

FEEDBACK_LIMIT = 500  # characters of one test's feedback
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


class Sandboxes:
    """The sandboxes of a grading, one for each phase, so that nothing of a later phase reaches an earlier one.

    A context manager. Without walls there is one for all phases: nothing would be hidden anyway.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, walls: bool | None = None):
        self.limits, self.walls = limits, have_walls() if walls is None else walls
        self.started: dict[str, Sandbox] = {}

    def __enter__(self) -> "Sandboxes":
        return self

    def __exit__(self, *_: object) -> None:
        for sandbox in self.started.values():
            sandbox.close()

    def of(self, phase: str) -> Sandbox:
        """Return the sandbox of "visible", "hidden" or "corrected" runs."""
        phase = phase if self.walls else "all"
        sandbox = self.started.setdefault(phase, Sandbox(self.limits, self.walls))
        sandbox.open()
        return sandbox


@contextlib.contextmanager
def machinery() -> Iterator[None]:
    """Tell errors of what runs submissions from errors of the master and of task.py."""
    try:
        yield
    except Exception as error:
        raise SandboxError(f"the process of a submission can't be handled: {error}") from error


class Student:
    """A submission in one phase; its process is started again after a crash. A context manager."""

    def __init__(self, exercise: Exercise, source: bytes, sandbox: Sandbox):
        self.source, self.sandbox = source, sandbox
        self.device = "cuda" if exercise.triton and torch.cuda.is_available() else "cpu"
        self.deadline = float("inf")  # until its process has started
        self.child, self.printed, self.endless = None, "", None

    def __enter__(self) -> "Student":
        return self

    def __exit__(self, *_: object) -> None:
        child, self.child = self.child, None
        if child is not None:
            with machinery():
                self.printed += child.printed()
                child.close()

    def call(self, call: Call, correct: Correct | None = None) -> dict[str, Any]:
        """Return what the submission gives; "raised" if it is an error. ChildError if it gives nothing."""
        if self.endless is not None:
            raise self.endless
        if time.monotonic() >= self.deadline:
            raise ChildError("used up the time of the exercise")
        if self.child is None:
            with machinery():
                self.child = self.sandbox.start(self.source)
            self.deadline = min(self.deadline, time.monotonic() + self.sandbox.limits.exercise_seconds)
        try:
            return self.child.call(call, device=self.device, deadline=self.deadline, correct=correct)
        except ChildError as error:
            if error.fatal:
                self.__exit__()
            self.endless = error if error.endless else None
            if error.raised:
                return {"raised": error.raised, "said": str(error)}
            raise


class Judge:
    """Judges the tests of one submission, one after the other, and remembers the mistakes it has recognised."""

    def __init__(self, exercise: Exercise):
        self.exercise = exercise
        self.made: list[Mistake] = []
        self.paid: frozenset[str] = frozenset()  # flags that have cost their points

    def judge(
        self, test: Test, seeds: Sequence[Any], student: Any, *, fixed: bool = False, corrected: bool = False
    ) -> TestResult:
        """Return the result of one test on all seeds, up to the first that fails.

        Args:
            test: The test.
            seeds: What its inputs are drawn from.
            student: Has a method `call`, as `Student` does.
            fixed: Whether only fixed hints are shown, no data and no word of the submission.
            corrected: Whether correct functions take the place of those that the test's function uses.
        """
        note = ""
        if self.exercise.capstone:
            return self.tried(test, seeds, student, fixed)
        for seed in seeds:
            calls, expected = self.exercise.calls(test, seed), self.exercise.observed(test, seed)
            try:
                used = [self.exercise.correct(call.function) if corrected else None for call in calls]
                found = [student.call(call, correct) for call, correct in zip(calls, used, strict=True)]
            except ChildError as error:
                said = error.shown if fixed else str(error)
                return self.failed(test, f"{calls[0].function} {error.shown}", f"{calls[0].function} {said}", fixed)
            differ = partial(wrong_part, test, paid=self.paid)
            if same(found, expected, differ):
                continue
            if self.made and same(found, self.given(test, seed, self.made), differ):
                note = "as a mistake above makes it"
                continue
            report = compare(found, expected, self.exercise.mistakes, partial(self.given_beside, test, seed), differ)
            if report.mistake is not None:
                self.made.append(report.mistake)
            return self.verdict(test, calls[report.number], report, fixed)
        return TestResult(test.name, test.points, "passed", note)

    def tried(self, test, seeds, student, fixed):
        """Return the result of a capstone's milestone: its calls up to the first that fails."""
        for call in (call for seed in seeds for call in self.exercise.calls(test, seed)):
            try:
                found = student.call(call)
            except ChildError as error:
                said = error.shown if fixed else str(error)
                return self.failed(test, f"{call.function} {error.shown}", f"{call.function} {said}", fixed)
            if "raised" in found:
                hint, said = f"{call.function} raised an error", f"{call.function} {found.get('said', found['raised'])}"
                return self.failed(test, hint, "" if fixed else said, fixed)
            if not observed_by_the_rules(found):
                return self.failed(test, f"{call.function} returned something that can't be read", "", fixed)
            verdict = call.judge(found)
            if verdict.kind:
                feedback = f"{verdict.hint} ({verdict.found})" if verdict.found and not fixed else ""
                return self.failed(test, verdict.hint, feedback, fixed)
        return TestResult(test.name, test.points, "passed")

    def given(self, test, seed, mistakes):
        """Return what the master gives with these mistakes; nothing if they can't be made together."""
        try:
            return self.exercise.observed(test, seed, mistakes)
        except (ValueError, SyntaxError):
            return ()

    def given_beside(self, test, seed, mistake):
        """Return what the master gives with a mistake, beside those made before if they can be made together."""
        both = self.given(test, seed, [*self.made, mistake]) if self.made and mistake not in self.made else ()
        return both or self.given(test, seed, [mistake])

    def verdict(self, test, call, report, fixed):
        """Return the result of a test that failed: the mistake's hint, or else one for the kind of what is wrong."""
        found, (kind, data), mistake = report.found[report.number], report.difference, report.mistake
        if mistake is not None:
            hint = mistake.hint or test.hint
        elif kind == "raised" and "raised" in found:
            said = f"{call.function} {found.get('said', 'raised an error')}"
            return self.failed(test, f"{call.function} raised an error", said if not fixed else "", fixed)
        elif kind == "changed":
            changed = found["changed"] if isinstance(found.get("changed"), tuple) else ()
            numbers = [x for x in changed if type(x) is int and 0 <= x < len(call.arguments)]
            names = " and ".join(self.exercise.parameter(call.function, x) for x in numbers) or "its arguments"
            hint = f"{call.function} overwrites {names}, which its caller still needs. Work on a copy."
        elif kind == "form" and found.get("result") is None and not call.outputs:
            hint = f"{call.function} returned None: is there a `return`?"
        else:
            hint = HINTS.get(kind, test.hint)
        self.paid |= {kind} & {"changed", "undefined"}
        return self.failed(test, hint, f"{hint} ({data})" if data and test.shows and not fixed else "", fixed)

    def failed(self, test, hint, feedback, fixed):
        feedback = " ".join((feedback or hint).split())[:FEEDBACK_LIMIT] + (" (on hidden inputs)" if fixed else "")
        return TestResult(test.name, test.points, "failed", feedback, hint)


def same(found: Sequence[dict], expected: Sequence[dict], differ: Callable) -> bool:
    """Whether as many calls gave the same."""
    return len(found) == len(expected) and all(differ(*pair) is None for pair in zip(found, expected, strict=True))


def observed_by_the_rules(found: dict[str, Any]) -> bool:
    """Return whether an answer has the form of what `sage_lab.climb.observe` returns: a submission may forge it."""
    listed, said = ("changed", "copied", "dots"), ("outside", "given", "jump")
    kinds = {"launched": bool, "undefined": bool} | dict.fromkeys(said, str) | dict.fromkeys(listed, tuple)
    formed = "result" in found and all(type(found.get(name)) is kind for name, kind in kinds.items())
    return formed and all(type(word) is str for name in listed for word in found[name])


def grade(exercise: Exercise, source: bytes | None, seeds: Sequence[Any], sandboxes: Sandboxes) -> ExerciseResult:
    """Grade one submission on all seeds, the visible one first. source None: nothing was handed in."""
    start, printed = time.monotonic(), ""
    if source is not None and len(source) > FILE_LIMIT:
        return unable(exercise, "exercise.py is larger than 1 MiB")
    if exercise.triton and importlib.util.find_spec("triton") is None:
        return unable(exercise, "needs Triton: Linux, or WSL on Windows", "skipped")
    hidden = [seed for seed in seeds if seed != VISIBLE_SEED]
    if hidden:
        sandboxes.of("hidden")  # it loads torch meanwhile
    try:
        judge = Judge(exercise)
        with Student(exercise, source, sandboxes.of("visible")) as student:
            results = [judge.judge(test, [VISIBLE_SEED], student) for test in exercise.tests]
        printed = student.printed
        if hidden and any(result.status == "passed" for result in results):
            with Student(exercise, source, sandboxes.of("hidden")) as student:
                for number, test in enumerate(exercise.tests):
                    if results[number].status == "passed":
                        result = judge.judge(test, hidden, student, fixed=True)
                        results[number] = results[number] if result.status == "passed" else result
        if student.endless is None:
            results = with_correct_functions(exercise, source, seeds, sandboxes, results)
    except SandboxError:
        raise
    except Exception as error:
        return unable(exercise, "the grader broke", "broken", "".join(traceback.format_exception(error)))
    return ExerciseResult(exercise.name, results, time.monotonic() - start, printed)


def with_correct_functions(
    exercise: Exercise, source: bytes, seeds: Sequence[Any], sandboxes: Sandboxes, results: list[TestResult]
) -> list[TestResult]:
    """Grade tests again whose function uses others that are wrong, with correct ones in their place.

    That is done in a process of its own, and only fixed hints come of it: a submission could show the correct code.
    """
    if exercise.capstone:  # one function
        return results
    calls = {test.name: {call.function for call in exercise.calls(test, VISIBLE_SEED)} for test in exercise.tests}
    failed = [test.name for test, result in zip(exercise.tests, results, strict=True) if result.status == "failed"]
    wrong, after = {function for name in failed for function in calls[name]}, list(results)
    for number, (test, result) in enumerate(zip(exercise.tests, results, strict=True)):
        if result.status != "failed":
            continue
        used = {name for x in calls[test.name] if (correct := exercise.correct(x)) for name in correct.names}
        if replaced := sorted(used & wrong):
            with Student(exercise, source, sandboxes.of("corrected")) as student:
                again = Judge(exercise).judge(test, seeds, student, fixed=True, corrected=True)
            if again.status == "passed" or again.hint != result.hint:
                note = f"(with a correct {' and '.join(replaced)} in the place of yours)"
                after[number] = dataclasses.replace(again, feedback=f"{again.hint} {note}".strip())
                continue
        causes = [name for name in failed[: failed.index(test.name)] if calls[name] & calls[test.name]]
        if causes and result.hint == test.hint:
            feedback = f"Perhaps for the same reason as '{causes[0]}'. If not: {result.feedback}"
            after[number] = dataclasses.replace(result, feedback=feedback[:FEEDBACK_LIMIT])
    return after


def unable(exercise: Exercise, reason: str, status: str = "failed", error: str | None = None) -> ExerciseResult:
    """Return the result of an exercise that can't be graded, with the same reason for each test."""
    tests = [TestResult(test.name, test.points, status, reason, reason) for test in exercise.tests]
    return ExerciseResult(exercise.name, tests, error=error)


def grade_folder(folder: Path, name: str, seeds: Sequence[Any], sandboxes: Sandboxes, *, alone: bool) -> ExerciseResult:
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
            return grade(exercise, source, seeds, sandboxes)
        except Exception as error:  # outside of a test: no error of a grader
            crash = "".join(traceback.format_exception(error))
            sandboxes.__exit__()
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
