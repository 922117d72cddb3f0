"""Gradescope: results.json, the autograder's zip and the students' zip.

python -m exercises.gradescope SUBMISSION RESULTS grades a submission in Gradescope's container. Only the grader's own
words get into results.json. If a grader broke there is no results.json: Gradescope then shows a failed autograder
without a score, and the instructor finds the reason in the log, which students don't see.
"""

import io
import json
import posixpath
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

from sage_lab.command_line import finish
from sage_lab.files import write_file

from exercises import ROOT, exercise_names
from exercises.answers import Exercise
from exercises.grading import ExerciseResult, grade_folder, table
from exercises.handing_in import NO_HIDDEN, read_file, seeds_of_grading, write_private
from exercises.isolation import Sandbox
from exercises.variants import read_text

REPOSITORY = ROOT.parent
ENGINE = [f"exercises/{x.name}" for x in ROOT.glob("*.py") if x.stem not in ("gradescope", "checking", "classes")]
SHARED = ["notebooks/sage_course/__init__.py", "notebooks/sage_course/gaps.py", "lab/sage_lab/__init__.py"]
SHARED += [f"lab/sage_lab/{name}.py" for name in ("command_line", "files")]
SHARED += [f"lab/sage_lab/capstones/{name}.py" for name in ("__init__", "observe", "trials")]
PINNED = ("torch", "triton", "numpy")  # what grading needs, under constraints.txt
SOLUTION = ("master.py", "task.py", "mistakes.toml")  # of an exercise: what tells its solution
PRIVATE = (*SOLUTION, "hidden_seeds.json", "weights.json")
ZIP_DATE = (1980, 1, 1, 0, 0, 0)

SETUP = f"""#!/usr/bin/env bash
# Runs once, as root, when Gradescope builds the container.
set -euo pipefail
apt-get update
apt-get install -y python3 bubblewrap
python=python3
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    apt-get install -y python3.11
    python=python3.11
fi
apt-get install -y "$($python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-venv"
$python -m venv /autograder/venv
/autograder/venv/bin/pip install --constraint /autograder/source/constraints.txt {" ".join(PINNED)}
chmod -R go-rwx /autograder/source
chmod a+rx /autograder
"""

RUN = """#!/usr/bin/env bash
# Runs for every submission, which sees neither graders nor results: they are root's alone, and outside of its walls.
set -euo pipefail
chmod -R go-rwx /autograder/source /autograder/results /autograder/submission
cd /autograder/source
exec /autograder/venv/bin/python -m exercises.gradescope /autograder/submission /autograder/results/results.json
"""

STUDENT_README = """# Exercises

Each folder holds one exercise: README.md is the task, exercise.py is where you write. From here, with PyTorch, NumPy
and, for the exercises that need it, Triton:

    python -m exercises grade FIRST
    python -m exercises grade --all

Your code runs in a process of its own. It is graded on the same inputs when you hand it in, and on others.
The notebooks that a page names, and files in `notebooks/` and `kernels/`, belong to the course; grading needs none.
"""


