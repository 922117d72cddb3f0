"""The command `count`: what one score costs in your own forward kernel, beside our levels, without a GPU.

Your function is called with tensors that have no memory, and its launches are noted. Each program is compiled for a GPU
that need not be there, and its loops over tiles of keys are found in the machine code: those with matmuls and with an
exponential for each score. Every instruction belongs to a unit, and notebook 08's rule (`cost_model.by_the_rule`) says
how many clocks a multiprocessor needs for a score. A loop that is there twice, once with a mask and once without,
counts without. What runs before and after the loop, and the tiles that a causal mask hides, are left out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from unittest import mock

import torch
from sage_kernels.common.launch_tables import SAME_CODE
from sage_kernels.sagebwd.ladder import FORWARD_LEVELS
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from sage_lab.bench.compile import Case, Compiled, assembled, compile_kernel, launched_source, runnable
from sage_lab.bench.cost_model import GPUS, WARP, by_the_rule, demand
from sage_lab.bench.instructions import KINDS, exponentials, kind_of, tile_loops
from sage_lab.command_line import POSITIONAL, Arguments, input_file, positive, process_pool
from sage_lab.records import RECORDED, Row, markdown_table, read_record, write_record

LEVELS = RECORDED / "count_levels_cpu.json"  # made by the command without a file
MEASURED = 90  # the compute capability on which our levels were measured
HEADS, N = 16, 8192  # of the tensors that a function is called with
SHOWN = ("name", "clocks", "instructions", *KINDS, "registers", "spills in the loop")


class Problem(NamedTuple):
    """For which GPU, head size and mask a kernel is compiled."""

    capability: int
    head_dim: int
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Count(Arguments):
    """Options of `count`."""

    files: Annotated[tuple[Path, ...], POSITIONAL, input_file, "with attention(q, k, v, is_causal); none: levels"] = ()
    target: Annotated[tuple[Literal[tuple(GPUS)], ...], "compute capabilities of GPUs"] = (MEASURED,)
    head_dim: Annotated[tuple[int, ...], positive, "head sizes"] = (128, 64)
    workers: Annotated[int, positive, "processes that compile"] = 2

    def run(self, command: str) -> None:
        """Count, print a table for each problem, and say what each file costs beside the one before it."""
        problems = [Problem(x, d, causal) for x in self.target for d in self.head_dim for causal in (False, True)]
        with process_pool(self.workers) as pool:
            jobs = [(file, problem) for problem in problems for file in self.files]
            rows = list(pool.map(count_of_file, *zip(*jobs, strict=True))) if jobs else []
            known = read_record(LEVELS).rows if LEVELS.exists() and self.files else []
            missing = [x for x in problems if not at(known, x)]
            jobs = [(level, x) for x in missing for level in runnable(FORWARD_LEVELS, min(GPUS))]
            counted = list(pool.map(count_of_level, *zip(*jobs, strict=True))) if jobs else []
        for problem in problems:
            print(f"\n{table([*at(known, problem), *at(counted, problem), *at(rows, problem)], problem)}")
        print("\n".join(["", *changes(rows)]))
        write_record(self.json, rows or counted, command=command)


def at(rows: Sequence[Row], problem: Problem) -> list[Row]:
    """Return the rows of a problem."""
    return [row for row in rows if all(row[name] == value for name, value in problem._asdict().items())]


def count_of_level(level: int, problem: Problem) -> Row:
    """Return the row of one of our forward levels that every GPU runs."""
    code_of = SAME_CODE.get(problem.capability, problem.capability)
    case = Case("forward", level, code_of, problem.head_dim, problem.causal)
    return row_of(f"level {level}", problem, [compile_kernel(case)])


def count_of_file(path: Path, problem: Problem) -> Row:
    """Return the row of a reader's file. Raises ValueError if it has no kernel that can be counted."""
    try:
        launches = noted(function_of(path), problem)
        built = [built_for(problem.capability, *launch) for launch in launches]
    except Exception as error:  # of the reader's code, or of the compiler on it
        raise ValueError(f"{path}: expected an attention that compiles, got {type(error).__name__}: {error}") from None
    return row_of(path.stem, problem, built)


