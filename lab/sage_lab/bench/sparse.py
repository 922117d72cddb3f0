"""SLA2's measurements: the public functions and their peers on one mask, and the ladder, level by level.

Peers: PyTorch's SDPA with FlashAttention-2 and with cuDNN over all blocks; FlexAttention and FlashAttention-4 with a
block mask (softmax branch alone: no router, no linear branch). Their backward passes need blocks of 128 keys; one of
them is two of ours.

The scope "autograd" is the public function. The ladder also has "kernel" (routing, copies and sums are done), "op"
(everything, from 16-bit tensors), and "part" (one part of level 3's op, timed alone). A peer has no such parts: its
rows have the scope of the turn. The ladder's public function is the module `sage_ref.SLA2`: its router chooses masks.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
from sage_kernels.common.quantize import quantize
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.forward.program import run_sparse_forward
from sage_kernels.sla2.ladder import LEVELS, Prepared, obstacle, prepare, run_backward, run_forward, sla2_launch
from sage_kernels.sla2.ops import LEVEL_HOPPER, LEVEL_INT8, forward_level
from sage_kernels.sla2.prepare import read_blocks
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q, route, sequence_mean
from sage_kernels.sla2.sums import unselected_sums
from torch import Tensor

import sage_ref
from sage_lab.bench.case import Case, Measurement, Shape
from sage_lab.bench.contenders import Absent, Contender, Entry, level_entries
from sage_lab.bench.judge import RESULTS, Results, require_close, sparse_head, worst_error
from sage_lab.bench.peers import PEER_BLOCK_KV, PEERS
from sage_lab.bench.ratios import OURS
from sage_lab.bench.timing import alone
from sage_lab.records import Row
from sage_ref.sla2 import selected_count, top_blocks
from sage_ref.sla2.router import Routing

JUDGED_QUERIES = 2048  # whole score matrices of long sequences don't fit
LARGE = 40_000  # tokens from which on attention over all blocks takes a second, and level 0 several
SPARSITIES = (0.85, 0.9, 0.95, 0.97)
MASKS = ("random", "skewed")  # skewed: every query selects the first key block too, whose list is as long as can be
DENSE_PEERS = ("sdpa_flash", "sdpa_cudnn")  # over all blocks
SPARSE_PEERS = tuple(name for name, peer in PEERS.items() if peer.sparse is not None)
BACKWARD_LEVELS = (0, 1)  # 1: on Hopper


class SparseCase(Case):
    """A case with a share of selected blocks, alpha, and a router that chooses them."""

    def __init__(self, shape: Shape, sparsity: float, mask: str = "router", **options):
        """Draw the tensors and alpha. mask: who chooses the blocks, as a record names it."""
        super().__init__(shape, **options)
        self.sparsity, self.mask, self.judged_queries = sparsity, mask, min(shape.n, JUDGED_QUERIES)
        self.repetitions = self.repetitions if shape.n < LARGE else 10
        self.query_blocks, self.key_blocks = triton.cdiv(shape.n, MASK_BLOCK_Q), triton.cdiv(shape.n, MASK_BLOCK_KV)
        self.wide_blocks = triton.cdiv(shape.n, PEER_BLOCK_KV)
        self.count = selected_count(sparsity, self.key_blocks)
        identity = torch.eye(shape.head_dim, device=self.device)
        self.router = Routing(identity, identity, self.count)
        self.alpha = torch.rand(shape.batch, shape.heads, self.query_blocks, device=self.device)

    @property
    def columns(self) -> Row:
        """The columns of a row that say what was computed."""
        return super().columns | {"selected_blocks": self.count, "mask": self.mask, "part": None, "peak_mb": None}

    @property
    def share(self) -> float:
        """The share of the selected blocks."""
        return self.count / self.key_blocks

    def prepare(self, level: int) -> Prepared:
        """Return the inputs of a forward level, with the blocks that the router chose."""
        return prepare(*self.tensors[:3], self.router, self.alpha, level, scale=self.scale)

    def exact_for(self, block_mask: Tensor, *, softmax_alone: bool = False) -> Results:
        """Compute the first head's results for a mask in blocks of 64 keys.

        softmax_alone: without the linear branch, which is the same with alpha = 1.
        """
        rows = triton.cdiv(self.judged_queries, MASK_BLOCK_Q)
        alpha = torch.ones_like(self.alpha) if softmax_alone else self.alpha
        return sparse_head(*self.judged_tensors, block_mask[:, :, :rows], alpha[:, :, :rows])

    def narrow(self, wide_mask: Tensor) -> Tensor:
        """Return a mask in blocks of 128 keys in our blocks of 64."""
        return wide_mask.repeat_interleave(PEER_BLOCK_KV // MASK_BLOCK_KV, -1)[..., : self.key_blocks]

    def wide_mask(self, count: int) -> Tensor:
        """Draw `count` blocks of 128 keys per row: bool [B, H, Tm, ceil(N / 128)]."""
        size = self.shape.batch, self.shape.heads, self.query_blocks, self.wide_blocks
        scores = torch.rand(size, device=self.device)
        if self.mask == "skewed":
            scores[..., 0] = 2  # above all others
        return top_blocks(scores, count)

    def peers(self, wide_mask: Tensor, dense: tuple[str, ...] = DENSE_PEERS) -> dict[str, Callable[[], Contender]]:
        """Return the peers over all blocks, and those with a mask in blocks of 128 keys."""
        make = {name: partial(self.peer, name) for name in dense}
        return make | {name: partial(self.sparse_peer, name, wide_mask) for name in SPARSE_PEERS}

    def sparse_peer(self, name: str, wide_mask: Tensor) -> Contender:
        """Return a peer with a mask in blocks of 128 keys."""
        attention = PEERS[name].required().sparse(wide_mask, PEER_BLOCK_KV, self.shape.n)
        exact = self.exact_for(self.narrow(wide_mask), softmax_alone=True)
        return self.contender(name, attention, exact, op="sla2")


def user_rows(shape: Shape, absent: Absent) -> Iterator[Row]:
    """Time `sage_ref.sparse_linear_attention`, in INT8 and in 16 bit, and its peers on both masks."""
    for mask in MASKS:
        case = SparseCase(shape, SPARSITIES[-1], mask)
        wide_count = selected_count(case.sparsity, case.wide_blocks)
        wide_mask = case.wide_mask(wide_count)
        case.count = PEER_BLOCK_KV // MASK_BLOCK_KV * wide_count
        make = {f"{OURS}, {name}": partial(ours, case, wide_mask, name == "INT8") for name in ("INT8", "16 bit")}
        yield from case.user_turns(absent.tried(make | case.peers(wide_mask), case.columns), absent)


def ours(case: SparseCase, wide_mask: Tensor, quantize: bool) -> Contender:
    """Return the public function with its softmax branch in INT8 or in 16 bit."""
    block_mask = case.narrow(wide_mask)
    level = forward_level(case.device, case.shape.head_dim, quantize)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = {"quantize": quantize, "backend": "triton"}
        return sage_ref.sparse_linear_attention(query, key, value, block_mask, case.alpha, **options)

    return case.contender(OURS, attention, case.exact_for(block_mask), op="sla2", level=level)


def ladder_rows(shape: Shape, absent: Absent) -> Iterator[Row]:
    """Time the forward levels, the parts of level 3's op, and the module with the backward levels."""
    for sparsity in SPARSITIES:
        case = SparseCase(shape, sparsity)
        block_mask = case.prepare(LEVEL_INT8).choice.block_mask
        exact = case.exact_for(block_mask)
        yield from level_rows(case, block_mask, exact[0], absent)
        yield from part_rows(case)
        yield from module_rows(case, exact, absent)


