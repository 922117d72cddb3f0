"""Time the SLA2 ladder, the registered operation and the peers a user could pick instead, in one process.

Peers: PyTorch's scaled_dot_product_attention with FlashAttention-2 and with cuDNN (all blocks), FlexAttention with the
same block mask (sparse branch only: it has no router and no linear branch). Scopes: "kernel" (routing, copies and sums
done), "op" (everything, from 16-bit tensors), "part" (one step of the op), "autograd" (the module `sage_ref.SLA2`).
Nothing is timed before its result on fresh random inputs was compared with the reference.

TOPS = 4 B H Nq Nk D (1 - sparsity) / seconds forward, 2.5 times that backward: the softmax branch's operations.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sage_kernels.common.quantize import quantize
from sage_kernels.measure.bench import PEERS, Timing, measure, require_close
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.forward.program import run_forward
from sage_kernels.sla2.ladder import LEVELS, Prepared, prepare, run, run_backward, sla2_launch
from sage_kernels.sla2.ops import LEVEL_16BIT, LEVEL_INT8
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q, route, sequence_mean, top_blocks
from sage_kernels.sla2.sums import key_blocks, unselected_sums
from sage_ref import SLA2
from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sla2 import BlockSettings, selected_count, sla2_backward, sla2_forward
from sage_ref.sla2.router import Routing

SPARSITIES = (0.85, 0.9, 0.95, 0.97)
JUDGED_QUERIES = 2048  # of the first head: whole score matrices of long sequences don't fit
MULTIPLES = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}


class Shape(NamedTuple):
    batch: int
    heads: int
    n: int
    head_dim: int


# The last two are the shapes of the paper's video models: Wan2.1-1.3B at 480p and 14B at 720p.
SHAPES = (Shape(1, 12, 8192, 128), Shape(1, 12, 32760, 128), Shape(1, 40, 75600, 128))


class Case:
    """Random tensors of one shape, one sparsity, and what the first queries of the first head should give."""

    def __init__(self, shape: Shape, sparsity: float, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.sparsity, self.dtype = shape, sparsity, dtype
        self.tensors = tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
        self.scale = 1 / math.sqrt(shape.head_dim)
        self.rows, self.columns = triton.cdiv(shape.n, MASK_BLOCK_Q), triton.cdiv(shape.n, MASK_BLOCK_KV)
        self.count = selected_count(sparsity, self.columns)
        identity = torch.eye(shape.head_dim, device="cuda")
        self.router = Routing(identity, identity, self.count)
        self.alpha = torch.rand(*shape[:2], self.rows, device="cuda")

    def prepare(self, level: int) -> Prepared:
        return prepare(*self.tensors[:3], self.router, self.alpha, level, scale=self.scale)

    def judge(self, block_mask: Tensor) -> tuple[Tensor, ...]:
        """O, dQ, dK, dV of the first head without quantisation, for a dO that is 0 after JUDGED_QUERIES queries."""
        q, k, v, do = (x[:1, :1].float() for x in self.tensors)
        q, do, rows = q[:, :, :JUDGED_QUERIES], do[:, :, :JUDGED_QUERIES], JUDGED_QUERIES // MASK_BLOCK_Q
        mask, alpha, settings = block_mask[:1, :1, :rows], self.alpha[:1, :1, :rows], BlockSettings()
        forward = sla2_forward(q, k, v, mask, alpha, settings)
        o_s, log_sum_exp = forward.sparse_output, forward.log_sum_exp
        return forward.output, *sla2_backward(do, q, k, v, mask, alpha, o_s, log_sum_exp, settings)[:3]

    def judged_grad_output(self) -> Tensor:
        judged = self.tensors[3].clone()
        judged[:, :, JUDGED_QUERIES:] = 0
        return judged

    def row(
        self, op: str, provider: str, level: int | None, scope: str, direction: str, timing: Timing,
        error: float | None, *, part: str | None = None, peak_mb: float | None = None,
    ) -> dict:  # fmt: skip
        share = 1.0 if op == "attention" else self.count / self.columns
        operations = 4 * math.prod(self.shape) * self.shape.n * share * MULTIPLES[direction]
        return {
            "op": op, "level": level, "provider": provider, "dtype": str(self.dtype).removeprefix("torch."),
            "batch": self.shape.batch, "heads": self.shape.heads, "kv_heads": self.shape.heads, "n_q": self.shape.n,
            "n_k": self.shape.n, "head_dim": self.shape.head_dim, "causal": False,
            "sparsity": self.sparsity if op == "sla2" else 0.0, "selected_blocks": self.count, "scope": scope,
            "part": part, "direction": direction,
            **{name: round(value, 5) for name, value in timing._asdict().items()},
            "tops": None if scope == "part" else round(operations / timing.ms_median / 1e9, 1), "peak_mb": peak_mb,
            "rel_l2": None if error is None else float(f"{error:.3g}"),
        }  # fmt: skip


def judged(x: Tensor) -> Tensor:
    return x[:1, :1, :JUDGED_QUERIES]


def bench_shape(shape: Shape) -> Iterator[dict]:
    """Rows for one shape: the dense peers, then for every sparsity the ladder, its parts, the module, FlexAttention."""
    yield from dense_peers(Case(shape, 0.0))
    for sparsity in SPARSITIES:
        case = Case(shape, sparsity)
        block_mask = case.prepare(LEVEL_INT8).block_mask
        exact = case.judge(block_mask)
        yield from ladder_rows(case, exact[0])
        yield from part_rows(case)
        yield from module_rows(case, exact)
        yield from flex_rows(case, block_mask)


def ladder_rows(case: Case, exact: Tensor) -> Iterator[dict]:
    for level in range(len(LEVELS)):
        if level == 0 and case.shape.n > 40_000:
            continue  # seconds, and nothing new
        prepared = case.prepare(level)
        error = require_close(judged(run(prepared, level, scale=case.scale).output), exact)
        timing = measure(lambda prepared=prepared, level=level: run(prepared, level, scale=case.scale))
        yield case.row("sla2", "sage_kernels", level, "kernel", "fwd", timing, error)
        timing = measure(lambda level=level: run(case.prepare(level), level, scale=case.scale))
        yield case.row("sla2", "sage_kernels", level, "op", "fwd", timing, error)


def part_rows(case: Case) -> Iterator[dict]:
    """The steps of the INT8 op one by one. Their sum exceeds the op's time: each is timed alone."""
    query, key, value, _ = case.tensors
    prepared = case.prepare(LEVEL_INT8)
    inputs, scale = prepared.inputs, case.scale
    q_bar = quantize(query, MASK_BLOCK_Q, values=False, block_mean=True)[1]
    k_bar = key_blocks(key, value, int8=True).k_bar
    level = LEVELS[LEVEL_INT8]
    launch = sla2_launch(level.kernel, LEVEL_INT8, query)
    steps = {
        "quantise Q, block means": lambda: quantize(query, MASK_BLOCK_Q, block_mean=True),
        "h_j, z_j, block means of K, quantise V": lambda: key_blocks(key, value, int8=True),
        "router, Top-k, lists": lambda: route(q_bar, k_bar, *case.router),
        "mean key": lambda: sequence_mean(k_bar, case.shape.n, MASK_BLOCK_KV),
        "smooth and quantise K": lambda: quantize(key, MASK_BLOCK_KV, mean=prepared.k_mean),
        "H = complement x h": lambda: unselected_sums(prepared.block_mask, prepared.key_sums),
        "sparse branch alone": lambda: run_forward(inputs, level.key_tile, launch, scale=scale, fused=False),
        "sparse, linear branch and mix": lambda: run_forward(inputs, level.key_tile, launch, scale=scale, save=False),
    }
    for part, step in steps.items():
        yield case.row("sla2", "sage_kernels", LEVEL_INT8, "part", "fwd", measure(step), None, part=part)


