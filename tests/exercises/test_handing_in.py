"""What is handed in, in which form; the commands, in odd surroundings; Gradescope's packages."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from exercises import ROOT, answers, exercise_names, gradescope, grading, handing_in, isolation, stubs
from exercises import __main__ as command_line
from exercises.handing_in import read_submission
from exercises.variants import read_text

FIRST, SECOND, TRITON = "01_block_quantizer", "02_integer_matmul", "09_triton_quantize"
STUB = stubs.stub_of(read_text(FIRST, "master.py"))[0]


FOUND = f"""
{FIRST}/exercise.py
{FIRST}.py
{FIRST} (1).py
{FIRST}-2.py
handed in/exercises/{FIRST}/exercise (1).py
1/2/3/4/5/6/{FIRST}.py
"""
ALONE = "exercise.py", "handed in/exercise (3).py"
PLACES = [(path, False, True) for path in FOUND.strip().splitlines()] + [(path, True, True) for path in ALONE]
PLACES += [("exercise.py", False, False), (f"{SECOND}/exercise.py", True, False), (f"{FIRST}_old.py", False, False)]
PLACES += [(f"__MACOSX/{FIRST}.py", False, False), (f".git/{FIRST}.py", False, False)]


@pytest.mark.parametrize(("path", "alone", "found"), PLACES)
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


def test_a_file_is_found_after_thousands_of_others(tmp_path):
    for number in range(2500):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / f"{FIRST}.py").write_text("here")
    assert read_submission(tmp_path, FIRST, alone=False)[0] == b"here"


@pytest.mark.parametrize(
    "seeds",
    ["[]", '{"a": 1}', '"abc"', "[0]", '["a", "a"]', '[""]', "null", "{", "[[1]]", "[" * 10**5, "a folder", "a pipe"],
)
def test_seeds_that_would_hide_nothing_are_refused(seeds, tmp_path, capsys, monkeypatch):
    file = tmp_path / "hidden_seeds.json"
    made = {"a folder": file.mkdir, "a pipe": lambda: os.mkfifo(file)}
    made.get(seeds, lambda: file.write_text(seeds))()
    monkeypatch.setattr(handing_in, "ROOT", tmp_path)
    assert command_line.main(["grade", "01"]) == 2
    assert f"{file}: expected a JSON list of" in capsys.readouterr().err
    with contextlib.suppress(SystemExit):  # of a folder and a pipe
        assert command_line.main(["package", str(tmp_path / "built"), "01", "--seeds", str(file)]) == 2
    assert f"{file}" in capsys.readouterr().err
    assert not (tmp_path / "built").exists()


def test_seeds_are_those_of_the_file_or_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(handing_in, "ROOT", tmp_path)
    (tmp_path / "hidden_seeds.json").write_text('["a", "b"]')
    assert handing_in.seeds_of_grading() == [0, "a", "b"]
    (tmp_path / "hidden_seeds.json").write_text('"visible"')
    assert handing_in.seeds_of_grading() == [0]
    assert handing_in.seeds_of_grading(3) == handing_in.seeds_of_grading(3) != handing_in.seeds_of_grading(4)
    assert len(set(handing_in.fresh_seeds() + handing_in.fresh_seeds())) == 2 * handing_in.HIDDEN_SEEDS


BAD = """
grade
grade 99
grade ''
grade 01 --all
grade 01 --submission ''
grade 01 --submission /misspelt
grade 01 --class ''
grade 01 --class . --trust
grade 01 --json ''
grade 01 --json /dev/null
grade 01 --json .
package ''
package x --seeds ''
package x --seeds /
check ''
check 99
check --seeds 0
"""


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_command_lines_end_with_status_2(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(shlex.split(line))
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


PATHS = ":".join(str(ROOT.parent / part) for part in ("", "notebooks", "lab"))


def run_module(folder, *arguments, path=PATHS, prefix=(), **surroundings):
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | surroundings
    command = [*prefix, sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", errors="replace")


LITTLE = {"__init__.py", "command_line.py", "files.py"}


def test_stubs_are_made_once_in_any_surroundings(tmp_path):
    """Without torch, in a locale that isn't UTF-8, under a mask that takes all rights, with stdout closed."""
    shutil.copytree(ROOT, tmp_path / "exercises", ignore=shutil.ignore_patterns("exercise.py", "__pycache__"))
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    shutil.copytree(ROOT.parent / "lab" / "sage_lab", tmp_path / "sage_lab", ignore=lambda _, x: {*x} - LITTLE)
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
        assert written == stubs.stub_of(read_text(name, "master.py"))[0]


def test_missing_walls_or_a_missing_torch_are_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no', name='torch')")
    command = "exercises", "grade", "01", "--class", "."
    for done, says in (
        (run_module(ROOT, *command, PATH=str(tmp_path)), "grade only your own. --trust does it all the same"),
        (run_module(ROOT, *command, path=f"{tmp_path}:{PATHS}"), "torch: expected a package that can be imported"),
    ):
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert says in done.stderr


