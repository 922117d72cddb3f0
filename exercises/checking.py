"""The proof that exercises are sound: masters pass, stubs earn nothing, every wrong answer meets its own hint."""

import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, NamedTuple

from exercises import ROOT, grading, stubs
from exercises.isolation import Sandbox

WORKERS = 2
SEEDS = (grading.VISIBLE_SEED, "check.0", "check.1")
# Answers of the wrong kind must be the student's failure in any grader, not the grader's.
MALFORMED = {
    "returns None": "return None",
    "returns one number": "return torch.tensor(1.0)",
    "returns an empty tensor": "return torch.zeros(0)",
    "returns three tensors": "return torch.ones(3), torch.ones(2, 2), torch.ones(1)",
}


class Mutant(NamedTuple):
    """A wrong answer that the grader must reject by the hint with this key. source: None if an edit is out of date."""

    name: str
    hint: str
    source: str | None
    out_of_date: str = ""


def check(names: list[str]) -> dict[str, Any]:
    """Grade masters, stubs, mutants and malformed answers of these exercises, two at a time."""
    sandboxes = SimpleQueue()

    def work(name):
        sandbox = sandboxes.get()
        try:
            return check_exercise(name, sandbox)
        finally:
            sandboxes.put(sandbox)

    workers = min(WORKERS, len(names))
    with ExitStack() as started, ThreadPoolExecutor(workers) as pool:
        for _ in range(workers):
            sandboxes.put(started.enter_context(Sandbox()))
        return report_of(list(pool.map(work, names)))


