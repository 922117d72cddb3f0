"""The submission's process: behind bubblewrap's walls where they can be had, limited, and gone when it is done.

The grader's process never imports a submission. It sends calls to a process and reads plain values back. A `Sandbox` is
one student's: a server with torch loaded, which forks a process for each file. README.md says what holds them.
"""

import contextlib
import functools
import itertools
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
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from sage_lab.capstones import observe

from exercises import wire
from exercises.task import Call
from exercises.worker import TEXT_LIMIT, seccomp_program

SERVER_FILES = [str(Path(__file__).with_name(name)) for name in ("worker.py", "wire.py", "perform.py")]
SERVER_FILES.append(observe.__file__)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "USER": "submission"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ENVIRONMENT |= {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}  # or macOS can't fork
FIRST_USER, USERS = 61184, 4096  # systemd's DynamicUser range: nobody else's
PRINTED_LIMIT = 4000  # characters kept of what it prints
SERVER_SECONDS, END_SECONDS = 300, 20  # to import torch on a slow disk; to end a process and all that it started
OPEN = "Without bubblewrap (bwrap): your files and the network are open to what is graded here; grade only your own."
# What comes of a call, by `perform` and by `observe`, and what each part of it is.
PERFORMED = {"result": object, "outputs": tuple, "gradients": tuple | None, "changed": tuple}
PERFORMED |= dict.fromkeys(("undefined", "launched", "spoiled"), bool)
OBSERVED = {"result": object} | dict.fromkeys(("launched", "undefined"), bool)
OBSERVED |= dict.fromkeys(("outside", "given", "jump"), str) | dict.fromkeys(("changed", "copied", "dots"), tuple)