def results_json(results: list[ExerciseResult], weights: dict[str, float]) -> dict[str, Any]:
    """Return a results.json. weights: points that an exercise is worth; its tests share them as in its task.

    ValueError if a grader broke or can't run here: there is no score to write.
    """
    if broken := [result.exercise for result in results if result.broken or not result.max_score]:
        raise ValueError(f"results: expected graders that work here, {', '.join(broken)} broke")
    tests = []
    for number, result in enumerate(results, 1):
        points = [round(weights[result.exercise] * test.max_score / result.max_score, 2) for test in result.tests]
        points[-1] += weights[result.exercise] - sum(points)  # what rounding left over
        for part, (test, worth) in enumerate(zip(result.tests, points, strict=True), 1):
            tests.append(
                {
                    "name": f"{result.exercise}: {test.name}",
                    "number": f"{number}.{part}",
                    "score": worth if test.status == "passed" else 0.0,
                    "max_score": worth,
                    "status": test.status,
                    "output": test.feedback,
                    "visibility": "visible",
                }
            )
    return {
        "execution_time": round(sum(result.seconds for result in results)),  # a fraction could say something of inputs
        **dict.fromkeys(("output_format", "test_output_format", "test_name_format"), "text"),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def grade_submission(submission: Path, destination: Path) -> int:
    """Grade every exercise of this package; return 0 and write a results.json, or 1 and none if a grader broke.

    With hidden inputs it grades behind bubblewrap's walls only. An exercise whose grading crashes twice outside of its
    grader has 0 points and says so; the others keep theirs.
    """
    destination.unlink(missing_ok=True)
    names = exercise_names()
    weights, seeds, error = read_weights(ROOT / "weights.json", names), seeds_of_grading(), None
    with Sandbox() as sandbox:
        if len(seeds) > 1 and not sandbox.walls:
            print("There is no score: hidden inputs need bubblewrap (bwrap), and it can't put up its walls here.")
            print("A package without hidden inputs doesn't: python -m exercises package DIR --visible")
            return 1
        results = [grade_folder(submission, name, seeds, sandbox, alone=len(names) == 1) for name in names]
    try:
        write_private(destination, json.dumps(results_json(results, weights), indent=1))
    except ValueError as problem:
        error = problem
    print(*map(table, results), *(x.error for x in results if x.error), sep="\n")
    if error is not None:
        print("THE GRADER BROKE; there is no score.", error, sep="\n")
    return int(error is not None)


def read_weights(path: Path, names: list[str]) -> dict[str, float]:
    """Return what each exercise is worth. ValueError if the file doesn't say so for all of them."""
    expected = f"{path}: expected a JSON object with a number above 0 for each of {', '.join(names)}"
    try:
        weights = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{expected}, got an error: {error}") from error
    worth = weights.values() if isinstance(weights, dict) else ()
    if set(names) != set(weights if worth else ()) or not all(type(x) in (int, float) and 0 < x < 1e6 for x in worth):
        raise ValueError(f"{expected}, got {str(weights)[:200]}")
    return weights


def package(folder: Path, names: list[str], seeds: list[str], variant: int = 1) -> list[Path]:
    """Write autograder.zip, student.zip and hidden_seeds.json to a folder; the same input gives the same bytes.

    Students get stubs; the rest of an exercise is packed, so that nobody reads it by accident. A package has one
    variant, and knows nothing of others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    exercises = {name: Exercise(name, variant) for name in names}
    text = lambda name, file: read_text(name, file, variant).encode()  # noqa: E731
    engine = {name: (REPOSITORY / name).read_bytes() for name in ENGINE}
    engine |= {path.partition("/")[2]: (REPOSITORY / path).read_bytes() for path in SHARED}
    engine |= {f"exercises/{name}/README.md": text(name, "README.md") for name in names}
    student = {**engine, "README.md": STUDENT_README.replace("FIRST", names[0]).encode()}
    for name, exercise in exercises.items():
        student[f"exercises/{name}/exercise.py"] = exercise.stub.encode()
        for file in SOLUTION:
            student[f"exercises/{name}/{Path(file).stem}.z"] = zlib.compress(text(name, file), 9)
    autograder = {
        **engine,
        "setup.sh": SETUP.encode(),
        "run_autograder": RUN.encode(),
        "constraints.txt": (REPOSITORY / "constraints.txt").read_bytes(),
        "exercises/gradescope.py": (ROOT / "gradescope.py").read_bytes(),
        **{f"exercises/{name}/{x}": text(name, x) for name in names for x in SOLUTION},
        "exercises/weights.json": json.dumps({name: x.points for name, x in exercises.items()}, indent=1).encode(),
        "exercises/hidden_seeds.json": json.dumps(seeds or NO_HIDDEN).encode(),
    }
    write_private(folder / "hidden_seeds.json", json.dumps(seeds or NO_HIDDEN) + "\n")
    write_private(folder / "autograder.zip", _zipped(autograder))
    write_file(folder / "student.zip", _zipped(student))
    return [folder / name for name in ("hidden_seeds.json", "autograder.zip", "student.zip")]


def _zipped(files):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in sorted(files.items()):
            name = posixpath.basename(path)
            entry = zipfile.ZipInfo(path, ZIP_DATE)
            mode = 0o600 if name in PRIVATE else 0o755 if name in ("setup.sh", "run_autograder") else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(finish("the autograder", lambda: grade_submission(Path(sys.argv[1]), Path(sys.argv[2]))))
