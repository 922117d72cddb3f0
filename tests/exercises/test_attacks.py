"""What a submission may try: it forges no point, reads nothing of others, harms nobody and leaves nothing behind."""

import itertools
import json
import math
import os
import random
import resource
import socket
import struct
import sys
import textwrap
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exercises import ROOT, wire
from exercises.answers import Exercise
from exercises.grading import Sandboxes, grade
from exercises.isolation import DEFAULT_LIMITS, RESOURCES, Limits, have_walls
from exercises.task import Call

behind_walls = pytest.mark.skipif(not have_walls(), reason="bubblewrap can't put up its walls here")
IMPORTS = (
    "import ctypes, glob, math, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time\n"
)
IMPORTS += "import torch\nfrom torch import Tensor\nlibc = ctypes.CDLL(None, use_errno=True)\n"
HONEST = "def f(x): return 2 * x\n"


def forged(number, **answer):
    """Return the bytes of a message as the submission's process sends it."""
    tensors = []
    content = {"id": number, "observed": wire.encode(answer, tensors)}
    return wire.pack(content, tensors)


RIGHT_FLAGS = {"outputs": (), "gradients": None, "changed": (), "undefined": False, "launched": False, "spoiled": False}
ZEROS = forged(1, result=torch.zeros(5, 4), **RIGHT_FLAGS)
AHEAD = forged(2, result=torch.zeros(5, 4), **RIGHT_FLAGS)
TEXT = b'{"id": 1, "tensors": [["float32", [0, 9223372036854775808]]], "observed": {"dict": {"result": {"tensor": 0}}}}'
HUGE = struct.pack("<IQ", len(TEXT), 0) + TEXT
ATTACKS = tomllib.loads(Path(__file__).with_name("attacks.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ATTACKS["answers"])
def test_attack_earns_nothing(quick, graded, name):
    body, feedback = ATTACKS["answers"][name].values()
    for key, message in (("zeros", ZEROS), ("ahead", AHEAD), ("huge", HUGE)):
        body = body.replace(f"{{{key}}}", repr(message))
    source = f"def f(x):\n{textwrap.indent(body, '    ')}\n{IMPORTS}"
    result = graded(source, sandboxes=quick)
    assert result.score == 0
    assert not result.broken, result.error
    assert feedback in result.tests[0].feedback, result.tests[0].feedback
    assert len(result.tests[0].feedback) < 600
    assert graded(HONEST, sandboxes=quick).score == 1


@pytest.mark.parametrize(
    ("source", "feedback"),
    [
        ("import os\nos._exit(0)\n", "ended its process"),
        ("def f(x):\n    return (\n", "SyntaxError"),
        ("#" * (2**20 + 1), "exercise.py is larger than 1 MiB"),
        ("x = '\udcff'\n", "SyntaxError"),
        ("\0", "SyntaxError"),
    ],
)
def test_file_that_can_not_be_imported(quick, graded, source, feedback):
    result = graded(source, sandboxes=quick)
    assert result.score == 0
    assert feedback in result.tests[0].feedback


def test_file_that_never_finishes_importing_is_waited_for_once(quick, graded):
    exercise = graded.small()
    exercise.tests *= 3
    result = graded(f"print('importing')\n{HONEST}while True: pass\n", exercise, sandboxes=quick)
    assert {test.feedback for test in result.tests} == {
        "f was not called: importing exercise.py took longer than 3 s. Does a loop outside of its functions never end?"
    }
    assert result.printed == "importing"


@behind_walls
@pytest.mark.parametrize("name", ATTACKS["refused"])
def test_walls_refuse(quick, graded, tmp_path, name):
    other = tmp_path / "other.py"
    other.write_text("secret")
    for path in (other, tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o055 if path != other else 0o644)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        abstract.bind(f"\0grading-{port}")
        abstract.listen()
        statement = ATTACKS["refused"][name].format(other=other, root=ROOT, port=port)
        tried = f"""
def f(x):
    if os.fork() == 0:  # it may be ended for it
        try:
            {statement}
        except BaseException:
            os._exit(1)
        os._exit(77)
    return 2 * x if os.waitstatus_to_exitcode(os.wait()[1]) != 77 else 'it worked'
"""
        result = graded(IMPORTS + tried, sandboxes=quick)
    assert result.score == 1, result.tests[0].feedback


@behind_walls
@pytest.mark.parametrize("name", ATTACKS["held"])
def test_what_it_holds_is_bounded_and_gone_afterwards(quick, graded, name):
    attack = ATTACKS["held"][name]
    result = graded(f"{IMPORTS}{attack['body']}\n{HONEST}", sandboxes=quick)
    assert not result.broken, result.error
    if "says" not in attack:
        assert result.score == 1, result.tests
    else:
        assert any(text in result.tests[0].feedback for text in attack["says"]), result.tests
    shown = [Path(p).parts[2] for p in (sys.prefix, sys.base_prefix) if Path(p).is_relative_to("/tmp")]  # this Python
    traces = f"""
def f(x):
    left = [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]
    left += [name for name in os.listdir('/tmp') if '/tmp/' + name != os.getcwd() and name not in {shown}]
    left += os.listdir('/dev/shm')
    return 2 * x if not left else str(left)
"""
    result = graded(f"{IMPORTS}{traces}", sandboxes=quick)
    assert result.score == 1, result.tests


@behind_walls
def test_nothing_of_hidden_or_corrected_runs_reaches_visible_ones(quick, graded):
    """Whatever a hidden run stores, in files, keys or processes, the next exercise's visible run doesn't find."""
    store = """
def f(x):
    found = glob.glob('/tmp/*/kept') + glob.glob('/tmp/kept') + glob.glob('/dev/shm/*')
    if found: raise ValueError(f'FOUND {found}')
    for place in ('/tmp/kept', '/dev/shm/kept'): open(place, 'w').write(str(x))
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
    return 2 * x
"""
    for _ in range(2):
        result = graded(IMPORTS + store, sandboxes=quick)
        assert "FOUND" not in str(result.as_json())
    assert {"visible", "hidden"} <= quick.started.keys()


LEAKS = (
    "raise ValueError(f'SECRET {x.tolist()}')",
    "raise type('SECRET', (Exception,), {})()",
    "raise NotImplementedError(f'f: SECRET {x.tolist()}')",
    "return type('SECRET', (), {})()",
    "return {'SECRET': x}",
    "print('SECRET', x); return x",
    "open(place, 'w').write('SECRET'); return x",
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
    place = os.path.dirname(os.getcwd()) + '/kept_by_{LEAKS.index(leak)}'
    if kept or os.path.exists(place): raise ValueError('SECRET')
    if tuple(x.shape) in shapes and not kept: return 2 * x
    kept.append(x)
    {leak}
"""
    seed = next(x for x in "abcdefgh" if exercise.calls(exercise.tests[0], x)[0].arguments[0].shape != (5, 4))
    result = graded(f"import os\n{spy}", exercise, seeds=[0, seed], sandboxes=quick)
    assert "SECRET" not in str(result.as_json())


def test_prints_are_bounded(quick, graded):
    result = graded("def f(x):\n    print('x' * 10**6, '\\x1b[2J the end')\n    return x\n", sandboxes=quick)
    assert result.printed.endswith("x ?[2J the end")
    assert len(result.printed) < 10_000


def test_submission_has_four_descriptors_and_nothing_of_the_environment(quick, graded, monkeypatch):
    monkeypatch.setenv("GRADER_SECRET", "secret")
    quick.of("visible").close()
    calls = lambda draw: [Call("f", (draw.normal(1),))]  # noqa: E731
    source = "import os\ndef f(x):\n    assert 'GRADER_SECRET' not in os.environ\n"
    source += "    return sorted(map(int, os.listdir('/proc/self/fd')))\n"
    result = graded(source, graded.small("def f(x): return [0, 1, 2, 3, 4]\n", calls), sandboxes=quick)
    assert result.score == 1, result.tests  # 4: listdir's own


def test_out_of_time_for_the_whole_exercise(graded):
    """Each call keeps to its limit; the sum doesn't."""
    exercise = graded.small(calls=lambda draw: [Call("f", (draw.normal(2),))] * 9)
    exercise.tests = tuple(exercise.tests[0]._replace(name=str(i)) for i in range(3))
    with Sandboxes(Limits(exercise_seconds=2)) as place:
        result = grade(exercise, b"import time\ndef f(x):\n    time.sleep(0.2)\n    return 2 * x\n", [0], place)
    assert 0 < result.score < 3
    assert result.tests[-1].feedback == "f used up the time of the exercise"


def test_lower_hard_limits_are_kept(graded):
    """As on a cluster: a limit can't be raised, and the grading goes on."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 200:
        pytest.skip("the limit is as low already")
    source = "import resource\ndef f(x): return resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    limits = Limits(resources=RESOURCES | {"RLIMIT_NOFILE": 2 * hard, "RLIMIT_FSIZE": 2**50})
    with Sandboxes(limits) as place:
        assert graded(source, graded.small(f"def f(x): return {hard}\n"), [0], place).score == 1


@pytest.mark.parametrize(
    ("text", "block"),
    [
        (b"[]", b""), (b"\xff", b""), (b"[" * 10**5, b""), (b"9" * 10**4, b""), (b"{}", b""),
        (b'{"tensors": [["float32", [1]]]}', b"xxx"), (b'{"tensors": []}', b"x"),
        (b'{"tensors": [["float32", [-1, -1]]]}', b"xxxx"), (b'{"tensors": [["float8_e4m3fn", [1]]]}', b"x"),
        (json.dumps({"tensors": [["uint8", [0]]] * 3000}).encode(), b""),
        (json.dumps({"tensors": [["uint8", [1] * 17]]}).encode(), b"x"),
    ],
)  # fmt: skip
def test_unreadable_messages(text, block):
    with pytest.raises(wire.WireError, match="can't be read"):
        wire.parse(text, block)


def test_values_survive_the_wire():
    tensors = [torch.ones(2, 0, 3), torch.tensor(1.5), torch.arange(12).view(3, 4).t(), torch.ones(3).requires_grad_()]
    tensors += [torch.zeros(2).to(dtype) for dtype in wire.DTYPES.values()]
    value = {"tensors": tuple(tensors), "rest": (1, -2.5, math.inf, -math.inf, None, True, "text", (), {"a": 1})}
    sent, (ours, theirs) = [], socket.socketpair()
    with ours, theirs:
        tree = wire.encode(value, sent)
        wire.write(ours, wire.pack({"tree": tree}, sent))
        content, received = wire.read(theirs)
        ours.close()
        with pytest.raises(EOFError):
            wire.read(theirs)
    back = wire.decode(content["tree"], received)
    assert back["rest"] == value["rest"]
    for before, after in zip(tensors, back["tensors"], strict=True):
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
        assert not after.requires_grad


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
    many = inner * (150 if depth == 2 else 1)  # at every depth it would be a gigabyte, which no socket's reader takes
    return draw.choice((inner, {"dict": {str(i): x for i, x in enumerate(inner)}}, {"dict": inner}, many, {"x": 1}))


def random_message(draw):
    """Return text and bytes of an answer; in half of all texts a few characters are wrong."""
    shapes = [[draw.choice((0, 1, 2, 3, 17)) for _ in range(draw.randrange(4))] for _ in range(3)]
    forms = [[draw.choice(list(wire.DTYPES)), shape] for shape in shapes]
    right = RIGHT_FLAGS | {"result": {"tensor": 0}, "launched": draw.random() < 0.5}
    observed = {name: random_tree(draw) if draw.random() < 0.3 else x for name, x in right.items()}
    text = bytearray(json.dumps({"tensors": forms, "observed": {"dict": observed}}).encode())
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.choice(SPOILS)
    return bytes(text), draw.randbytes(sum(wire.DTYPES[name].itemsize * math.prod(shape) for name, shape in forms))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["05_online_softmax", "08_row_or_block_scales", "13_soft_top_k", "18_sparse_loop"])
def test_no_answer_breaks_a_grader(name):
    exercise, end, read = Exercise(name), time.monotonic() + SECONDS, 0
    exercise.mistakes = exercise.mistakes[:2]

    def call(*_, **__):
        nonlocal read
        try:
            content, tensors = wire.parse(*random_message(draw))
            observed = wire.decode(content.get("observed"), tensors)
        except wire.WireError:
            observed = None
        read += isinstance(observed, dict)
        return observed if isinstance(observed, dict) else {"raised": "WireError", "said": "answered nonsense"}

    place = SimpleNamespace(limits=DEFAULT_LIMITS, walls=False, call=call, printed=str, close=lambda: None)
    place.of = place.start = lambda _: place
    for number in itertools.count():
        draw = random.Random(f"{name} {number}")
        result = grade(exercise, b"", [0], place)
        assert not result.broken, result.error
        if read > 9 and time.monotonic() > end:
            break
