"""Grade a class: a folder with a zip or a folder of each student, into one report that is whole at any moment."""

import concurrent.futures
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from sage_lab.command_line import process_pool

from exercises.grading import CRASHED, grade_folder
from exercises.handing_in import seeds_of_grading, unpack
from exercises.isolation import Sandbox

ATTEMPTS = 2  # to grade a student; then a crash is the student's result


def students_of(folder: Path) -> dict[str, Path]:
    """Return each student's zip or folder by its name. ValueError if there is none."""
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() or path.suffix.lower() == ".zip"}
    if not found:
        raise ValueError(f"{folder}: expected a zip or a folder of each student, got none")
    return found


def read_report(path: Path, names: list[str], seed: int | None, variant: int = 1) -> dict[str, Any]:
    """Return the report that was begun, or a new one with seeds of its own. ValueError if it is another report."""
    if not path.exists():
        return {"exercises": names, "variant": variant, "seeds": seeds_of_grading(seed), "students": {}}
    try:
        report = json.loads(path.read_bytes())
        begun = (report["exercises"], report.get("variant", 1)) == (names, variant)
        begun &= all("score" in x for x in report["students"].values())
        seeds = report["seeds"]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        begun = False
    if not begun or not isinstance(seeds, list):
        raise ValueError(f"{path}: expected a new file, or a report on these exercises that was begun, got another")
    return report


def grade_class(students: dict[str, Path], report: dict[str, Any], workers: int) -> Iterator[tuple[str, Any]]:
    """Yield each student who isn't in the report yet and the result, as they come."""
    attempts = {name: 0 for name in students if name not in report["students"]}
    context = multiprocessing.get_context("spawn")
    while attempts:
        with process_pool(workers, mp_context=context) as pool:
            facts = report["exercises"], report["seeds"], report.get("variant", 1)
            waiting = {pool.submit(grade_student, students[name], *facts): name for name in attempts}
            for future in concurrent.futures.as_completed(waiting):
                name = waiting[future]
                try:
                    result = future.result()
                except BrokenProcessPool:  # a process of the grader was ended: all who wait are tried again
                    attempts[name] += 1
                    if attempts[name] < ATTEMPTS:
                        continue
                    result = {"score": 0, "max_score": 0, "error": CRASHED, "exercises": []}
                del attempts[name]
                yield name, result


def grade_student(path: Path, names: list[str], seeds: list[Any], variant: int = 1) -> dict[str, Any]:
    """Return the result of one student; whatever goes wrong is in it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Sandbox() as sandbox:
        error = ""
        try:
            if not path.is_dir():
                unpack(path, Path(folder))
                path = Path(folder)
            alone = len(names) == 1
            results = [grade_folder(path, name, seeds, sandbox, alone=alone, variant=variant) for name in names]
        except Exception as problem:
            error, results = f"{type(problem).__name__}: {problem}", []
    score, most = (sum(getattr(x, field) or 0 for x in results) for field in ("score", "max_score"))
    return {"score": score, "max_score": most, "error": error, "exercises": [x.as_json() for x in results]}
