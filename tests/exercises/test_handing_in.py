"""What is handed in, in which form, and what one submission's crash, seeds or feedback do to the rest."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile

import pytest
import torch

from exercises import ROOT, gradescope, grading
from exercises import __main__ as command_line
from exercises.grading import Grader, Guarded, close, expect
from exercises.isolation import Child

SEEDS = (grading.VISIBLE_SEED, "hidden")
FIRST, SECOND = "01_block_quantizer", "02_integer_matmul"
MASTER = (ROOT / FIRST / "master.py").read_text()


USELESS = ("[]", '{"a": 1}', '"abc"', "[0]", "[1, 2]", '["a", "a"]', '[""]', "null", "{", "[[1]]")


@pytest.mark.parametrize("seeds", USELESS)
def test_seeds_that_would_hide_nothing_are_refused(seeds, tmp_path, capsys, monkeypatch):
    file = tmp_path / "hidden_seeds.json"
    file.write_text(seeds)
    assert command_line.main(["package", str(tmp_path / "built"), "01", "--seeds", str(file)]) == 2
    assert f"{file}: expected a JSON list of" in capsys.readouterr().err
    monkeypatch.setattr(grading, "ROOT", tmp_path)
    assert command_line.main(["grade", "01"]) == 2
    assert f"{file}: expected a JSON list of" in capsys.readouterr().err
    assert not (tmp_path / "built").exists()
    with pytest.raises(ValueError, match="missing.json: expected a JSON list"):
        grading.read_seeds(tmp_path / "missing.json")
    file.write_text('["a", "b"]')
    assert grading.read_seeds(file) == ["a", "b"]


@pytest.mark.parametrize("option", ["--submission", "--json"])
def test_misspelt_path_is_an_error(option, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["grade", "01", option, str(tmp_path / "misspelt" / "results.json")])
    assert stopped.value.code == 2
    assert f"{option}: expected a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (f"{FIRST}/exercise.py", True),
        (f"{FIRST}.py", True),
        (f"handed in/{FIRST}/exercise.py", True),
        (f"handed in/{FIRST}.py", True),
        (f"handed in/exercises/{FIRST}/exercise.py", True),
        (f"exercises/{FIRST}/exercise.py", True),
        (f"exercises/{FIRST}.py", True),
        (f"one/two/three/{FIRST}.py", False),
    ],
)
def test_where_in_a_zip(tmp_path, path, found):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("here")
    for clutter in (".git", "__MACOSX"):
        (tmp_path / clutter).mkdir()
    folder = grading.submission_folder(tmp_path)
    assert (grading.read_submission(folder, FIRST, alone=False) == b"here") is found


def test_no_link_is_followed(tmp_path):
    """Whether it leads out of the submission or not."""
    private, handed_in = tmp_path / "private", tmp_path / "submission"
    (private / FIRST).mkdir(parents=True)
    handed_in.mkdir()
    secret = private / FIRST / "exercise.py"
    secret.write_text("secret")
    links = {"exercises": private, FIRST: private / FIRST, f"{FIRST}.py": secret, "exercise.py": secret}
    for name, target in links.items():
        (handed_in / name).symlink_to(target)
        folder = grading.submission_folder(handed_in)
        assert folder == handed_in
        assert grading.read_submission(folder, FIRST, alone=True) is None
        (handed_in / name).unlink()
    (handed_in / "folder").symlink_to(private)  # the only one
    assert grading.submission_folder(handed_in) == handed_in
    (handed_in / "inside.py").write_text("mine")
    (handed_in / f"{FIRST}.py").symlink_to("inside.py")
    assert grading.read_submission(handed_in, FIRST, alone=False) is None
    os.mkfifo(handed_in / "exercise.py")
    assert grading.read_submission(handed_in, FIRST, alone=True) is None


def small_grader(test, functions=("f",)):
    grader = Grader("00_small", functions)
    grader.hint("hint", "THE HINT")
    grader.test("the test")(test)
    return grader


def grade(test, source, sandbox, functions=("f",), seeds=SEEDS):
    return grading.grade(small_grader(test, functions), source.encode(), seeds, sandbox)


def call(student, draw):
    student.f(draw.normal(3))


@pytest.mark.parametrize(
    ("body", "feedback"),
    [
        ("raise NotImplementedError('f: do it')", "f not written yet: do it"),
        ("raise NotImplementedError('do it')", "f raised an error: line 2: NotImplementedError: do it"),
        ("return torch.empty(2, device='meta').cpu()", "f raised an error: line 2: NotImplementedError"),
        ("raise type('E', (NotImplementedError,), {})('f: x')", "f raised an error: line 2: E: f: x"),
        ("return type('x' * 10**6, (), {})()", "f returned xxx"),
        ("raise ValueError('\\n' * 9 + 'x' * 10**6)", "f raised an error: line 2: ValueError: xxx"),
        ("return 10**400", "returned an integer of more than 64 bits"),
        ("return {'a': [2**63]}", "returned an integer of more than 64 bits"),
        ("return torch.zeros(2**17)", "f returned 0.5 MiB of tensors, more than the 0.25 allowed"),
    ],
)
def test_feedback(sandbox, body, feedback):
    result = grade(call, f"def f(x):\n    {body}\nimport torch\n", sandbox)
    shown = result.tests[0].feedback
    assert shown.startswith(feedback)
    assert len(shown) < 400
    assert len(shown.splitlines()) == 1


def test_prints_are_few_lines(sandbox):
    result = grade(call, "def f(x): print('\\n'.join('abc' * 999))\n", sandbox)
    assert len(result.printed.splitlines()) == 100


def test_times_are_whole_seconds():
    tests = [grading.TestResult("test", 1, "passed")]
    result = grading.ExerciseResult(FIRST, tests, 1.734)
    assert result.as_json()["seconds"] == gradescope.results_json([result], {FIRST: 1})["execution_time"] == 2


HEADER = b'{"t0":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'
FORGED = """
import os, struct, torch
block = struct.pack("<Q", {size}) + {header}
text = b'{{"id": 1, "result": {{"tensor": "t0"}}}}'
def f(x):
    os.write(65, struct.pack("<IQ", len(text), len(block)) + text + block)
    return x
