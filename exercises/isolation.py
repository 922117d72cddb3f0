"""The submission's process: started from a bare server, limited, and gone with all it started when it is done.

The grader's process never imports a submission. It talks to a child over two pipes and reads plain values from them.
As root (Gradescope, containers) the child is another, unprivileged user; otherwise it is the grader's own user, and
limits guard against accidents only: see README.md.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exercises import wire

WORKER = Path(__file__).resolve().with_name("worker.py")
UIDS = range(61184, 65520)  # users that exist only while something runs (systemd's DynamicUser)
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
TEXT_LIMIT = 300  # characters of an error that are shown
PRINTED_LIMIT = 4000  # characters kept of what it prints
SERVER_SECONDS = 120  # to import torch on a slow disk


class Limits(NamedTuple):
    """What one submission may use in one exercise."""

    call_seconds: float = 20.0
    exercise_seconds: float = 120.0
    cpu_seconds: int = 120
    memory: int = 2 * 2**30  # bytes beyond what importing torch takes
    file_size: int = 16 * 2**20
    processes: int = 32
    open_files: int = 128


DEFAULT_LIMITS = Limits()


class SandboxError(Exception):
    """The machinery failed, not the submission."""


class ChildError(Exception):
    """The submission crashed, hung or answered nonsense. str(): with its own words, which may quote its inputs.

    shown: the same without a word of the submission. fatal: its process can't be called again.
    """

    def __init__(self, shown: str, detail: str | None = None, fatal: bool = False):
        super().__init__(detail or shown)
        self.shown, self.fatal = shown, fatal


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A tensor argument inside a larger buffer: +inf (integers: 77) stands `margin` elements before and after it."""

    tensor: Tensor
    margin: int = 256


class Buffer(NamedTuple):
    """A guarded argument after the call. intact: nothing was stored outside of it."""

    tensor: Tensor
    intact: bool


class Sandbox:
    """A server process with torch loaded; runs one submission at a time. A context manager."""

    _numbers = itertools.count()

    def __init__(self, limits: Limits = DEFAULT_LIMITS):
        self.limits = limits
        self.uid = UIDS[(8 * os.getpid() + next(self._numbers)) % len(UIDS)] if os.getuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="grading-"))
        self.on_gpu = torch.cuda.is_available()
        self.server = self.control = None

    def __enter__(self) -> "Sandbox":
        self._open_server()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_server()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def note(self) -> str | None:
        """What a grading should say about this machine."""
        closed = _closed_to_others(Path(os.__file__)) if self.uid is not None else None
        return closed and (
            f"note: submissions run as a user who may not enter {closed}, where this Python is installed:"
            " they can import torch, triton, numpy and common standard modules, and nothing else"
        )

    def start(self, source: bytes) -> "Child":
        """A fresh child that will import `source` as exercise.py."""
        return Child(self, source)

    def command(self, command: dict[str, Any], descriptors: list[int] = ()) -> dict[str, Any]:
        """{"start": ...} or {"stop": true} for the server; the reply: the new child's pid, the old one's exit code."""
        if self.server is None or self.server.poll() is not None:
            self._close_server()
            self._open_server()
        try:
            socket.send_fds(self.control, [json.dumps(command).encode()], list(descriptors))
            return json.loads(self.control.recv(2**16))
        except (OSError, ValueError) as error:
            self._close_server()  # ended from outside, as a submission of the same user could do
            raise ChildError("ended the grader's helper process", fatal=True) from error

    def _open_server(self):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS refuses to fork otherwise
        }
        if self.on_gpu:
            environment |= {name: os.environ[name] for name in GPU_VARIABLES if name in os.environ}
        else:
            environment["TRITON_INTERPRET"] = "1"
        with theirs, open(self.folder / "server", "wb") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-I", str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self.control.settimeout(SERVER_SECONDS)
        if not self.control.recv(2**16):
            raise SandboxError(f"the server of submissions didn't start: {(self.folder / 'server').read_text()}")

    def _close_server(self):
        if self.server is None:
            return
        self.control.close()  # the server kills what is left and ends
        try:
            self.server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.server = self.control = None


