"""What a submission may try: it earns nothing that its values don't, harms nobody and leaves nothing behind."""

import io
import itertools
import json
import math
import os
import random
import re
import resource
import socket
import textwrap
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from exercises import ROOT, wire
from exercises import __main__ as command_line
from exercises.answers import Exercise, Judge
from exercises.isolation import Failure, Limits, Sandbox, have_walls, received
from exercises.task import Call

behind_walls = pytest.mark.skipif(not have_walls(), reason="bubblewrap can't put up its walls here")
IMPORTS = "import ctypes, math, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time\n"
IMPORTS += "import torch\nfrom torch import Tensor\nlibc = ctypes.CDLL(None, use_errno=True)\n"
HONEST = "def f(x): return 2 * x\n"
HOSTILE = tomllib.loads(Path(__file__).with_name("hostile.toml").read_text(encoding="utf-8"))
RIGHT_PARTS = {"outputs": (), "gradients": None, "changed": (), "undefined": False, "launched": False, "spoiled": False}


def framed(text, block=b""):
    """Return a message of any two parts."""
    return wire.LENGTHS.pack(len(text), len(block)) + text + block


ROWS = json.dumps([[{"tensor": 0}] * 250] * 250).encode()
FORGED = {
    "{zeros}": wire.pack(RIGHT_PARTS | {"result": torch.zeros(5, 4)}),
    "{references}": framed(b'{"value": {"dict": {"result": %b}}, "tensors": [["uint8", [1]]]}' % ROWS, b"x"),
    "{huge}": framed(b'{"value": {"tensor": 0}, "tensors": [["float32", [0, 9223372036854775808]]]}'),
    "{error}": wire.pack({"kind": ["raised"], "text": {}, "line": 5, "more": "\x1b"}),
}


def source_of(attack):
    """Return the file of one hostile submission."""
    if "patch" in attack:
        return f"import sys, torch\nsys.modules['perform'].perform = lambda *a, **k: {attack['patch']}\n{HONEST}"
    if "body" not in attack:
        return attack.get("source") or attack["repeated"] * 10**6
    body = attack["body"]
    for name, content in FORGED.items():
        body = body.replace(name, repr(content))
    return f"def f(x):\n{textwrap.indent(body, '    ')}\n{IMPORTS}"


@pytest.mark.parametrize("name", HOSTILE["answers"] | HOSTILE["files"])
def test_attack_earns_nothing(quick, graded, name):
    attack = (HOSTILE["answers"] | HOSTILE["files"])[name]
    result = graded(source_of(attack), sandbox=quick)
    said = result.tests[0].feedback
    assert (result.score, result.error) == (0, None)
    assert re.search(attack["says"], said), said
    assert len(said) < 600
    assert (said + result.printed.replace("\n", "")).isprintable()
    assert graded(HONEST, seeds=[0], sandbox=quick).score == 1


def test_file_that_never_finishes_importing_is_waited_for_once(quick, graded):
    exercise = graded.small()
    exercise.tests = tuple(exercise.tests[0]._replace(name=name) for name in "abc")
    result = graded(f"print('importing')\n{HONEST}import time\ntime.sleep(99)\n", exercise, sandbox=quick)
    assert {test.feedback for test in result.tests} == {
        "f was not called: importing exercise.py took longer than 4 s: does a loop never end?"
    }
    assert result.seconds < 12
    assert result.printed == "importing"
    assert graded("#" * (2**20 + 1)).tests[0].feedback == "exercise.py is larger than 1 MiB"


@behind_walls
def test_walls_refuse(sandbox, graded, tmp_path):
    """Each statement is tried in a process of its own: it may be ended for it."""
    other = tmp_path / "other.py"
    other.write_text("secret")
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        abstract.bind(f"\0grading-{port}")
        abstract.listen()
        facts = {"other": other, "root": ROOT, "port": port}
        statements = {name: text.format(**facts) for name, text in HOSTILE["refused"].items()}
        tried = f"""
def worked(statement):
    if os.fork() == 0:
        try: exec(statement, globals())
        except BaseException: os._exit(1)
        os._exit(77)
    return os.waitstatus_to_exitcode(os.wait()[1]) == 77
def f(x): return ', '.join(name for name, statement in {statements}.items() if worked(statement))
"""
        calls = lambda draw: [Call("f", (1,))]  # noqa: E731
        result = graded(IMPORTS + tried, graded.small("def f(x): return ''", calls), sandbox=sandbox)
    assert result.score == 1, result.tests[0].feedback


@behind_walls
@pytest.mark.parametrize("name", HOSTILE["held"])
def test_what_it_holds_is_bounded_and_gone_afterwards(quick, graded, name):
    attack = HOSTILE["held"][name]
    result = graded(f"{IMPORTS}{attack['body']}\n{HONEST}", sandbox=quick)
    assert result.error is None
    assert result.score == 1 if "says" not in attack else re.search(attack["says"], result.tests[0].feedback)
    others = "[p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
    result = graded(f"import os\ndef f(x): return 2 * x if not {others} else str({others})\n", sandbox=quick)
    assert result.score == 1, result.tests
    if quick.server and "No space" in attack.get("says", ""):
        quick.close()  # its files are its student's alone, and end with the sandbox


