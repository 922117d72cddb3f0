"""What runs beside the grader: a server that imports torch once and forks a limited child for each submission.

Started as `python -I worker.py CONTROL OBSERVE PACKAGES...`, where OBSERVE is the path of `sage_lab/climb/observe.py`
and PACKAGES are the folders of packages that the grader knows. Each message on the socket CONTROL carries a child's
socket and where its prints go, and starts a child; "stop" ends it. When a child has ended, so has all that it started,
and the server says how. It holds no seed, no expected answer and no grader. The child imports the submission and
answers calls: what it answers is a claim, never a verdict.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path.extend(sys.argv[3:] if __name__ == "__main__" else [])

import torch
from torch import Tensor

BLOCKED = ("sage_ref", "sage_kernels", "sage_lab", "sage_course", "exercises")
TEXT_LIMIT = 300
SUBMISSION_USER = 61184  # of systemd's DynamicUser range: nobody else's
# What torch and Triton import at their first use: once here, it costs no child anything.
PRELOADED = ("torch.fx.experimental.symbolic_shapes", "triton", "triton.language", "triton.compiler.code_generator")


def load(name: str, path: Path) -> Any:
    """Import a module by its path, as names that start with digits need; hints are docstrings, which -OO would drop."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True, optimize=0), vars(module))
    return module


def serve(control: socket.socket) -> None:
    """Fork, end and clean up children until the grader closes the socket."""
    walls = os.getpid() == 1  # bubblewrap has made a namespace of processes, and a /tmp of our own
    before = open_to_all()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 2**12, 2)
        if not message:
            return
        if not descriptors:  # "stop", and the child has ended already
            continue
        scratch = Path(tempfile.mkdtemp(prefix="submission-"))
        child = os.fork()
        if child == 0:
            control.close()
            become_child(json.loads(message), walls, scratch, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        status = _end(child, control, walls)
        shutil.rmtree(scratch, ignore_errors=True)
        control.send(json.dumps([status, not walls or open_to_all() == before]).encode())


def open_to_all() -> set[Path]:
    """Return what is in the folders where everybody may write."""
    return {path for folder in ("/tmp", "/dev/shm") if os.path.isdir(folder) for path in Path(folder).iterdir()}


def _end(child, control, walls):
    """Wait until the child ends or the grader says so, then end all it started; its exit code if it ended by itself."""
    code = None
    while code is None:
        if select.select([control], [], [], 0.02)[0]:
            control.recv(2**12)
            break
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1 if walls else -child, signal.SIGKILL)  # everything in this namespace, or in its group
    with contextlib.suppress(ChildProcessError):
        while walls or code is None:
            os.waitpid(-1, 0)
    return code


def become_child(limits: dict[str, int], walls: bool, scratch: Path, answers: int, printed: int) -> None:
    """Give up every right that isn't needed, then answer calls until the grader is done. Doesn't return."""
    try:
        os.setsid()
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (printed, 1), (printed, 2)):
            os.dup2(source, target)
        sys.stdout.reconfigure(line_buffering=True)
        stream = socket.socket(fileno=os.dup2(answers, 3))
        os.closerange(4, 2**16)
        os.environ.update(dict.fromkeys(("HOME", "TMPDIR", "TRITON_CACHE_DIR"), str(scratch)))
        os.chdir(scratch)
        if walls and os.getuid() == 0:
            os.chown(scratch, SUBMISSION_USER, SUBMISSION_USER)
        give_up_rights(limits, walls)
        answer_calls(stream, scratch / "exercise.py")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def give_up_rights(limits: dict[str, int], walls: bool) -> None:
    """Set resource limits, and on Linux become a user without rights, in a namespace of its own if that may be."""
    sizes = {}
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Vm"))
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # the kernel ends it, nobody else
    for name, value in limits.items():
        base = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}.get(name)
        value += int(sizes[base].split()[0]) * 1024 if base in sizes else 0
        kind = getattr(resource, name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if walls:
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(*(SUBMISSION_USER,) * 3)
            os.setresuid(*(SUBMISSION_USER,) * 3)
        uid, gid = os.getuid(), os.getgid()
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files in /proc are its own again
        if libc.unshare(0x10000000) == 0:  # CLONE_NEWUSER: its processes are counted apart from anybody else's
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with contextlib.suppress(OSError):
                    Path("/proc/self", name).write_text(text, encoding="utf-8")
            libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # the first process there has all rights in it
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    program = ctypes.create_string_buffer(seccomp_program())
    filter_of = ctypes.c_char_p(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(program)))
    if libc.prctl(22, 2, filter_of, 0, 0) and walls:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


