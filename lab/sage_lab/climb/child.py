"""The process in which a reader's file runs: one that a crash ends, or a time limit, and not the command with it.

Started as `python -m sage_lab.climb.child ACTION SOURCE ANSWER`, with a request in JSON on stdin. It writes its answer,
in JSON, to the file ANSWER: {"answer": ...}, or {"error": one line} if the reader's code raised one.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sage_lab.climb.problems import Problem, Unfit
from sage_lab.command_line import PARENT, end_with

SECONDS = {"check": 300, "trace": 300, "count": 900, "time": 600}


def ask(action: str, source: str, on_gpu: bool, **request: Any) -> Any:
    """Run an action in a process of its own and return its answer.

    Raises:
        ValueError: In one sentence, what is wrong with the reader's file.
    """
    interpreted = "1" if action == "trace" or (action == "check" and not on_gpu) else "0"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        environment = os.environ | {PARENT: str(os.getpid()), "TRITON_INTERPRET": interpreted}
        if action == "count":  # what is read from Triton's cache has no word of the assembler
            environment["TRITON_CACHE_DIR"] = folder
        command = [sys.executable, "-m", "sage_lab.climb.child", action, source, str(answer)]
        seconds = SECONDS[action]
        try:
            done = subprocess.run(
                command, input=json.dumps(request | {"on_gpu": on_gpu}), env=environment, text=True, timeout=seconds,
                stdout=sys.stderr, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{source}: expected an end of `{action}` within {seconds} s, it hangs or is slow"
            ) from None
        if not answer.exists():
            raise ValueError(f"{source}: expected a result, its process crashed with status {done.returncode}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise ValueError(found["error"])
    return found["answer"]


def attention_of(source: str, target: int | None = None):
    """Return the function of a level's name, for a target, or of a reader's file."""
    from sage_lab.climb.levels import LEVELS, level_attention

    if source in LEVELS:
        return level_attention(source, target)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(source).absolute().parent))  # for files beside it
    spec.loader.exec_module(module)
    found = getattr(module, "attention", None)
    if not callable(found):
        raise Unfit("expected a function attention(q, k, v, is_causal=False), found none")
    return found


def check(source: str, request: dict[str, Any]) -> list:
    """Return the verdicts of all milestones."""
    from sage_lab.climb import trials
    from sage_lab.climb.launches import first_configurations

    attention = attention_of(source)
    if request["on_gpu"]:
        return list(trials.run(attention, trials.ATTENTION, device="cuda"))
    with first_configurations():
        return list(trials.run(attention, trials.ATTENTION))


def trace(source: str, request: dict[str, Any]) -> list:
    """Return the executions of every launch, by target (of a level) and problem."""
    from sage_lab.climb.launches import traced
    from sage_lab.climb.levels import LEVELS, level_launch

    found, known = [], {}
    for target in request["targets"]:
        for problem in (Problem(*x) for x in request["problems"]):
            key = problem, level_launch(source, target, *problem) if source in LEVELS else None
            if key not in known:
                known[key] = traced(attention_of(source, target), problem)
            found.append([target, problem, known[key]])
    return found


def count(source: str, request: dict[str, Any]) -> list:
    """Return a row for every target and problem. executions: what `trace` answered."""
    known = {(target, tuple(problem)): executions for target, problem, executions in request["executions"]}
    tasks = [(target, problem) for target in request["targets"] for problem in request["problems"]]
    attention_of(source)  # imported once, before the processes fork
    with ProcessPoolExecutor(request["workers"], mp_context=get_context("fork"), initializer=end_with) as pool:
        return list(pool.map(partial(count_one, source, known), *zip(*tasks, strict=True)))


def count_one(source: str, known: dict, target: int, problem: list) -> dict[str, Any]:
    """Return the row of one target and problem."""
    from sage_lab.climb.counting import columns, counted, summary
    from sage_lab.climb.launches import Executions, noted

    problem = Problem(*problem)
    executions = [Executions(*x) for x in known.get((target, problem)) or known[None, problem]]
    try:
        launches, other_bytes = noted(attention_of(source, target), problem)
    except Exception as error:
        why = f"{type(error).__name__}{line_of(source, error)}: {' '.join(str(error).split())[:200]}"
        raise Unfit(f"expected launches that need no values of tensors, to count without a GPU, got {why}") from None
    if [x.program.__name__ for x in launches] != [x.program for x in executions]:
        raise Unfit("expected the same launches for 512 and for 8192 tokens")
    try:
        found = [counted(x, known, problem, target) for x, known in zip(launches, executions, strict=True)]
    except Exception as error:  # of Triton's compiler, of many kinds; other GPUs may take the program
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return columns(Path(source).stem, problem, target) | {"problem": f"does not compile. {why}"}
    print(f"sm_{target}, D={problem.head_dim}{', causal' * problem.is_causal}: counted", file=sys.stderr, flush=True)
    return summary(Path(source).stem, problem, target, found, other_bytes)


def time(source: str, request: dict[str, Any]) -> list:
    """Return rows of paired times on this GPU."""
    from sage_lab.climb.timing import timed

    return timed(source, attention_of(source), request["problems"])


def explained(source: str, error: BaseException) -> str:
    """Return one line on an error that the reader's code raised."""
    while error.__cause__ is not None:  # Triton wraps what goes wrong in a kernel
        error = error.__cause__
    text = " ".join(str(error).split())[:300]
    return f"{source}: expected code that runs, got {type(error).__name__}{line_of(source, error)}: {text}"


def line_of(source: str, error: BaseException) -> str:
    """Return the reader's last line that an error went through, after a comma."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(Path(source))]
    return f", line {lines[-1]}" if lines else ""


def main(action: str, source: str, answer: str) -> None:
    if parent := os.environ.pop(PARENT, None):
        end_with(int(parent))
    request = json.load(sys.stdin)
    if os.environ["TRITON_INTERPRET"] == "1":
        import sage_kernels.common.interpreter  # noqa: F401 (mended)
    try:
        found = {"answer": {"check": check, "trace": trace, "count": count, "time": time}[action](source, request)}
    except Unfit as error:
        found = {"error": f"{source}: {error}"}
    except (Exception, SystemExit) as error:
        found = {"error": explained(source, error)}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
