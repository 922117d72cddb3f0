"""Gradescope: results.json, the autograder's zip and the students' zip.

python -m exercises.gradescope SUBMISSION RESULTS grades a submission in Gradescope's container. Only the grader's own
words get into results.json. If a grader broke there is no results.json: Gradescope then shows a failed autograder
without a score, and the instructor finds the reason in the log, which students don't see.
"""

import json
import posixpath
import re
import sys
import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any

from sage_lab.records import replaced

from exercises import ROOT, exercise_names, grading
from exercises.isolation import Sandbox

FRAMEWORK = (
    *("__init__.py", "__main__.py", "confinement.py", "grading.py", "isolation.py", "leftovers.py", "wire.py"),
    "worker.py",
)
PINNED = ("safetensors", "torch", "triton", "numpy")  # what grading needs, under constraints.txt
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
# Runs for every submission. Submissions are another user: neither graders nor results are theirs to read or write.
set -euo pipefail
chmod -R go-rwx /autograder/source /autograder/results /autograder/submission
cd /autograder/source
export PYTHONPATH=/autograder/source:/autograder/source/kernels
exec /autograder/venv/bin/python -m exercises.gradescope /autograder/submission /autograder/results/results.json
"""

STUDENT_README = """# Exercises

Each folder holds one exercise: README.md is the task, exercise.py is where you write. From here, in the course's
environment:

    python -m exercises grade 01_block_quantizer
    python -m exercises grade --all

Grading runs your code in a process of its own, on inputs that differ each time. It is graded by the same tests when
you hand it in.
"""


def results_json(results: list[grading.ExerciseResult], weights: dict[str, float]) -> dict[str, Any]:
    """A results.json. weights: points that an exercise is worth; its tests share them as in its grader.

    ValueError if a grader broke or can't run here: there is no score to write.
    """
    if broken := [result.exercise for result in results if result.broken or not result.max_score]:
        raise ValueError(f"results: expected graders that work here, {', '.join(broken)} broke")
    tests = []
    for number, result in enumerate(results, 1):
        counted = [test for test in result.tests if test.status != "skipped"]
        points = [round(weights[result.exercise] * test.max_score / result.max_score, 2) for test in counted]
        points[-1] += weights[result.exercise] - sum(points)  # what rounding left over
        for part, (test, worth) in enumerate(zip(counted, points, strict=True), 1):
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
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def grade_submission(submission: Path, destination: Path) -> int:
    """Grade every exercise of this package; 0 and a results.json, or 1 and none if a grader broke.

    An exercise whose grading crashes twice outside of its grader has 0 points and says so; the others keep theirs.
    """
    destination.unlink(missing_ok=True)
    weights = json.loads((ROOT / "weights.json").read_text())
    seeds, results = grading.seeds_of_grading(), []
    folder = grading.submission_folder(submission)
    with Sandbox() as sandbox:
        if sandbox.note:
            print(sandbox.note)
        for name in exercise_names():
            results.append(grading.grade_folder(folder, name, seeds, sandbox, alone=len(weights) == 1))
            print(grading.table(results[-1]))
    print(*(x.error for x in results if x.error), sep="\n")
    try:
        content = results_json(results, weights)
    except ValueError as error:
        print("THE GRADER BROKE; there is no score.", error, sep="\n")
        return 1
    with replaced(destination) as temporary:
        temporary.write_text(json.dumps(content, indent=1))
    return 0


def without_dead_links(path: str, text: str, files: Container[str]) -> str:
    """A Markdown page with the words alone of each link to a file that isn't among `files`."""
    if not path.endswith(".md"):
        return text

    def kept(link):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2].partition("#")[0]))
        return link[0] if "://" in link[2] or link[2].startswith("#") or target in files else link[1]

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", kept, text)


def package(folder: Path, names: list[str], seeds: list[str]) -> list[Path]:
    """Write autograder.zip, student.zip and hidden_seeds.json to a folder; the same input gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = ROOT.parent
    weights = {name: grading.load_grader(name).max_score for name in names}
    student = {f"exercises/{name}": (ROOT / name).read_text() for name in FRAMEWORK}
    for name in names:
        for file in ("grader.py", "README.md"):
            student[f"exercises/{name}/{file}"] = (ROOT / name / file).read_text()
    autograder = dict(student)
    for name in names:
        student[f"exercises/{name}/exercise.py"] = (ROOT / name / "exercise.py").read_text()
    student["README.md"] = STUDENT_README
    student = {path: without_dead_links(path, text, student) for path, text in student.items()}
    for file in sorted([*repository.glob("sage_ref/**/*.py"), *repository.glob("kernels/sage_kernels/**/*")]):
        if file.suffix in (".py", ".json"):
            autograder[str(file.relative_to(repository))] = file.read_text()
    autograder |= {
        "setup.sh": SETUP,
        "run_autograder": RUN,
        "constraints.txt": (repository / "constraints.txt").read_text(),
        "exercises/gradescope.py": (ROOT / "gradescope.py").read_text(),
        **{f"exercises/{name}/master.py": (ROOT / name / "master.py").read_text() for name in names},
        "exercises/weights.json": json.dumps(weights, indent=1) + "\n",
        "exercises/hidden_seeds.json": json.dumps(seeds) + "\n",
    }
    with replaced(folder / "hidden_seeds.json") as temporary:
        temporary.write_text(json.dumps(seeds) + "\n")
    written = [folder / "hidden_seeds.json"]
    for path, files in ((folder / "autograder.zip", autograder), (folder / "student.zip", student)):
        with replaced(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in sorted(files.items()):
                entry = zipfile.ZipInfo(name, ZIP_DATE)
                executable = name in ("setup.sh", "run_autograder")
                entry.external_attr = (0o100755 if executable else 0o100644) << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, text)
        written.append(path)
    return written


if __name__ == "__main__":
    sys.exit(grade_submission(Path(sys.argv[1]), Path(sys.argv[2])))