LEAKS = (
    "raise ValueError(f'SECRET {x.tolist()}')",
    "raise type('SECRET', (Exception,), {})()",
    "raise NotImplementedError(f'f: SECRET {x.tolist()}')",
    "return type('SECRET', (), {})()",
    "return {'SECRET': x}",
    "print('SECRET', x); return x",
)


@pytest.mark.parametrize("leak", LEAKS)
def test_feedback_on_hidden_inputs_holds_no_word_of_the_submission(quick, graded, leak):
    """In its own test or in the next, whose visible run comes first."""
    exercise = graded.small()
    exercise.tests = exercise.tests[0], exercise.tests[0]._replace(name="next")
    spy = f"""
shapes = {[tuple(call.arguments[0].shape) for test in exercise.tests for call in exercise.calls(test, 0)]}
kept = []
def f(x):
    if tuple(x.shape) in shapes: return 2 * x if not kept else kept
    kept.append('SECRET')
    {leak}
"""
    shapes = {call.arguments[0].shape for test in exercise.tests for call in exercise.calls(test, 0)}
    seed = next(x for x in "abcdefgh" if exercise.calls(exercise.tests[0], x)[0].arguments[0].shape not in shapes)
    result = graded(spy, exercise, seeds=[0, seed], sandbox=quick)
    assert result.score < 2
    assert "SECRET" not in str(result.as_json())


def test_prints_are_bounded_and_printable(quick, graded):
    result = graded("def f(x):\n    print('x' * 10**6, '\\x1b[2J the \\udcff end')\n    return x\n", sandbox=quick)
    assert result.printed.endswith("x  [2J the \\udcff end")
    assert len(result.printed) < 10_000


def test_submission_has_four_descriptors_and_nothing_of_the_environment(graded, monkeypatch):
    monkeypatch.setenv("GRADER_SECRET", "secret")
    calls = lambda draw: [Call("f", (draw.normal(1),))]  # noqa: E731
    source = "import os\ndef f(x):\n    assert 'GRADER_SECRET' not in os.environ\n"
    source += "    return sorted(map(int, os.listdir('/proc/self/fd')))\n"
    exercise = graded.small("def f(x): return [0, 1, 2, 3, 4]\n", calls)  # 4: listdir's own
    with Sandbox() as fresh:
        assert graded(source, exercise, sandbox=fresh).score == 1


def test_limits_of_the_whole_exercise_and_of_the_machine(graded):
    """Each call keeps to its limit and the sum doesn't; a limit can't be raised, as on a cluster."""
    exercise = graded.small(calls=lambda draw: [Call("f", (draw.normal(2),))] * 9)
    exercise.tests = tuple(exercise.tests[0]._replace(name=str(i)) for i in range(3))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with Sandbox(Limits(exercise_seconds=4, file=2**50)) as place:
        result = graded("import time\ndef f(x):\n    time.sleep(0.4)\n    return 2 * x\n", exercise, [0], place)
        assert result.tests[-1].feedback == "f used up the time of the exercise"
        source = "import resource\ndef f(x): return resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        expected = 2**50 if hard == resource.RLIM_INFINITY else min(hard, 2**50)
        assert graded(source, graded.small(f"def f(x): return {expected}\n"), [0], place).score == 1


def test_a_class_loses_nobodys_result(tmp_path, capsys, monkeypatch):
    """Zips and folders of hostile and honest students; a second start grades only those who aren't in the report."""
    folder, report, name = tmp_path / "class", tmp_path / "report.json", "01_block_quantizer"
    folder.mkdir()
    master = (ROOT / name / "master.py").read_bytes()
    kill = "\nimport os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\n" if have_walls() else "\nraise SystemExit\n"
    handed_in = {"ada": master, "bob": b"import os\nos._exit(0)\n", "eve": master + kill.encode(), "zoe": master}
    for student, source in handed_in.items():
        with zipfile.ZipFile(folder / f"{student}.zip", "w") as archive:
            archive.writestr(f"../a/b/c/d/e/{name}/exercise.py", source)
    (folder / "liz.zip").write_bytes(b"no zip")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    arguments = ["grade", "01", "--class", str(folder), "--json", str(report), "--workers", "1", "--trust"]
    assert command_line.main(arguments) == 1
    students = json.loads(report.read_text())["students"]
    scores = {student: result["score"] for student, result in students.items()}
    assert scores == {"ada.zip": 8, "bob.zip": 0, "eve.zip": 8 * have_walls(), "liz.zip": 0, "zoe.zip": 8}
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["class", "report.json"] or os.listdir(tmp_path) == ["report.json", "class"]
    capsys.readouterr()
    content = json.loads(report.read_text())
    del content["students"]["zoe.zip"]  # as if it had been killed
    report.write_text(json.dumps(content))
    assert command_line.main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[0] == "zoe.zip: 8 of 8 points"
    assert json.loads(report.read_text())["seeds"] == content["seeds"]
    report.write_text("[" * 10**5)
    assert command_line.main(arguments) == 2


