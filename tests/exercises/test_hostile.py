"""What a submission may try: it earns nothing that its values don't, harms nobody and leaves nothing behind."""

import io
import json
import math
import os
import random
import re
import socket
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from exercises import ROOT, wire
from exercises import __main__ as command_line
from exercises.answers import Judge, load_exercise
from exercises.isolation import Limits, Sandbox, have_walls, received
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
    left = "[p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
    left += f" + [x for x in os.listdir('/tmp') if x not in {ROOT.parts}] + os.listdir('/dev/shm')"
    result = graded(f"import os\ndef f(x): return 2 * x if not {left} else str({left})\n", sandbox=quick)
    assert result.score == 1, result.tests


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
    exercise = graded.small(calls=lambda draw: [Call("f", (torch.tensor(float(draw.seed != 0)),))])
    result = graded(f"def f(x):\n    if x == 0: return 2 * x\n    {leak}\n", exercise, sandbox=quick)
    assert result.score == 0
    assert "SECRET" not in f"{result.as_json()} {result.printed}"


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


def test_each_call_keeps_to_its_limit_and_the_sum_does_not(graded):
    exercise = graded.small(calls=lambda draw: [Call("f", (draw.normal(2),))] * 9)
    exercise.tests = tuple(exercise.tests[0]._replace(name=name) for name in "abc")
    with Sandbox(Limits(exercise_seconds=4)) as place:
        result = graded("import time\ndef f(x):\n    time.sleep(0.4)\n    return 2 * x\n", exercise, [0], place)
    assert result.tests[-1].feedback == "f used up the time of the exercise"


def test_a_class_loses_nobodys_result(tmp_path, capsys):
    """Zips of hostile and honest students; a second start grades only those who aren't in the report."""
    folder, report, name = tmp_path / "class", tmp_path / "report.json", "01_block_quantizer"
    folder.mkdir()
    master = (ROOT / name / "master.py").read_bytes()
    stop = b"\nimport os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\n" if have_walls() else b"\nraise SystemExit\n"
    for student, source in {"bob": b"import os\nos._exit(0)\n", "eve": master + stop, "zoe": master}.items():
        with zipfile.ZipFile(folder / f"{student}.zip", "w") as archive:
            archive.writestr(f"../a/b/c/d/e/{name}/exercise.py", source)
    (folder / "liz.zip").write_bytes(b"no zip")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    arguments = ["grade", "01", "--class", str(folder), "--json", str(report), "--workers", "1", "--trust"]
    assert command_line.main(arguments) == 1
    content = json.loads(report.read_text())
    scores = {student: result["score"] for student, result in content["students"].items()}
    assert scores == {"bob.zip": 0, "eve.zip": 8 * have_walls(), "liz.zip": 0, "zoe.zip": 8}
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["class", "report.json"]
    capsys.readouterr()
    report.write_text(json.dumps(content | {"students": {"bob.zip": content["students"]["bob.zip"]}}))  # as if killed
    for student in ("eve.zip", "liz.zip"):
        (folder / student).unlink()
    assert command_line.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[0] == "zoe.zip: 8 of 8 points"
    assert json.loads(report.read_text())["seeds"] == content["seeds"]
    report.write_text("[" * 10**5)
    assert command_line.main(arguments) == 2


UNREADABLE = """
[]
{}
[1, 2
{"value": 0, "tensors": [["float32", [2]]]}
{"value": 0, "tensors": [["float32", [-1, -1]]]}
{"value": 0, "tensors": [["float8_e4m3fn", [1]]]}
{"value": {"tensor": 5}, "tensors": [["uint8", [4]]]}
{"value": 0, "tensors": [["uint8", [4.0]]]}
{"value": 0, "tensors": [["uint8", [8]], ["uint8", [-4]]]}
{"value": 0, "tensors": [["uint8", [4]], ["uint8", [0, 9223372036854775808]]]}
"""


@pytest.mark.parametrize("text", [*UNREADABLE.strip().splitlines(), "\xff", "[" * 10**5, "9" * 10**4])
def test_unreadable_messages(text):
    with pytest.raises(wire.WireError, match="can't be read"):
        wire.read(io.BytesIO(framed(text.encode("latin-1"), b"four")))


def test_values_survive_the_wire():
    tensors = [torch.ones(2, 0, 3), torch.tensor(1.5), torch.arange(12).view(3, 4).t(), torch.ones(3).requires_grad_()]
    tensors += [torch.zeros(2).to(dtype) for dtype in wire.DTYPES.values()]
    rest = (1, -2.5, math.inf, -math.inf, None, True, "text", (), {"a": 1})
    whole = wire.pack([tensors, rest, "\ud800\x1b[2J"])
    stream = io.BytesIO(whole + whole[:-1])
    back, *others = wire.read(stream)
    assert others == [rest, "  [2J"]
    for before, after in zip(tensors, back, strict=True):
        assert torch.equal(before, after)
        assert (after.dtype, after.requires_grad) == (before.dtype, False)
    with pytest.raises(EOFError):
        wire.read(stream)


# Random answers: whatever comes back is read or refused, and no grader breaks on it.
ODD = (
    0,
    -1,
    2**63,
    10**400,
    math.nan,
    None,
    "text",
    [],
    [[None]],
    {"tensor": 9},
    {"dict": {}},
    {"dict": []},
)
RIGHT = RIGHT_PARTS | {"result": {"tensor": 0}, "outputs": [], "changed": []}


def random_message(draw):
    """Return an answer with odd parts; in half of all texts a few characters are wrong."""
    forms = [[draw.choice(list(wire.DTYPES)), [draw.choice((0, 1, 17))] * draw.randrange(4)] for _ in range(3)]
    parts = {name: draw.choice(ODD) if draw.random() < 0.1 else part for name, part in RIGHT.items()}
    text = bytearray(json.dumps({"tensors": forms, "value": {"dict": parts}}).encode())
    if draw.random() < 0.5:
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.randbytes(1)
    return framed(bytes(text), bytes(sum(wire.DTYPES[name].itemsize * math.prod(shape) for name, shape in forms)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["05_online_softmax", "08_row_or_block_scales", "13_soft_top_k"])
def test_no_answer_breaks_a_grader(name):
    exercise, test = load_exercise(name), load_exercise(name).tests[0]
    calls = exercise.calls(test, 0)
    for number in range(100):
        draw = random.Random(number)
        stream = io.BytesIO(wire.pack({}) + b"".join(random_message(draw) for _ in calls))
        _, *outcomes = received(stream, calls, "ended")
        assert Judge(exercise).judge(test, 0, outcomes).status == "failed"
