"""The submission's process: behind bubblewrap's walls where they can be had, limited, and gone when it is done.

The grader's process never imports a submission. It sends calls to a child and reads plain values back. `Sandbox` is a
server with torch loaded that forks such children one after the other; README.md says what holds them.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sage_lab.climb import observe

from exercises import wire
from exercises.task import Call
from exercises.worker import TEXT_LIMIT, seccomp_program

SERVER_FILES = [str(Path(__file__).with_name(name)) for name in ("worker.py", "wire.py", "perform.py")]
SERVER_FILES.append(observe.__file__)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
# The server becomes a submission's user, ends its processes and removes its files.
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": "/tmp"}
ENVIRONMENT |= {"USER": "submission", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ENVIRONMENT |= {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}  # or macOS can't fork
PRINTED_LIMIT = 4000  # characters kept of what it prints
ANSWER_LEAST, ANSWER_FACTOR = 2**18, 8  # bytes that an answer may have: this, and so many times what was sent
SERVER_SECONDS, SERVER_END_SECONDS = 300, 20  # to import torch on a slow disk; to end a child and remove its files
OPEN = "Without bubblewrap (bwrap): your files and the network are open to what is graded here; grade only your own."
# Of each process; memory in bytes beyond what importing torch takes.
RESOURCES = {"RLIMIT_CPU": 120, "RLIMIT_DATA": 2 * 2**30, "RLIMIT_AS": 2 * 2**30, "RLIMIT_FSIZE": 16 * 2**20}
RESOURCES |= {"RLIMIT_NOFILE": 128, "RLIMIT_NPROC": 16, "RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0}


class Limits(NamedTuple):
    """What one submission may use in one exercise."""

    call_seconds: float = 20.0
    exercise_seconds: float = 120.0
    resources: dict[str, int] = RESOURCES
    memory: int = 4 * 2**30  # bytes of the server and all processes, where a cgroup can be made
    disk: int = 64 * 2**20  # bytes of files


DEFAULT_LIMITS = Limits()


class SandboxError(Exception):
    """The machinery failed, not the submission."""


class ChildError(Exception):
    """The submission crashed, hung or answered nonsense. str(): with its own words, which may quote its inputs.

    shown: without a word of the submission. fatal: its process can't be called again. raised: its exception.
    endless: importing it takes too long, and would again.
    """

    def __init__(
        self, shown: str, detail: str | None = None, fatal: bool = False, raised: str = "", endless: bool = False
    ):
        super().__init__(detail or shown)
        self.shown, self.fatal, self.raised, self.endless = shown, fatal, raised, endless


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
    if os.getuid() == 0:  # the child becomes another user, and makes its namespace of users itself
        command += [word for name in CAPABILITIES for word in ("--cap-add", f"CAP_{name}")]
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
    """A server process that runs one submission at a time, behind walls or without. It starts when it is needed."""

    def __init__(self, limits: Limits, walls: bool):
        self.limits, self.walls, self.temporary = limits, walls, tempfile.gettempdir()
        self.server = self.control = self.group = None

    def open(self) -> None:
        """Start the server if none runs; it gets ready by itself."""
        if self.server is not None and self.server.poll() is None:
            return
        self.close()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = ENVIRONMENT | {"PATH": os.environ.get("PATH", os.defpath)}
        environment |= {x: os.environ[x] for x in GPU_VARIABLES if x in os.environ and torch.cuda.is_available()}
        environment |= {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        environment |= {} if self.walls else {"TMPDIR": self.temporary}
        command = bubblewrap(self.limits.disk) if self.walls else []
        worker, *_, watcher = (f"/grader/{Path(x).name}" if self.walls else x for x in SERVER_FILES)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        with theirs:
            self.server = subprocess.Popen(
                [*command, sys.executable, "-I", worker, str(theirs.fileno()), watcher, *packages()],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                cwd="/",
                start_new_session=True,
            )
        self.ready = False
        self.group = memory_group(self.server.pid, self.limits.memory) if self.walls else None

    def start(self, source: bytes) -> "Child":
        """Return a fresh child that will import `source` as exercise.py."""
        self.open()
        if not self.ready:
            self.control.settimeout(SERVER_SECONDS)
            if not self.control.recv(2**12):
                self.log.seek(0)
                raise SandboxError(f"the server didn't start: {self.log.read().decode(errors='replace')}")
            self.ready = True
        return Child(self, source)

    def close(self) -> None:
        """End the server and with it all that runs in it."""
        server, self.server = self.server, None
        if server is None:
            return
        self.control.close()
        if self.walls:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # its namespaces end with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=SERVER_END_SECONDS)
        server.kill()
        server.wait()
        self.log.close()
        if self.group is not None:
            with contextlib.suppress(OSError):
                time.sleep(0.01)
                self.group.rmdir()


def memory_group(process: int, most: int) -> Path | None:
    """Put a process into a cgroup in which all its children have `most` bytes; None where none can be made."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controllers != "memory":
            continue
        group = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), f"grading-{process}")
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                limit = "memory.max" if number == "0" else "memory.limit_in_bytes"
                (group / limit).write_text(str(most), encoding="utf-8")
                (group / "cgroup.procs").write_text(str(process), encoding="utf-8")
                return group
            except OSError:
                group.rmdir()
    return None