def level_rows(case: SparseCase, block_mask: Tensor, exact_output: Tensor, absent: Absent) -> Iterator[Row]:
    """Time every forward level, and the peers' forward passes with the mask that the router chose."""

    def error_of(found: tuple) -> float:
        return require_close(found[0], exact_output)

    levels = [x for x, chosen in LEVELS.items() if obstacle(chosen, case.device, case.shape.head_dim) is None]
    levels, run = levels if case.shape.n < LARGE else levels[1:], partial(run_forward, scale=case.scale)
    peers = absent.tried({name: partial(forward_peer, case, name, block_mask) for name in SPARSE_PEERS}, case.columns)
    for scope in ("kernel", "op"):
        make = level_entries("sla2", levels, case.prepare, run, error_of, scope)
        make |= {name: lambda entry=entry: entry for name, entry in peers.items()}
        yield from case.turn(make, absent, scope=scope, direction="fwd")


def forward_peer(case: SparseCase, name: str, block_mask: Tensor) -> Entry:
    """Return a peer's forward pass with our blocks of 64 keys, with which it has no backward pass."""
    sparse = PEERS[name].required().sparse(block_mask, MASK_BLOCK_KV, case.shape.n)
    attention = partial(sparse, *case.tensors[:3])
    error = require_close(attention(), case.exact_for(block_mask, softmax_alone=True)[0])
    return Entry("sla2", name, None, attention, error)


