"""The loop: whoever computes a case right is timed in turn with the others; for the rest a row says why not.

A case is one pass of one problem, so what is timed is what was judged. A provider is a function that takes a case and
returns a call: to add a peer, write one, and append a line to PEERS or MASKED_PEERS of `peers`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sage_lab.bench.judge import LARGEST_ERROR, RESULTS, worst_error
from sage_lab.bench.problem import Problem
from sage_lab.bench.timing import REPETITIONS, Timing
from sage_lab.records import Row

# Operations of a direction over those of the forward pass: two matmuls, five, and both.
OPERATIONS = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}

Run = Callable[[Tensor], Sequence[Tensor]]  # dO -> (O,) in a forward pass, else (dQ, dK, dV)


@dataclass(frozen=True)
class Case:
    """One pass of one problem."""

    problem: Problem
    direction: str  # "fwd", "bwd" or "fwd+bwd"
    # "kernel": the kernels of a level alone; "op": with what prepares their inputs; "autograd": the public function,
    # from 16-bit tensors to O and the gradients.
    scope: str = "autograd"
    cuda_graph: bool = False  # captured once and replayed without the host
    repetitions: int = REPETITIONS


class Provider(NamedTuple):
    """Somebody who computes a case."""

    name: str
    of: Callable[[Case], Run]  # an error says why this case can't be computed
    op: str = "attention"  # what it computes, see `MaskedProblem`
    level: int | str | None = None
    largest_error: float = LARGEST_ERROR


class Turn(NamedTuple):
    """A case, and everybody who is timed on it."""

    case: Case
    providers: Sequence[Provider]


def measure(turns: Iterable[Turn], without: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a row for everybody who is timed, and one with the reason, `missing`, for everybody who can't be.

    without: names of those who are left out.
    """
    for case, providers in turns:
        gpu, calls, errors = case.problem.gpu, {}, {}
        for provider in (provider for provider in providers if provider.name not in without):
            try:
                calls[provider], errors[provider] = judged(case, provider)
            except Exception as error:  # whatever it is, the others are timed
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                where = {"scope": case.scope, "direction": case.direction, "cuda_graph": case.cuda_graph}
                yield {"missing": reason, "provider": provider.name, **case.problem.columns, **where}
        for provider, timing in gpu.paired(calls, case.repetitions).items():
            call = calls[provider]
            yield row_of(
                case,
                provider,
                timing,
                rel_l2=float(f"{errors[provider]:.3g}"),
                host_us=round(gpu.host_microseconds(call), 1),
                peak_mb=gpu.peak_megabytes(call),
            )


def judged(case: Case, provider: Provider) -> tuple[Callable[[], object], float]:
    """Return the call that is timed, and the error of what it computes."""
    problem = case.problem
    compute = provider.of(case)
    run = partial(compute, problem.grad_output)
    if case.cuda_graph:
        graph = problem.gpu.captured(run)
        for result in graph.outputs:
            result.zero_()
        graph.replay()
        run, found = graph.replay, graph.outputs
    else:
        found = compute(problem.judged_grad_output)
    computed = slice(0, 1) if case.direction == "fwd" else slice(1, 4)
    return run, worst_error(found, problem.exact(provider.op)[computed], provider.largest_error, RESULTS[computed])


def row_of(case: Case, provider: Provider, timing: Timing, **figures: float) -> Row:
    """Return the row of one time. TOPS count two matmuls forward, five backward, of the scores that are needed."""
    problem, shape = case.problem, case.problem.shape
    scores = shape.batch * shape.heads * shape.n**2 * problem.share(provider.op)
    operations = 4 * scores * shape.head_dim * OPERATIONS[case.direction]
    dense = {"sparsity": 0.0} if provider.op == "attention" else {}
    return {
        "op": provider.op,
        "level": provider.level,
        "provider": provider.name,
        **problem.columns,
        **dense,
        "scope": case.scope,
        "direction": case.direction,
        "protocol": "paired",
        "cuda_graph": case.cuda_graph,
        **timing._asdict(),
        "tops": round(operations / timing.ms_median / 1e9, 1),
        **figures,
    }


def by_autograd(case: Case, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
    """Return the case's pass of an attention that autograd can differentiate."""
    inputs = case.problem.inputs
    leaves = [x.detach().requires_grad_() for x in inputs]
    if case.direction == "fwd":
        return lambda grad_output: (attention(*inputs),)
    if case.direction == "bwd":
        output = attention(*leaves)
        return lambda grad_output: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
    return lambda grad_output: torch.autograd.grad(attention(*leaves), leaves, grad_output)


def by_kernels(case: Case, prepare: Callable[[Tensor], object], compute: Callable[[object], Sequence[Tensor]]) -> Run:
    """Return compute(prepare(dO)), or, in scope "kernel", `compute` alone."""
    grad_output = case.problem.grad_output
    if case.scope == "op":
        return lambda grad_output: compute(prepare(grad_output))
    prepared = prepare(grad_output)
    return lambda given: compute(prepared if given is grad_output else prepare(given))
