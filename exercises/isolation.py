"""The submission's process: behind bubblewrap's walls where they can be had, limited, and gone when it is done.

The grader's process never imports a submission. It writes calls to a file, and reads plain values from another one once
the process has ended. A `Sandbox` is one student's: a server with torch loaded forks a process for each run. README.md
says what holds them.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from sage_lab.capstones import observe

from exercises import wire
from exercises.task import Call
from exercises.worker import KEPT, LATE, seccomp_program

SERVER_FILES = [str(Path(__file__).with_name(name)) for name in ("worker.py", "wire.py", "perform.py")]
SERVER_FILES.append(observe.__file__)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "USER": "submission"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ENVIRONMENT |= {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}  # or macOS can't fork
FIRST_USER, USERS = 61184, 4096  # systemd's DynamicUser range: nobody else's
PRINTED_LIMIT = 4000  # characters kept of what it prints
ANSWERS_LIMIT = 2**24  # bytes of all answers of one process
SERVER_SECONDS, END_SECONDS = 300, 20  # to import torch on a slow disk; to end a process and all that it started
OPEN = "Without bubblewrap (bwrap): your files and the network are open to what is graded here; grade only your own."
# What comes of a call, by `perform` and by `observe`, and what each part of it is.
PERFORMED = {"result": object, "outputs": tuple, "gradients": tuple | None, "changed": tuple}
PERFORMED |= dict.fromkeys(("undefined", "launched", "spoiled"), bool)
OBSERVED = {"result": object} | dict.fromkeys(("launched", "undefined"), bool)
OBSERVED |= dict.fromkeys(("outside", "given", "jump"), str) | dict.fromkeys(("changed", "copied", "dots"), tuple)
KINDS = {"unwritten": "not written yet", "unusable": "returned something that can't be used"}  # of errors; else raised
IMPORTING = "was not called: importing exercise.py"
Outcome = dict[str, Any]


class Limits(NamedTuple):
    """What one submission may use in one exercise: seconds of the clock, and bytes."""

    call_seconds: float = 20.0
    exercise_seconds: float = 120.0
    memory: int = 2 * 2**30  # of each process, beyond what importing torch takes
    processes: int = 16  # and threads, behind walls
    file: int = 16 * 2**20
    disk: int = 64 * 2**20  # of all files in each of two folders, behind walls

    def resources(self, walls: bool) -> dict[str, int]:
        """Return the limits that the system keeps for each process."""
        limits = {"RLIMIT_DATA": self.memory, "RLIMIT_FSIZE": self.file, "RLIMIT_NOFILE": 128}
        limits |= {"RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0}
        if not torch.cuda.is_available():  # CUDA maps terabytes
            limits["RLIMIT_AS"] = self.memory
        if walls:  # without, the user's other processes would be counted, too
            limits["RLIMIT_NPROC"] = self.processes
        return limits


DEFAULT_LIMITS = Limits()


class SandboxError(Exception):
    """The machinery failed, not the submission."""


class Failure(NamedTuple):
    """What comes of a call that gave nothing usable; it earns nothing.

    said: with its own words, which may quote its inputs. shown: without a word of the submission. raised: its error.
    """

    shown: str
    said: str
    raised: str = ""


@functools.cache
def have_walls() -> bool:
    """Return whether bubblewrap can put up its walls here, with a filter of system calls inside."""
    filtered = sys.platform == "linux" and not torch.cuda.is_available() and seccomp_program()
    if not filtered or not shutil.which("bwrap"):
        return False
    command = [*bubblewrap(2**20), sys.executable, "-I", "-c", ""]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def packages() -> list[str]:
    """Return the folders of packages that Python knows here; -I leaves out some, such as those of `pip --user`."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def bubblewrap(disk: int) -> list[str]:
    """Return the command that runs another one inside walls.

    Inside are the system's programs, this Python, the server in /grader, and /tmp and /dev/shm of `disk` bytes each.
    What is left behind ends with the command.
    """
    command = ["bwrap", "--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    if os.getuid() == 0:  # the server becomes another user: the limit of processes holds for nobody else
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    for folder in ("/tmp", "/dev/shm"):  # before what is shown: this Python may lie in /tmp
        command += ["--perms", "1777", "--size", str(disk), "--tmpfs", folder]
    python = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *packages()}
    python |= {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    shown = [*SYSTEM, *sorted(python - {"/"})]
    # bubblewrap would close the folders above to all but root.
    for path in sorted({above for x in shown for above in Path(x).parents} - {Path("/"), Path("/tmp")}):
        command += ["--perms", "0755", "--dir", str(path)]
    for path in shown:
        command += ["--ro-bind-try", path, path]
    command += ["--perms", "0755", "--dir", "/grader"]
    for path in SERVER_FILES:
        command += ["--ro-bind", path, f"/grader/{Path(path).name}"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


class Sandbox:
    """Where the files of one student run, one at a time. A context manager.

    Its server starts when it is needed. Behind walls it ends with a process that has left files: another one could read
    there which hidden inputs it has got, and show them.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS):
        self.limits, self.walls = limits, have_walls()
        self.folder = None if self.walls else tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.server = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.folder is not None:
            self.folder.cleanup()

    def open(self) -> None:
        """Start the server if none runs. SandboxError if it can't start."""
        if self.server is not None and self.server.poll() is None:
            return
        self.close()  # without walls, an earlier submission may have ended it
        self.control, theirs = socket.socketpair()
        temporary = "/tmp" if self.walls else self.folder.name
        environment = ENVIRONMENT | {"PATH": os.environ.get("PATH", os.defpath)}
        environment |= dict.fromkeys(("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), temporary)
        if torch.cuda.is_available():
            environment |= {x: os.environ[x] for x in GPU_VARIABLES if x in os.environ}
        else:
            environment["TRITON_INTERPRET"] = "1"
        worker, *_, observer = (f"/grader/{Path(x).name}" if self.walls else x for x in SERVER_FILES)
        facts = {
            "observe": observer,
            "user": FIRST_USER + os.getpid() % USERS,  # two gradings at once count their processes apart
            "resources": self.limits.resources(self.walls),
            "call_seconds": self.limits.call_seconds,
            "processor_seconds": int(self.limits.exercise_seconds),
        }
        walls = bubblewrap(self.limits.disk) if self.walls else []
        with theirs, tempfile.TemporaryFile() as log:
            self.server = subprocess.Popen(
                [*walls, sys.executable, "-I", worker, str(theirs.fileno()), json.dumps(facts), *packages()],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/" if self.walls else temporary,
                start_new_session=True,
            )
            theirs.close()  # so that its end is noticed
            self.control.settimeout(SERVER_SECONDS)
            if not self.control.recv(16):
                self.close()
                log.seek(0)
                raise SandboxError(f"the server didn't start: {log.read().decode(errors='replace')}")

    def close(self) -> None:
        """End the server and with it all that runs in it."""
        server, self.server = self.server, None
        if server is None:
            return
        self.control.close()  # it then ends the process that it has forked, and itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # behind walls, its namespaces end with it
        server.wait()

    def answers(
        self, source: bytes, tests: Sequence[Sequence[Call]], deadline: float
    ) -> tuple[list[list[Outcome | Failure]], str]:
        """Return what comes of the calls of each test, and what was printed.

        A test whose calls end the process has no further outcomes; the tests after it are made in another process.
        """
        found, printed = [], ""
        while len(found) < len(tests):
            waiting = tests[len(found) :]
            outcomes, text = self.run(source, [call for calls in waiting for call in calls], deadline)
            printed += text
            for calls in waiting:
                answer, outcomes = outcomes[: len(calls)], outcomes[len(calls) :]
                found.append(answer)
                if not outcomes:
                    break
        return found, printed

    def run(self, source: bytes, calls: Sequence[Call], deadline: float) -> tuple[list[Outcome | Failure], str]:
        """Return what comes of calls in a process of their own, up to the one that ends it, and what it prints."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            late = "used up the time of the exercise"
            return [Failure(late, late)] * len(calls), ""
        with contextlib.ExitStack() as stack:
            sent, answered, printed = files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            sent.write(wire.pack(torch.frombuffer(bytearray(source or b"\n"), dtype=torch.uint8)))
            for call in calls:
                sent.write(wire.pack(call.sent()))
            sent.seek(0)
            ended = self.epitaph(self.process(files, seconds))
            answered.seek(0)
            imported, *outcomes = received(io.BytesIO(answered.read(ANSWERS_LIMIT)), calls, ended)
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - PRINTED_LIMIT))
            lines = printed.read(PRINTED_LIMIT).decode(errors="replace").splitlines()
        text = "\n".join(map(wire.printable, lines))
        if isinstance(imported, Failure):
            outcomes = [Failure(f"{IMPORTING} {imported.shown}", f"{IMPORTING} {imported.said}")] * len(calls)
        return outcomes, text

    def process(self, files: Sequence[BinaryIO], seconds: float) -> int | None:
        """Let the server fork a process, and return its exit status once all that it started has ended.

        None if it had to be ended, or has ended the server.
        """
        self.open()
        try:
            socket.send_fds(self.control, [str(seconds).encode()], [file.fileno() for file in files])
        except OSError as error:
            raise SandboxError(f"the server has ended: {error}") from error
        self.control.settimeout(seconds + END_SECONDS)
        try:
            message = self.control.recv(16)
        except OSError:
            message = b""
        status = message.removesuffix(KEPT)
        if not message or status != message:
            self.close()  # files end with the server
        return int(status) if status not in (b"", LATE) else None

    def epitaph(self, status: int | None) -> str:
        """Return in words how a process ended."""
        if status is None:
            return "used up the time of the exercise, or ended the grader's helper by using too much memory"
        if status >= 0:
            return f"ended its process (exit status {status}) instead of returning"
        if status == -signal.SIGALRM:
            return f"took longer than {self.limits.call_seconds:g} s: does a loop never end?"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"crashed ({name})"


def received(stream: BinaryIO, calls: Sequence[Call], ended: str) -> list[Outcome | Failure]:
    """Return what a process has written of its import and of each call, up to the first of which there is nothing.

    ended: how the process has ended, in words.
    """
    outcomes = []
    for fields in ({}, *(PERFORMED if call.judge is None else OBSERVED for call in calls)):
        try:
            outcomes.append(outcome_of(wire.read(stream), fields))
        except EOFError:
            return [*outcomes, Failure(ended, ended)]
        except wire.WireError as error:
            return [*outcomes, unusable(str(error))]
    return outcomes


def outcome_of(value: Any, fields: dict[str, Any]) -> Outcome | Failure:
    """Return what a process says of a call, if it has the parts that it should have, each of its type."""
    match value:
        case {"kind": str(kind), "line": str(line), "text": str(text)}:
            shown = KINDS.get(kind, "raised an error")
            return Failure(shown, f"{shown}: {line}{text}", " ".join(text.split()) if kind == "raised" else "")
        case dict() if value.keys() == fields.keys():
            formed = all(isinstance(value[name], kind) for name, kind in fields.items())
            named = [value[name] for name in ("changed", "copied", "dots") if name in value]
            if formed and all(isinstance(x, int | str) for names in named for x in names):
                return value
    return unusable("what can't be read")


def unusable(what: str) -> Failure:
    return Failure(KINDS["unusable"], f"{KINDS['unusable']}: {what}")