def part_rows(case: SparseCase) -> Iterator[Row]:
    """Time the steps of level 3's op one by one. Their sum exceeds the op's time: each is timed alone."""
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
        "sparse branch alone": lambda: run_sparse_forward(inputs, level.key_tile, launch, scale=scale, fused=False),
        "sparse, linear branch and mix": lambda: run_sparse_forward(
            inputs, level.key_tile, launch, scale=scale, save=False
        ),
    }
    for part, step in steps.items():
        entry = Entry("sla2", OURS, LEVEL_INT8, step, None)
        yield case.row(entry, alone(step), scope="part", direction="fwd", part=part, protocol="alone")


def module_rows(case: SparseCase, exact: Results, absent: Absent) -> Iterator[Row]:
    """Time `sage_ref.SLA2` in INT8 and in 16 bit, our backward kernels, and the peers.

    The peers that read a mask get a random one in blocks of 128 keys, half as many.
    """
    wide_count = round(case.count / 2)
    make = {f"{OURS}, {name}": partial(sla2_module, case, name == "INT8", exact) for name in ("16 bit", "INT8")}
    make |= case.peers(case.wide_mask(wide_count), DENSE_PEERS if case.sparsity == SPARSITIES[-1] else ())
    found = absent.tried(make, case.columns)
    peaks = {(contender.provider, contender.level): peak_memory(contender.both) for contender in found.values()}
    hopper = obstacle(LEVELS[LEVEL_HOPPER], case.device, case.shape.head_dim) is None
    backward = {
        f"{OURS}, backward level {level}": partial(backward_entry, case, level, exact)
        for level in BACKWARD_LEVELS[: 1 + hopper]
    }
    for row in case.user_turns(found, absent, backward):
        if row["level"] in BACKWARD_LEVELS:
            row["scope"] = "kernel"
        if row["provider"] in SPARSE_PEERS:
            row["part"] = f"{wide_count} blocks of {PEER_BLOCK_KV} keys"
        if row["direction"] == "fwd+bwd":
            row["peak_mb"] = peaks[row["provider"], row["level"]]
        yield row


def sla2_module(case: SparseCase, quantize: bool, exact: Results) -> Contender:
    """Return the module with the case's alpha."""
    module = sage_ref.SLA2(
        case.shape.head_dim, case.shape.heads, sparsity=case.sparsity, quantize=quantize,
        query_blocks=case.query_blocks, backend="triton",
    ).to(case.device)  # fmt: skip
    with torch.no_grad():
        module.alpha_logit.copy_(case.alpha[0].logit(eps=1e-6))
    module.requires_grad_(False)  # alpha's gradient comes with dQ, dK and dV whether it is asked for or not
    level = forward_level(case.device, case.shape.head_dim, quantize)
    return case.contender(OURS, module, exact, op="sla2", level=level)


def backward_entry(case: SparseCase, level: int, exact: Results) -> Entry:
    """Return our backward kernels alone, matched to a forward pass in INT8."""
    prepared = case.prepare(LEVEL_INT8)
    results = run_forward(prepared, LEVEL_INT8, scale=case.scale, save=True)[1:]
    *operands, grad_output = case.tensors
    hats = {"k_mean": None, "q_hat": prepared.inputs.q_hat, "k_hat": prepared.inputs.k_hat}
    inputs = BackwardInputs(grad_output, *operands, case.alpha, prepared.inputs.sums, *results, **hats)
    kernels = partial(run_backward, choice=prepared.choice, scale=case.scale, level=level)
    judged = grad_output.clone()
    judged[:, :, case.judged_queries :] = 0
    found = kernels(inputs._replace(grad_output=judged))
    error = worst_error(found[:3], exact[1:], names=RESULTS[1:])
    return Entry("sla2", OURS, level, partial(kernels, inputs), error)


def peak_memory(step: Callable[[], object]) -> float:
    """Return the most memory that was allocated during step(), what was there before included; 10^6 bytes."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return round(torch.cuda.max_memory_allocated() / 1e6, 1)


USER = Measurement("sla2", tuple(Shape(1, 12, 12, n, 128) for n in (4096, 8192, 16384, 32760)), user_rows)
# The last two are the shapes of the paper's video models: Wan2.1-1.3B at 480p and 14B at 720p.
LADDER_SIZES = ((12, 8192), (12, 32760), (40, 75600))
LADDER = Measurement("sla2 levels", tuple(Shape(1, heads, heads, n, 128) for heads, n in LADDER_SIZES), ladder_rows)
