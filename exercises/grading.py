"""Grading of one exercise of a submission, and its results.

An error in the master or in task.py is not the student's: the test is "broken" and the exercise has no score.
"""

import dataclasses
import importlib.util
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from exercises.answers import Exercise, TestResult, graded, load_exercise, with_correct_functions
from exercises.handing_in import FILE_LIMIT, read_submission
from exercises.isolation import Sandbox, SandboxError

CRASHED = "grading this exercise crashed twice; tell your instructor, who has the reason in the log"


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
    return ExerciseResult(exercise.title, results, time.monotonic() - start, printed)


def unable(exercise: Exercise, reason: str, status: str = "failed", error: str | None = None) -> ExerciseResult:
    """Return the result of an exercise that can't be graded, with the same reason for each test."""
    tests = [TestResult(test.name, test.points, status, reason, reason) for test in exercise.tests]
    return ExerciseResult(exercise.title, tests, error=error)


def grade_folder(
    folder: Path, name: str, seeds: Sequence[Any], sandbox: Sandbox, *, alone: bool, variant: int = 1
) -> ExerciseResult:
    """Grade one exercise of a submission; whatever goes wrong with it costs no other exercise its score."""
    try:
        exercise = load_exercise(name, variant)
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