"""


def test_shape_beyond_64_bits_is_the_submissions(sandbox):
    result = grade(call, FORGED.format(size=len(HEADER), header=HEADER), sandbox)
    assert not result.broken
    assert "can't be read" in result.tests[0].feedback


def test_large_answers_that_are_sent_back_are_the_submissions(sandbox):
    """Two of 24 MiB fit into two answers, but not into the next request."""

    def test(student, draw):
        x = torch.zeros(3 * 2**20)
        student.g(student.f(x), student.f(x))

    source = "import torch\ndef f(x): return x.double()\ndef g(x, y): return x\n"
    result = grade(test, source, sandbox, functions=("f", "g"), seeds=[0])
    assert result.tests[0].feedback == "g can't be called with what was returned before"
    unsendable = grade(lambda student, draw: student.f(torch.zeros(2**24)), source, sandbox)
    assert unsendable.broken  # what the grader itself can't send is its own mistake


def test_casts(sandbox):
    def test(student, draw):
        _, undefined = student.f.casts(torch.zeros(3))
        expect(not undefined, "hint")

    for body, score in {
        "(x / x).to(torch.int8)": 0,
        "(1 / x).int()": 0,
        "x.new_zeros(3, dtype=torch.int8).copy_(x / x)": 0,
        "torch.as_tensor(x / x, dtype=torch.int8)": 0,
        "torch.tensor(x / x, dtype=torch.int8)": 0,
        "torch.vmap(lambda y: y.to(torch.int8))(x / x)": 0,
        "(1 / x).nan_to_num().to(torch.int8)": 0,
        "torch.vmap(lambda y: y.to(torch.int8))(x - 128.9)": 1,
        "(x / x).nan_to_num().to(torch.int8)": 1,
        "torch.where(x == 0, 0, x / x).to(torch.int8)": 1,
        "(x / x).half()": 1,
    }.items():
        assert grade(test, f"import torch\ndef f(x): return {body}\n", sandbox).score == score, body


KERNEL = """import torch, triton, triton.language as tl
@triton.jit
def kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)
def f(x):
    {body}
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stray store on a GPU may harm the tests after it")
def test_launches_and_mended_margins(sandbox):
    """A kernel's stray store counts, even if PyTorch mends it before the call returns."""
    counts = []

    def test(student, draw):
        _, (buffer,) = student.f.in_place(Guarded(torch.zeros(4)))
        counts.append(student.launches)
        expect(buffer.intact, "hint")
        close(buffer.tensor, torch.ones(4), "hint", relative_l2=0)

    mended = "kernel[(1,)](x, N=8)\n    torch.as_strided(x, (4,), (1,), x.storage_offset() + 4).fill_(float('inf'))"
    for body, score, launches in (
        ("kernel[(1,)](x, N=4)", 1, 1),
        ("kernel[(1,)](x, N=4)\n    kernel[(1,)](x, N=2)", 1, 2),
        ("x.fill_(1)", 1, 0),
        ("kernel[(1,)](x, N=8)", 0, 1),
        (mended, 0, 1),
    ):
        assert grade(test, KERNEL.format(body=body), sandbox, seeds=[0]).score == score, body
        assert counts.pop() == launches


