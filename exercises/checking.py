"""The proof that exercises are sound: masters pass, stubs earn nothing, every mistake meets its own hint."""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sage_course.gaps import Mistake
from sage_lab.records import markdown_table

from exercises import ROOT, exercise_names, stubs
from exercises.answers import Error, Exercise, Judge, attempt, load_exercise, read_mistakes
from exercises.grading import grade, table
from exercises.handing_in import VISIBLE_SEED
from exercises.isolation import Failure, Outcome, Sandbox
from exercises.task import Call

SEEDS = (VISIBLE_SEED, "check")


def check(names: list[str], seeds: int = 1, variant: int = 1) -> Iterator[str]:
    """Yield a line for each exercise, and one for each problem."""
    with Sandbox() as sandbox:
        for name in names:
            start, problems = time.monotonic(), check_exercise(name, sandbox, seeds, variant)
            yield f"{name}: {len(problems)} problems, {time.monotonic() - start:.1f} s"
            yield from (f"  PROBLEM: {problem}" for problem in problems)


def check_exercise(
    name: str, sandbox: Sandbox, seeds: int = 1, variant: int = 1, *, all_mistakes: bool = True
) -> list[str]:
    """Return what is wrong with one exercise.

    Args:
        name: The exercise.
        sandbox: Where the master and the stub are graded.
        seeds: How many seeds each mistake is made on.
        variant: Which variant. If it isn't the first, the first one's master may earn half of the points at most.
        all_mistakes: Whether each mistake of a capstone is made, which takes minutes, or the first of each milestone.
    """
    exercise = load_exercise(name, variant)
    stub, solution = stubs.stub_of(exercise.master, f"{name}/master.py")
    problems = [f"the stub holds a line of the solution: {line.strip()}" for line in stubs.leaked(stub, solution)]
    result = grade(exercise, exercise.master.encode(), SEEDS, sandbox)
    if result.score != result.max_score:
        problems.append(f"the master doesn't pass:\n{table(result)}\n{result.error or ''}")
    result = grade(exercise, stub.encode(), SEEDS, sandbox)
    if result.score != 0 or not any("not written yet" in test.feedback for test in result.tests):
        problems.append(f"the stub should earn 0 and say what is not written yet:\n{table(result)}")
    if variant != 1:
        result = grade(exercise, load_exercise(name).master.encode(), SEEDS, sandbox)
        if result.score > exercise.points / 2:
            problems.append(f"the first variant's master earns more than half of the points:\n{table(result)}")
    mistakes = read_mistakes(name, variant)
    if not all_mistakes and exercise.capstone:
        mistakes = list({mistake.test: mistake for mistake in reversed(mistakes)}.values())
    for seed in (VISIBLE_SEED, *map(str, range(1, seeds))):
        for mistake in mistakes:
            hint, met = judged(exercise, mistake, seed)
            if hint != met:
                problems.append(f"the mistake {mistake.new!r} should meet {hint!r}, and met {met!r}")
    return problems


def outcomes_of(functions: dict[str, Any], calls: Sequence[Call]) -> Iterator[Outcome | Failure]:
    """Yield what our own functions give in each call, as a submission's process does."""
    for call in calls:
        outcome = attempt(functions.get(call.function), call)
        yield Failure("raised an error", outcome, outcome) if isinstance(outcome, Error) else outcome


def judged(exercise: Exercise, mistake: Mistake, seed: Any) -> tuple[str, str]:
    """Return the hint that a mistake should meet, and the one that it meets."""
    judge = Judge(exercise)
    for test in exercise.tests:
        if mistake.test not in ("", test.name):
            continue
        try:
            result = judge.judge(test, seed, outcomes_of(exercise.functions((mistake,)), exercise.calls(test, seed)))
        except (ValueError, SyntaxError) as error:
            return mistake.hint, str(error)
        if result.status == "failed":
            return mistake.hint or test.hint, result.hint
    return mistake.hint, "no test that fails"


def page() -> str:
    """Return exercises/README.md with an up-to-date table of the exercises."""
    rows = []
    for name in exercise_names():
        header, exercise = stubs.header_of(name), load_exercise(name)
        cells = header.difficulty, header.importance, header.minutes, len(exercise.tests), f"{exercise.points:g}"
        rows.append((f"[{name}]({name}/README.md)", header.title, *cells))
    table = markdown_table(("exercise", "title", "difficulty", "importance", "minutes", "tests", "points"), rows)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"(<!-- exercises -->\n)(?:.*\n)*?(<!-- /exercises -->\n)", text)
    if len(parts) != 4:
        raise stubs.StubError("README.md: expected the markers <!-- exercises --> and <!-- /exercises --> once")
    before, begin, end, after = parts
    return f"{before}{begin}{table}\n{end}{after}"
