"""What is handed in, in which form; the commands, in odd surroundings; Gradescope's packages."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from exercises import ROOT, answers, exercise_names, gradescope, grading, handing_in, isolation, stubs
from exercises import __main__ as command_line
from exercises.handing_in import read_submission

FIRST, SECOND = "01_block_quantizer", "02_integer_matmul"
STUB = stubs.stub_of(stubs.read_master(FIRST))[0]


@pytest.mark.parametrize(
    ("path", "alone", "found"),
    [
        (f"{FIRST}/exercise.py", False, True),
        (f"{FIRST}.py", False, True),
        (f"{FIRST} (1).py", False, True),
        (f"{FIRST}-2.py", False, True),
        (f"{FIRST}/exercise (1).py", False, True),
        (f"handed in/{FIRST}/exercise.py", False, True),
        (f"handed in/exercises/{FIRST}/exercise.py", False, True),
        (f"exercises/{FIRST}.py", False, True),
        ("exercise.py", True, True),
        ("handed in/exercise (3).py", True, True),
        ("exercise.py", False, False),
        (f"{SECOND}/exercise.py", True, False),
        (f"{FIRST}_old.py", False, False),
        (f"1/2/3/4/5/6/{FIRST}.py", False, False),
        (f"__MACOSX/{FIRST}.py", False, False),
        (f".git/{FIRST}.py", False, False),
    ],
)
def test_where_in_a_zip(tmp_path, path, alone, found):
    """With a README and a desktop.ini beside it, and an untouched stub in the usual place."""
    for name in ("README.md", "desktop.ini"):
        (tmp_path / name).write_text("clutter")
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("here")
    source, reason = read_submission(tmp_path, FIRST, alone=alone, stub=STUB)
    assert (source == b"here") is found
    assert found or reason == "exercise.py wasn't handed in"
    if f"{FIRST}/exercise.py" not in path:
        (tmp_path / FIRST).mkdir(exist_ok=True)
        (tmp_path / FIRST / "exercise.py").write_text(STUB.replace("\n", "\r\n"))
        source, _ = read_submission(tmp_path, FIRST, alone=alone, stub=STUB)
        assert (source == b"here") is found
        assert found or b"NotImplementedError" in source


def test_no_link_is_followed_and_what_is_no_file_is_named(tmp_path):
    private, handed_in = tmp_path / "private", tmp_path / "submission"
    (private / FIRST).mkdir(parents=True)
    handed_in.mkdir()
    secret = private / FIRST / "exercise.py"
    secret.write_text("secret")
    place = handed_in / f"{FIRST}.py"
    for make, reason in (
        (lambda: place.symlink_to(secret), "can't be read"),
        (lambda: os.link(secret, place), "can't be read: it is a hard link"),
        (lambda: os.mkfifo(place), "can't be read: it is no file"),
        (lambda: (handed_in / FIRST).symlink_to(private / FIRST), "wasn't handed in"),
    ):
        make()
        source, said = read_submission(handed_in, FIRST, alone=True)
        assert source is None
        assert reason in said
        place.unlink(missing_ok=True)
    if os.getuid():
        place.write_text("mine")
        place.chmod(0)
        assert "can't be read: Permission denied" in read_submission(handed_in, FIRST, alone=True)[1]


@pytest.mark.parametrize(
    "seeds", ['{"a": 1}', '"abc"', "[0]", '["a", "a"]', '[""]', "null", "{", "[[1]]", "[" * 10**5, None]
)
def test_seeds_that_would_hide_nothing_are_refused(seeds, tmp_path, capsys, monkeypatch):
    file = tmp_path / "hidden_seeds.json"
    file.write_text(seeds) if seeds else os.mkfifo(file)
    assert command_line.main(["package", str(tmp_path / "built"), "01", "--seeds", str(file)]) == 2
    assert f"{file}: expected a JSON list of" in capsys.readouterr().err
    assert not (tmp_path / "built").exists()
    monkeypatch.setattr(handing_in, "ROOT", tmp_path)
    assert command_line.main(["grade", "01"]) == 2
    file.unlink()
    file.write_text('["a", "b"]')
    assert handing_in.seeds_of_grading() == [0, "a", "b"]
    assert handing_in.seeds_of_grading(3) == handing_in.seeds_of_grading(3) != handing_in.seeds_of_grading(4)
    assert len(set(handing_in.fresh_seeds() + handing_in.fresh_seeds())) == 2 * handing_in.HIDDEN_SEEDS


@pytest.mark.parametrize(
    "arguments",
    [
        ["grade"], ["grade", "99"], ["grade", "01", "--all"], ["grade", "01", "--submission", ""],
        ["grade", "01", "--submission", "/misspelt"], ["grade", "01", "--json", "/misspelt/results.json"],
        ["grade", "01", "--json", "/dev/null"], ["package", ""], ["check", "99"],
    ],
)  # fmt: skip
def test_bad_command_lines_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(arguments)
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


def run_module(folder, *arguments, path=f"{ROOT.parent}:{ROOT.parent / 'course'}", prefix=(), **surroundings):
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | surroundings
    command = [*prefix, sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", errors="replace")


def test_stubs_are_made_once_in_any_surroundings(tmp_path):
    """Without torch, in a locale that isn't UTF-8, under a mask that takes all rights, with stdout closed."""
    for name in exercise_names():
        (tmp_path / "exercises" / name).mkdir(parents=True)
        for file in ("README.md", "master.py"):
            shutil.copy(ROOT / name / file, tmp_path / "exercises" / name)
    for file in ("__init__", "__main__", "stubs"):
        shutil.copy(ROOT / f"{file}.py", tmp_path / "exercises")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    mine = tmp_path / "exercises" / FIRST / "exercise.py"
    mine.write_text("mine")
    bare = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "path": str(tmp_path)}
    for shell in ('umask 777; exec "$@" >&-', 'exec "$@"'):
        done = run_module(tmp_path, "exercises", "stubs", prefix=("sh", "-c", shell, "sh"), **bare)
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ""  # all were there by now
    assert mine.read_text() == "mine"
    for name in exercise_names()[1:]:
        written = (tmp_path / "exercises" / name / "exercise.py").read_text(encoding="utf-8")
        assert written == stubs.stub_of(stubs.read_master(name))[0]