def report_of(exercises: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of `check_exercise` and what they come to."""
    mutants = [verdict for exercise in exercises for verdict in exercise["mutants"]]
    return {
        "sound": not any(exercise["problems"] for exercise in exercises),
        "counts": {
            "exercises": len(exercises),
            "tests": sum(exercise["tests"] for exercise in exercises),
            "mutants": len(mutants),
            "mutants_rejected_by_their_hint": sum(verdict["as_meant"] for verdict in mutants),
        },
        "exercises": exercises,
    }


def check_exercise(name: str, sandbox: Sandbox) -> dict[str, Any]:
    """What is wrong with one exercise ("problems"), and the verdict on each mutant."""
    problems, mutants = [], []
    grader = grading.load_grader(name)
    master = stubs.read_master(name)
    problems += page_problems(name, stubs.header_of(master, name))
    if grader.name != name:
        problems.append(f"grader.py: expected Grader({name!r}, ...), got {grader.name!r}")
    stub, solution = stubs.stub_of(master, f"{name}/master.py")
    problems += [f"the stub holds a line of the solution: {line.strip()}" for line in stubs.leaked(stub, solution)]
    if (ROOT / name / "exercise.py").read_text() != stub:
        problems.append("exercise.py is out of date: run python -m exercises stubs")

    start = time.monotonic()
    result = grading.grade(grader, master.encode(), SEEDS, sandbox)
    seconds = time.monotonic() - start
    if result.score != result.max_score:
        problems.append(f"the master doesn't pass:\n{grading.table(result)}\n{result.error or ''}")
    for function, correct in (grading.correct_functions(grader) or {}).items():
        for test in result.tests:
            if function in test.called and (both := sorted({*test.called} & {*correct.names})):
                problems.append(
                    f"test {test.name!r} calls {function} and {both[0]}, which that uses: make it two tests"
                )

    result = grading.grade(grader, stub.encode(), SEEDS, sandbox)
    unwritten = [test for test in result.tests if test.status == "failed" and "not written yet" in test.feedback]
    if result.score != 0 or not unwritten:
        problems.append(f"the stub should earn 0 and say what is not written yet:\n{grading.table(result)}")

    for label, body in MALFORMED.items():
        functions = "\n".join(f"def {function}(*arguments, **keywords): {body}" for function in grader.returns)
        result = grading.grade(grader, f"import torch\n{functions}\n".encode(), SEEDS, sandbox)
        if result.score != 0:
            problems.append(f"a submission that {label} should earn 0:\n{grading.table(result)}\n{result.error or ''}")

    for mutant in mutants_of(name, master):
        if mutant.source is None:
            mutants.append({"mutant": mutant.name, "hint": mutant.hint, "shown": None, "as_meant": False})
            problems.append(f"mutant {mutant.name} is out of date: {mutant.out_of_date}")
            continue
        result = grading.grade(grader, mutant.source.encode(), SEEDS, sandbox, first_failure_only=True)
        last = result.tests[-1]
        as_meant = last.status == "failed" and last.hint == mutant.hint
        mutants.append({"mutant": mutant.name, "hint": mutant.hint, "shown": last.hint, "as_meant": as_meant})
        if not as_meant:
            problems.append(
                f"mutant {mutant.name} should be rejected by {mutant.hint!r}:\n"
                f"{grading.table(result)}\n{result.error or ''}"
            )
    if len(mutants) < 3:
        problems.append(f"mutants.toml: expected at least 3 mutants, found {len(mutants)}")
    return {
        "exercise": name,
        "tests": len(grader.tests),
        "points": grader.max_score,
        "seconds": round(seconds, 2),
        "mutants": mutants,
        "problems": problems,
    }


def page_problems(name: str, header: stubs.Header) -> list[str]:
    """What the student's page, README.md, lacks."""
    page = (ROOT / name / "README.md").read_text()
    wanted = (f"{header.minutes} minutes", f"python -m exercises grade {name}")
    problems = [f"README.md: expected {text!r} somewhere" for text in wanted if text not in page]
    if not page.startswith(f"# {name[:2]} "):
        problems.append(f"README.md: expected a first line '# {name[:2]} Title', got {page.partition(chr(10))[0]!r}")
    if header.difficulty not in page.lower():
        problems.append(f"README.md: expected the master's difficulty, {header.difficulty!r}, somewhere")
    hints = page.count("<details>")
    if hints < 2 or hints != page.count("</details>"):
        problems.append(f"README.md: expected at least 2 hints, each in <details> ... </details>, found {hints}")
    return problems


def mutants_of(name: str, master: str) -> list[Mutant]:
    """The master with each mutant's edits of mutants.toml: [name], hint = "key", edits = [["old text", "new text"]].

    Each old text must occur exactly once in what the edits before it left of the master.
    """
    mutants = []
    path = ROOT / name / "mutants.toml"
    if not path.exists():
        return []
    for mutant, entry in tomllib.loads(path.read_text()).items():
        if entry.keys() != {"hint", "edits"} or not entry["edits"]:
            raise ValueError(f"{name}/mutants.toml: expected a hint and edits of {mutant}, got {sorted(entry)}")
        if any(not isinstance(edit, list) or len(edit) != 2 for edit in entry["edits"]):
            raise ValueError(
                f'{name}/mutants.toml: expected edits = [["old text", "new text"], ...] of {mutant}, '
                f"got {entry['edits']}"
            )
        source, out_of_date = master, ""
        for old, new in entry["edits"]:
            if source.count(old) != 1:
                source, out_of_date = None, f"expected {old!r} once in the master, found it {source.count(old)} times"
                break
            source = source.replace(old, new)
        mutants.append(Mutant(mutant, entry["hint"], source, out_of_date))
    return mutants


def table(report: dict[str, Any]) -> str:
    """Verdicts and counts for a terminal."""
    lines = []
    for exercise in report["exercises"]:
        lines.append(f"{exercise['exercise']}: {exercise['tests']} tests, master graded in {exercise['seconds']:.1f} s")
        for verdict in exercise["mutants"]:
            mark = "rejected" if verdict["as_meant"] else "NOT AS MEANT"
            lines.append(f"  {mark:12} {verdict['mutant']:32} {verdict['hint']}")
        lines += [f"  PROBLEM: {problem}" for problem in exercise["problems"]]
    counts = report["counts"]
    lines.append(
        f"{counts['exercises']} exercises, {counts['tests']} tests, {counts['mutants']} mutants"
        f" ({counts['mutants_rejected_by_their_hint']} rejected by their own hint)"
    )
    return "\n".join(lines)