def module_rows(case: Case, exact: tuple[Tensor, ...]) -> Iterator[dict]:
    """`sage_ref.SLA2` in INT8 and in 16 bit, and the backward kernels alone."""
    *operands, grad_output = case.tensors
    for level, int8 in ((LEVEL_16BIT, False), (LEVEL_INT8, True)):
        module = SLA2(
            case.shape.head_dim, case.shape.heads, sparsity=case.sparsity, quantize=int8, query_blocks=case.rows,
            backend="triton",
        ).cuda()  # fmt: skip
        with torch.no_grad():
            module.alpha_logit.copy_(case.alpha[0].logit(eps=1e-6))
        leaves = [x.detach().requires_grad_() for x in operands]
        output = module(*leaves)
        found = torch.autograd.grad(output, leaves, case.judged_grad_output())
        errors = [require_close(judged(output), exact[0]), require_close(judged(found[0]), exact[1])]
        errors += [require_close(found[i], exact[i + 1]) for i in (1, 2)]
        trained = [*leaves, module.alpha_logit]
        output = module(*leaves)

        def backward(output=output, trained=trained):
            return torch.autograd.grad(output, trained, grad_output, retain_graph=True)

        def both(module=module, leaves=leaves, trained=trained):
            return torch.autograd.grad(module(*leaves), trained, grad_output)

        def inference(module=module):
            with torch.no_grad():
                return module(*operands)

        for direction, step in (("fwd", inference), ("bwd", backward), ("fwd+bwd", both)):
            peak_mb = peak_memory(step)
            row = "sla2", "sage_kernels", level, "autograd", direction, measure(step), max(errors)
            yield case.row(*row, peak_mb=peak_mb)
    prepared = case.prepare(LEVEL_INT8)
    result = run(prepared, LEVEL_INT8, scale=case.scale, save=True)
    inputs = BackwardInputs(
        grad_output, *operands, case.alpha, prepared.inputs.sums, *result[1:], prepared.k_mean
    )  # fmt: skip
    kernels = measure(lambda: run_backward(inputs, prepared.block_mask, prepared.inputs.lists, scale=case.scale))
    yield case.row("sla2", "sage_kernels", 0, "kernel", "bwd", kernels, max(errors))