def test_closed_streams_cost_a_right_file_nothing(tmp_path):
    """The report is written before anything is printed, in whatever encoding the terminal has."""
    greek = "print('αβγ', '\\udcff')\n"
    (tmp_path / "exercise.py").write_text(greek + read_text(FIRST, "master.py"), encoding="utf-8")
    surroundings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    arguments = ["grade", "01", "--submission", str(tmp_path), "--json", str(tmp_path / "report.json")]
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    run_module(tmp_path, "exercises", *arguments, prefix=closed, **surroundings)
    assert json.loads((tmp_path / "report.json").read_text())[0]["score"] == 8


def test_a_submissions_modules_are_not_the_graders_and_hints_survive_oo(tmp_path):
    for name in ("json", "argparse", "re", "pathlib", "torch", "sage_course", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('IMPORTED')")
    zeros = "def quantize_block(x, block_size): return (0 * x).char(), x.new_ones(-(-len(x) // block_size), 1)\n"
    (tmp_path / "exercise.py").write_text(f"print('hello')\n{zeros}")
    surroundings = {"PYTHONOPTIMIZE": "2", "PATH": str(tmp_path)}  # without bubblewrap, too
    done = run_module(tmp_path, "exercises", "grade", "01", "--submission", ".", **surroundings)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED" not in done.stderr
    assert done.stdout.startswith(f"{FIRST}: 1 of 8 points")
    assert "is the scale max|X| / 127, of this block alone?" in done.stdout
    assert done.stdout.endswith(f"  what it printed:\n    hello\n{isolation.OPEN}\n")


def depth(process):
    """Return how deep the tree of a process's children is."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
        return max((1 + depth(child) for child in children), default=0)
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_grading_and_leave_nothing(tmp_path, number):
    (tmp_path / "exercise.py").write_text("import time\ntime.sleep(99)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "exercises", "grade", "01", "--submission", str(tmp_path)],
        cwd=ROOT.parent, env=os.environ | {"PYTHONPATH": PATHS}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deep, end = 2 + isolation.have_walls(), time.monotonic() + 120  # bubblewrap, the server, the submission
    while depth(process.pid) < deep and process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors.decode()
    time.sleep(0.5)
    assert os.listdir(tempfile.gettempdir()) == []


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Packages of two exercises, unpacked."""
    folder = tmp_path_factory.mktemp("packages")
    gradescope.package(folder, [FIRST, TRITON], ["seed a", "seed b"])
    for name in ("student", "autograder"):
        with zipfile.ZipFile(folder / f"{name}.zip") as archive:
            archive.extractall(folder / name)
    return folder


def test_zips_hold_what_they_should_and_are_the_same_each_time(packages, tmp_path):
    gradescope.package(tmp_path, [FIRST, TRITON], ["seed a", "seed b"])
    modes = {}
    for name in ("student", "autograder"):
        assert (tmp_path / f"{name}.zip").read_bytes() == (packages / f"{name}.zip").read_bytes()
        with zipfile.ZipFile(packages / f"{name}.zip") as archive:
            modes[name] = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in archive.infolist()}
    secret = re.compile(r"hidden|gradescope|sage_ref|bench|master\.py|mistakes\.toml|checking|classes|0\d_\w+/task.py")
    assert not list(filter(secret.search, modes["student"]))
    for path in modes["student"]:
        text = (packages / "student" / path).read_bytes()
        assert b"### SOLUTION: " not in text or path.endswith("exercises/stubs.py")
        assert b"block.abs().amax()" not in text or path.endswith("README.md")
    private = {x.rpartition("/")[2] for x, mode in modes["autograder"].items() if mode == 0o600}
    assert private == {"hidden_seeds.json", "master.py", "mistakes.toml", "task.py", "weights.json"}
    for path in ("hidden_seeds.json", "autograder.zip"):
        assert stat.S_IMODE((packages / path).stat().st_mode) == 0o600
    assert modes["autograder"]["setup.sh"] == modes["autograder"]["run_autograder"] == 0o755
    subprocess.run(["bash", "-n", packages / "autograder" / "setup.sh"], check=True)


