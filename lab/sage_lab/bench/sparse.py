"""SLA2's measurements: the public functions and their peers on one mask, and the ladder, level by level.

Peers are attention over all blocks, and attention with the same block mask, which computes the softmax branch alone: no
router, no linear branch. A peer's rows have the scope of the turn in which they were timed. The ladder's public
function is the module `sage_ref.SLA2`, whose router chooses masks.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.ladder import LEVELS, obstacle, run_backward, run_forward
from sage_kernels.sla2.ops import LEVEL_HOPPER, LEVEL_INT8, forward_level

import sage_ref
from sage_lab.bench.measure import OPERATIONS, Case, Provider, Run, Turn, by_autograd, by_kernels
from sage_lab.bench.peers import EVERY_BLOCK, MASKED_PEERS
from sage_lab.bench.problem import MaskedProblem, Shape
from sage_lab.bench.ratios import OURS
from sage_lab.bench.timing import GPU, REPETITIONS, Gpu

LARGE, FEW = 40_000, 10  # tokens from which on attention over all blocks takes a second; its repetitions
SPARSITIES = (0.85, 0.9, 0.95, 0.97)
USERS_SPARSITY = SPARSITIES[-1]
MASKS = ("random", "skewed")
LENGTHS, HEAD_DIMS = (4096, 8192, 16384, 32760), (128,)
# Heads and lengths of the paper's video models, Wan2.1-1.3B at 480p and 14B at 720p; 12 heads for all other lengths.
LADDER_LENGTHS, HEADS, MANY_HEADS = (8192, 32760, 75600), 12, {75600: 40}


def user_shapes(lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Shape]:
    """Yield the shapes on which SLA2 is timed."""
    for head_dim, n in itertools.product(head_dims, lengths):
        heads = MANY_HEADS.get(n, HEADS)
        yield Shape(1, heads, heads, n, head_dim)


def ladder_shapes(lengths: Sequence[int] = LADDER_LENGTHS, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Shape]:
    """Yield the shapes on which levels are timed."""
    return user_shapes(lengths, head_dims)


def repetitions(shape: Shape) -> int:
    return REPETITIONS if shape.n < LARGE else FEW


def user_turns(shape: Shape, gpu: Gpu = GPU) -> Iterator[Turn]:
    """Yield `sage_ref.sparse_linear_attention`, in INT8 and in 16 bit, and its peers on both masks."""
    for mask in MASKS:
        problem = MaskedProblem(shape, USERS_SPARSITY, mask, gpu)
        everybody = [*ours(problem, public), *EVERY_BLOCK, *MASKED_PEERS]
        for direction in OPERATIONS:
            yield Turn(Case(problem, direction, repetitions=repetitions(shape)), everybody)


def ladder_turns(shape: Shape, gpu: Gpu = GPU, sparsities: Sequence[float] = SPARSITIES) -> Iterator[Turn]:
    """Yield the forward levels, the module, and the backward levels."""
    for sparsity in sparsities:
        problem = MaskedProblem(shape, sparsity, gpu=gpu)
        of_shape = {"repetitions": repetitions(shape)}
        for scope in ("kernel", "op"):
            yield Turn(Case(problem, "fwd", scope, **of_shape), [*forward_levels(problem), *MASKED_PEERS])
        dense = EVERY_BLOCK if sparsity == sparsities[-1] else ()
        for direction in OPERATIONS:
            yield Turn(Case(problem, direction, **of_shape), [*ours(problem, module), *dense])
        yield Turn(Case(problem, "bwd", "kernel", **of_shape), backward_levels(problem))


def ours(problem: MaskedProblem, function) -> list[Provider]:
    """Return the public function or the module, with the softmax branch in INT8 and in 16 bit."""
    where = problem.query.device, problem.shape.head_dim
    return [
        Provider(OURS, partial(function, quantize=quantize), "sla2", forward_level(*where, quantize))
        for quantize in (True, False)
    ]


def public(case: Case, quantize: bool) -> Run:
    """Run `sage_ref.sparse_linear_attention`."""
    mask, alpha = case.problem.block_mask, case.problem.alpha
    options = {"block_mask": mask, "alpha": alpha, "quantize": quantize, "backend": "triton"}
    return by_autograd(case, partial(sage_ref.sparse_linear_attention, **options))


def module(case: Case, quantize: bool) -> Run:
    """Run `sage_ref.SLA2` with the problem's alpha."""
    problem = case.problem
    found = sage_ref.SLA2(
        problem.shape.head_dim,
        problem.shape.heads,
        sparsity=problem.sparsity,
        quantize=quantize,
        query_blocks=problem.query_blocks,
        backend="triton",
    ).to(problem.query.device)
    with torch.no_grad():
        found.alpha_logit.copy_(problem.alpha[0].logit(eps=1e-6))
    found.requires_grad_(False)  # alpha's gradient comes with dQ, dK and dV whether it is asked for or not
    return by_autograd(case, found)


def forward_levels(problem: MaskedProblem) -> list[Provider]:
    """Return the forward levels that run here; of long sequences without level 0, which takes seconds."""
    device, head_dim = problem.query.device, problem.shape.head_dim
    first = 0 if problem.shape.n < LARGE else 1
    can_run = [x for x, level in LEVELS.items() if x >= first and obstacle(level, device, head_dim) is None]
    return [Provider(OURS, partial(forward_of_level, level=level), "sla2", level) for level in can_run]


def forward_of_level(case: Case, level: int) -> Run:
    """Run a level of the forward ladder."""
    problem = case.problem
    return by_kernels(
        case,
        prepare=lambda _: problem.prepare(level),
        compute=lambda prepared: run_forward(prepared, level, scale=problem.scale)[:1],
    )


def backward_levels(problem: MaskedProblem) -> list[Provider]:
    """Return the backward levels that run here: 0, and on Hopper 1."""
    on_hopper = obstacle(LEVELS[LEVEL_HOPPER], problem.query.device, problem.shape.head_dim) is None
    return [Provider(OURS, partial(backward_of_level, level=x), "sla2", x) for x in ((0, 1) if on_hopper else (0,))]


def backward_of_level(case: Case, level: int) -> Run:
    """Run our backward kernels, matched to a forward pass in INT8."""
    problem = case.problem
    prepared = problem.prepare(LEVEL_INT8)
    saved = run_forward(prepared, LEVEL_INT8, scale=problem.scale, save=True)[1:]
    hats = {"k_mean": None, "q_hat": prepared.inputs.q_hat, "k_hat": prepared.inputs.k_hat}
    tensors = *problem.inputs, problem.alpha, prepared.inputs.sums, *saved
    return by_kernels(
        case,
        prepare=lambda grad_output: BackwardInputs(grad_output, *tensors, **hats),
        compute=lambda inputs: run_backward(inputs, prepared.choice, scale=problem.scale, level=level)[:3],
    )