class Limits(NamedTuple):
    """What one submission may use in one exercise: seconds of the clock, and bytes."""

    call_seconds: float = 20.0
    exercise_seconds: float = 120.0
    processor_seconds: int = 120  # of each process
    memory: int = 2 * 2**30  # of each process, beyond what importing torch takes
    processes: int = 16  # and threads, behind walls
    file: int = 16 * 2**20
    disk: int = 64 * 2**20  # of all files in each of two folders, behind walls

    def resources(self, walls: bool) -> dict[str, int]:
        """Return the limits that the system keeps for each process."""
        limits = {"RLIMIT_CPU": self.processor_seconds, "RLIMIT_DATA": self.memory, "RLIMIT_FSIZE": self.file}
        limits |= {"RLIMIT_NOFILE": 128, "RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0}
        if not torch.cuda.is_available():  # CUDA maps terabytes
            limits["RLIMIT_AS"] = self.memory
        if walls:  # without, the user's other processes would be counted, too
            limits["RLIMIT_NPROC"] = self.processes
        return limits


DEFAULT_LIMITS = Limits()


class SandboxError(Exception):
    """The machinery failed, not the submission."""


class SubmissionError(Exception):
    """The submission raised an error, crashed, hung or answered nonsense; it earns nothing for this call.

    str(): with its own words, which may quote its inputs. shown: without a word of the submission. raised: its error.
    """

    def __init__(self, shown: str, detail: str = "", raised: str = ""):
        super().__init__(detail or shown)
        self.shown, self.raised = shown, raised


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
    python = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    python |= {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | set(packages())
    shown = [path for path in SYSTEM if os.path.exists(path) and not os.path.islink(path)]
    for path in sorted(python - {"/"}, key=len):
        if os.path.isdir(path) and not any(Path(path).is_relative_to(above) for above in shown):
            shown.append(path)
    # bubblewrap would close the folders above to all but root.
    for path in sorted({above for x in shown for above in Path(x).parents} - {Path("/"), Path("/tmp")}):
        command += ["--perms", "0755", "--dir", str(path)]
    command += [word for x in SYSTEM if os.path.islink(x) for word in ("--symlink", os.readlink(x), x)]
    command += [word for path in shown for word in ("--ro-bind", path, path)]
    command += ["--perms", "0755", "--dir", "/grader"]
    command += [word for x in SERVER_FILES for word in ("--ro-bind", x, f"/grader/{Path(x).name}")]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


class Sandbox:
    """Where the files of one student run, one at a time. Its server starts when it is needed. A context manager."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, walls: bool | None = None):
        self.limits, self.walls = limits, have_walls() if walls is None else walls
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
        if self.server is not None:
            return
        self.control, theirs = socket.socketpair()
        temporary = "/tmp" if self.walls else self.folder.name
        environment = ENVIRONMENT | {"PATH": os.environ.get("PATH", os.defpath)}
        environment |= dict.fromkeys(("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), temporary)
        if torch.cuda.is_available():
            environment |= {x: os.environ[x] for x in GPU_VARIABLES if x in os.environ}
        else:
            environment["TRITON_INTERPRET"] = "1"
        worker, *_, observer = (f"/grader/{Path(x).name}" if self.walls else x for x in SERVER_FILES)
        # Two gradings at once have different users, and count their processes apart.
        facts = [str(FIRST_USER + os.getpid() % USERS), json.dumps(self.limits.resources(self.walls))]
        walls = bubblewrap(self.limits.disk) if self.walls else []
        with theirs, tempfile.TemporaryFile() as log:
            self.server = subprocess.Popen(
                [*walls, sys.executable, "-I", worker, str(theirs.fileno()), observer, *facts, *packages()],
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

    def run(self, stream: socket.socket, prints: BinaryIO) -> None:
        """Let the server fork a process that answers on this stream."""
        if self.server is not None and self.server.poll() is not None:  # without walls, an earlier one may end it
            self.close()
        self.open()
        try:
            socket.send_fds(self.control, [b"x"], [stream.fileno(), prints.fileno()])
        except OSError as error:
            raise SandboxError(f"the server has ended: {error}") from error

    def status(self, seconds: float) -> int | None:
        """Return the exit status of the process, once it and all that it started has ended.

        None if that takes longer, or the server is gone: then it is ended, and whatever runs in it.
        """
        if self.server is None:
            return None
        try:
            self.control.settimeout(seconds)
            return int(self.control.recv(16))
        except (OSError, ValueError):
            self.close()
            return None

    def close(self) -> None:
        """End the server and with it all that runs in it."""
        server, self.server = self.server, None
        if server is not None:
            self.control.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # behind walls, its namespaces end with it
            server.wait()


class Submission:
    """One file of a student while it is graded. Its process is started again after a crash. A context manager."""

    def __init__(self, source: bytes, sandbox: Sandbox, device: str = "cpu"):
        self.source, self.sandbox, self.device = source, sandbox, device
        self.numbers, self.deadline = itertools.count(1), float("inf")
        self.stream, self.printed = None, ""
        self.not_imported: SubmissionError | None = None  # it would fail again

    def __enter__(self) -> "Submission":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, call: Call) -> dict[str, Any]:
        """Return what `perform` or `observe` says of a call; SubmissionError if nothing usable comes."""
        if self.not_imported is not None:
            raise self.not_imported
        if time.monotonic() >= self.deadline:
            raise SubmissionError("used up the time of the exercise")
        if self.stream is None:
            self.start()
        tensors = []
        content = {"id": next(self.numbers), "call": wire.encode(call.sent(), tensors), "device": self.device}
        late = f"took longer than {self.sandbox.limits.call_seconds:g} s"
        return checked(self.exchange(content, tensors, late), PERFORMED if call.judge is None else OBSERVED)

    def start(self) -> None:
        """Start the process and let it import the submission. SubmissionError if that takes too long or ends it."""
        self.stream, theirs = socket.socketpair()
        self.prints = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        with theirs:
            self.sandbox.run(theirs, self.prints)
        limits = self.sandbox.limits
        self.deadline = min(self.deadline, time.monotonic() + limits.exercise_seconds)
        source = torch.frombuffer(bytearray(self.source or b"\n"), dtype=torch.uint8)
        late = f"was not called: importing exercise.py took longer than {limits.call_seconds:g} s. "
        late += "Does a loop outside of its functions never end?"
        try:
            self.exchange({"id": 0}, [source], late)
        except SubmissionError as error:
            self.not_imported = error
            raise

    def exchange(self, content: dict[str, Any], tensors: list[torch.Tensor], late: str) -> Any:
        """Send a message and return the answer's value. late: what to say if none comes in time."""
        deadline = min(self.deadline, time.monotonic() + self.sandbox.limits.call_seconds)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.write(self.stream, wire.pack(content, tensors), deadline)
            answer, returned = wire.read(self.stream, deadline, self.sandbox.control)
            if answer.get("id") != content["id"]:
                raise wire.WireError("answered out of turn")
            if "error" not in answer:
                return wire.decode(answer.get("observed"), returned)
            raise as_submission_error(wire.decode({"dict": answer["error"]}, []))
        except TimeoutError:
            self.end(patience=0)
            raise SubmissionError(late) from None
        except EOFError:
            raise SubmissionError(epitaph(self.end())) from None
        except wire.WireError as error:
            self.end(patience=0)
            raise SubmissionError(str(error)) from error

    def end(self, patience: float = END_SECONDS) -> int | None:
        """End the process and all it started, and return its exit status; None if it had to be ended."""
        stream, self.stream = self.stream, None
        if stream is None:
            return None
        stream.close()
        status = self.sandbox.status(patience)
        with self.prints:
            size = os.fstat(self.prints.fileno()).st_size
            text = os.pread(self.prints.fileno(), PRINTED_LIMIT, max(0, size - PRINTED_LIMIT)).decode(errors="replace")
        self.printed += "\n".join(wire.printable(line) for line in text.splitlines())
        return status


def checked(observed: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what a submission's process says of a call if it has the parts that it should have, each of its type."""
    formed = isinstance(observed, dict) and observed.keys() == fields.keys()
    if not formed or not all(isinstance(observed[name], kind) for name, kind in fields.items()):
        raise SubmissionError(wire.UNREADABLE)
    lists = [observed[name] for name in ("changed", "copied", "dots") if name in observed]
    if not all(isinstance(x, int | str) for found in lists for x in found):
        raise SubmissionError(wire.UNREADABLE)
    return observed


def as_submission_error(error: dict[str, Any]) -> SubmissionError:
    """Return a submission's own account of what went wrong. It may quote inputs: its text is for visible ones only."""
    line, text = (" ".join(str(error.get(part))[:TEXT_LIMIT].split()) for part in ("line", "text"))
    match error.get("kind"):
        case "unwritten":
            return SubmissionError("not written yet", f"not written yet: {text.partition(': ')[2]}")
        case "answer":
            return SubmissionError("returned something that can't be used", text)
    return SubmissionError("raised an error", f"raised an error: {line} {text}", raised=text)


def epitaph(status: int | None) -> str:
    """Return in words how a process ended."""
    if status is None:
        return "closed its connection to the grader, or ended the grader's helper process by using too much memory"
    if status >= 0:
        return f"ended its process (exit status {status}) instead of returning"
    if status == -signal.SIGXCPU:
        return "used too much processor time"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"crashed ({name})"