def test_student_zip_grades_itself_and_needs_torch_and_numpy_alone(packages):
    """A stub earns 0 and says why, a master everything, and a mistake meets its hint although no master is there.

    Packages may be in a folder that `python -I` doesn't know, as those of `pip --user` are.
    """
    exercises, mine = packages / "student" / "exercises", packages / "mine" / "site-packages"
    mine.mkdir(parents=True)
    (mine / "mine.py").touch()
    (packages / "student" / "sage_ref.py").write_text("raise SystemExit('the library is imported')")
    truncated = read_text(FIRST, "master.py").replace("torch.round(block / divisor)", "(block / divisor)")
    for source, score in ((read_text(FIRST, "master.py"), 8), (truncated + "\nimport mine\n", 5)):
        (exercises / FIRST / "exercise.py").write_text(source)
        path = f"{packages / 'student'}:{mine}"
        done = run_module(packages / "student", "exercises", "grade", "--all", "--json", "results.json", path=path)
        assert done.returncode == 0, done.stderr
        first, second = json.loads((packages / "student" / "results.json").read_text())
        assert (first["score"], second["score"]) == (score, 0)
        assert "not written yet: " in second["tests"][0]["feedback"]
    assert "nearest integer, ties to even, not truncated" in done.stdout
    assert "as a mistake above makes it" in done.stdout
    assert run_module(packages / "student", "exercises", "check", path=path).returncode == 2


SPY = """
import glob, os
def quantize_block(x, block_size):
    paths = ['source', 'results', 'source/exercises/hidden_seeds.json', 'submission']
    found = [path for path in paths if os.path.exists('{top}/' + path)] + glob.glob('/*/hidden_seeds.json')
    raise ValueError(f'FOUND {{found}}')
"""


def test_as_gradescope_runs_a_package(packages, tmp_path):
    """run_autograder's own lines, with another folder in the place of /autograder."""
    top, commands = tmp_path / "autograder", tmp_path / "commands"
    shutil.copytree(packages / "autograder", top / "source")
    for folder in (commands, top / "results", top / "submission", top / "venv" / "bin"):
        folder.mkdir(parents=True)
    for command in ("bash", "chmod"):
        (commands / command).symlink_to(shutil.which(command))
    python, exercises, results = top / "venv/bin/python", top / "source/exercises", top / "results/results.json"
    python.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shutil.copy(ROOT / TRITON / "master.py", top / "submission" / f"{TRITON}.py")
    (top / "submission" / f"{FIRST}.py").write_text(SPY.format(top=top))
    (exercises / "weights.json").write_text(json.dumps({FIRST: 11, TRITON: 20}))

    def run(path):
        script = gradescope.RUN.replace("/autograder", str(top))
        environment = os.environ | {"PATH": path}
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)

    done = run(str(commands))  # without bubblewrap
    assert (done.returncode, "hidden inputs need bubblewrap" in done.stdout) == (1, True), done.stderr
    assert not results.exists()
    if not isolation.have_walls():
        (exercises / "hidden_seeds.json").write_text('"visible"')
    done = run(os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    tests = json.loads(results.read_text())["tests"]
    assert sum(test["score"] for test in tests) == pytest.approx(20)
    assert not isolation.have_walls() or "FOUND []" in tests[0]["output"]
    assert stat.S_IMODE(results.stat().st_mode) == 0o600
    (exercises / FIRST / "task.py").write_text("import no_such_module\n")
    done = run(os.environ["PATH"])
    assert (done.returncode, "THE GRADER BROKE" in done.stdout, results.exists()) == (1, True, False)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', f'{{"{FIRST}": "8"}}', f'{{"{FIRST}": -8}}', "[" * 10**5])
def test_weights_that_are_none_are_refused(text, tmp_path):
    (tmp_path / "weights.json").write_text(text)
    with pytest.raises(ValueError, match="weights.json: expected a JSON object with a number above 0"):
        gradescope.read_weights(tmp_path / "weights.json", [FIRST])


def test_results_have_the_form_of_gradescopes_specification():
    """11 points shared by 8 are rounded, and add up. What can't be graded here has no score."""
    tests = [answers.TestResult("a", 3, "passed"), answers.TestResult("b", 5, "failed", "a hint")]
    content = gradescope.results_json([grading.ExerciseResult(FIRST, tests, seconds=1.5)], {FIRST: 11})
    assert (content["execution_time"], content["stdout_visibility"]) == (2, "hidden")
    found = [(x["name"], x["number"], x["score"], x["max_score"], x["status"]) for x in content["tests"]]
    assert found == [(f"{FIRST}: a", "1.1", 4.12, 4.12, "passed"), (f"{FIRST}: b", "1.2", 0, 6.88, "failed")]
    skipped = grading.ExerciseResult(FIRST, [answers.TestResult("a kernel", 1, "skipped")])
    with pytest.raises(ValueError, match="work here"):
        gradescope.results_json([skipped], {FIRST: 12})


def test_a_crash_is_tried_again_and_a_second_one_costs_its_exercise(tmp_path):
    shutil.copy(ROOT / FIRST / "master.py", tmp_path / "exercise.py")

    class Crashing(isolation.Sandbox):
        def process(self, *arguments):
            if self.crashes:
                self.crashes -= 1
                raise isolation.SandboxError("no memory for a process")
            return super().process(*arguments)

    with Crashing() as sandbox:
        for sandbox.crashes, score in ((1, 8), (2, 0)):
            result = grading.grade_folder(tmp_path, FIRST, [0], sandbox, alone=True)
            assert result.score == score
    assert "no memory for a process" in result.error
