"""Fill the SLA2 launch table: time every candidate of every kernel on this GPU, keep the fastest that is correct."""

from collections.abc import Iterator

from sage_kernels.common.candidates import Launch
from sage_kernels.sla2.backward.program import BackwardInputs, run_key, run_linear_query, run_query
from sage_kernels.sla2.forward import level1_lists
from sage_kernels.sla2.ladder import BACKWARD_KERNELS, LEVELS, run, sla2_launch
from sage_kernels.sla2.lists import block_lists
from sage_kernels.sla2.sums import unselected_sums_by_key

from sage_lab.bench.sla2_bench import Case, Shape, judged
from sage_lab.bench.tuning import Kernel, compile_candidates, fastest
from sage_lab.plan import FinishedParts

SPARSITY = 0.97


def kernels() -> Iterator[Kernel]:
    for head_dim in (64, 128):
        for level, chosen in enumerate(LEVELS):
            for kernel in chosen.kernels if chosen.hopper is None else ():
                yield Kernel(kernel, level, head_dim, causal=False)
        for kernel in BACKWARD_KERNELS:
            yield Kernel(kernel, 0, head_dim, causal=False)


def runner(kernel: Kernel, case: Case):
    """A function of a launch that runs the kernel and returns its output with what it should be."""
    query, key, _, _ = case.tensors
    prepared = case.prepare(kernel.level)
    exact = case.judge(prepared.choice.block_mask)
    if kernel.kernel == LEVELS[kernel.level].kernel:
        return lambda launch: [(judged(run(prepared, kernel.level, scale=case.scale, launch=launch).output), exact[0])]
    saved = run(prepared, 1, scale=case.scale)
    if kernel.kernel == "sla2_mix":
        return lambda launch: [(judged(level1_lists.run_mix(prepared.inputs, saved.sparse_output, launch)), exact[0])]
    tensors = case.judged_grad_output(), *case.tensors[:3], case.alpha
    inputs = BackwardInputs(*tensors, prepared.inputs.sums, saved.sparse_output, saved.log_sum_exp, None)
    choice, by_key = prepared.choice, block_lists(prepared.choice.block_mask, by_key=True)

    def query_gradients(linear: Launch, sparse: Launch):  # timed together: the second adds to the first's dQ
        gradients = run_linear_query(inputs, linear, scale=case.scale)
        run_query(inputs, gradients, choice.lists, sparse, scale=case.scale)
        return gradients

    linear, sparse = (sla2_launch(name, 0, query) for name in ("sla2_linear_query", "sla2_query"))
    if kernel.kernel == "sla2_linear_query":
        return lambda launch: [(judged(query_gradients(launch, sparse).grad_query), exact[1])]
    if kernel.kernel == "sla2_query":
        return lambda launch: [(judged(query_gradients(linear, launch).grad_query), exact[1])]
    gradients = query_gradients(linear, sparse)
    grad_sums = unselected_sums_by_key(choice.complement, gradients.grad_sums, key.shape[1])
    return lambda launch: [(run_key(inputs, gradients, grad_sums, by_key, launch, scale=case.scale)[0], exact[2])]


def compile_one(job: tuple[Kernel, Launch]) -> None:
    """Run one candidate on a small input, which leaves its machine code in Triton's cache."""
    kernel, launch = job
    try:
        runner(kernel, Case(Shape(1, 12, 2048, kernel.head_dim), SPARSITY))(launch)
    except Exception as error:  # too much shared memory, say: `rows` meets the same error and reports it
        print(f"{kernel} {launch}: {error}"[:200])


def rows(workers: int, parts: FinishedParts) -> Iterator[dict]:
    """The fastest launch of every kernel; see `tuning.rows`."""
    wanted = [kernel for kernel in kernels() if str(kernel) not in parts.parts]
    compile_candidates(compile_one, wanted, workers)
    for kernel in wanted:
        case = Case(Shape(1, 12, 32760, kernel.head_dim), SPARSITY)
        parts.rows(str(kernel), lambda kernel=kernel, case=case: [fastest(kernel, runner(kernel, case))])
    for kernel in kernels():
        yield from parts.parts[str(kernel)]
