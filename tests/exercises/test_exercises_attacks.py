"""What a submission may try against the grader: each attempt earns nothing, harms nothing and leaves nothing behind."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exercises import grading, wire
from exercises.grading import Grader, close, expect
from exercises.isolation import Limits

SEEDS = (grading.VISIBLE_SEED, "hidden")
HONEST = b"import torch\ndef double(x): return 2 * x\n"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can run a submission as another user")

grader = Grader("00_attacked", {"double": Tensor})
grader.hint("shape", "HINT shape")
grader.hint("values", "HINT values")


@grader.test("twice its argument")
def twice(student, draw):
    x = draw.normal(draw.choice((3, 4, 5)), 4)
    doubled = student.double(x)
    expect(doubled.shape == x.shape, "shape")
    close(doubled, 2 * x, "values", relative_l2=1e-6)


@pytest.fixture(scope="module")
def sandbox(sandbox):
    usual, sandbox.limits = sandbox.limits, Limits(call_seconds=1, cpu_seconds=5)
    yield sandbox
    sandbox.limits = usual


def attack(sandbox, source):
    """Grade a hostile file; then nothing of it runs any more, and an honest one still gets its point."""
    result = grading.grade(grader, source.encode(), SEEDS, sandbox)
    assert processes_in(sandbox.folder) == []
    assert grading.grade(grader, HONEST, SEEDS, sandbox).score == 1
    return result


def processes_in(folder):
    """Whoever runs in a folder, or ran there when it still existed: a daemon keeps its working directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(folder)):
                found.append(process.name)
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


FORGED = wire.pack({"id": 1, "result": {"tensor": "t0"}}, {"t0": torch.zeros(4, 4)})
AHEAD = wire.pack({"id": 2, "result": {"scalar": True}}, {})
# name: (the body of double(x), what the student reads)
SLOW, RAISED = "took longer than 1 s", "raised an error: line 2: "
ATTACKS = {
    "infinite loop": ("while True: pass", SLOW),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", SLOW),
    "ignores signals": ("[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15, 24)]\n    while True: pass", SLOW),
    "fork bomb": ("while True:\n        try: os.fork()\n        except OSError: pass", SLOW),
    "thread bomb": (
        "for _ in range(10**4): threading.Thread(target=time.sleep, args=(99,)).start()",
        "can't start new thread",
    ),
    "4 GB tensor, which the machine has": ("return torch.empty(2**32, dtype=torch.int8)", f"{RAISED}RuntimeError"),
    "4 GB shared memory": ("return mmap.mmap(-1, 2**32)", f"{RAISED}OSError"),
    "50 GB of Python": ("return bytearray(50 * 2**30)", f"{RAISED}MemoryError"),
    "large file": ("open('large', 'wb').write(bytes(2**26))", f"{RAISED}OSError"),
    "many open files": ("keep = [open(os.devnull) for _ in range(10**4)]", f"{RAISED}OSError"),
    "endless prints": ("while True: print('x' * 10**6)", f"{RAISED}OSError"),
    "sys.exit(0)": ("sys.exit(0)", f"{RAISED}SystemExit: 0"),
    "os._exit(0)": ("os._exit(0)", "ended its process (exit status 0) instead of returning"),
    "segfault": ("ctypes.string_at(0)", "crashed (SIGSEGV)"),
    "stack overflow": ("f = lambda: f()\n    sys.setrecursionlimit(10**8)\n    f()", "double "),
    "patched comparisons": (
        """yes = lambda *a, **k: True
    torch.allclose = torch.equal = torch.isclose = torch.testing.assert_close = yes
    Tensor.__eq__ = Tensor.__le__ = Tensor.__bool__ = Tensor.allclose = Tensor.equal = yes
    return torch.zeros_like(x)""",
        "HINT values",
    ),
    "NaN": ("return x * float('nan')", "HINT values"),
    "another shape": ("return (2 * x)[:1]", "HINT shape"),
    "nothing": ("return None", "double returned None, expected a tensor"),
    "a list": ("return (2 * x).tolist()", "expected a tensor"),
    "huge tensor": ("return torch.zeros(1).expand(10**12)", "1000000000000 elements, more than is allowed"),
    "many tensors": ("return [x] * 10**6", "too many nested values"),
    "nested without end": ("a = []\n    a.append(a)\n    return a", "too many nested values"),
    "huge text": ("return 'x' * 10**8", "returned more text than is allowed"),
    "sparse tensor": ("return x.to_sparse()", "expected a dense tensor"),
    "a lie about its class": (
        """class Lie:
        __class__ = Tensor
        shape, dtype = x.shape, x.dtype
        __torch_function__ = classmethod(lambda *a, **k: True)
        __getattr__ = lambda self, name: lambda *a, **k: True
    return Lie()""",
        "expected a dense tensor",
    ),
    "a tensor that agrees with all": (
        """class Yes(Tensor):
        __torch_function__ = classmethod(lambda *a, **k: True)
    return torch.zeros(x.shape).as_subclass(Yes)""",
        "HINT values",
    ),
    "forged results on stdout": (
        """print('{"score": 100, "tests": [{"score": 1, "max_score": 1, "status": "passed"}]}')\n    return x""",
        "HINT values",
    ),
    "forged verdicts on every descriptor": (
        """for i in range(256):
        try: os.write(i, b'{"status": "passed", "score": 1}' * 99)
        except OSError: pass
    return x""",
        "double returned more than is allowed",
    ),
    "a message of endless length": (
        "for i in range(3, 256):\n        try: os.write(i, b'\\xff' * 12)\n        except OSError: pass\n    return x",
        "double returned more than is allowed",
    ),
    "half a message": ("os.write(65, b'\\x09')\n    time.sleep(99)", SLOW),
    # A claim like any other.
    "a valid answer, forged": (f"os.write(65, {FORGED!r})\n    time.sleep(99)", "HINT"),
    "an answer ahead of its call": (f"os.write(65, {AHEAD!r} * 3)\n    return 2 * x", "out of turn"),
    "closes all descriptors": ("os.closerange(0, 999)\n    time.sleep(9)", "closed its connection to the grader"),
    "imports the oracle": ("import sage_ref", "sage_ref isn't available to a submission: write it yourself"),
    "imports the grader": ("import exercises.grading", "exercises isn't available to a submission"),
    "a warning on stderr": ("print('warning', file=sys.stderr)\n    return x", "HINT values"),
    "markup in its error": (
        "raise ValueError('<script>alert(1)</script>\\x1b[2J' + 'x' * 10**6)",
        f"{RAISED}ValueError: <script>alert(1)</script> [2Jxxx",
    ),
}
PREFIX = "def double(x):\n    "
IMPORTS = "\nimport ctypes, mmap, os, signal, sys, threading, time, torch\nfrom torch import Tensor\n"


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_earns_nothing(sandbox, name):
    body, feedback = ATTACKS[name]
    result = attack(sandbox, PREFIX + body + IMPORTS)
    assert result.score == 0
    assert not result.broken, result.error
    assert feedback in result.tests[0].feedback
    assert len(result.tests[0].feedback) < 500