@pytest.mark.parametrize(
    ("text", "block"),
    [
        (b"[]", b""), (b"\xff", b""), (b"[" * 10**5, b""), (b"9" * 10**4, b""), (b"{}", b""),
        (b'{"value": 0, "tensors": [["float32", [1]]]}', b"xxx"), (b'{"value": 0, "tensors": []}', b"x"),
        (b'{"value": 0, "tensors": [["float32", [-1, -1]]]}', b"xxxx"),
        (b'{"value": {"tensor": 0}, "tensors": []}', b""),
        (b'{"value": 0, "tensors": [["float8_e4m3fn", [1]]]}', b"x"),
        (json.dumps({"value": 0, "tensors": [["uint8", [0]]] * 3000}).encode(), b""),
        (json.dumps({"value": 0, "tensors": [["uint8", [1] * 17]]}).encode(), b"x"),
    ],
)  # fmt: skip
def test_unreadable_messages(text, block):
    with pytest.raises(wire.WireError, match="can't be read"):
        wire.read(io.BytesIO(framed(text, block)))


def test_values_survive_the_wire():
    tensors = [torch.ones(2, 0, 3), torch.tensor(1.5), torch.arange(12).view(3, 4).t(), torch.ones(3).requires_grad_()]
    tensors += [torch.zeros(2).to(dtype) for dtype in wire.DTYPES.values()]
    value = {"tensors": tuple(tensors), "rest": (1, -2.5, math.inf, -math.inf, None, True, "text", (), {"a": 1})}
    stream = io.BytesIO(wire.pack(value) + wire.pack(["\ud800\x1b[2J", {"\r\udcff": 1}]) + wire.pack(1)[:-1])
    back = wire.read(stream)
    assert back["rest"] == value["rest"]
    for before, after in zip(tensors, back["tensors"], strict=True):
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
        assert not after.requires_grad
    assert wire.read(stream) == ("  [2J", {"  ": 1})
    with pytest.raises(EOFError):
        wire.read(stream)


# Random answers: whatever comes back is read or refused, and no grader breaks on it. EXERCISES_FUZZ=60: for 60 s.
SECONDS = float(os.environ.get("EXERCISES_FUZZ", "1"))
NUMBERS = (0, 1, -1, 127, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-320, math.nan, math.inf, True, None, "text")
SPOILS = (b"0", b"9" * 30, b'"', b"[", b"{", b"}", b"-", b"\xff", b"null", b"1e999", b"")


def random_tree(draw, depth=0):
    kind = draw.randrange(9 if depth < 4 else 5)
    if kind < 2:
        return {"tensor": draw.choice((0, 1, 2, 9, -1, True, None, "0", []))}
    if kind < 5:
        return draw.choice(NUMBERS)
    inner = [random_tree(draw, depth + 1) for _ in range(draw.randrange(4))]
    return draw.choice((inner, {"dict": {str(i): x for i, x in enumerate(inner)}}, {"dict": inner}, {"x": 1}))


def random_message(draw):
    """Return the message of an answer; in half of all texts a few characters are wrong."""
    shapes = [[draw.choice((0, 1, 2, 3, 17)) for _ in range(draw.randrange(4))] for _ in range(3)]
    forms = [[draw.choice(list(wire.DTYPES)), shape] for shape in shapes]
    right = RIGHT_PARTS | {"result": {"tensor": 0}, "outputs": [], "changed": []}
    observed = {name: random_tree(draw) if draw.random() < 0.1 else x for name, x in right.items()}
    text = bytearray(json.dumps({"tensors": forms, "value": {"dict": observed}}).encode())
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.choice(SPOILS)
    block = draw.randbytes(sum(wire.DTYPES[name].itemsize * math.prod(shape) for name, shape in forms))
    return framed(bytes(text), block)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["05_online_softmax", "08_row_or_block_scales", "13_soft_top_k", "18_sparse_loop"])
def test_no_answer_breaks_a_grader(name):
    exercise, end, read = Exercise(name), time.monotonic() + SECONDS, 0
    exercise.mistakes = exercise.mistakes[:2]
    for number in itertools.count():
        draw = random.Random(f"{name} {number}")
        judge = Judge(exercise)
        for test in exercise.tests:
            calls = exercise.calls(test, 0)
            stream = io.BytesIO(wire.pack({}) + b"".join(random_message(draw) for _ in calls))
            _, *outcomes = received(stream, calls, "ended")
            read += sum(not isinstance(outcome, Failure) for outcome in outcomes)
            assert judge.judge(test, 0, outcomes).status == "failed"
        if read > 9 and time.monotonic() > end:
            break
