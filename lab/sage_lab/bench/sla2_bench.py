"""Time the SLA2 ladder, the module and their peers in turn, and the steps of level 3's op one by one.

Peers: PyTorch's SDPA with FlashAttention-2 and with cuDNN (all blocks, in the turns of the highest sparsity);
FlexAttention and FlashAttention-4 with a block mask (softmax branch only: no router, no linear branch). Scopes:
"kernel" (routing, copies and sums done), "op" (everything, from 16-bit tensors), "part" (one step of the op, timed
alone), "autograd" (the module `sage_ref.SLA2`). A peer has no such parts: its rows carry the scope of the turn.
Nothing is timed before its result on fresh random inputs was compared with the reference.

TOPS = 4 B H Nq Nk D (1 - sparsity) / seconds forward, 2.5 times that backward: the softmax branch's operations.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
from sage_kernels.common.quantize import quantize
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.forward.program import run_forward
from sage_kernels.sla2.ladder import LEVELS, obstacle, run, run_backward, sla2_launch
from sage_kernels.sla2.ops import LEVEL_INT8, forward_level
from sage_kernels.sla2.prepare import read_blocks
from sage_kernels.sla2.routing import MASK_BLOCK_KV, route, sequence_mean, top_blocks
from sage_kernels.sla2.sums import unselected_sums
from torch import Tensor

from sage_lab.bench.contenders import OPERATIONS, OURS, Absent, Contender, Entry, turn
from sage_lab.bench.judge import require_close
from sage_lab.bench.paired import Timing, measure
from sage_lab.bench.sla2_case import DENSE_PEERS, Case, Shape, judged
from sage_lab.bench.sparse_peers import PEER_BLOCK_KV, SPARSE_PEERS
from sage_ref import SLA2

SPARSITIES = (0.85, 0.9, 0.95, 0.97)
BACKWARD_LEVELS = (0, 1)  # 1: on Hopper

# The last two are the shapes of the paper's video models: Wan2.1-1.3B at 480p and 14B at 720p.
SHAPES = (Shape(1, 12, 8192, 128), Shape(1, 12, 32760, 128), Shape(1, 40, 75600, 128))


def bench_shape(shape: Shape, absent: Absent | None = None) -> Iterator[dict]:
    """Rows of one shape, all sparsities. absent: where missing peers are noted."""
    absent = absent or Absent()
    for sparsity in SPARSITIES:
        torch.compiler.reset()  # it gives up after eight shapes
        case = Case(shape, sparsity)
        block_mask = case.prepare(LEVEL_INT8).choice.block_mask
        exact = case.judge(block_mask)
        yield from level_rows(case, block_mask, exact[0], absent)
        yield from part_rows(case)
        yield from module_rows(case, exact, absent)


def level_rows(case: Case, block_mask: Tensor, exact: Tensor, absent: Absent) -> Iterator[dict]:
    """Every forward level, and the peers' forward passes with the mask that the router chose."""
    head_dim, device = case.shape.head_dim, case.alpha.device
    levels = [level for level, chosen in enumerate(LEVELS) if obstacle(chosen, device, head_dim) is None]
    levels = levels[1:] if case.shape.n > 40_000 else levels  # level 0 then takes seconds, and shows nothing new
    providers = absent.present(tuple(SPARSE_PEERS), case.where)
    peers = absent.tried({name: partial(forward_peer, case, name, block_mask) for name in providers}, case.where)
    for scope in ("kernel", "op"):
        entries = {f"level {level}": level_entry(case, level, scope, exact) for level in levels}
        yield from turn(entries | peers, partial(case.row, scope, "fwd"), case.repetitions)


def level_entry(case: Case, level: int, scope: str, exact: Tensor) -> Entry:
    kernel = partial(run, case.prepare(level), level, scale=case.scale)
    error = require_close(judged(kernel().output), exact)

    def whole():
        return run(case.prepare(level), level, scale=case.scale)

    return Entry("sla2", OURS, level, kernel if scope == "kernel" else whole, error)


def forward_peer(case: Case, provider: str, block_mask: Tensor) -> Entry:
    """A peer's O_s with our blocks of 64 keys, with which it has no backward pass."""
    attention = partial(SPARSE_PEERS[provider](block_mask, MASK_BLOCK_KV, case.shape.n), *case.tensors[:3])
    error = require_close(judged(attention()), case.judge_softmax(block_mask, MASK_BLOCK_KV)[0])
    return Entry("sla2", provider, None, attention, error)