@pytest.mark.parametrize(
    ("source", "feedback"),
    [
        ("import os\nos._exit(0)\n", "ended its process"),
        ("def double(x):\n    return (\n", "SyntaxError"),
        ("#" * (grading.FILE_LIMIT + 1), "exercise.py is larger than 1 MiB"),
    ],
)
def test_file_that_can_not_be_imported(sandbox, source, feedback):
    result = attack(sandbox, source)
    assert result.score == 0
    assert feedback in result.tests[0].feedback


@pytest.mark.parametrize("holds_pipe", [True, False])
def test_daemon_does_not_survive(sandbox, holds_pipe):
    """Two forks and a session of its own, out of reach of a process group."""
    close_all = "" if holds_pipe else "os.closerange(0, 999)"
    body = f"""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            {close_all}
            time.sleep(60)
        os._exit(0)
    os.wait()
    os._exit(3)"""
    start = time.monotonic()
    result = attack(sandbox, PREFIX + body + IMPORTS)
    assert "exit status 3" in result.tests[0].feedback
    assert time.monotonic() - start < 30  # it wasn't waited for


def test_feedback_on_hidden_inputs_holds_no_word_of_the_submission(sandbox):
    """Its error may quote the hidden input; its type's name too."""
    leaks = (
        "raise ValueError(f'SECRET {x.tolist()}')",
        "raise type('SECRET', (Exception,), {})()",
        "raise NotImplementedError(f'SECRET {x.tolist()}')",
        "return type('SECRET', (), {})()",
        "return {'SECRET': x}",
        "print('SECRET', x); return x",
    )
    for leak in leaks:
        source = f"calls = []\ndef double(x):\n    calls.append(0)\n    if len(calls) == 1: return 2 * x\n    {leak}\n"
        result = grading.grade(grader, source.encode(), SEEDS, sandbox)
        assert result.score == 0
        assert "hidden inputs" in result.tests[0].feedback
        assert "SECRET" not in str(result.as_json())


def test_prints_are_bounded(sandbox):
    result = attack(sandbox, "def double(x):\n    print('x' * 10**6, '\\x1b[2J the end')\n    return x\n")
    assert result.printed.endswith("x ?[2J the end")
    assert len(result.printed) < 10_000