def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / FIRST).mkdir()
    command = 'exec "$@" > /dev/full'
    done = run_module(
        ROOT.parent, "exercises", "grade", "01", "--submission", str(tmp_path), prefix=("sh", "-c", command, "sh")
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_a_submissions_modules_are_not_the_graders_and_hints_survive_oo(tmp_path):
    for name in ("json", "argparse", "re", "pathlib", "torch", "sage_course", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('IMPORTED')")
    zeros = "def quantize_block(x, block_size): return (0 * x).char(), x.new_ones(-(-len(x) // block_size), 1)\n"
    (tmp_path / "exercise.py").write_text(zeros)
    done = run_module(tmp_path, "exercises", "grade", "01", "--submission", ".", PYTHONOPTIMIZE="2")
    assert done.returncode == 0, done.stderr
    assert "IMPORTED" not in done.stderr
    assert done.stdout.startswith(f"{FIRST}: 1 of 8 points")
    assert "is the scale max|X| / 127, of this block alone?" in done.stdout


def depth(process):
    """Return how deep the tree of a process's children is."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
        return max((1 + depth(child) for child in children), default=0)
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "status", "runs"),
    [(signal.SIGINT, 130, False), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, True), (signal.SIGHUP, 129, True)],
)
def test_signals_end_a_grading_and_leave_nothing(tmp_path, number, status, runs):
    """While torch is imported, and while the submission runs."""
    (tmp_path / "exercise.py").write_text("import time\ntime.sleep(99)\n")
    before = set(os.listdir("/tmp"))
    process = subprocess.Popen(
        [sys.executable, "-m", "exercises", "grade", "01", "--submission", str(tmp_path)],
        cwd=ROOT.parent, env=os.environ | {"PYTHONPATH": "course"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deep = (2 + isolation.have_walls()) * runs  # bubblewrap, the server, the submission
    end = time.monotonic() + 120
    time.sleep(1)
    while depth(process.pid) < deep and process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (status, -number), errors.decode()
    assert b"Traceback" not in errors or process.returncode == -number
    time.sleep(0.5)
    left = [name for name in set(os.listdir("/tmp")) - before if name.startswith(("submission-", "grading-"))]
    assert left == []


def results_json(*statuses, weight=12):
    """Return results.json of one exercise whose tests, worth 1, 2, ... points, ended like this."""
    tests = [grading.TestResult(f"test {i}", i + 1, status, "why") for i, status in enumerate(statuses)]
    result = grading.ExerciseResult(FIRST, tests, 1.734, printed="SECRET", error="SECRET")
    assert result.as_json()["seconds"] == 2
    return gradescope.results_json([result], {FIRST: weight})


def test_results_json_is_as_documented():
    """By the section "Output format" of Gradescope's specification; the sum of the tests is the only total."""

    def row(part, score, worth, status):
        names = {"name": f"{FIRST}: test {part - 1}", "number": f"1.{part}"}
        return names | {"score": score, "max_score": worth, "status": status, "output": "why", "visibility": "visible"}

    assert results_json("passed", "failed", "passed") == {
        "execution_time": 2,
        **dict.fromkeys(("output_format", "test_output_format", "test_name_format"), "text"),
        **{"visibility": "visible", "stdout_visibility": "hidden"},
        "tests": [row(1, 2, 2, "passed"), row(2, 0, 4, "failed"), row(3, 6, 6, "passed")],
    }
    uneven = results_json("passed", "passed", "passed", weight=10)
    assert [test["score"] for test in uneven["tests"]] == pytest.approx([1.67, 3.33, 5])
    assert sum(test["score"] for test in uneven["tests"]) == pytest.approx(10, abs=1e-9)
    with pytest.raises(ValueError, match="work here"):
        results_json("skipped")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Packages of two exercises, unpacked."""
    folder = tmp_path_factory.mktemp("packages")
    gradescope.package(folder, [FIRST, "09_triton_quantize"], ["seed a", "seed b"])
    for name in ("student", "autograder"):
        with zipfile.ZipFile(folder / f"{name}.zip") as archive:
            archive.extractall(folder / name)
    return folder


def test_zips_hold_what_they_should_and_are_the_same_each_time(packages, tmp_path):
    gradescope.package(tmp_path, [FIRST, "09_triton_quantize"], ["seed a", "seed b"])
    modes = {}
    for name in ("student", "autograder"):
        assert (tmp_path / f"{name}.zip").read_bytes() == (packages / f"{name}.zip").read_bytes()
        with zipfile.ZipFile(packages / f"{name}.zip") as archive:
            modes[name] = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in archive.infolist()}
    for name in (FIRST, "09_triton_quantize"):
        assert {f"exercises/{name}/{x}" for x in ("exercise.py", "README.md", "answers.pt")} <= modes["student"].keys()
        assert {f"exercises/{name}/{x}" for x in ("master.py", "task.py")} <= modes["autograder"].keys()
    for secret in ("hidden", "gradescope", "sage_ref", "sage_lab", "master", "checking", f"{FIRST}/task"):
        assert not any(secret in entry for entry in modes["student"])
    for path in modes["student"]:
        text = (packages / "student" / path).read_bytes()
        assert b"### SOLUTION: " not in text or path.endswith("stubs.py")
        assert b"block.abs().amax()" not in text or path.endswith("README.md")
    private = [x for x, mode in modes["autograder"].items() if mode == 0o600]
    assert sorted({x.rpartition("/")[2] for x in private}) == [
        "hidden_seeds.json",
        "master.py",
        "task.py",
        "weights.json",
    ]
    for path in ("hidden_seeds.json", "autograder.zip"):
        assert stat.S_IMODE((packages / path).stat().st_mode) == 0o600
    for script in ("setup.sh", "run_autograder"):
        assert modes["autograder"][script] & 0o111
        subprocess.run(["bash", "-n", packages / "autograder" / script], check=True)


def test_no_link_of_the_student_zip_is_dead(packages):
    """And only dead ones are gone: `files` may hold what a page links to."""
    for page in (packages / "student").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in target or page.parent.joinpath(target).exists(), (page, target)
    text = b"[a](../b/c.md), [d](e.md), [`f`](https://example.org), [g](#h)"
    kept = b"[a](../b/c.md), d, [`f`](https://example.org), [g](#h)"
    assert gradescope.without_dead_links("exercises/a.md", text, {"b/c.md"}) == kept
    assert gradescope.without_dead_links("exercises/a.py", text, set()) == text


def test_student_zip_grades_itself_and_needs_torch_and_numpy_alone(packages):
    """A stub earns 0 and says why, a master everything, and a mistake meets its hint although no master is there."""
    exercises = packages / "student" / "exercises"
    (packages / "student" / "sage_ref.py").write_text("raise SystemExit('the library is imported')")
    shutil.copy(packages / "student" / "sage_ref.py", packages / "student" / "sage_lab.py")
    wrong = stubs.read_master(FIRST).replace("/ INT8_MAX", "/ 128").replace("torch.round(block", "torch.floor(block")
    wrong = wrong.replace("/ 128", "/ INT8_MAX")
    for source, score in ((None, 0), (stubs.read_master(FIRST), 8), (wrong, 3)):
        if source:
            (exercises / FIRST / "exercise.py").write_text(source)
        path = str(packages / "student")
        done = run_module(packages / "student", "exercises", "grade", "--all", "--json", "results.json", path=path)
        assert done.returncode == 0, done.stderr
        first, second = json.loads((packages / "student" / "results.json").read_text())
        assert (first["score"], second["score"]) == (score, 0)
        assert "not written yet: " in second["tests"][0]["feedback"]
    truncated = stubs.read_master(FIRST).replace("torch.round(block / divisor)", "(block / divisor)")
    (exercises / FIRST / "exercise.py").write_text(truncated)
    done = run_module(packages / "student", "exercises", "grade", "01", path=path)
    assert "nearest integer, ties to even, not truncated" in done.stdout
    assert "as a mistake above makes it" in done.stdout


@pytest.fixture
def package(sandboxes, packages, tmp_path, monkeypatch):
    """The autograder's package with this session's sandboxes, and a submission that solves both exercises."""
    shutil.copytree(packages / "autograder" / "exercises", tmp_path / "exercises")
    for module in (gradescope, answers, handing_in):
        monkeypatch.setattr(module, "ROOT", tmp_path / "exercises")
    for module in (gradescope, answers):
        monkeypatch.setattr(module, "exercise_names", lambda: [FIRST, "09_triton_quantize"])
    monkeypatch.setattr(gradescope, "Sandboxes", lambda: contextlib.nullcontext(sandboxes))
    monkeypatch.setattr(gradescope, "limit_memory", lambda: None)
    for name in (FIRST, "09_triton_quantize"):
        (tmp_path / "submission").mkdir(exist_ok=True)
        shutil.copy(ROOT / name / "master.py", tmp_path / "submission" / f"{name}.py")
    (tmp_path / "exercises" / "weights.json").write_text(json.dumps({FIRST: 10, "09_triton_quantize": 20}))
    return tmp_path


def points(package):
    tests = json.loads((package / "results.json").read_text())["tests"]
    return [sum(x["score"] for x in tests if x["name"].startswith(name)) for name in (FIRST, "09")]


def test_one_exercises_trouble_costs_no_other_its_score(package, sandboxes, monkeypatch, capsys):
    """A crash is tried again, a second one costs its exercise; a task that breaks leaves no results at all."""
    if not sandboxes.walls:
        pytest.skip("a package with hidden inputs isn't graded without bubblewrap")
    run, results = gradescope.grade_submission, package / "results.json"
    assert run(package / "submission", results) == 0
    assert points(package) == [10, 20]
    close, crashes = isolation.Child.close, []

    def crash(child):
        close(child)
        if len(crashes) < most:
            crashes.append(child)
            raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(isolation.Child, "close", crash)
    for most, expected in ((1, [10, 20]), (2, [0, 20])):  # noqa: B007, crash reads it
        crashes.clear()
        assert run(package / "submission", results) == 0
        assert points(package) == pytest.approx(expected)
    assert "maximum recursion depth" in capsys.readouterr().out
    (package / "exercises" / FIRST / "task.py").write_text("import no_such_module\n")
    assert run(package / "submission", results) == 1
    assert "THE GRADER BROKE" in capsys.readouterr().out
    assert not results.exists()
    sandboxes.walls, walls = False, sandboxes.walls
    assert run(package / "submission", results) == 1
    sandboxes.walls = walls
    assert "hidden inputs need bubblewrap" in capsys.readouterr().out


SPY = """
import glob, os, torch
def quantize_block(x, block_size):
    done, folders = [], ['{top}/source', '{top}/results', '{top}/submission', '{top}/source/exercises/{name}']
    for number, attempt in enumerate([
        *(lambda folder=folder: os.listdir(folder) for folder in folders),
        lambda: open('{top}/source/exercises/hidden_seeds.json').read(),
        lambda: open('{top}/source/exercises/{name}/master.py').read(),
        lambda: open('{top}/results/results.json', 'w'),
        lambda: open('{top}/submission/exercise.py').read(),
        lambda: glob.glob('/**/hidden_seeds.json')[0],
        lambda: __import__('exercises.grading'),
        lambda: os.kill(os.getppid(), 9),
    ]):
        try: attempt()
        except BaseException: continue
        done.append(number)
    raise ValueError(f'ATTEMPTS {{number + 1}} DONE {{done}}')
"""


@pytest.mark.skipif(os.getuid() != 0 or not isolation.have_walls(), reason="needs root and bubblewrap")
def test_as_gradescope_runs_it(packages, tmp_path):
    """run_autograder's own lines, with another folder in the place of /autograder; each attempt fails."""
    top = tmp_path / "autograder"
    gradescope.package(tmp_path, [FIRST], ["seed a", "seed b"])
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(top / "source")
    for folder in ("results", "submission", "venv/bin"):
        (top / folder).mkdir(parents=True)
    python = top / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = gradescope.RUN.replace("/autograder", str(top))
    for source, score, said in (
        (SPY.format(top=top, name=FIRST), 0, "ATTEMPTS 11 DONE []"),
        (stubs.read_master(FIRST), 8, ""),
    ):
        (top / "submission" / "exercise.py").write_text(source)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        results = json.loads((top / "results" / "results.json").read_text())
        assert sum(test["score"] for test in results["tests"]) == score
        assert said in results["tests"][0]["output"]
        assert stat.S_IMODE((top / "results" / "results.json").stat().st_mode) == 0o600
    # Where bubblewrap isn't, there is no score; without hidden inputs there is.
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "chmod", "env"):
        (tools / tool).symlink_to(shutil.which(tool))
    python.write_text(f'#!/bin/sh\nPYTHONPATH= PATH={tools} exec {sys.executable} "$@"\n')
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, "hidden inputs need bubblewrap" in done.stdout) == (1, True)
    assert not (top / "results" / "results.json").exists()
    (top / "source" / "exercises" / "hidden_seeds.json").write_text("[]")
    assert subprocess.run(["bash", "-c", script], capture_output=True).returncode == 0


def test_grade_command(tmp_path, capsys):
    (tmp_path / "exercise.py").write_text(f"print('hello')\n{stubs.read_master(FIRST)}")
    written = tmp_path / "result.json"
    assert command_line.main(["grade", "01", "--submission", str(tmp_path), "--json", str(written), "--seed", "7"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{FIRST}: 8 of 8 points, ")
    assert "what it printed:\n    hello" in shown
    assert (isolation.OPEN in shown) is not isolation.have_walls()
    (result,) = json.loads(written.read_text())
    assert (result["exercise"], result["score"], result["max_score"]) == (FIRST, 8, 8)


def test_without_walls_one_line_says_what_is_open(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grading, "have_walls", lambda: False)
    (tmp_path / "exercise.py").write_text("import os\ndef quantize_block(x, block_size): os._exit(3)\n")
    assert command_line.main(["grade", "01", "--submission", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{FIRST}: 0 of 8 points")
    assert "ended its process (exit status 3)" in shown[2]
    assert shown[-1] == isolation.OPEN
    assert not torch.cuda.is_initialized()
