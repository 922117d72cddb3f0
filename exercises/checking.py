"""The proof that exercises are sound: masters pass, stubs earn nothing, every mistake meets its own hint."""

import time
from collections.abc import Iterator
from typing import Any

from sage_course.gaps import Mistake

from exercises import stubs
from exercises.answers import Error, Exercise, attempt
from exercises.grading import Judge, grade
from exercises.grading import table as grading_table
from exercises.handing_in import VISIBLE_SEED
from exercises.isolation import Sandbox, SubmissionError

SEEDS = (VISIBLE_SEED, "check.0", "check.1")


def check(names: list[str], seeds: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a report on each exercise."""
    with Sandbox() as sandbox:
        for name in names:
            yield check_exercise(name, sandbox, seeds)


def check_exercise(name: str, sandbox: Sandbox, seeds: int = 1) -> dict[str, Any]:
    """Return what is wrong with one exercise ("problems"), and the verdict on each mistake."""
    start = time.monotonic()
    exercise = Exercise(name)
    stub, solution = stubs.stub_of(exercise.master, f"{name}/master.py")
    problems = [f"the stub holds a line of the solution: {line.strip()}" for line in stubs.leaked(stub, solution)]
    seeds_of_master = SEEDS[:2] if exercise.capstone else SEEDS  # a capstone makes twenty calls on each
    result = grade(exercise, exercise.master.encode(), seeds_of_master, sandbox)
    if result.score != result.max_score:
        problems.append(f"the master doesn't pass:\n{grading_table(result)}\n{result.error or ''}")
    result = grade(exercise, stub.encode(), SEEDS, sandbox)
    if result.score != 0 or not any("not written yet" in test.feedback for test in result.tests):
        problems.append(f"the stub should earn 0 and say what is not written yet:\n{grading_table(result)}")
    for seed in (VISIBLE_SEED, *map(str, range(1, seeds))):
        for mistake in exercise.mistakes:
            hint, met = judged(exercise, mistake, seed)
            if hint != met:
                problems.append(f"the mistake {mistake.new!r} should meet {hint!r}, and met {met!r}")
    if len(exercise.mistakes) < 3:
        problems.append(f"task.py: expected at least 3 mistakes, found {len(exercise.mistakes)}")
    facts = {"exercise": name, "tests": len(exercise.tests), "mistakes": len(exercise.mistakes)}
    return facts | {"seconds": round(time.monotonic() - start, 1), "problems": problems}


class Made:
    """The master with a mistake, called as a submission is."""

    def __init__(self, exercise: Exercise, mistake: Any):
        self.functions = exercise.functions((mistake,))

    def call(self, call: Any) -> dict[str, Any]:
        outcome = attempt(self.functions[call.function], call)
        if isinstance(outcome, Error):
            raise SubmissionError("raised an error", raised=outcome)
        return outcome


def judged(exercise: Exercise, mistake: Mistake, seed: Any) -> tuple[str, str]:
    """Return the hint that a mistake should meet, and the one that it meets."""
    try:
        judge, student = Judge(exercise), Made(exercise, mistake)
    except (ValueError, SyntaxError) as error:
        return mistake.hint, str(error)
    for test in exercise.tests:
        if mistake.test not in ("", test.name):
            continue
        result = judge.judge(test, [seed], student)
        if result.status == "failed":
            return mistake.hint or test.hint, result.hint
    return mistake.hint, "no test that fails"


def table(report: dict[str, Any]) -> str:
    """Return a report as a line, and a line for each problem."""
    facts = "{exercise}: {tests} tests, {mistakes} mistakes, {seconds} s".format(**report)
    return "\n".join([facts, *(f"  PROBLEM: {problem}" for problem in report["problems"])])
