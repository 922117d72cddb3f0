"""What runs beside the grader: a server that imports torch once and forks a process for each file of one student.

Started as `python -I worker.py CONTROL OBSERVE USER LIMITS PACKAGES...`: OBSERVE is the path of `observe.py`, USER a
number for it to become if it is root, LIMITS the resources of each process as JSON, PACKAGES the folders of packages
that the grader knows. Each message on the socket CONTROL carries a process's socket and the file of its prints; when
the process has ended, so has all that it started, and the answer is its exit status. There is no seed here, no expected
answer and no grader. The process imports the submission and answers calls: its answer is a claim, never a verdict.
"""

import contextlib
import ctypes
import errno
import importlib.util
import json
import linecache
import os
import platform
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.extend(sys.argv[5:] if __name__ == "__main__" else [])

import torch
from torch import Tensor

BLOCKED = ("sage_ref", "sage_kernels", "sage_lab", "sage_course", "exercises")
TEXT_LIMIT = 300  # characters of an error
FILE = "exercise.py"
# What torch and Triton import at their first use: once here, it costs no process anything.
PRELOADED = ("torch.fx.experimental.symbolic_shapes", "triton", "triton.language", "triton.compiler.code_generator")
# System calls that keep what no limit counts, or what outlives a process: keys, System V's memory, semaphores and
# queues, and file systems. For each machine: its number for the kernel, and those of the calls.
REFUSED = {
    "x86_64": (
        0xC000003E,
        {"add_key": 248, "request_key": 249, "keyctl": 250, "shmget": 29, "semget": 64, "msgget": 68}
        | {"mount": 165, "fsopen": 430},
    ),
    "aarch64": (
        0xC00000B7,
        {"add_key": 217, "request_key": 218, "keyctl": 219, "shmget": 194, "semget": 190, "msgget": 186}
        | {"mount": 40, "fsopen": 430},
    ),
}
NUMBER, ARCHITECTURE = ((0x20, 0, 0, offset) for offset in (0, 4))  # load what the next instruction compares
EQUAL, AT_LEAST, RETURN = 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = ((RETURN, 0, 0, x) for x in (0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000))
OTHER_NUMBERS = 0x40000000  # from here on, an x86_64 counts its system calls in a second way
SET_PARENT_DEATH_SIGNAL, SET_SECCOMP, SET_NO_NEW_PRIVILEGES = 1, 22, 38  # of prctl


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


def serve(control: socket.socket, processor_seconds: int) -> None:
    """Fork a process for each message, and end all that it started, until the grader closes the socket."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        process = os.fork()
        if process == 0:
            control.close()
            limit_resources({"RLIMIT_CPU": processor_seconds}, {})  # not of the server, which has imported torch
            answer_calls(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # As process 1 it ends everything in this namespace, else what has stayed in the process's group.
            os.kill(-1 if os.getpid() == 1 else -process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.getpid() == 1:
                os.waitpid(-1, 0)
        control.send(str(os.waitstatus_to_exitcode(status)).encode())


def give_up_rights(user: int, limits: dict[str, int]) -> None:
    """Set the limits of each process and, on Linux, become a user without rights and put up the filter."""
    if sys.platform != "linux":
        limit_resources(limits, {})
        return
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    limit_resources(limits, dict(line.split(":", 1) for line in status if line.startswith("Vm")))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # the kernel ends it, nobody else
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


def limit_resources(limits: dict[str, int], used: dict[str, str]) -> None:
    """Set limits, those of memory beyond what is used; lower ones of the machine's own stay."""
    for name, value in limits.items():
        base = used.get({"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}.get(name), "0 kB")
        value += int(base.split()[0]) * 1024
        if (kind := getattr(resource, name, None)) is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # The signal of processor time comes at the lower limit, and says what it was; the end at the higher one.
            resource.setrlimit(kind, (value - (name == "RLIMIT_CPU"), value))


def seccomp_program() -> bytes:
    """Return the filter that refuses system calls, as BPF; empty for machines whose numbers aren't here."""
    if (machine := platform.machine()) not in REFUSED:
        return b""
    architecture, calls = REFUSED[machine]
    program = [ARCHITECTURE, (EQUAL, 1, 0, architecture), KILL, NUMBER, (AT_LEAST, 0, 1, OTHER_NUMBERS), KILL]
    for number in calls.values():
        program += [(EQUAL, 0, 1, number), REFUSE]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, ALLOW])


def answer_calls(answers: int, printed: int) -> None:
    """Import the submission, then answer one message after the other until the grader is done. Doesn't return."""
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (printed, 1), (printed, 2)):
            os.dup2(source, target)
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        stream = socket.socket(fileno=os.dup2(answers, 3))
        os.closerange(4, 2**12)
        content, tensors = wire.read(stream)
        module, failure = None, {}
        try:
            module = define("exercise", tensors[0].numpy().tobytes(), FILE)
        except BaseException as error:
            failure = {"error": describe(error)}
        wire.write(stream, wire.pack({"id": 0}, []))  # from here on, what takes too long is a call
        while True:
            content, tensors = wire.read(stream)
            wire.write(stream, answer(module, content, tensors, failure))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


def answer(module: ModuleType, content: dict[str, Any], tensors: list[Tensor], failure: dict[str, Any]) -> bytes:
    """Return the message that answers a call: what came of it, or an error."""
    sent = []
    try:
        observed = failure or {"observed": wire.encode(made(module, content, tensors), sent)}
        return wire.pack({"id": content["id"], **observed}, sent)
    except BaseException as error:
        return wire.pack({"id": content["id"], "error": describe(error)}, [])


def made(module: ModuleType, content: dict[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Make one call, and look at what it does."""
    call = wire.decode(content["call"], tensors)
    function, layouts = getattr(module, call.pop("function")), call.pop("layouts")
    if layouts is not None:
        return observe.observe(function, *call["arguments"], layouts, content["device"])
    return perform.perform(function, **call, device=content["device"])


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as a student should see it: kind, type and text, line of exercise.py."""
    if isinstance(error, wire.WireError):
        return {"kind": "answer", "text": str(error)[:TEXT_LIMIT]}
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
    called = ours[-1].name if ours and ours[-1] is frames[-1] else ""
    if type(error) is NotImplementedError and called and text.startswith(f"{called}: "):
        return {"kind": "unwritten", "text": text[:TEXT_LIMIT]}
    line = f"line {ours[-1].lineno}: " if ours else ""
    if isinstance(error, ImportError) and (name := str(error.name).partition(".")[0]) in BLOCKED:
        text = f"{name} isn't available to a submission: write it yourself"
    return {"kind": "raised", "line": line, "text": f"{type(error).__name__}: {text}"[:TEXT_LIMIT]}


if __name__ == "__main__":
    wire, perform = (load(name, Path(__file__).resolve().with_name(f"{name}.py")) for name in ("wire", "perform"))
    observe = load("observe", Path(sys.argv[2]))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    sys.modules.update(dict.fromkeys(BLOCKED))  # what an exercise asks for can't be imported
    limits = json.loads(sys.argv[4])
    processor_seconds = limits.pop("RLIMIT_CPU")
    give_up_rights(int(sys.argv[3]), limits)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.send(b"ready")
        serve(control, processor_seconds)