def test_soft_top_k_of_another_shape_is_refused_before_it_is_used(sandbox):
    """Broadcast against the grader's tensors it would take gigabytes. Honest gradients have no such shape."""
    source = """import torch
torch.autograd.grad = lambda results, inputs, *_, **__: [torch.zeros_like(x) for x in inputs]
def soft_top_k(x, count, temperature): return x.sum() * torch.ones(500, 1, 1, 1, dtype=x.dtype)
"""
    grader = grading.load_grader("13_soft_top_k")
    grader.tests = [test for test in grader.tests if test.name == "the gradient of x"]
    result = grading.grade(grader, source.encode(), [0], sandbox)
    assert result.tests[0].hint == "values"


@pytest.fixture
def two_exercises(sandbox, monkeypatch, tmp_path):
    """A package of two exercises and a submission that solves both."""
    for module in (gradescope, command_line, grading):
        monkeypatch.setattr(module, "exercise_names", lambda: [FIRST, SECOND])
    for module in (gradescope, command_line):
        monkeypatch.setattr(module, "Sandbox", lambda: contextlib.nullcontext(sandbox))
    for name in (FIRST, SECOND):
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / name / "grader.py", tmp_path / name)
        shutil.copy(ROOT / name / "master.py", tmp_path / name / "exercise.py")
    (tmp_path / "weights.json").write_text(json.dumps({FIRST: 10, SECOND: 20}))
    for module in (gradescope, grading):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sandbox, "restart", lambda: None)  # which takes seconds, and needn't
    return tmp_path


def crash_on(monkeypatch, name, times):
    """The machinery crashes when this exercise's process is closed."""
    close_child, crashes = Child.close, []
    reading = grading.read_submission

    def read(folder, wanted, **how):
        crash_on.current = wanted
        return reading(folder, wanted, **how)

    def crash(child):
        close_child(child)
        if crash_on.current == name and len(crashes) < times:
            crashes.append(name)
            raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(grading, "read_submission", read)
    monkeypatch.setattr(Child, "close", crash)


def test_one_crash_is_tried_again(two_exercises, monkeypatch):
    crash_on(monkeypatch, FIRST, 1)
    results = two_exercises / "results.json"
    assert gradescope.grade_submission(two_exercises, results) == 0
    assert [sum(x["score"] for x in json.loads(results.read_text())["tests"])] == [30]


def test_a_crash_costs_its_exercise_only(two_exercises, monkeypatch, capsys):
    crash_on(monkeypatch, FIRST, 9)
    results = two_exercises / "results.json"
    assert gradescope.grade_submission(two_exercises, results) == 0
    tests = json.loads(results.read_text())["tests"]
    assert {test["score"] for test in tests if FIRST in test["name"]} == {0}
    assert {test["output"] for test in tests if FIRST in test["name"]} == {grading.CRASHED}
    assert sum(test["score"] for test in tests) == 20
    assert "maximum recursion depth" in capsys.readouterr().out
    written = two_exercises / "local.json"
    arguments = ["grade", "--all", "--submission", str(two_exercises), "--json", str(written)]
    assert command_line.main(arguments) == 1
    assert [result["score"] for result in json.loads(written.read_text())] == [0, 11]


