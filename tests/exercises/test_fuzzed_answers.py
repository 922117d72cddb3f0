"""Random answers of a submission: whatever comes back is read or refused, and no grader breaks on it.

A few seconds by default. EXERCISES_FUZZ=600 fuzzes for 600 s in each test: EXERCISES_FUZZ=600 pytest -s this_file.
"""

import contextlib
import json
import math
import os
import random
import time

import pytest
import torch
from torch import Tensor

from exercises import ROOT, exercise_names, grading, isolation, wire, worker
from exercises.isolation import Child, ChildError, Limits

SECONDS = float(os.environ.get("EXERCISES_FUZZ", "1"))
LARGEST = 2**63
NUMBERS = (0, 1, -1, 2, 127, 256, 2**31, LARGEST - 1, LARGEST, -LARGEST, 10**400, 0.5, -0.0, 1e-320, 1e308, math.nan)


def rounds(seed):
    """(a number, its own random numbers) until the time is up."""
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        yield number, random.Random(f"{seed} {number}")
        number += 1
    print(f"{number} rounds")


def random_tensor(draw, like=None):
    """A tensor that was never asked for, or one that is nearly `like`."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    if like is None or draw.random() < 0.5:
        sizes = [0, 1, 1, 2, 3, 5, 17, 64]
        shape = [draw.choice(sizes) for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3, 4, 9)))]
        if draw.random() < 0.1:
            shape = [draw.choice((2**14, 2**12)), *[1] * draw.randrange(4)]
        shape = shape if math.prod(shape) < 10**5 else [3, 3]
        dtype = draw.choice(wire.DTYPES)
        return (torch.randn(shape, generator=generator) * 10.0 ** draw.randrange(-5, 5)).to(dtype)
    changed = like.clone()
    kind = draw.randrange(9)
    if kind == 0:
        return changed.to(draw.choice(wire.DTYPES))
    if kind == 1 and changed.ndim:
        return changed[: draw.randrange(len(changed) + 1)]
    if kind == 2:
        return changed[None] if draw.random() < 0.5 else changed[..., None]
    if kind == 3 and changed.ndim:
        return changed.transpose(0, -1).contiguous()
    if kind == 4:
        return changed.flatten()
    if kind == 5:
        return torch.zeros_like(changed)
    if kind == 6:
        return changed.squeeze()
    if changed.numel():
        value = draw.choice((0, 1, -1, 127, math.nan, math.inf, -math.inf, 1e30, -1e-30))
        value = value if changed.is_floating_point() else draw.choice((0, 1))
        changed.view(-1)[draw.randrange(changed.numel()) :: draw.randrange(1, 9)] = value
    return changed


def random_tree(draw, tensors, depth=0):
    """A tree as wire.encode makes them, or nearly."""
    kind = draw.randrange(10 if depth < 4 else 6)
    if kind < 2:
        key = f"t{draw.randrange(4)}" if draw.random() < 0.9 else draw.choice(("t9", "", "t0 ", None, 7, []))
        if isinstance(key, str) and draw.random() < 0.9:
            tensors[key] = random_tensor(draw)
        return {"tensor": key}
    if kind < 5:
        scalar = draw.choice((None, True, False, "", "text", "x" * 99, *NUMBERS))
        return {"scalar": scalar} | ({"float": draw.choice(("nan", "inf", "1", 7))} if draw.random() < 0.2 else {})
    if kind == 5:
        return draw.choice((None, [], {}, "tensor", 5, {"tuple": None}, {"dict": []}, {"scalar": {}}, {"tuple": [1]}))
    inner = [random_tree(draw, tensors, depth + 1) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
    if draw.random() < 0.05:
        inner += [{"scalar": 1}] * 300
    if kind < 9:
        return {"tuple": inner}
    return {"dict": {draw.choice(("a", "b", "dq", "", str(i))): item for i, item in enumerate(inner)}}


def spoiled_tree(draw, tree, tensors):
    """A valid tree with something in it changed."""
    if draw.random() < 0.25 or not isinstance(tree, dict):
        return random_tree(draw, tensors)
    if "tensor" in tree:
        tensors[tree["tensor"]] = random_tensor(draw, tensors[tree["tensor"]])
        return tree
    if tree.get("tuple"):
        items = list(tree["tuple"])
        i = draw.randrange(len(items))
        items[i] = spoiled_tree(draw, items[i], tensors)
        if draw.random() < 0.1:
            del items[i]
        return {"tuple": items}
    if tree.get("dict"):
        key = draw.choice(sorted(tree["dict"]))
        return {"dict": tree["dict"] | {key: spoiled_tree(draw, tree["dict"][key], tensors)}}
    return random_tree(draw, tensors)


def spoiled_bytes(draw, data):
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:at] = draw.randbytes(draw.choice((1, 3, 40)))
        elif kind == 2:
            del data[at : at + draw.choice((1, 4, 100))]
        elif kind == 3:
            data[at : at + 1] = draw.choice((b"0", b"9" * 30, b'"', b"[", b"{", b"}", b"-", b"\xff", b"null", b"1e999"))
        else:
            start = draw.randrange(len(data) + 1)
            data[at:at] = data[start : start + draw.choice((2, 16, 64))]
    return bytes(data)


HEADERS = [  # of safetensors, whose block follows
    {"t0": {"dtype": "F32", "shape": [0, LARGEST], "data_offsets": [0, 0]}},
    {"t0": {"dtype": "F32", "shape": [0, 2**40], "data_offsets": [0, 0]}},
    {"t0": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}},
    {"t0": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
    {"t0": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}},
    {"t0": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}},
    {"t0": {"dtype": "F32", "shape": [1] * 10_000, "data_offsets": [0, 4]}},
    {"t0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"a": "b"}},
    {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(3000)},
]


def block_of(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
@pytest.mark.parametrize("size", [0, 4, 8])
def test_hostile_header_is_refused_or_harmless(header, size):
    try:
        _, tensors = wire.parse(b'{"id": 1}', block_of(header, bytes(size)))
    except wire.WireError:
        return
    for tensor in tensors.values():
        assert math.prod(max(1, length) for length in tensor.shape) <= 4


def test_mutated_messages_are_read_or_refused():
    """Bytes of the JSON, of the header and of the numbers; only WireError may come of it, and quickly."""
    for _, draw in rounds("messages"):
        tensors = {}
        content = {"id": 1, "result": random_tree(draw, tensors), "extra": random_tree(draw, tensors)}
        text, block = json.dumps(content).encode(), wire.safetensors.torch.save(tensors)
        if draw.random() < 0.5:
            text = spoiled_bytes(draw, text)
        if draw.random() < 0.7:
            block = spoiled_bytes(draw, block)
        try:
            read, received = wire.parse(text, block)
            wire.decode(read.get("result"), received)
            wire.decode(read.get("extra"), received)
        except wire.WireError:
            continue


class Answers:
    """In the place of a submission's process: valid answers of the master, each recorded once, with changes."""

    def __init__(self, name, monkeypatch):
        self.module = worker.load(f"fuzzed_{name}", ROOT / name / "master.py")
        self.recorded, self.draw, self.calls, self.last = {}, None, 0, None
        self.limits, self.path = Limits(), ROOT / name / "master.py"
        monkeypatch.setattr(worker, "wire", wire, raising=False)
        monkeypatch.setattr(isolation.wire, "write", self.write)
        monkeypatch.setattr(isolation.wire, "read", self.read)

    def start(self, source):
        child = object.__new__(Child)
        child.sandbox, child.limits, child.calls, child.launches = self, self.limits, 0, 0
        child.requests = child.answers = child.ended = None
        child.close, child.printed = (lambda: None), (lambda: "")
        return child

    def write(self, descriptor, message, deadline):
        sizes = wire.LENGTHS.unpack(message[: wire.LENGTHS.size])
        text = message[wire.LENGTHS.size :][: sizes[0]]
        self.last = wire.parse(text, message[wire.LENGTHS.size + sizes[0] :])

    def read(self, descriptor, deadline, ended, limit):
        """The recorded answer to the call of this number in this test, perhaps changed, by way of bytes."""
        content, tensors = self.last
        key = (*self.test, self.calls)
        self.calls += 1
        if key not in self.recorded or self.recorded[key][0] != content["function"]:
            try:
                self.recorded[key] = content["function"], *worker.answer(self.module, content, tensors)
            except Exception as error:  # called with what the fuzz made of an earlier answer
                self.recorded.pop(key, None)
                return {"id": content["id"], "error": worker.describe(error, self.path)}, {}
        _, reply, sent = self.recorded[key]
        reply, sent = json.loads(json.dumps(reply)), dict(sent)
        for field in ("result", "extra"):
            if field in reply and self.draw.random() < self.share:
                reply[field] = spoiled_tree(self.draw, reply[field], sent)
        if self.draw.random() < 0.05:
            reply[self.draw.choice(("launches", "spoiled", "extra", "error"))] = self.draw.choice(
                (None, -1, "1", [], {}, 10**400, 0.5, {"tuple": [{"tensor": "t0"}]}, {"text": 7, "line": 10**4000})
            )
        return wire.parse(json.dumps({"id": content["id"], **reply}).encode(), wire.safetensors.torch.save(sent), limit)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", exercise_names() if "EXERCISES_FUZZ" in os.environ else ["05_online_softmax"])
