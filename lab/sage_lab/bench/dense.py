"""SageBwd's measurements: the public function and its peers, and both ladders, level by level.

A peer has no scopes "kernel" and "op": its rows have the scope of the turn in which they were timed.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from sage_kernels.sagebwd.backward.program import BackwardInputs
from sage_kernels.sagebwd.ladder import (
    BACKWARD_LEVELS,
    FORWARD_LEVELS,
    BackwardLevel,
    ForwardLevel,
    obstacle,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)
from sage_kernels.sagebwd.ops import backward_level, forward_level
from torch import Tensor

import sage_ref
from sage_lab.bench.measure import OPERATIONS, Case, Provider, Run, Turn, by_autograd, by_kernels
from sage_lab.bench.peers import PEERS
from sage_lab.bench.problem import LONG, Problem, Shape
from sage_lab.bench.ratios import OURS, UNBIASED
from sage_lab.bench.timing import GPU, Gpu

WIDTH, TOKENS = 2048, 32768  # heads times head size, batch times N
LENGTHS, HEAD_DIMS = (1024, 2048, 4096, 8192, 16384), (128, 64)
GROUPED = (2048, 8192)  # lengths at which 64 heads share 8 key heads, too


def user_shapes(lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Shape]:
    """Yield the shapes on which users' functions are timed."""
    for head_dim, n, causal, layout in itertools.product(head_dims, lengths, (False, True), ("bhnd", "bnhd")):
        heads = WIDTH // head_dim
        yield Shape(max(1, TOKENS // n), heads, heads, n, head_dim, causal, layout)
    grouped = [n for n in lengths if n in GROUPED and 128 in head_dims]
    for n, causal in itertools.product(grouped, (False, True)):  # four times the heads, a quarter of the batch
        yield Shape(TOKENS // n // 4, 64, 8, n, 128, causal)


def ladder_shapes(
    lengths: Sequence[int] = (*LENGTHS, LONG, 2 * LONG), head_dims: Sequence[int] = HEAD_DIMS
) -> Iterator[Shape]:
    """Yield the shapes on which levels are timed."""
    for head_dim, n, causal in itertools.product(head_dims, lengths, (False, True)):
        heads = WIDTH // head_dim
        yield Shape(1 if n >= LONG else 4, heads, heads, n, head_dim, causal)


def user_turns(shape: Shape, gpu: Gpu = GPU) -> Iterator[Turn]:
    """Yield what a user gets: each direction, then both as a CUDA graph."""
    problem = Problem(shape, gpu)
    everybody = [*ours(problem), *PEERS]
    for direction in OPERATIONS:
        yield Turn(Case(problem, direction), everybody)
    if shape.layout == "bhnd":
        yield Turn(Case(problem, "fwd+bwd", cuda_graph=True), everybody)


def ladder_turns(shape: Shape, gpu: Gpu = GPU) -> Iterator[Turn]:
    """Yield every level and the peers, one turn per scope and direction; then what a user gets."""
    problem = Problem(shape, gpu)
    for direction, scope in itertools.product(("fwd", "bwd"), ("kernel", "op") if shape.n < LONG else ()):
        yield Turn(Case(problem, direction, scope), [*levels(problem, direction), *PEERS])
    for direction in OPERATIONS:
        yield Turn(Case(problem, direction), [*ours(problem), *PEERS])


def ours(problem: Problem) -> list[Provider]:
    """Return the public function with its kernels, with a biased and an unbiased O."""
    where = problem.query.device, problem.shape.head_dim
    level = f"{forward_level(*where)}/{backward_level(*where, problem.shape.causal)}"
    return [Provider(name, partial(public, unbiased=name == UNBIASED), "sagebwd", level) for name in (OURS, UNBIASED)]


def public(case: Case, unbiased: bool) -> Run:
    """Run `sage_ref.sagebwd_attention` with its kernels."""
    options = {"is_causal": case.problem.shape.causal, "enable_gqa": True, "unbiased": unbiased, "backend": "triton"}
    return by_autograd(case, partial(sage_ref.sagebwd_attention, **options))


def levels(problem: Problem, direction: str) -> list[Provider]:
    """Return the levels of a ladder that run here."""
    ladder, of_level = LADDERS[direction]
    can_run = [number for number, level in ladder.items() if runs(level, problem)]
    return [Provider(OURS, partial(of_level, level=number), "sagebwd", number) for number in can_run]


def runs(level: ForwardLevel | BackwardLevel, problem: Problem) -> bool:
    """Return whether a level can run here."""
    return obstacle(level, problem.query.device, problem.shape.head_dim) is None


def forward_of_level(case: Case, level: int) -> Run:
    """Run a level of the forward ladder."""
    problem = case.problem
    options = {"is_causal": problem.shape.causal, "scale": problem.scale}
    return by_kernels(
        case,
        prepare=lambda _: prepare_forward(*problem.inputs, level, scale=problem.scale, smooth_k=True),
        compute=lambda inputs: run_forward(inputs, level, **options)[:1],
    )


def backward_of_level(case: Case, level: int) -> Run:
    """Run a level of the backward ladder."""
    options = {"is_causal": case.problem.shape.causal, "scale": case.problem.scale}
    return by_kernels(
        case,
        prepare=BackwardPreparation(case.problem, level).inputs,
        compute=lambda inputs: run_backward(inputs, level, **options),
    )


class BackwardPreparation:
    """A forward pass, and the inputs that a backward level takes from it.

    INT8 levels take the results of the best forward level, levels in 16 bit those of level 0.
    """

    def __init__(self, problem: Problem, level: int):
        best = forward_level(problem.query.device, problem.shape.head_dim) if BACKWARD_LEVELS[level].int8 else 0
        self.problem, self.level = problem, level
        self.forward = prepare_forward(*problem.inputs, best, scale=problem.scale, smooth_k=True)
        self.results = run_forward(self.forward, best, is_causal=problem.shape.causal, scale=problem.scale)

    def inputs(self, grad_output: Tensor) -> BackwardInputs:
        """Return what the level reads."""
        return prepare_backward(
            grad_output,
            *self.problem.inputs,
            *self.results,
            self.level,
            q_hat=self.forward.q_hat,
            k_hat=self.forward.k_hat,
            v_range=self.forward.v_range,
            is_causal=self.problem.shape.causal,
        )


LADDERS = {"fwd": (FORWARD_LEVELS, forward_of_level), "bwd": (BACKWARD_LEVELS, backward_of_level)}
