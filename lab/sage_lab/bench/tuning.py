"""Launch tables: time a level with every candidate of each of its kernels on this GPU, and keep the fastest launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import get_context
from unittest import mock

import torch
from sage_kernels.common.candidates import CANDIDATES, Launch, candidates
from sage_kernels.common.launch import choose_launch
from sage_kernels.common.launch_tables import Case as Kernel
from sage_kernels.sagebwd import ladder
from sage_kernels.sla2 import ladder as sla2_ladder

from sage_lab.bench import dense, sparse
from sage_lab.bench.compile import cases, is_sla2, sla2_cases
from sage_lab.bench.measure import Case, Provider, judged
from sage_lab.bench.problem import MaskedProblem, Problem, Shape
from sage_lab.command_line import process_pool
from sage_lab.plan import FinishedParts
from sage_lab.records import Row


def kernels(operation: str = "sagebwd") -> list[Kernel]:
    """Return every kernel of every level of "sagebwd" or "sla2" that has candidates: those of GPUs before Hopper."""
    found = [case for case in (sla2_cases if operation == "sla2" else cases)(80) if case.kernel in CANDIDATES]
    masks = (False,) if operation == "sla2" else (False, True)
    return [Kernel(case.kernel, case.level, case.head_dim, causal) for causal in masks for case in found]


@lru_cache(maxsize=1)
def problem_of(operation: str, head_dim: int, causal: bool, small: bool = False) -> Problem:
    """Return the tensors on which candidates are timed, or small ones on which they are compiled."""
    if operation == "sla2":
        return MaskedProblem(Shape(1, 12, 12, 2048 if small else 32760, head_dim), sparse.USERS_SPARSITY)
    heads = 2048 // head_dim
    return Problem(Shape(1 if small else 4, heads, heads, 1024 if small else 8192, head_dim, causal))


def level_of(kernel: Kernel, problem: Problem) -> tuple[Case, Provider]:
    """Return the pass that a kernel is a part of, and the level that computes it."""
    if is_sla2(kernel):
        direction = "bwd" if kernel.kernel in sla2_ladder.BACKWARD_KERNELS else "fwd"
        compute = sparse.backward_of_level if direction == "bwd" else sparse.forward_of_level
    else:
        direction = "fwd" if kernel.kernel == "forward" else "bwd"
        _, compute = dense.LADDERS[direction]
    operation = "sla2" if is_sla2(kernel) else "sagebwd"
    return Case(problem, direction, "kernel"), Provider("level", partial(compute, level=kernel.level), operation)


@contextmanager
def launched_as(kernel: Kernel, launch: Launch) -> Iterator[None]:
    """Let one kernel of a level have this launch, and all others their own."""

    def choose(name: str, level: int, head_dim: int, is_causal: bool, device: torch.device) -> Launch:
        is_meant = (name, level) == (kernel.kernel, kernel.level)
        return launch if is_meant else choose_launch(name, level, head_dim, is_causal, device)

    with mock.patch.object(ladder, "choose_launch", choose), mock.patch.object(sla2_ladder, "choose_launch", choose):
        yield


def tuned_rows(operation: str, workers: int, parts: FinishedParts) -> Iterator[Row]:
    """Yield the fastest launch of every kernel.

    parts: what an interrupted run timed; the rest is timed now and kept there.
    """
    compile_candidates(operation, [x for x in kernels(operation) if str(x) not in parts.parts], workers)
    for kernel in kernels(operation):

        def measure(kernel: Kernel = kernel) -> list[Row]:
            return [fastest(kernel, problem_of(operation, kernel.head_dim, kernel.causal))]

        yield from parts.rows(str(kernel), measure)


def compile_candidates(operation: str, wanted: list[Kernel], workers: int) -> None:
    """Run all candidates of the wanted kernels in parallel processes, which leaves machine code in Triton's cache."""
    jobs = [(operation, x, launch) for x in wanted for launch in candidates(x.kernel, x.level)]
    with process_pool(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def compile_one(job: tuple[str, Kernel, Launch]) -> None:
    """Run one candidate on a small input."""
    operation, kernel, launch = job
    try:
        with launched_as(kernel, launch):
            judged(*level_of(kernel, problem_of(operation, kernel.head_dim, kernel.causal, small=True)))
    except Exception as error:  # too much shared memory, say: `fastest` meets the same error and reports it
        print(f"{kernel} {launch}: {error}"[:200])


def fastest(kernel: Kernel, problem: Problem) -> Row:
    """Return the row of one kernel. A candidate that fails or is wrong is out; if all are, so is the table."""
    times = {}
    for launch in candidates(kernel.kernel, kernel.level):
        try:
            with launched_as(kernel, launch):
                run, _ = judged(*level_of(kernel, problem))
                times[launch] = problem.gpu.alone(run).ms_median
        except Exception as error:
            print(f"{kernel} {launch}: {error}"[:200])
    if not times:
        raise RuntimeError(f"tune: no candidate of {kernel} is correct")
    best = min(times, key=times.get)
    return {**kernel._asdict(), **best._asdict(), "ms_median": round(times[best], 4)}