def test_no_answer_breaks_a_grader(name, monkeypatch):
    answers, grader = Answers(name, monkeypatch), grading.load_grader(name)
    tests, broken = [test for test in grader.tests if not test.needs_gpu], {}
    for number, draw in rounds(name):
        answers.draw, answers.calls, answers.share = draw, 0, draw.choice((0.1, 0.3, 1))
        seed, grader.tests = draw.choice((0, "fuzz")), [draw.choice(tests)]
        answers.test = seed, grader.tests[0].name
        start = time.monotonic()
        result = grading.grade(grader, b"", [seed], answers)
        if result.broken or time.monotonic() - start > 20:
            broken.setdefault((result.error or "too slow")[-1500:], number)
    assert not broken, "\n".join(f"round {number}: {error}" for error, number in broken.items())


def test_every_answer_is_read_or_the_submissions_failure(monkeypatch):
    """Through Child.call, in every mode, with trees that no function returned."""
    answers = Answers("05_online_softmax", monkeypatch)
    arguments = torch.ones(3, 4), isolation.Guarded(torch.ones(2, 2)), 7
    for _, draw in rounds("calls"):
        tensors, mode = {}, draw.choice(("call", "gradients", "in_place", "casts"))
        reply = {"id": 1, "result": random_tree(draw, tensors), "extra": random_tree(draw, tensors), "launches": 1}
        if draw.random() < 0.2:
            reply[draw.choice(sorted(reply))] = draw.choice((None, 2, "x", [], {}, {"kind": []}, -LARGEST))
        if draw.random() < 0.3:
            reply["spoiled"] = random_tree(draw, tensors)
        if draw.random() < 0.2:
            errors = None, [], {}, {"kind": "answer"}, {"text": [[]], "line": 10**9}, {"line": 0.5}
            reply["error"] = draw.choice(errors)
        text, block = json.dumps(reply).encode(), wire.safetensors.torch.save(tensors)
        monkeypatch.setattr(isolation.wire, "read", lambda *_, t=text, b=block: wire.parse(t, b))
        with contextlib.suppress(ChildError):
            answer = answers.start(b"").call("f", arguments, mode=mode)
            assert mode == "call" or isinstance(answer, tuple)
            assert not isinstance(answer, Tensor) or answer.dtype in wire.DTYPES