def part_rows(case: Case) -> Iterator[dict]:
    """The steps of level 3's op one by one. Their sum exceeds the op's time: each is timed alone."""
    query, key, value, _ = case.tensors
    prepared = case.prepare(LEVEL_INT8)
    inputs, scale = prepared.inputs, case.scale
    _, k_bar, q_bar, *_ = read_blocks(query, key, value, int8=True, means=True)
    level = LEVELS[LEVEL_INT8]
    launch = sla2_launch(level.kernel, LEVEL_INT8, query)
    steps = {
        "h_j, z_j, block means, quantise Q and V": lambda: read_blocks(query, key, value, int8=True, means=True),
        "router, Top-k, lists": lambda: route(q_bar, k_bar, *case.router),
        "mean key": lambda: sequence_mean(k_bar, case.shape.n, MASK_BLOCK_KV),
        "smooth and quantise K": lambda: quantize(key, MASK_BLOCK_KV, mean=prepared.k_mean),
        "H = complement x h": lambda: unselected_sums(prepared.choice.complement, prepared.key_sums),
        "sparse branch alone": lambda: run_forward(inputs, level.key_tile, launch, scale=scale, fused=False),
        "sparse, linear branch and mix": lambda: run_forward(inputs, level.key_tile, launch, scale=scale, save=False),
    }
    for part, step in steps.items():
        entry = Entry("sla2", OURS, LEVEL_INT8, step, None)
        yield case.row("part", "fwd", entry, measure(step), None, part=part, protocol="alone")


def module_rows(case: Case, exact: tuple[Tensor, ...], absent: Absent) -> Iterator[dict]:
    """`sage_ref.SLA2` in INT8 and in 16 bit, our backward kernels, and the peers.

    The peers that read a mask get a random one of blocks of 128 keys, half as many.
    """
    count = round(case.count / 2)
    scores = torch.rand(*case.shape[:2], case.rows, triton.cdiv(case.shape.n, PEER_BLOCK_KV), device=case.alpha.device)
    wide_mask = top_blocks(scores, count).block_mask
    dense = DENSE_PEERS if case.sparsity == SPARSITIES[-1] else ()
    make = {f"{OURS}, {name}": partial(sla2_module, case, name == "INT8", exact) for name in ("16 bit", "INT8")}
    for provider in absent.present((*dense, *SPARSE_PEERS), case.where):
        make[provider] = partial(case.peer_contender, provider, wide_mask, PEER_BLOCK_KV)
    found = absent.tried(make, case.where)
    peaks = {(contender.provider, contender.level): peak_memory(contender.both) for contender in found.values()}

    def row(direction: str, entry: Entry, timing: Timing, host_us: float) -> dict:
        scope = "kernel" if entry.level in BACKWARD_LEVELS else "autograd"
        part = f"{count} blocks of {PEER_BLOCK_KV} keys" if entry.provider in SPARSE_PEERS else None
        peak_mb = peaks[entry.provider, entry.level] if direction == "fwd+bwd" else None
        return case.row(scope, direction, entry, timing, host_us, part=part, peak_mb=peak_mb)

    for direction in OPERATIONS:
        make = {name: partial(contender.entry, direction) for name, contender in found.items()}
        entries = absent.tried(make, case.where | {"direction": direction})
        if direction == "bwd" and (module := found.get(f"{OURS}, INT8")):
            for level in BACKWARD_LEVELS[: 1 + (obstacle(LEVELS[-1], case.alpha.device, case.shape.head_dim) is None)]:
                entries[f"kernels, level {level}"] = backward_entry(case, level, module.error)
        yield from turn(entries, partial(row, direction), case.repetitions)


def sla2_module(case: Case, quantize: bool, exact: tuple[Tensor, ...]) -> Contender:
    module = SLA2(
        case.shape.head_dim, case.shape.heads, sparsity=case.sparsity, quantize=quantize,
        query_blocks=case.rows, backend="triton",
    ).to(case.alpha.device)  # fmt: skip
    with torch.no_grad():
        module.alpha_logit.copy_(case.alpha[0].logit(eps=1e-6))
    module.requires_grad_(False)  # alpha's gradient comes with dQ, dK and dV whether it is asked for or not
    level = forward_level(case.alpha.device, case.shape.head_dim, quantize)
    return case.contender(OURS, module, exact, "sla2", level)


def backward_entry(case: Case, level: int, error: float) -> Entry:
    """Our backward kernels alone. error: of the module; level 1 is compared with level 0."""
    prepared = case.prepare(LEVEL_INT8)
    result = run(prepared, LEVEL_INT8, scale=case.scale, save=True)
    *operands, grad_output = case.tensors
    inputs = BackwardInputs(
        grad_output, *operands, case.alpha, prepared.inputs.sums, *result[1:], prepared.k_mean
    )  # fmt: skip
    kernels = partial(run_backward, inputs, prepared.choice, scale=case.scale)
    if level > 0:
        pairs = zip(kernels(level=level)[:3], kernels()[:3], strict=True)
        error = max(require_close(found, expected[:1, :1].float()) for found, expected in pairs)
    return Entry("sla2", OURS, level, partial(kernels, level=level), error)


def peak_memory(step: Callable[[], object]) -> float:
    """Most memory that was allocated during step(), what was there before it included; 10^6 bytes."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return round(torch.cuda.max_memory_allocated() / 1e6, 1)