class Child:
    """One process of one submission: call() until it ends or misbehaves, then close()."""

    _numbers = itertools.count()

    def __init__(self, sandbox: Sandbox, source: bytes):
        self.sandbox, self.calls, self.limits = sandbox, 0, sandbox.limits
        self.folder = sandbox.folder / f"child{next(self._numbers)}"
        scratch = self.folder / "scratch"
        scratch.mkdir(parents=True)
        (scratch / "exercise.py").write_bytes(source)
        if sandbox.uid is not None:
            for path in (sandbox.folder, self.folder):
                path.chmod(0o711)  # others may pass, not list
            for path in (scratch, scratch / "exercise.py"):
                os.chown(path, sandbox.uid, sandbox.uid)
        theirs_in, self.requests = os.pipe()
        self.answers, theirs_out = os.pipe()
        os.set_blocking(self.requests, False)
        printed = [
            os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "err")
        ]
        theirs = [theirs_in, theirs_out, *printed]
        try:
            self.process = sandbox.command({"start": self._start(scratch)}, theirs)["child"]
            # Another process may hold the pipe open when this one has ended.
            self.ended = os.pidfd_open(self.process) if hasattr(os, "pidfd_open") else None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        try:
            wire.read(self.answers, time.monotonic() + SERVER_SECONDS, self.ended)
        except (EOFError, TimeoutError) as error:
            raise SandboxError(f"the process of a submission didn't start: {self.printed()}") from error

    def _start(self, scratch):
        limits, uid = self.limits, self.sandbox.uid
        # RLIMIT_AS can't be used with CUDA, which reserves address space by the terabyte.
        memory = ["RLIMIT_DATA"] if self.sandbox.on_gpu else ["RLIMIT_DATA", "RLIMIT_AS"]
        resources = {
            "RLIMIT_CPU": limits.cpu_seconds,
            "RLIMIT_FSIZE": limits.file_size,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_NPROC": limits.processes + (0 if uid is not None else _threads_of(os.getuid())),
            "RLIMIT_CORE": 0,
        }
        return {
            "uid": uid,
            "scratch": str(scratch),
            "resources": resources,
            "memory": limits.memory,
            "memory_resources": memory,
        }

    def call(
        self,
        function: str,
        arguments: tuple = (),
        keywords: dict[str, Any] | None = None,
        *,
        mode: str = "call",
        upstream: Any = None,
        repeat: int = 1,
        device: str = "cpu",
        deadline: float = float("inf"),
    ) -> Any:
        """What the submission's function claims; ChildError if nothing usable comes.

        mode "call": the result. "gradients": (result, gradient of each tensor argument, None where there is none).
        "in_place": (result, the arguments as the call left them).
        """
        self.calls += 1
        tensors = {}
        plain = tuple(x.tensor if isinstance(x, Guarded) else x for x in arguments)
        content = {
            "id": self.calls,
            "function": function,
            "arguments": wire.encode(plain, tensors),
            "keywords": wire.encode(keywords or {}, tensors),
            "upstream": wire.encode(upstream, tensors),
            "mode": mode,
            "repeat": repeat,
            "margins": {i: x.margin for i, x in enumerate(arguments) if isinstance(x, Guarded)},
            "device": device,
        }
        message = wire.pack(content, tensors)
        seconds = self.limits.call_seconds
        deadline = min(deadline, time.monotonic() + seconds)
        try:
            with contextlib.suppress(BrokenPipeError):
                wire.write(self.requests, message, deadline)
            answer, returned = wire.read(self.answers, deadline, self.ended)
            if answer.get("id") != self.calls:
                raise wire.WireError("answered out of turn")
            if "error" in answer:
                raise _as_child_error(answer["error"], function)
            result = wire.decode(answer.get("result"), returned)
            if mode == "call":
                return result
            extra = wire.decode(answer.get("extra"), returned)
        except TimeoutError:
            raise ChildError(f"took longer than {seconds:g} s", fatal=True) from None
        except EOFError:
            if self.ended is not None:  # pipes close a moment before the exit code is known
                select.select([self.ended], [], [], 0.5)
            raise ChildError(_epitaph(self.sandbox.command({"stop": True})["status"]), fatal=True) from None
        except wire.WireError as error:
            raise ChildError(str(error), fatal=True) from error
        # In "gradients" tensors only: each has its gradient or None. The count is the submission's claim too.
        sent = arguments if mode == "in_place" else [x for x in arguments if isinstance(x, Tensor)]
        if not isinstance(extra, tuple) or len(extra) != len(sent):
            raise ChildError("returned something that can't be read", fatal=True)
        return result, tuple(_returned(x, y, mode) for x, y in zip(sent, extra, strict=True))

    def printed(self) -> str:
        """The end of what the submission wrote to stdout and stderr."""
        texts = [(self.folder / name).read_bytes()[-PRINTED_LIMIT:].decode(errors="replace") for name in ("out", "err")]
        return "".join(x if x.isprintable() or x == "\n" else "?" for x in "".join(texts)).strip()

    def close(self) -> None:
        """End the process and all it started, and remove its files."""
        for descriptor in (self.requests, self.answers, self.ended):
            if descriptor is not None:
                os.close(descriptor)
        with contextlib.suppress(ChildError):  # nothing of it is left if it ended the server
            self.sandbox.command({"stop": True})
        shutil.rmtree(self.folder, ignore_errors=True)


