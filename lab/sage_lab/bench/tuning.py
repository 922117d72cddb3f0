"""Launch tables: time every candidate of every kernel on this GPU and keep the fastest that is correct."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from multiprocessing import get_context

from sage_kernels.common.candidates import CANDIDATES, Launch, candidates
from sage_kernels.common.launch_tables import Case as Kernel
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.sagebwd.backward.program import run_dkdv, run_dq
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, prepare_forward, run_forward
from sage_kernels.sla2 import ladder as sla2_ladder
from sage_kernels.sla2.backward.program import BackwardInputs, run_key, run_linear_query, run_query
from sage_kernels.sla2.forward.level1_lists import run_mix
from sage_kernels.sla2.lists import block_lists
from sage_kernels.sla2.sums import unselected_sums_by_key
from torch import Tensor

from sage_lab.bench.compile import cases, sla2_cases
from sage_lab.bench.dense import BackwardPreparation
from sage_lab.bench.judge import RESULTS, require_close
from sage_lab.bench.problem import MaskedProblem, Problem, Shape
from sage_lab.bench.sparse import USERS_SPARSITY
from sage_lab.bench.timing import alone
from sage_lab.command_line import process_pool
from sage_lab.plan import FinishedParts
from sage_lab.records import Row

Run = Callable[[Launch], dict[str, Tensor]]  # -> those of O, dQ, dK and dV that the kernel computes


def kernels(operation: str = "sagebwd") -> list[Kernel]:
    """Return every kernel of every level of "sagebwd" or "sla2" that has candidates: those of GPUs before Hopper."""
    found = [case for case in (sla2_cases if operation == "sla2" else cases)(80) if case.kernel in CANDIDATES]
    masks = (False,) if operation == "sla2" else (False, True)
    return [Kernel(case.kernel, case.level, case.head_dim, causal) for causal in masks for case in found]


@lru_cache(maxsize=1)
def problem_of(operation: str, head_dim: int, causal: bool, small: bool = False) -> Problem:
    """Return the tensors on which candidates are timed, or small ones on which they are compiled."""
    if operation == "sla2":
        return MaskedProblem(Shape(1, 12, 12, 2048 if small else 32760, head_dim), USERS_SPARSITY)
    heads = 2048 // head_dim
    return Problem(Shape(1 if small else 4, heads, heads, 1024 if small else 8192, head_dim, causal))


def runner(kernel: Kernel, problem: Problem) -> Run:
    """Return the function that runs a kernel of SageBwd."""
    options = {"is_causal": problem.shape.causal, "scale": problem.scale}
    if kernel.kernel == "forward":
        inputs = prepare_forward(*problem.inputs, kernel.level, scale=problem.scale, smooth_k=True)
        return lambda launch: {"O": run_forward(inputs, kernel.level, launch=launch, **options)[0]}
    chosen = BACKWARD_LEVELS[kernel.level]
    options["per_block"] = chosen.per_block
    inputs = BackwardPreparation(problem, kernel.level).inputs(problem.grad_output)
    if kernel.kernel.startswith("dq"):
        return lambda launch: {"dQ": run_dq(inputs, chosen.key_tile, launch, **options)}
    outputs = kernel.kernel.partition("_")[0]

    def run(launch: Launch) -> dict[str, Tensor]:
        gradients = run_dkdv(inputs, chosen.query_tile, launch, outputs=outputs, **options)
        return {name: x for name, x in zip(("dK", "dV"), gradients, strict=True) if name.lower() in outputs}

    return run


def sla2_runner(kernel: Kernel, problem: MaskedProblem) -> Run:
    """Return the function that runs a kernel of SLA2."""
    query, key, _ = problem.inputs
    scale, prepared = problem.scale, problem.prepare(kernel.level)
    choice, sums = prepared.choice, prepared.inputs.sums
    if kernel.kernel == sla2_ladder.LEVELS[kernel.level].kernel:
        return lambda launch: {"O": sla2_ladder.run_forward(prepared, kernel.level, scale=scale, launch=launch).output}
    saved = sla2_ladder.run_forward(prepared, 1, scale=scale)
    if kernel.kernel == "sla2_mix":
        return lambda launch: {"O": run_mix(prepared.inputs, saved.sparse_output, launch, start_with_triton)}
    tensors = problem.judged_grad_output, *problem.inputs, problem.alpha, sums
    inputs = BackwardInputs(*tensors, saved.sparse_output, saved.log_sum_exp, None)
    launches = {name: sla2_ladder.sla2_launch(name, 0, query) for name in ("sla2_linear_query", "sla2_query")}

    def query_gradients(launches: dict[str, Launch]):  # timed together: the second adds to the first's dQ
        gradients = run_linear_query(inputs, launches["sla2_linear_query"], scale=scale)
        run_query(inputs, gradients, choice.lists, launches["sla2_query"], scale=scale)
        return gradients

    if kernel.kernel in launches:
        return lambda launch: {"dQ": query_gradients(launches | {kernel.kernel: launch}).grad_query}
    gradients, by_key = query_gradients(launches), block_lists(choice.block_mask, by_key=True)
    grad_sums = unselected_sums_by_key(choice.complement, gradients.grad_sums, key.shape[1])
    arguments = inputs, gradients, grad_sums, by_key
    return lambda launch: dict(zip(("dK", "dV"), run_key(*arguments, launch, scale=scale), strict=True))


def prepared_run(kernel: Kernel, problem: Problem) -> tuple[Run, dict[str, Tensor]]:
    """Return the function that runs a kernel, and the exact results by name."""
    is_masked = isinstance(problem, MaskedProblem)
    exact = problem.exact("sla2" if is_masked else "attention")
    return (sla2_runner if is_masked else runner)(kernel, problem), dict(zip(RESULTS, exact, strict=True))


def tuned_rows(operation: str, workers: int, parts: FinishedParts) -> Iterator[Row]:
    """Yield the fastest launch of every kernel.

    parts: what an interrupted run timed; the rest is timed now and kept there.
    """
    compile_candidates(operation, [x for x in kernels(operation) if str(x) not in parts.parts], workers)
    for kernel in kernels(operation):

        def measure(kernel: Kernel = kernel) -> list[Row]:
            return [fastest(kernel, *prepared_run(kernel, problem_of(operation, kernel.head_dim, kernel.causal)))]

        yield from parts.rows(str(kernel), measure)


def compile_candidates(operation: str, wanted: list[Kernel], workers: int) -> None:
    """Compile all candidates of the wanted kernels in parallel processes."""
    jobs = [(operation, x, launch) for x in wanted for launch in candidates(x.kernel, x.level)]
    with process_pool(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def compile_one(job: tuple[str, Kernel, Launch]) -> None:
    """Run one candidate on a small input, which leaves its machine code in Triton's cache."""
    operation, kernel, launch = job
    try:
        prepared_run(kernel, problem_of(operation, kernel.head_dim, kernel.causal, small=True))[0](launch)
    except Exception as error:  # too much shared memory, say: `fastest` meets the same error and reports it
        print(f"{kernel} {launch}: {error}"[:200])


def fastest(kernel: Kernel, run: Run, exact: dict[str, Tensor]) -> Row:
    """Return the row of one kernel. A candidate that fails or is wrong is out; if all are, so is the table."""
    times = {}
    for launch in candidates(kernel.kernel, kernel.level):
        try:
            for name, found in run(launch).items():
                require_close(found, exact[name], name=name)
        except Exception as error:
            print(f"{kernel} {launch}: {error}"[:200])
        else:
            times[launch] = alone(lambda launch=launch: run(launch)).ms_median
    if not times:
        raise RuntimeError(f"tune: no candidate of {kernel} is correct")
    best = min(times, key=times.get)
    return {**kernel._asdict(), **best._asdict(), "ms_median": round(times[best], 4)}