def try_all(sandbox, attempts):
    """Grade a submission that is right if the system refuses all these statements; else the first that worked."""
    # Behind bubblewrap's walls a file isn't even there.
    body = f"""for attempt in {attempts!r}:
        try: exec(attempt)
        except (PermissionError, FileNotFoundError, ValueError): continue
        raise RuntimeError(f'it worked: {{attempt}}')
    return 2 * x"""
    result = attack(sandbox, PREFIX + body + IMPORTS)
    assert result.score == 1, result.tests[0].feedback


@needs_root
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_graders_file_can_not_be_written_nor_a_private_one_read(sandbox, tmp_path, mode):
    """A folder for root only is what keeps masters and hidden seeds in Gradescope's container."""
    victim = tmp_path / "grader.py"
    victim.write_text("the grader")
    victim.chmod(mode)
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o011)
    name = repr(str(victim))
    attempts = [f"open({name}, 'w')", f"os.remove({name})", f"os.chmod({name}, 0o777)"]
    try_all(sandbox, attempts + [f"open({name}).read()"] * (mode == 0o600))
    assert victim.read_text() == "the grader"


@needs_root
def test_no_way_out_of_its_user(sandbox):
    limits = "resource.setrlimit(resource.RLIMIT_NPROC, (99999, 99999))"
    of_server = [f"open(f'/proc/{{os.getppid()}}/{name}', 'rb')" for name in ("mem", "environ")]
    users = ["os.setuid(0)", "os.setgid(0)", "os.kill(os.getppid(), signal.SIGKILL)"]
    folders = ["os.listdir(f'/proc/{os.getppid()}/fd')", "os.listdir('..')"]
    try_all(sandbox, [*users, *of_server, *folders, f"import resource; {limits}"])


def test_submission_has_five_descriptors(sandbox):
    """Standard streams, requests and answers: nothing of the server's or of an earlier submission's."""
    source = "import os, torch\ndef double(x): return torch.tensor([int(fd) for fd in os.listdir('/proc/self/fd')])\n"

    def test(student, draw):
        assert set(student.double(draw.normal(1)).tolist()) - {0, 1, 2, 64, 65} == {3}  # 3: listdir's own

    listing = Grader("00_descriptors", {"double": Tensor})
    listing.test("its descriptors")(test)
    result = grading.grade(listing, source.encode(), SEEDS, sandbox)
    assert result.score == 1, result.error


def test_link_to_a_private_file_is_no_submission(tmp_path):
    """The grader, which may read everything, must not hand a student the file behind a link."""
    handed_in, private = tmp_path / "submission", tmp_path / "private"
    handed_in.mkdir()
    (private / "01_block_quantizer").mkdir(parents=True)
    (private / "01_block_quantizer" / "exercise.py").write_text("secret")
    (handed_in / "exercise.py").symlink_to(private / "01_block_quantizer" / "exercise.py")
    (handed_in / "01_block_quantizer").symlink_to(private / "01_block_quantizer")
    assert grading.read_submission(handed_in, "01_block_quantizer", alone=True) is None


def test_unquantised_answer_is_rejected(sandbox):
    """Returning the float32 input as its own quantised form would be exact, and is not what is asked."""
    source = b"""
import torch
def quantize_block(x, block_size): return x, torch.ones(-(-len(x) // block_size), 1)
def dequantize_block(values, scale, block_size): return values
"""
    result = grading.grade(grading.load_grader("01_block_quantizer"), source, SEEDS, sandbox)
    assert result.score == 0
    assert result.tests[0].hint == "dtype"


def test_out_of_time_for_the_whole_exercise(sandbox, monkeypatch):
    """Each call keeps to its limit; the sum doesn't."""
    slow = Grader("00_slow", {"double": Tensor})
    for i in range(20):
        slow.test(f"{i}")(lambda student, draw: student.double(draw.normal(2)))
    monkeypatch.setattr(sandbox, "limits", Limits(call_seconds=5, exercise_seconds=2))
    source = b"import time\ndef double(x):\n    time.sleep(0.3)\n    return 2 * x\n"
    result = grading.grade(slow, source, SEEDS, sandbox)
    assert 0 < result.score < 20
    assert result.tests[-1].feedback.startswith("used up the time of the exercise")


def test_server_that_was_killed_is_started_again_and_gets_nothing_of_the_environment(sandbox, monkeypatch):
    folders = set(sandbox.folder.iterdir())
    monkeypatch.setenv("GRADER_SECRET", "secret")
    sandbox.server.kill()
    sandbox.server.wait()
    body = "assert 'GRADER_SECRET' not in os.environ\n    assert 'exercises' not in sys.modules\n    return 2 * x"
    assert grading.grade(grader, (PREFIX + body + IMPORTS).encode(), SEEDS, sandbox).score == 1
    assert set(sandbox.folder.iterdir()) == folders