def _returned(argument, after, mode):
    """What came back for an argument: a Buffer if it was guarded, else its gradient or what it is after the call."""
    if not isinstance(argument, Guarded):
        gradient = mode == "gradients" and after is None
        if isinstance(argument, Tensor) and not isinstance(after, Tensor) and not gradient:
            raise ChildError("returned something that can't be read", fatal=True)
        return after
    tensor, margin = argument.tensor, argument.margin
    if not isinstance(after, Tensor) or after.dtype != tensor.dtype or after.shape != (tensor.numel() + 2 * margin,):
        raise ChildError("returned something that can't be read", fatal=True)
    outside = torch.cat((after[:margin], after[margin + tensor.numel() :]))
    intact = (outside == (float("inf") if tensor.is_floating_point() else 77)).all()
    return Buffer(after[margin : margin + tensor.numel()].view(tensor.shape), bool(intact))


def _as_child_error(error, function):
    """A submission's own account of what went wrong. It may quote inputs: its text is for visible ones only."""
    if not isinstance(error, dict):
        return ChildError("returned something that can't be read", fatal=True)
    text = " ".join(re.sub(r"[^\x20-\x7e]", " ", str(error.get("text", "")))[:TEXT_LIMIT].split())
    if error.get("kind") == "unwritten":
        return ChildError("not written yet", f"not written yet: {text.removeprefix(f'{function}: ')}")
    if error.get("kind") == "answer":
        return ChildError("returned something that can't be used", text)
    line = f"line {error['line']}: " if isinstance(error.get("line"), int) else ""
    return ChildError("raised an error", f"raised an error: {line}{text}")


def _epitaph(code):
    if code is None:
        return "closed its connection to the grader"
    if code >= 0:
        return f"ended its process (exit status {code}) instead of returning"
    if code == -signal.SIGXCPU:
        return "used too much processor time"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"


def _closed_to_others(path):
    """The first folder above a file that other users may not enter, or None."""
    return next((x for x in reversed(path.parents) if not x.stat().st_mode & stat.S_IXOTH), None)


def _threads_of(uid):
    """How many threads a user has: RLIMIT_NPROC counts them all."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == uid:
                count += len(list((process / "task").iterdir()))
    return count