# System calls that outlive a process, make memory that no limit counts, or leave the walls: keyring, System V, message
# queues and files in memory, other processes' memory, namespaces and mounts, and doors to the kernel nobody needs.
# For each machine: its number for the kernel, that of clone, and those that are refused.
CALLS = {
    "x86_64": (0xC000003E, 56, "29 30 31 64 65 66 68 69 70 71 101 155 161 165 166 167 172 173 175 220 240 246 248 249 "
               "250 272 298 308 310 311 312 313 319 321 323 425 426 427 428 429 430 431 432 435 438 442 447"),
    "aarch64": (0xC00000B7, 220, "39 40 41 51 97 104 105 117 180 186 187 188 189 190 191 192 193 194 195 196 197 217 "
                "218 219 224 225 241 268 270 271 272 273 279 280 282 425 426 427 428 429 430 431 432 435 438 442 447"),
}  # fmt: skip
CLONE_NEW = 0x7E020080  # all flags that make a namespace


def seccomp_program() -> bytes:
    """Return the filter that refuses `CALLS`, as BPF; empty for machines whose numbers aren't here."""
    if (machine := platform.machine()) not in CALLS:
        return b""
    architecture, clone, refused = CALLS[machine]
    load_number, load_architecture, load_flags = ((0x20, 0, 0, offset) for offset in (0, 4, 16))
    allow, refuse, unknown, kill = ((0x06, 0, 0, x) for x in (0x7FFF0000, 0x00050001, 0x00050026, 0x80000000))
    program = [load_architecture, (0x15, 1, 0, architecture), kill, load_number, (0x35, 0, 1, 0x40000000), kill]
    for number in map(int, refused.split()):  # clone3 doesn't exist: its flags can't be looked at
        program += [(0x15, 0, 1, number), unknown if number == 435 else refuse]
    program += [(0x15, 0, 4, clone), load_flags, (0x45, 0, 1, CLONE_NEW), refuse, allow, allow]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def answer_calls(stream: socket.socket, path: Path) -> None:
    """Import the submission, then answer one message after the other."""
    torch.set_num_threads(1)
    content, _ = wire.read(stream)
    path.write_text(content["source"], encoding="utf-8", errors="surrogateescape", newline="")
    module = None
    wire.write(stream, wire.pack({"id": 0}, []))  # from here on, what goes wrong is the submission's
    while True:
        try:
            content, tensors = wire.read(stream)
        except EOFError:
            return
        try:
            if module is None:
                module = load("exercise", path)
                wire.write(stream, wire.pack({"id": 0}, []))  # from here on, what takes too long is the call
            sent = []
            observed = wire.encode(answer(module, content, tensors), sent)
            message = wire.pack({"id": content["id"], "observed": observed}, sent, content["limit"])
        except BaseException as error:
            message = wire.pack({"id": content["id"], "error": describe(error, path)}, [])
        wire.write(stream, message)


def answer(module: Any, content: dict[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Make one call. Functions that the grader gives take the place of the submission's for as long as it takes."""
    call = wire.decode(content["call"], tensors)
    name, others, correct = call.pop("function"), {}, content["correct"] or {"names": (), "source": ""}
    exec(correct["source"], others)
    own = dict(vars(module))
    vars(module).update({x: others[x] for x in correct["names"]})
    try:
        if (layouts := call.pop("layouts")) is not None:
            return observe.observe(getattr(module, name), *call["arguments"], layouts, content["device"])
        return perform.perform(getattr(module, name), **call, device=content["device"])
    finally:  # what Triton's interpreter has put there stays
        vars(module).update(dict.fromkeys(correct["names"]) | own)


def describe(error: BaseException, path: Path) -> dict[str, Any]:
    """Return an exception as a student should see it: kind, type and text, line of exercise.py."""
    if isinstance(error, wire.WireError):
        return {"kind": "answer", "text": str(error)[:TEXT_LIMIT]}
    frames = traceback.extract_tb(error.__traceback__)
    while error.__cause__ is not None:  # Triton's interpreter wraps what goes wrong in a kernel
        error = error.__cause__
        frames += traceback.extract_tb(error.__traceback__)
    # A stub's own error names the function that raises it. PyTorch has errors of this type too.
    ours = [frame for frame in frames if frame.filename == str(path)]
    called = ours[-1].name if ours and ours[-1] is frames[-1] else ""
    if type(error) is NotImplementedError and called and str(error).startswith(f"{called}: "):
        return {"kind": "unwritten", "text": str(error)[:TEXT_LIMIT]}
    line = f"line {ours[-1].lineno}: " if ours else ""
    if isinstance(error, ImportError) and (name := str(error.name).partition(".")[0]) in BLOCKED:
        error = ImportError(f"{name} isn't available to a submission: write it yourself")
    return {"kind": "raised", "line": line, "text": f"{type(error).__name__}: {error}"[:TEXT_LIMIT]}


if __name__ == "__main__":
    wire, perform = (load(name, Path(__file__).resolve().with_name(f"{name}.py")) for name in ("wire", "perform"))
    observe = load("observe", Path(sys.argv[2]))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    with perform.CastsOfNaN():  # its first use imports what takes a second
        torch.zeros(1).int()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no child may look into its server
    sys.modules.update(dict.fromkeys(BLOCKED))  # what an exercise asks for can't be imported
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.send(b"{}")
        serve(control)