def test_a_grader_that_can_not_be_loaded_costs_its_exercise_only(two_exercises, capsys):
    (two_exercises / FIRST / "grader.py").write_text("import no_such_module\n")
    written = two_exercises / "local.json"
    assert command_line.main(["grade", "--all", "--submission", str(two_exercises), "--json", str(written)]) == 1
    assert [result["score"] for result in json.loads(written.read_text())] == [None, 11]
    assert gradescope.grade_submission(two_exercises, two_exercises / "results.json") == 1
    assert not (two_exercises / "results.json").exists()  # as for every grader that breaks


SPY = """
import glob, os, socket, subprocess, sys, torch
def attempts():
    yield lambda: open('{top}/source/exercises/hidden_seeds.json').read()
    yield lambda: open('{top}/source/exercises/{name}/grader.py').read()
    yield lambda: os.listdir('{top}/source/sage_ref')
    yield lambda: open('{top}/results/results.json', 'w')
    yield lambda: os.listdir('{top}/results')
    yield lambda: open('{top}/submission/exercise.py').read()
    yield lambda: os.rename('{top}/submission', '{top}/other')
    yield lambda: open(f'/proc/{{os.getppid()}}/mem', 'rb')
    yield lambda: open(f'/proc/{{os.getppid()}}/environ').read()
    yield lambda: os.readlink(f'/proc/{{os.getppid()}}/cwd')
    yield lambda: os.kill(os.getppid(), 9)
    yield lambda: os.chown('exercise.py', 0, 0)
    yield lambda: os.setuid(0)
    yield lambda: os.chroot('.')
    yield lambda: os.mknod('device', 0o60666, os.makedev(8, 0))
    yield lambda: open('/etc/passwd', 'a')
    yield lambda: open(sys.executable, 'r+b')
    yield lambda: open(torch.__file__, 'a')
    yield lambda: open(os.path.dirname(torch.__file__) + '/../sitecustomize.py', 'w')
    yield lambda: subprocess.run(['sudo', '-n', 'true'], check=True)
    yield lambda: subprocess.run(['su', '-c', 'true'], check=True, stdin=subprocess.DEVNULL, timeout=1)
    yield lambda: subprocess.run(['mount', '-t', 'tmpfs', 'none', '.'], check=True)
    yield lambda: glob.glob('/tmp/grading-*/*')[0]
    yield lambda: glob.glob('/proc/*/fd/*')[200]
    yield lambda: __import__('exercises.grading')
def quantize_block(x, block_size):
    done = []
    for number, attempt in enumerate(attempts()):
        try: attempt()
        except BaseException: continue
        done.append(number)
    raise ValueError(f'ATTEMPTS {{number + 1}} DONE {{done}}')
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a submission as another user")
@pytest.mark.parametrize("walls", [True, False])
def test_as_gradescope_runs_it(tmp_path, walls):
    """run_autograder's own lines, with another folder in the place of /autograder; each attempt fails."""
    if walls and shutil.which("bwrap") is None:
        pytest.skip("there is no bubblewrap here")
    top = tmp_path / "autograder"
    gradescope.package(tmp_path, [FIRST], ["seed a", "seed b"])
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(top / "source")
    for folder in ("results", "submission", "venv/bin"):
        (top / folder).mkdir(parents=True)
    python = top / "venv" / "bin" / "python"
    # Without walls: a PATH on which bash and chmod are, and bwrap isn't.
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "chmod", "env", *(["bwrap"] if walls else [])):
        (tools / tool).symlink_to(shutil.which(tool))
    python.write_text(f'#!/bin/sh\nPATH={tools} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for path in (top, *list(top.parents)[:-1]):
        path.chmod(path.stat().st_mode | stat.S_IXOTH)
    (top / "submission" / "exercise.py").write_text(SPY.format(top=top, name=FIRST))
    script = gradescope.RUN.replace("/autograder", str(top))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("without namespaces" in done.stdout) is not walls
    results = json.loads((top / "results" / "results.json").read_text())
    assert sum(test["score"] for test in results["tests"]) == 0
    assert "ATTEMPTS 25 DONE []" in results["tests"][0]["output"], results["tests"][0]["output"]
    assert "submissions can read" not in done.stdout
