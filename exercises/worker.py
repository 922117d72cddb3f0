"""What runs beside the grader: a server that imports torch once and forks a limited child for each submission.

Started as `python -I worker.py CONTROL`. CONTROL is a socket: {"start": limits} with four descriptors forks a child,
{"stop": true} ends it and all it left behind. The server holds no seed, no expected answer and no grader; so neither
does the memory that a child inherits. The child imports the submission and answers calls: what it answers is a claim,
never a verdict.
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
import time
import traceback
from pathlib import Path

BLOCKED = ("sage_ref", "sage_kernels", "exercises")
TEXT_LIMIT = 300
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


def serve(control: socket.socket) -> None:
    """Fork, end and clean up children until the grader closes the socket."""
    child = uid = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 2**16, 4)
        command = json.loads(message) if message else {}
        status = _end(child, uid)
        child = None
        if "start" in command:
            uid = command["start"]["uid"]
            child = os.fork()
            if child == 0:
                control.close()
                become_child(command["start"], *descriptors)  # doesn't return
        for descriptor in descriptors:
            os.close(descriptor)
        if not message:
            return
        control.send(json.dumps({"child": child, "status": status}).encode())


def _end(child, uid):
    """Kill the child and every process it started. The child's exit code if it had ended by itself, else None."""
    if child is None:
        return None
    code = _reap(child)
    if code is None:
        os.killpg(child, signal.SIGKILL)  # all that there is to do where there is no /proc
    for _ in range(200):
        if uid is not None:
            _kill_all_of(uid)
        for process in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _reap(child)
        if not _descendants():
            return code
        time.sleep(0.005)
    raise RuntimeError("a submission's processes don't end")


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


def _kill_all_of(uid):
    """One kill(-1) as the submission's own user: unlike a loop over processes, no fork can run away from it."""
    helper = os.fork()
    if helper == 0:
        os.setgid(uid)
        os.setuid(uid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(helper, 0)


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


def become_child(limits: dict, requests: int, answers: int, output: int, errors: int) -> None:
    """The forked side: give up every right that isn't needed, then answer calls until the grader is done."""
    try:
        os.setsid()
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        requests, answers = os.dup2(requests, 64), os.dup2(answers, 65)
        os.closerange(3, 64)
        os.closerange(66, 2**16)
        _limit(limits)
        os.environ.update(HOME=limits["scratch"], TMPDIR=limits["scratch"], TRITON_CACHE_DIR=limits["scratch"])
        os.chdir(limits["scratch"])
        wire.write(answers, wire.pack({"id": 0}, {}))  # from here on, what goes wrong is the submission's
        answer_calls(Path(limits["scratch"]) / "exercise.py", requests, answers)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _limit(limits):
    """Resource limits, then another user if there is one. Memory counts from what torch has mapped by now."""
    ceilings = dict(limits["resources"])
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        for name in limits["memory_resources"]:
            mapped = int(status[{"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[name]].split()[0]) * 1024
            ceilings[name] = mapped + limits["memory"]
    for name, value in ceilings.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if limits["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[limits["uid"]] * 3)
        os.setresuid(*[limits["uid"]] * 3)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38


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
            message = wire.pack({"id": content["id"], **reply}, sent)
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
    for position, margin in content["margins"].items():
        arguments[int(position)], after[int(position)] = guarded(arguments[int(position)], margin)
    if content["mode"] == "gradients":
        inputs = [x.requires_grad_(x.is_floating_point()) for x in arguments if isinstance(x, torch.Tensor)]
    for _ in range(content["repeat"]):
        result = function(*arguments, **keywords)
    if content["device"] != "cpu":
        torch.cuda.synchronize()
    sent = {}
    reply = {"result": wire.encode(result, sent)}
    if content["mode"] == "gradients":
        reply["extra"] = wire.encode(gradients(result, inputs, wire.decode(content["upstream"], tensors)), sent)
    elif content["mode"] == "in_place":
        reply["extra"] = wire.encode(tuple(after), sent)
    return reply, sent


def guarded(tensor, margin):
    """(the tensor inside a larger buffer, that buffer, flat): infinity around floats poisons a stray load."""
    mark = float("inf") if tensor.is_floating_point() else 77  # a maximum would pass over NaN
    whole = torch.full((tensor.numel() + 2 * margin,), mark, dtype=tensor.dtype, device=tensor.device)
    inside = whole[margin : margin + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor), whole


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
    if isinstance(error, NotImplementedError):
        return {"kind": "unwritten", "text": str(error)[:TEXT_LIMIT]}
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    text = f"{type(error).__name__}: {error}"[:TEXT_LIMIT]
    return {"kind": "raised", "text": text, "line": lines[-1] if lines else None}


if __name__ == "__main__":
    wire = load("wire", Path(__file__).resolve().with_name("wire.py"))
    import torch

    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # there is no Triton on some systems
            importlib.import_module(name)
    torch.set_num_threads(1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.meta_path.insert(0, Blocked)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.send(b"{}")
        serve(control)
