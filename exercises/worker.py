"""What runs beside the grader: a server that imports torch once, which takes seconds, and forks a process for each run.

Started as `python -I worker.py CONTROL FACTS PACKAGES...`: FACTS, as JSON, are the path of `observe.py`, a user for
root to become, and limits; PACKAGES are the folders of packages that the grader knows. Each message on the socket
CONTROL says how many seconds a run may take, and carries three files: the submission with its calls, the answers, the
prints. What comes back is the process's exit status, once all that it started has ended, and whether it has left files.
There is no seed here, no expected answer and no grader: what a process writes is a claim, never a verdict.
"""

import contextlib
import ctypes
import errno
import functools
import importlib.util
import io
import json
import linecache
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

sys.path.extend(sys.argv[3:] if __name__ == "__main__" else [])

import torch

BLOCKED = ("sage_ref", "sage_kernels", "sage_lab", "sage_course", "exercises")
TEXT_LIMIT = 300  # characters of an error
FILE = "exercise.py"
LATE = b"late"  # instead of an exit status
KEPT = b" kept"  # after it: files are left that the next process could read
PAUSE = 0.005  # seconds between two looks at a process
# What torch and Triton import at their first use: once here, it costs no process anything.
PRELOADED = ("torch.fx.experimental.symbolic_shapes", "triton", "triton.language", "triton.compiler.code_generator")
# A machine's number for the kernel, and the system calls that keep what no limit counts, or what outlives a process:
# add_key, request_key, keyctl; shmget, semget, msgget; mount, fsopen.
REFUSED = {
    "x86_64": (0xC000003E, (248, 249, 250, 29, 64, 68, 165, 430)),
    "aarch64": (0xC00000B7, (217, 218, 219, 194, 190, 186, 40, 430)),
}
NUMBER, ARCHITECTURE = ((0x20, 0, 0, offset) for offset in (0, 4))  # load what the next instruction compares
EQUAL, AT_LEAST, RETURN = 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = ((RETURN, 0, 0, x) for x in (0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000))
OTHER_NUMBERS = 0x40000000  # from here on, an x86_64 counts its system calls in a second way
SET_SECCOMP, SET_NO_NEW_PRIVILEGES = 22, 38  # of prctl


def load(name: str, path: Path) -> ModuleType:
    """Import a module by its path, as names that start with digits need."""
    return define(name, path.read_bytes(), str(path))


def define(name: str, source: bytes, file: str) -> ModuleType:
    """Run a module's source. Tracebacks and Triton find its lines; hints are docstrings, which -OO would drop."""
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    code = compile(source, file, "exec", dont_inherit=True, optimize=0)
    lines = importlib.util.decode_source(source).splitlines(keepends=True)
    linecache.cache[file] = len(source), None, lines, file
    exec(code, vars(module))
    return module


def serve(control: socket.socket, limits: dict[str, Any]) -> None:
    """Fork a process for each message and end all that it has started, until the grader closes the socket."""
    empty = own_files()
    while True:
        seconds, (*files,), _, _ = socket.recv_fds(control, 64, 3)
        if not seconds:
            return
        process = os.fork()
        if process == 0:
            control.close()
            answer_calls(*files, limits)
        for file in files:
            os.close(file)
        status, end = LATE, time.monotonic() + float(seconds)
        while time.monotonic() < end and not select.select([control], [], [], PAUSE)[0]:
            ended, code = os.waitpid(process, os.WNOHANG)
            if ended:
                status = str(os.waitstatus_to_exitcode(code)).encode()
                break
        # As process 1 it ends everything in this namespace, else the process and what has stayed in its group.
        for target in (-1,) if os.getpid() == 1 else (-process, process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        control.send(status + KEPT * (own_files() != empty))


def own_files() -> list[str]:
    """Return what stands in the folders that a submission may write to, behind walls."""
    return sorted(os.listdir("/tmp") + os.listdir("/dev/shm")) if os.getpid() == 1 else []


def answer_calls(calls: int, answers: int, printed: int, limits: dict[str, Any]) -> None:
    """Import the submission and make each call, in the process that was forked for it. Doesn't return."""
    try:
        os.setsid()
        limit_resources({"RLIMIT_CPU": limits["processor_seconds"]})  # not of the server, which has imported torch
        with open(calls, "rb") as file:
            waiting = io.BytesIO(file.read())
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (printed, 1), (printed, 2), (answers, 3)):
            os.dup2(source, target)
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        os.closerange(4, 2**12)
        with open(3, "wb", closefd=False) as stream:
            answer = functools.partial(write_answer, stream, limits["call_seconds"])
            if answer(import_submission, wire.read(waiting)):
                while True:
                    answer(make_call, **wire.read(waiting))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


