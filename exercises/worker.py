"""What runs beside the grader: a server that imports torch once and forks a limited child for each submission.

Started as `python -I worker.py CONTROL FOLDER`. CONTROL is a socket: {"start": limits} with five descriptors forks a
child, {"stop": true} ends it and removes all it left behind. FOLDER is where children have their files. The server
holds no seed, no expected answer and no grader; so neither does the memory that a child inherits. The child imports the
submission and answers calls: what it answers is a claim, never a verdict.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKED = ("sage_ref", "sage_kernels", "exercises")
TEXT_LIMIT = 300
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
END_SECONDS = 10.0  # to end a submission's processes
# What torch and Triton import at their first use, and what a submission may want. Once here it costs no child anything,
# and a child can import it even where its user may not enter the folder of the Python installation.
PRELOADED = (
    "torch.fx.experimental.symbolic_shapes",
    *("triton", "triton.language", "triton.compiler.code_generator", "triton.experimental.gluon"),
    *("bisect", "cmath", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "itertools"),
    *("math", "numpy", "operator", "random", "statistics", "string", "textwrap", "timeit", "typing", "unittest.mock"),
)


def load(name: str, path: Path):
    """A module by its path, as names that start with digits need."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Blocked:
    """Import hook: what an exercise asks for can't be imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} isn't available to a submission: write it yourself")


class Running(NamedTuple):
    """One submission's processes and what there is to end and clean up."""

    child: int
    scratch: Path
    uid: int | None
    spare: int | None
    watcher: int | None
    report: int | None  # where the watcher says why it ended the child


def serve(control: socket.socket, folder: Path) -> None:
    """Fork, end and clean up children until the grader closes the socket."""
    running = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 2**16, 5)
        command = json.loads(message) if message else {}
        reply, sent = _end(running) if running is not None else {"status": None, "reason": ""}, []
        running = None
        try:
            if "start" in command:
                running = _start(command["start"], folder, control, descriptors)
                if hasattr(os, "pidfd_open"):  # a number of this namespace would mean nothing to the grader
                    sent.append(os.pidfd_open(running.child))
        except OSError as error:  # nothing of a submission runs or is left by now
            reply["error"] = str(error)
        for descriptor in descriptors:
            os.close(descriptor)
        if not message:
            return
        socket.send_fds(control, [json.dumps(reply).encode()], sent)
        for descriptor in sent:
            os.close(descriptor)