def peak_memory(step: Callable[[], object]) -> float:
    """Most memory that was allocated during step(), what was there before it included; 10^6 bytes."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return round(torch.cuda.max_memory_allocated() / 1e6, 1)


def peer_rows(
    case: Case, op: str, provider: str, attention: Callable, exact: tuple[Tensor, ...], part: str | None = None
) -> Iterator[dict]:
    *operands, grad_output = case.tensors
    leaves = [x.detach().requires_grad_() for x in operands]
    output = attention(*leaves)
    found = torch.autograd.grad(output, leaves, case.judged_grad_output(), retain_graph=True)
    pairs = [(judged(output), exact[0]), (judged(found[0]), exact[1]), *zip(found[1:], exact[2:], strict=True)]
    error = max(require_close(*pair) for pair in pairs)
    steps = {
        "fwd": lambda: attention(*operands),
        "bwd": lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True),
        "fwd+bwd": lambda: torch.autograd.grad(attention(*leaves), leaves, grad_output),
    }
    for direction, step in steps.items():
        peak_mb = peak_memory(step)
        yield case.row(op, provider, None, "autograd", direction, measure(step), error, part=part, peak_mb=peak_mb)


def dense_peers(case: Case) -> Iterator[dict]:
    q, k, v, do = (x[:1, :1].float() for x in case.tensors)
    q, do = judged(q), judged(do)
    forward = attention_forward(q, k, v)
    exact = forward.output, *attention_backward(do, q, k, v, forward.output, forward.log_sum_exp)[:3]
    del forward
    for provider, backend in PEERS.items():
        with sdpa_kernel(backend):
            yield from peer_rows(case, "attention", provider, F.scaled_dot_product_attention, exact)


def flex_rows(case: Case, block_mask: Tensor) -> Iterator[dict]:
    """FlexAttention's O_s. Its backward needs blocks of 128 keys: with one, it visits half as many of those."""
    query, key, value, _ = case.tensors
    o_s = _with_alpha_one(case).judge(block_mask)[0]
    attention = _flex_attention(block_mask, MASK_BLOCK_KV, case.shape.n)
    error = require_close(judged(attention(query, key, value)), o_s)
    yield case.row("sla2", "flex", None, "autograd", "fwd", measure(lambda: attention(query, key, value)), error)
    scores = torch.rand(*block_mask.shape[:3], triton.cdiv(case.shape.n, 128), device="cuda")
    wide_mask, _ = top_blocks(scores, round(case.count / 2))
    attention = _flex_attention(wide_mask, 128, case.shape.n)
    narrow = wide_mask.repeat_interleave(2, -1)[..., : case.columns]
    exact = _with_alpha_one(case).judge(narrow)
    yield from peer_rows(case, "sla2", "flex", attention, exact, f"{round(case.count / 2)} blocks of 128 keys")


def _flex_attention(block_mask: Tensor, block_kv: int, n: int) -> Callable:
    counts = block_mask.sum(-1, dtype=torch.int32)
    order = block_mask.int().argsort(dim=-1, descending=True, stable=True).int()
    mask = BlockMask.from_kv_blocks(  # every listed block is full: no mask inside
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=(MASK_BLOCK_Q, block_kv),
        seq_lengths=(n, n),
    )  # fmt: skip
    torch.compiler.reset()  # dynamo gives up after eight shapes
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask)


def _with_alpha_one(case: Case) -> Case:
    """The same tensors with alpha = 1: then O is O_s."""
    twin = copy.copy(case)
    twin.alpha = torch.ones_like(case.alpha)
    return twin