def write_answer(stream: BinaryIO, seconds: float, make: Callable, *arguments: Any, **named: Any) -> bool:
    """Write what a function returns, or the error that it raises; return whether it returned."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # at its end, the process ends
    try:
        message, has_returned = wire.pack(make(*arguments, **named)), True
    except BaseException as error:
        message, has_returned = wire.pack(described(error)), False
    stream.write(message)
    stream.flush()
    return has_returned


def import_submission(source: torch.Tensor) -> dict[str, Any]:
    """Run the file that a student has handed in."""
    define("exercise", source.numpy().tobytes(), FILE)
    return {}


def make_call(function: str, arguments: tuple, layouts: dict | None, device: str, **looked_at: Any) -> dict[str, Any]:
    """Make one call, and look at what it does."""
    function = getattr(sys.modules["exercise"], function)
    if layouts is not None:
        return observe.observe(function, *arguments, layouts, device)
    return perform.perform(function, arguments, device=device, **looked_at)


def described(error: BaseException) -> dict[str, str]:
    """Return an exception as a student should see it: kind, line of exercise.py, type and text."""
    if isinstance(error, wire.WireError):
        return {"kind": "unusable", "line": "", "text": str(error)[:TEXT_LIMIT]}
    frames = traceback.extract_tb(error.__traceback__)
    while error.__cause__ is not None:  # Triton's interpreter wraps what goes wrong in a kernel
        error = error.__cause__
        frames += traceback.extract_tb(error.__traceback__)
    try:
        text = str(error)
    except BaseException:
        text = "an error that can't be shown"
    # A stub's own error names the function that raises it. PyTorch has errors of this type too.
    ours = [frame for frame in frames if frame.filename == FILE]
    begin = f"{ours[-1].name}: " if ours and ours[-1] is frames[-1] else None
    if type(error) is NotImplementedError and begin and text.startswith(begin):
        return {"kind": "unwritten", "line": "", "text": text.removeprefix(begin)[:TEXT_LIMIT]}
    line = f"line {ours[-1].lineno}: " if ours else ""
    if isinstance(error, ImportError) and (name := str(error.name).partition(".")[0]) in BLOCKED:
        text = f"{name} isn't available to a submission: write it yourself"
    return {"kind": "raised", "line": line, "text": f"{type(error).__name__}: {text}"[:TEXT_LIMIT]}


def give_up_rights(user: int) -> None:
    """Become a user without rights, put up the filter, and be the first to end if memory is short: on Linux."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getpid() == 1 and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    program = ctypes.create_string_buffer(seccomp_program())
    filter_of = ctypes.c_char_p(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(program)))
    if libc.prctl(SET_SECCOMP, 2, filter_of, 0, 0) and os.getpid() == 1:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def seccomp_program() -> bytes:
    """Return the filter that refuses system calls, as BPF; empty for machines whose numbers aren't here."""
    if (machine := platform.machine()) not in REFUSED:
        return b""
    architecture, numbers = REFUSED[machine]
    program = [ARCHITECTURE, (EQUAL, 1, 0, architecture), KILL, NUMBER, (AT_LEAST, 0, 1, OTHER_NUMBERS), KILL]
    for number in numbers:
        program += [(EQUAL, 0, 1, number), REFUSE]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, ALLOW])


def limit_resources(limits: dict[str, int]) -> None:
    """Set limits, those of memory beyond what is used; lower ones of the machine's own stay."""
    used = {}
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        used = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}
    for name, value in limits.items():
        value += used.get({"RLIMIT_AS": "VmSize:", "RLIMIT_DATA": "VmData:"}.get(name), 0)
        if (kind := getattr(resource, name, None)) is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    wire, perform = (load(name, Path(__file__).resolve().with_name(f"{name}.py")) for name in ("wire", "perform"))
    facts = json.loads(sys.argv[2])
    observe = load("observe", Path(facts["observe"]))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    sys.modules.update(dict.fromkeys(BLOCKED))  # what an exercise asks for can't be imported
    limit_resources(facts["resources"])
    give_up_rights(facts["user"])
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.send(b"ready")
        serve(control, facts)