def function_of(path: Path) -> Callable[..., Tensor]:
    """Return the function `attention` of a file."""
    loader = SourceFileLoader(path.stem, str(path))
    module = module_from_spec(spec_from_loader(path.stem, loader))
    loader.exec_module(module)
    return module.attention


def noted(attention: Callable[..., Tensor], problem: Problem) -> list[tuple[JITFunction, tuple, dict[str, Any]]]:
    """Return the launches of a call: programs, arguments, keywords."""
    launches = []

    def run(self, *arguments, grid, warmup, **keywords):
        launches.append((self, arguments, keywords))

    tensors = (torch.empty(1, HEADS, N, problem.head_dim, dtype=torch.float16, device="meta") for _ in range(3))
    with mock.patch.object(JITFunction, "run", run), first_configurations():
        attention(*tensors, is_causal=problem.causal)
    return launches


@contextmanager
def first_configurations() -> Iterator[None]:
    """Let every autotuner take its first configuration instead of timing all."""

    def run(self, *arguments, **keywords):
        return self.fn.run(*arguments, **keywords, **self.configs[0].all_kwargs())

    with mock.patch.object(Autotuner, "run", run):
        yield


def built_for(target: int, program: JITFunction, arguments: tuple, keywords: dict) -> tuple[str, Compiled]:
    """Return a launch's machine code for a GPU, and what it is like."""
    options = {name: value for name, value in keywords.items() if name not in program.arg_names}
    return assembled(launched_source(program, arguments, keywords, target), options, target)


def row_of(name: str, problem: Problem, built: Sequence[tuple[str, Compiled]]) -> Row:
    """Return what a score costs in all loops over keys together."""
    found = [(loop, scores, compiled) for code, compiled in built for loop, scores in key_loops(code, problem)]
    if not found:
        raise ValueError(
            f"{name}: expected a loop over keys with matmuls and an exponential for each score, found none"
        )
    kinds, needed = Counter(), Counter()
    for loop, scores, _ in found:
        for instruction in loop:
            kinds[kind_of(instruction)] += 1 / scores
        for unit, amount in demand(loop).items():
            needed[unit] += amount / (WARP * scores)
    return {
        "name": name,
        **problem._asdict(),
        "clocks": round(sum(by_the_rule(needed, GPUS[problem.capability])), 4),
        "instructions": round(kinds.total(), 2),
        **{kind: round(kinds[kind], 3) for kind in KINDS},
        "registers": max(compiled.registers for _, _, compiled in found),
        "spills in the loop": round(sum(kinds["spill"] * scores for _, scores, _ in found)),
    }


def key_loops(code: str, problem: Problem) -> list[tuple[list[str], float]]:
    """Return the loops over keys of a program, without copies that have a mask, and a thread's scores in each.

    A loop that computes S alone does D multiply-adds for a score, one that multiplies P and V too does 2 D.
    """
    found: dict[float, tuple[list[str], float]] = {}
    for loop in sorted(tile_loops(code), key=len, reverse=True):
        needed = demand(loop)
        multiply_adds = (needed["int8"] + needed["float16"]) / WARP
        for matmuls in (2, 1):
            scores = multiply_adds / (matmuls * problem.head_dim)
            if 0 < scores <= exponentials(loop) < 2 * scores:  # and a few more for each row
                found[multiply_adds] = loop, scores
    return list(found.values())


def mask_of(problem: Problem) -> str:
    return "causal" if problem.causal else "no mask"


def table(rows: Sequence[Row], problem: Problem) -> str:
    """Return the kernels in the order of their clocks."""
    lines = [[row[name] for name in SHOWN] for row in sorted(rows, key=lambda row: row["clocks"])]
    where = f"sm_{problem.capability}, D={problem.head_dim}, {mask_of(problem)}"
    return f"{where}: clocks of a multiprocessor and instructions per score\n\n{markdown_table(SHOWN, lines)}"


def changes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each file and problem: its clocks over those of the file before."""
    lines = []
    for before, after in zip(rows, rows[1:], strict=False):
        problem = Problem(*(after[name] for name in Problem._fields))
        if at([before], problem):
            ratio = after["clocks"] / before["clocks"]
            lines.append(
                f"D={problem.head_dim}, {mask_of(problem)}: {after['name']} costs {ratio:.3f} of {before['name']}"
            )
    return lines