def _start(limits, folder, control, descriptors):
    """Fork a child for the submission whose file is the last descriptor, and as root a process that watches it."""
    *pipes, source = descriptors
    scratch = Path(tempfile.mkdtemp(prefix="child", dir=folder))  # for its owner only
    path = scratch / "exercise.py"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(os.pread(source, os.fstat(source).st_size, 0))
    uid, spare = limits["users"] or (None, None)
    if uid is not None:
        for owned in (scratch, path):
            os.chown(owned, uid, uid, follow_symlinks=False)
    child = os.fork()
    if child == 0:
        control.close()
        become_child(limits, uid, scratch, *pipes)  # doesn't return
    if uid is None or sys.platform != "linux":
        return Running(child, scratch, uid, spare, None, None)
    report, theirs = os.pipe()
    os.set_blocking(report, False)
    watcher = os.fork()
    if watcher == 0:
        try:
            theirs = os.dup2(theirs, 64)
            os.closerange(3, 64)
            os.closerange(65, 2**16)
            leftovers.watch(uid, spare, limits["watched"], str(scratch), theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    return Running(child, scratch, uid, spare, watcher, report)


def _end(running):
    """Kill the child and every process it started, and remove what it left.

    status: the child's exit code if it had ended by itself, else None. reason: why the watcher ended it, or "".
    """
    code, reason = _reap(running.child), ""
    if running.report is not None:
        with contextlib.suppress(BlockingIOError):
            reason = os.read(running.report, 1000).decode()
        os.close(running.report)
    if code is None:
        os.killpg(running.child, signal.SIGKILL)  # all that there is to do where there is no /proc
    deadline = time.monotonic() + END_SECONDS
    while True:
        if running.uid is not None:
            leftovers.as_user(running.uid, running.spare, leftovers.kill_all)
        for process in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _reap(running.child)
        if not _descendants():
            break
        if time.monotonic() > deadline:
            raise RuntimeError("a submission's processes don't end")
        time.sleep(0.005)
    leftovers.remove_tree(running.scratch)
    if running.uid is not None:
        leftovers.clean_up(running.uid, running.spare)
    return {"status": code, "reason": reason}


def _reap(child):
    """Collect ended processes; the exit code of `child` if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def _descendants():
    """All processes below this one; orphans too, because the server is their reaper."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, front = set(), {os.getpid()}
    while front:
        front = {process for process, parent in parents.items() if parent in front} - found
        found |= front
    return found


def become_child(
    limits: dict, uid: int | None, scratch: Path, requests: int, answers: int, output: int, errors: int
) -> None:
    """The forked side: give up every right that isn't needed, then answer calls until the grader is done."""
    try:
        os.setsid()
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        requests, answers = os.dup2(requests, 64), os.dup2(answers, 65)
        os.closerange(3, 64)
        os.closerange(66, 2**16)
        _limit(limits, uid)
        os.environ.update(dict.fromkeys(("HOME", "TMPDIR", "TRITON_CACHE_DIR"), str(scratch)))
        os.chdir(scratch)
        wire.write(answers, wire.pack({"id": 0}, {}))  # from here on, what goes wrong is the submission's
        answer_calls(scratch / "exercise.py", requests, answers)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _limit(limits, uid):
    """Resource limits, then another user if there is one. Memory counts from what torch has mapped by now."""
    ceilings = dict(limits["resources"])
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for name in limits["memory_resources"]:
            mapped = int(status[{"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[name]].split()[0]) * 1024
            ceilings[name] = mapped + limits["memory"]
    for name, value in ceilings.items():
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(PR_SET_DUMPABLE, 1)  # its watcher, which has no more rights than it, may look into it
    prctl(PR_SET_NO_NEW_PRIVS, 1)


PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38


def prctl(option: int, value: int) -> None:
    """Linux's process options; elsewhere there are none to set."""
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def answer_calls(path: Path, requests: int, answers: int) -> None:
    """Import the submission, then answer one message after the other."""
    torch.set_num_threads(1)
    module = failure = None
    while True:
        try:
            content, tensors = wire.read(requests)
        except EOFError:
            return
        try:
            if module is None and failure is None:
                try:
                    module = load("exercise", path)
                except BaseException as error:
                    failure = error
            if failure is not None:
                raise failure
            reply, sent = answer(module, content, tensors)
            message = wire.pack({"id": content["id"], **reply}, sent, content["limit"])
        except BaseException as error:
            message = wire.pack({"id": content["id"], "error": describe(error, path)}, {})
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        wire.write(answers, message)


def answer(module, content: dict, tensors: dict) -> tuple[dict, dict]:
    """Call the function that was asked for: (the result and what else was asked for as trees, their tensors)."""
    function = getattr(module, content["function"], None)
    if not callable(function):
        raise wire.WireError(f"has no function {content['function']}")
    tensors = {name: tensor.to(content["device"]) for name, tensor in tensors.items()}
    arguments = list(wire.decode(content["arguments"], tensors))
    keywords = wire.decode(content["keywords"], tensors)
    after = list(arguments)  # what the grader gets back of them: a guarded tensor with its surroundings
    buffers = {}
    for position, margin in content["margins"].items():
        i = int(position)
        arguments[i], after[i] = guarded(arguments[i], margin)
        buffers[i] = after[i], margin
    if content["mode"] == "gradients":
        inputs = [x.requires_grad_(x.is_floating_point()) for x in arguments if isinstance(x, torch.Tensor)]
    launches, casts = Launches(buffers), CastsOfNaN()
    watching = casts if content["mode"] == "casts" else contextlib.nullcontext()
    with replaced(module, content.get("correct")), launches, watching:
        for _ in range(content["repeat"]):
            result = function(*arguments, **keywords)
    if content["device"] != "cpu":
        torch.cuda.synchronize()
    sent = {}
    reply = {"result": wire.encode(result, sent), "launches": launches.count}
    if content["mode"] == "gradients":
        reply["extra"] = wire.encode(gradients(result, inputs, wire.decode(content["upstream"], tensors)), sent)
    elif content["mode"] == "in_place":
        reply["extra"] = wire.encode(tuple(after), sent)
        reply["spoiled"] = wire.encode(tuple(launches.spoiled), sent)
    elif content["mode"] == "casts":
        reply["extra"] = wire.encode(casts.found, sent)
    return reply, sent


@contextlib.contextmanager
def replaced(module, correct: dict | None):
    """Inside, the submission's functions of these names are others, which the grader's code defines."""
    if correct is None:
        yield
        return
    own, others = dict(vars(module)), {}
    exec(correct["source"], others)
    vars(module).update({name: others[name] for name in correct["names"]})
    try:
        yield
    finally:
        for name in correct["names"]:
            vars(module).pop(name)
        vars(module).update(own)


class Launches:
    """Counts launches of Triton kernels inside `with`, and looks at the margins of `buffers` after each.

    spoiled: positions of buffers whose margin a kernel wrote to. What a submission mends later doesn't change that.
    """

    def __init__(self, buffers: dict):
        self.buffers, self.count, self.spoiled = buffers, 0, set()
        self.classes = kinds_of_kernels()
        self.originals = [kind.run for kind in self.classes]

    def __enter__(self):
        for kind, original in zip(self.classes, self.originals, strict=True):
            kind.run = self.counted(original)
        return self

    def __exit__(self, *_):
        for kind, original in zip(self.classes, self.originals, strict=True):
            kind.run = original

    def counted(self, run):
        def counted_run(kernel, *arguments, **keywords):
            result = run(kernel, *arguments, **keywords)
            self.count += 1
            for position, (whole, margin) in self.buffers.items():
                outside = torch.cat((whole[:margin], whole[-margin:]))
                if not (outside == mark_of(whole)).all():
                    self.spoiled.add(position)
            return result

        return counted_run


def kinds_of_kernels():
    """Triton's classes of compiled and of interpreted kernels; none where there is no Triton."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return ()
    return JITFunction, InterpretedFunction


class CastsOfNaN(TorchDispatchMode):
    """found: whether NaN, infinity or too large a number was converted to integers inside `with`.

    C says nothing of what comes of it. However a conversion is written, `_to_copy` or `copy_` does it.
    """

    def __init__(self):
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = arguments[1 if function is torch.ops.aten.copy_.default else 0]
            if source.is_floating_point() and result.dtype in INTEGERS:
                bounds, source = torch.iinfo(result.dtype), source.double()
                inside = (source > bounds.min - 1) & (source < bounds.max + 1)  # false for NaN
                self.found |= not inside.all()
        return result


def guarded(tensor, margin):
    """(the tensor inside a larger buffer, that buffer, flat): infinity around floats poisons a stray load."""
    whole = torch.empty(tensor.numel() + 2 * margin, dtype=tensor.dtype, device=tensor.device)
    whole.fill_(mark_of(whole))
    inside = whole[margin : margin + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor), whole


def mark_of(tensor):
    """What stands around a guarded tensor. A maximum would pass over NaN."""
    return float("inf") if tensor.is_floating_point() else 77


def gradients(result, inputs, upstream):
    """d(sum of upstream * result)/d(inputs), None where there is no path from an input to the result."""
    results, upstream = (x if isinstance(x, tuple | list) else (x,) for x in (result, upstream))
    pairs = [(x, dx) for x, dx in zip(results, upstream, strict=True) if dx is not None and x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return tuple(None for _ in inputs)
    outputs, grad_outputs = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


def describe(error: BaseException, path: Path) -> dict:
    """An exception as a student should see it: type, text, line of exercise.py."""
    if isinstance(error, wire.WireError):
        return {"kind": "answer", "text": str(error)[:TEXT_LIMIT]}
    frames = traceback.extract_tb(error.__traceback__)
    while error.__cause__ is not None:  # Triton's interpreter wraps what goes wrong in a kernel
        error = error.__cause__
        frames += traceback.extract_tb(error.__traceback__)
    # A stub's own error names the function that raises it. PyTorch has errors of this type too.
    own = bool(frames) and frames[-1].filename == str(path)
    if type(error) is NotImplementedError and own and str(error).startswith(f"{frames[-1].name}: "):
        return {"kind": "unwritten", "text": str(error)[:TEXT_LIMIT]}
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    text = f"{type(error).__name__}: {error}"[:TEXT_LIMIT]
    return {"kind": "raised", "text": text, "line": lines[-1] if lines else None}


if __name__ == "__main__":
    wire, leftovers = (load(name, Path(__file__).resolve().with_name(f"{name}.py")) for name in ("wire", "leftovers"))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # there is no Triton on some systems
            importlib.import_module(name)
    torch.set_num_threads(1)
    tempfile.tempdir = sys.argv[2]  # inside walls there is no other, and the import below asks for one
    with CastsOfNaN():  # its first use imports what takes a second
        torch.zeros(1).int()
    tempfile.tempdir = None  # each child has its own
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.meta_path.insert(0, Blocked)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.send(b"{}")
        serve(control, Path(sys.argv[2]))
