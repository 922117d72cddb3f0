"""Launches of a reader's function on a GPU that this machine need not have, and how often the programs' lines run.

`noted` calls the function on tensors without memory, with launches that only take notes. `traced` runs it in Triton's
interpreter on two short sequences and counts how often each line of a program is executed. All executions of a program
for attention grow as a N^2 + b N, which the two lengths decide, so the count holds for any length.
"""

import ast
import math
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.autotuner import Autotuner

from sage_lab.climb.problems import HEADS, N, Problem, Unfit

Attention = Callable[..., Tensor]  # attention(q, k, v, is_causal=...) of [B, H, N, D]
DTYPE = torch.float16  # the interpreter has no bfloat16
TRACED_N = (256, 512)
NOT_TRACED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
MARKS = ("create_dot", "create_exp", "create_exp2")  # of the interpreter
MENDED = "sage_kernels/common/interpreter.py"


class Launched(NamedTuple):
    """One launch: what Triton's launcher was told."""

    program: Any
    arguments: tuple
    keywords: dict[str, Any]
    config: str  # which of an autotuner's configurations it is; "" without one

    @property
    def bytes(self) -> int:
        """The size of all its tensors: each is read or written at least once."""
        return size_of([*self.arguments, *self.keywords.values()])


class Executions(NamedTuple):
    """How often the lines of one launch run at the standard problem, all programs together."""

    program: str
    programs: float
    lines: dict[str, float]  # by "file:line"
    prepares: bool  # without any matmul or exponential


class Bytes(TorchDispatchMode):
    """Adds up what PyTorch's own operations read and write."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        returned = operation._schema.returns
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in returned)
        if not is_view and "empty" not in operation._schema.name:
            self.total += size_of((arguments, keywords, result))
        return result


def size_of(values: Any) -> int:
    """Return the bytes of all tensors in nested values, descriptors' tensors too."""
    leaves = [getattr(x, "base", x) if not isinstance(x, Tensor) else x for x in tree_leaves(values)]
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))


@contextmanager
def first_configurations():
    """Let every autotuner take its first configuration instead of timing all; yield the list of what it took."""
    taken = []

    def run(self, *arguments, **keywords):
        config = self.configs[0]
        taken.append(f"the first of {len(self.configs)} configurations, {config}" if len(self.configs) > 1 else "")
        if config.pre_hook is not None:
            config.pre_hook(dict(zip(self.arg_names, arguments, strict=False)) | keywords | config.all_kwargs())
        return self.fn.run(*arguments, **keywords, **config.all_kwargs())

    with mock.patch.object(Autotuner, "run", run):
        yield taken


def noted(attention: Attention, problem: Problem) -> tuple[list[Launched], int]:
    """Return the launches of the standard problem in their order, and the bytes of PyTorch's operations around them."""
    from triton.runtime.jit import JITFunction

    launches = []

    def run(self, *arguments, grid, warmup, **keywords):
        launches.append(Launched(self, arguments, keywords, taken.pop() if taken else ""))

    tensors = (torch.empty(1, HEADS, N, problem.head_dim, dtype=DTYPE, device="meta") for _ in range(3))
    with mock.patch.object(JITFunction, "run", run), first_configurations() as taken, Bytes() as others:
        attention(*tensors, is_causal=problem.is_causal)
    return launches, others.total


def traced(attention: Attention, problem: Problem) -> list[Executions]:
    """Run the function in the interpreter and return the executions of every launch's lines."""
    short, long = ([*one_length(attention, problem, n)] for n in TRACED_N)
    if [name for name, *_ in short] != [name for name, *_ in long]:
        raise Unfit(f"expected the same launches for {TRACED_N[0]} and {TRACED_N[1]} tokens")

    def extended(first: float, second: float) -> float:
        squares = (second / TRACED_N[1] - first / TRACED_N[0]) / (TRACED_N[1] - TRACED_N[0])
        return HEADS * N * (squares * N + first / TRACED_N[0] - squares * TRACED_N[0])

    found = []
    for (name, few, lines, _), (_, many, more, prepares) in zip(short, long, strict=True):
        counts = {line: extended(lines.get(line, 0), count) for line, count in more.items()}
        counts = {line: count for line, count in counts.items() if count > 0}
        found.append(Executions(name, extended(few, many), counts, prepares))
    return found


def one_length(attention: Attention, problem: Problem, n: int):
    """Yield (name, programs, executions by line, whether it prepares) of every launch for n tokens and one head."""
    from triton.runtime import interpreter

    launches: list[tuple[str, int, Counter, bool]] = []
    original = interpreter.InterpretedFunction.run

    def run(self, *arguments, **keywords):
        hits, marks = Counter(), []

        def marked(name: str):
            method = getattr(interpreter.InterpreterBuilder, name)
            return lambda *values: (marks.append(name), method(*values))[1]

        def count(frame, event, _):
            if event == "line":
                hits[frame.f_code.co_filename, frame.f_lineno] += 1
            elif frame.f_code.co_filename.startswith(NOT_TRACED) or frame.f_code.co_filename.endswith(MENDED):
                return None
            return count

        with mock.patch.multiple(interpreter.InterpreterBuilder, **{name: marked(name) for name in MARKS}):
            sys.settrace(count)
            try:
                original(self, *arguments, **keywords)
            finally:
                sys.settrace(None)
        launches.append((self.__name__, math.prod(interpreter.interpreter_builder.grid_dim), hits, not marks))

    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(1, 1, n, problem.head_dim, generator=generator).to(DTYPE) for _ in range(3))
    with mock.patch.object(interpreter.InterpretedFunction, "run", run), first_configurations():
        attention(*tensors, is_causal=problem.is_causal)
    for name, programs, hits, prepares in launches:
        yield name, programs, executions(hits), prepares


def executions(hits: Counter) -> dict[str, int]:
    """Return how often each line of functions that ran was executed, by "file:line".

    A line's own hits say too much where a statement has several lines. All statements of a loop's body, or of a
    function's, are executed equally often, apart from branches; so the fewest hits of one of them count for all.
    """
    found = {}
    for file in {file for file, _ in hits}:
        path = Path(file)
        if not path.is_file():
            continue
        blocks = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, BLOCKS))
        for block in blocks:  # outer blocks come before inner ones
            counts = [hits[file, statement.lineno] for statement in block.body if hits[file, statement.lineno]]
            lines = range(block.body[0].lineno, block.body[-1].end_lineno + 1)
            found |= {f"{path.name}:{line}": min(counts, default=0) for line in lines}
    return {line: count for line, count in found.items() if count}


BLOCKS = (ast.FunctionDef, ast.For, ast.While)
