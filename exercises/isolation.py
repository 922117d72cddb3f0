"""The submission's process: started from a bare server, limited, and gone with all it started when it is done.

The grader's process never imports a submission. It talks to a child over two pipes and reads plain values from them.
As root (Gradescope, containers) the child is another, unprivileged user, behind the walls of confinement.py; otherwise
it is the grader's own user, and limits guard against accidents only: see README.md.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exercises import confinement, leftovers, wire

WORKER = Path(__file__).resolve().with_name("worker.py")
SERVER_FILES = ("worker.py", "wire.py", "leftovers.py")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
TEXT_LIMIT = 300  # characters of an error that are shown
PRINTED_LIMIT = 4000  # characters kept of what it prints
PRINTED_LINES = 100
FILE_LINES = 10**6  # more than a submission can have
ANSWER_LEAST, ANSWER_FACTOR = 2**18, 8  # bytes that an answer may have: this, and so many times what was sent
SERVER_SECONDS = 120  # to import torch on a slow disk
SERVER_END_SECONDS = 20


class Limits(NamedTuple):
    """What one submission may use in one exercise."""

    call_seconds: float = 20.0
    exercise_seconds: float = 120.0
    cpu_seconds: int = 120
    memory: int = 2 * 2**30  # bytes beyond what importing torch takes
    file_size: int = 16 * 2**20
    disk: int = 64 * 2**20  # bytes of all its files
    files: int = 2000
    processes: int = 16
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

    def __init__(self, limits: Limits = DEFAULT_LIMITS):
        self.limits = limits
        self.as_root = os.getuid() == 0
        self.folder = Path(tempfile.mkdtemp(prefix="grading-"))
        self.on_gpu = torch.cuda.is_available()
        self.users = self.server = self.control = None
        self.open_because = None  # why submissions run without namespaces of their own

    def __enter__(self) -> "Sandbox":
        self._open_server()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_server()
        leftovers.remove_tree(self.folder)

    @property
    def note(self) -> str | None:
        """What a grading should say about this machine; None if there is nothing."""
        if not self.as_root:
            return None
        notes = []
        if self.open_because:
            notes.append(
                f"note: submissions run without namespaces of their own: {self.open_because}. They see the files that"
                " every user may read, and the network"
            )
            if closed := confinement.closed_to_others(Path(os.__file__)):
                notes.append(
                    f"note: submissions run as a user who may not enter {closed}, where this Python is installed:"
                    " they can import torch, triton, numpy and common standard modules, and nothing else"
                )
        secret = [*WORKER.parent.glob("*/master.py"), WORKER.with_name("hidden_seeds.json")]
        secret += [WORKER.parents[1] / ".git" / "HEAD"]
        if path := confinement.readable(secret, inside=not self.open_because):
            notes.append(
                f"note: submissions can read {path}: close it to others before you grade what you don't trust,"
                f" chmod -R go-rwx {WORKER.parents[1]}"
            )
        return "\n".join(notes) or None

    def start(self, source: bytes) -> "Child":
        """A fresh child that will import `source` as exercise.py."""
        return Child(self, source)

    def restart(self) -> None:
        """Begin anew after a crash: the next submission finds a fresh server."""
        with contextlib.suppress(OSError):
            self._close_server()

    def command(self, command: dict[str, Any], descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """{"start": ...} or {"stop": true} for the server: its reply, about the old child, and the new one's pidfd."""
        if self.server is None or self.server.poll() is not None:
            self._close_server()
            if "start" not in command:  # nothing runs that could be stopped
                return {"status": None, "reason": ""}, []
            self._open_server()
        if "start" in command:  # users are those of the server that runs by now
            command["start"]["users"] = self.users and self.users[:2]
        try:
            socket.send_fds(self.control, [json.dumps(command).encode()], list(descriptors))
            reply, received, _, _ = socket.recv_fds(self.control, 2**16, 1)
            reply = json.loads(reply)
        except (OSError, ValueError) as error:
            self._close_server()  # ended from outside, as a submission of the same user could do
            raise ChildError("ended the grader's helper process", fatal=True) from error
        if "error" in reply:
            raise SandboxError(f"the process of a submission didn't start: {reply['error']}")
        return reply, received

    def _open_server(self):
        if self.as_root:
            self.users = confinement.lend_users()  # new ones: the last server may have left a process
        walls = None
        if self.as_root and not self.on_gpu:
            walls = confinement.bubblewrap(self.folder, self.limits.disk, [WORKER.with_name(x) for x in SERVER_FILES])
        if walls and self._serve(walls):
            self.open_because = None
            return
        if self.as_root:
            reasons = self._log()[-1:] if walls else ["bubblewrap (bwrap) isn't installed"]
            self.open_because = "they need the GPU" if self.on_gpu else " ".join(reasons) or "bubblewrap didn't start"
            self.folder.chmod(0o711)  # others may pass, not list
        if not self._serve([]):
            raise SandboxError("the server of submissions didn't start: " + "\n".join(self._log()))

    def _log(self):
        return (self.folder / "server").read_text(errors="replace").splitlines()

    def _serve(self, walls):
        """Start the server, within walls or without; False if it doesn't answer."""
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
                [*walls, sys.executable, "-I", str(WORKER), str(theirs.fileno()), str(self.folder)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self.control.settimeout(SERVER_SECONDS)
        with contextlib.suppress(OSError):
            if self.control.recv(2**16):
                return True
        self._end_server()
        return False

    def _close_server(self):
        if self.server is not None:
            self._end_server()
        for scratch in self.folder.glob("child*"):  # of a server that was ended before it could clean up
            leftovers.remove_tree(scratch)
        if self.users is not None:
            leftovers.remove_files_of(self.users.uid)
            leftovers.remove_segments_of(self.users.uid)
            os.close(self.users.lock)
            self.users = None

    def _end_server(self):
        self.control.close()  # the server kills what is left and ends
        try:
            self.server.wait(timeout=SERVER_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.server = self.control = None


class Child:
    """One process of one submission: call() until it ends or misbehaves, then close()."""

    _numbers = itertools.count()

    def __init__(self, sandbox: Sandbox, source: bytes):
        self.sandbox, self.calls, self.limits = sandbox, 0, sandbox.limits
        self.launches = 0  # of Triton kernels in the last call, as the submission's process counts them
        self.folder = sandbox.folder / f"printed{next(self._numbers)}"
        self.folder.mkdir(mode=0o700)
        (self.folder / "exercise.py").write_bytes(source)
        theirs_in, self.requests = os.pipe()
        self.answers, theirs_out = os.pipe()
        os.set_blocking(self.requests, False)
        printed = [
            os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "err")
        ]
        theirs = [theirs_in, theirs_out, *printed, os.open(self.folder / "exercise.py", os.O_RDONLY)]
        self.ended = None
        try:
            _, received = sandbox.command({"start": self._start()}, theirs)
            # Another process may hold the pipe open when this one has ended.
            self.ended = received[0] if received else None
            os.close(theirs.pop(1))  # or the end of the answers would never be seen
            wire.read(self.answers, time.monotonic() + SERVER_SECONDS, self.ended)
        except Exception as error:
            printed = self.printed()
            self.close()
            if isinstance(error, EOFError | TimeoutError):
                raise SandboxError(f"the process of a submission didn't start: {printed}") from error
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _start(self):
        limits = self.limits
        # RLIMIT_AS can't be used with CUDA, which reserves address space by the terabyte.
        memory = ["RLIMIT_DATA"] if self.sandbox.on_gpu else ["RLIMIT_DATA", "RLIMIT_AS"]
        resources = {
            "RLIMIT_CPU": limits.cpu_seconds,
            "RLIMIT_FSIZE": limits.file_size,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_NPROC": limits.processes + (0 if self.sandbox.as_root else _threads_of(os.getuid())),
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,  # a queue would outlive its process
        }
        return {
            "resources": resources,
            "memory": limits.memory,
            "memory_resources": memory,
            "watched": {"memory": limits.memory, "disk": limits.disk, "files": limits.files},
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
        correct: Any = None,
    ) -> Any:
        """What the submission's function claims; ChildError if nothing usable comes.

        mode "call": the result. "gradients": (result, gradient of each tensor argument, None where there is none).
        "in_place": (result, the arguments as the call left them). "casts": (result, whether NaN or too large
        a number was converted to integers, which has no defined result). WireError: the arguments can't be sent.
        """
        self.calls += 1
        self.launches = 0
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
            "correct": correct and correct._asdict(),
        }
        margins = sum(2 * x.margin * x.tensor.element_size() for x in arguments if isinstance(x, Guarded))
        size = margins + sum(x.numel() * x.element_size() for x in tensors.values())
        content["limit"] = limit = min(ANSWER_LEAST + ANSWER_FACTOR * size, wire.MESSAGE_LIMIT // 2)
        message = wire.pack(content, tensors)
        seconds = self.limits.call_seconds
        deadline = min(deadline, time.monotonic() + seconds)
        try:
            with contextlib.suppress(BrokenPipeError):
                wire.write(self.requests, message, deadline)
            answer, returned = wire.read(self.answers, deadline, self.ended, limit)
            if answer.get("id") != self.calls:
                raise wire.WireError("answered out of turn")
            if "error" in answer:
                raise _as_child_error(answer["error"], function)
            self.launches = answer.get("launches") if type(answer.get("launches")) is int else 0
            result = wire.decode(answer.get("result"), returned)
            if mode == "call":
                return result
            extra = wire.decode(answer.get("extra"), returned)
            spoiled = wire.decode(answer.get("spoiled", {"tuple": []}), returned)
        except TimeoutError:
            raise ChildError(f"took longer than {seconds:g} s", fatal=True) from None
        except EOFError:
            if self.ended is not None:  # pipes close a moment before the exit code is known
                select.select([self.ended], [], [], 0.5)
            end, _ = self.sandbox.command({"stop": True})
            raise ChildError(end["reason"] or _epitaph(end["status"]), fatal=True) from None
        except wire.WireError as error:
            raise ChildError(str(error), fatal=True) from error
        if mode == "casts":
            return result, extra is not False
        # In "gradients" tensors only: each has its gradient or None. The count is the submission's claim too.
        sent = arguments if mode == "in_place" else [x for x in arguments if isinstance(x, Tensor)]
        if not isinstance(extra, tuple) or len(extra) != len(sent) or not isinstance(spoiled, tuple):
            raise ChildError("returned something that can't be read", fatal=True)
        spoiled = [x for x in spoiled if type(x) is int]
        # A margin that a kernel spoiled counts, although the submission may have mended it since.
        pairs = enumerate(zip(sent, extra, strict=True))
        return result, tuple(_returned(x, y, mode, mended=i in spoiled) for i, (x, y) in pairs)

    def printed(self) -> str:
        """The end of what the submission wrote to stdout and stderr."""
        texts = [(self.folder / name).read_bytes()[-PRINTED_LIMIT:].decode(errors="replace") for name in ("out", "err")]
        lines = "".join(x if x.isprintable() or x == "\n" else "?" for x in "".join(texts)).strip().splitlines()
        return "\n".join(lines[-PRINTED_LINES:])

    def close(self) -> None:
        """End the process and all it started, and remove its files."""
        for descriptor in (self.requests, self.answers, self.ended):
            if descriptor is not None:
                os.close(descriptor)
        with contextlib.suppress(ChildError):  # nothing of it is left if it ended the server
            self.sandbox.command({"stop": True})
        leftovers.remove_tree(self.folder)


def _returned(argument, after, mode, mended):
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
    return Buffer(after[margin : margin + tensor.numel()].view(tensor.shape), bool(intact) and not mended)


def _as_child_error(error, function):
    """A submission's own account of what went wrong. It may quote inputs: its text is for visible ones only."""
    if not isinstance(error, dict):
        return ChildError("returned something that can't be read", fatal=True)
    text = " ".join(re.sub(r"[^\x20-\x7e]", " ", str(error.get("text", "")))[:TEXT_LIMIT].split())
    if error.get("kind") == "unwritten":
        return ChildError("not written yet", f"not written yet: {text.removeprefix(f'{function}: ')}")
    if error.get("kind") == "answer":
        return ChildError("returned something that can't be used", text)
    line = f"line {error['line']}: " if error.get("line") in range(1, FILE_LINES) else ""
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


def _threads_of(uid):
    """How many threads a user has: RLIMIT_NPROC counts them all."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == uid:
                count += len(list((process / "task").iterdir()))
    return count