class Child:
    """One process of one submission: call() until it ends or misbehaves, then close()."""

    def __init__(self, sandbox: Sandbox, source: bytes):
        self.sandbox, self.limits, self.numbers = sandbox, sandbox.limits, itertools.count(1)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        self.stream, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.status, self.ended, self.imported = None, False, False
        # CUDA maps terabytes; without walls the user's other processes would be counted, too.
        counted = {"RLIMIT_AS": not torch.cuda.is_available(), "RLIMIT_NPROC": sandbox.walls}
        resources = {name: most for name, most in self.limits.resources.items() if counted.get(name, True)}
        deadline = time.monotonic() + SERVER_SECONDS
        try:
            with theirs:
                descriptors = [theirs.fileno(), self.output.fileno()]
                socket.send_fds(sandbox.control, [json.dumps(resources).encode()], descriptors)
            source = source.decode("utf-8", errors="surrogateescape")
            wire.write(self.stream, wire.pack({"source": source}, []), deadline)
            wire.read(self.stream, deadline, sandbox.control)
        except (OSError, EOFError, TimeoutError, wire.WireError) as error:
            printed = self.printed()
            self.close()
            raise SandboxError(f"the process of a submission didn't start: {printed}") from error

    def call(self, call: Call, *, device: str = "cpu", deadline: float = float("inf"), correct: Any = None) -> dict:
        """Return what the submission's process says of a call, as `perform` does; ChildError if nothing usable comes.

        correct: names and source of functions that take the place of the submission's.
        """
        number, tensors = next(self.numbers), []
        content = {"id": number, "call": wire.encode(call.sent(), tensors), "device": device}
        content["correct"] = correct and correct._asdict()
        size = sum(x.numel() * x.element_size() for x in tensors)
        content["limit"] = limit = min(ANSWER_LEAST + ANSWER_FACTOR * size, wire.MESSAGE_LIMIT // 2)
        deadline = min(deadline, time.monotonic() + self.limits.call_seconds)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.write(self.stream, wire.pack(content, tensors), deadline)
            answer, returned = wire.read(self.stream, deadline, self.sandbox.control, limit)
            if answer.get("id") == 0 and not self.imported:
                self.imported = True
                answer, returned = wire.read(self.stream, deadline, self.sandbox.control, limit)
            if answer.get("id") != number:
                raise wire.WireError("answered out of turn")
            if "error" in answer:
                raise _as_child_error(answer["error"], call.function)
            observed = wire.decode(answer.get("observed"), returned)
            if not isinstance(observed, dict):
                raise wire.WireError("returned something that can't be read")
        except TimeoutError:
            late = f"took longer than {self.limits.call_seconds:g} s"
            if not self.imported:
                late = f"was not called: importing exercise.py {late}. Does a loop outside of its functions never end?"
            raise ChildError(late, fatal=True, endless=not self.imported) from None
        except EOFError:
            self._wait_for_end(patience=0.5)
            raise ChildError(_epitaph(self.status), fatal=True) from None
        except wire.WireError as error:
            raise ChildError(str(error), fatal=True) from error
        return observed

    def printed(self) -> str:
        """Return the end of what the submission wrote to stdout and stderr."""
        self.output.seek(max(0, self.output.seek(0, os.SEEK_END) - PRINTED_LIMIT))
        text = self.output.read().decode(errors="replace")
        return "".join(x if x.isprintable() or x == "\n" else "?" for x in text).strip()

    def close(self) -> None:
        """End the process and all it started; what it left in files ends with its server."""
        self.stream.close()
        self._wait_for_end()
        self.output.close()

    def _wait_for_end(self, patience=0.0):
        """Learn from the server how the child ended, or end it. A server that doesn't say is ended itself."""
        if not self.ended:
            self.ended = True
            try:
                if not select.select([self.sandbox.control], [], [], patience)[0]:
                    self.sandbox.control.send(b"stop")
                self.sandbox.control.settimeout(SERVER_END_SECONDS)
                self.status, clean = json.loads(self.sandbox.control.recv(2**12))
                if not clean:
                    self.sandbox.close()  # the next one starts with new folders
            except (OSError, ValueError, AttributeError):
                self.status = "server"
                self.sandbox.close()


def _as_child_error(error, function):
    """Return a submission's own account of what went wrong. It may quote inputs: its text is for visible ones only."""
    if not isinstance(error, dict):
        return ChildError("returned something that can't be read", fatal=True)
    line, text = (" ".join(re.sub(r"[^\x20-\x7e]", " ", str(error.get(x, ""))).split()) for x in ("line", "text"))
    line, text = line[:TEXT_LIMIT], text[:TEXT_LIMIT]
    if error.get("kind") == "unwritten":
        return ChildError("not written yet", f"not written yet: {text.removeprefix(f'{function}: ')}")
    if error.get("kind") == "answer":
        return ChildError("returned something that can't be used", text)
    return ChildError("raised an error", f"raised an error: {line} {text}", raised=text)


def _epitaph(code):
    if code is None:
        return "closed its connection to the grader"
    if type(code) is not int:
        return "ended the grader's helper process, perhaps by using too much memory"
    if code >= 0:
        return f"ended its process (exit status {code}) instead of returning"
    if code == -signal.SIGXCPU:
        return "used too much processor time"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"crashed ({name})"
