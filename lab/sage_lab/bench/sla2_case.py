"""Tensors of one shape and sparsity, what their first head should give, and the peers for a block mask on them."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from sage_kernels.sla2.ladder import Prepared, prepare
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from torch import Tensor

from sage_lab.bench.contenders import OPERATIONS, REPETITIONS, Contender, Entry, measured_columns
from sage_lab.bench.judge import require_close
from sage_lab.bench.paired import Timing
from sage_lab.bench.peers import PEERS
from sage_lab.bench.sparse_peers import SPARSE_PEERS
from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sla2 import BlockSettings, selected_count, sla2_backward, sla2_forward
from sage_ref.sla2.router import Routing

JUDGED_QUERIES = 2048  # of the first head: whole score matrices of long sequences don't fit
DENSE_PEERS = ("sdpa_flash", "sdpa_cudnn")  # over all blocks


class Shape(NamedTuple):
    batch: int
    heads: int
    n: int
    head_dim: int


class Case:
    """Random tensors of one shape, one sparsity, and what the first queries of the first head should give."""

    def __init__(self, shape: Shape, sparsity: float, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"):
        self.shape, self.sparsity, self.dtype = shape, sparsity, dtype
        self.tensors = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        self.scale = 1 / math.sqrt(shape.head_dim)
        self.rows, self.columns = triton.cdiv(shape.n, MASK_BLOCK_Q), triton.cdiv(shape.n, MASK_BLOCK_KV)
        self.count = selected_count(sparsity, self.columns)
        identity = torch.eye(shape.head_dim, device=device)
        self.router = Routing(identity, identity, self.count)
        self.alpha = torch.rand(*shape[:2], self.rows, device=device)

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

    @property
    def where(self) -> dict:
        return self.shape._asdict() | {"sparsity": self.sparsity}

    @property
    def repetitions(self) -> int:
        """Fewer where attention over all blocks takes a second."""
        return REPETITIONS if self.shape.n < 40_000 else 10

    def judge_dense(self) -> tuple[Tensor, ...]:
        """The same of attention over all blocks."""
        q, k, v, do = (x[:1, :1].float() for x in self.tensors)
        q, do = judged(q), judged(do)
        forward = attention_forward(q, k, v)
        return forward.output, *attention_backward(do, q, k, v, forward.output, forward.log_sum_exp)[:3]

    def contender(
        self, provider: str, attention: Callable, exact: tuple[Tensor, ...], op: str, level: int | None = None
    ) -> Contender:
        """attention: of query, key, value; exact: what `judge` returns for it."""

        def judge(found: tuple[Tensor, ...]) -> float:
            output, grad_query, grad_key, grad_value = found
            pairs = zip((judged(output), judged(grad_query), grad_key, grad_value), exact, strict=True)
            return max(require_close(x, right) for x, right in pairs)

        *operands, grad_output = self.tensors
        return Contender(
            provider, attention, operands, grad_output, judge, op=op, level=level,
            judged_grad_output=self.judged_grad_output(),
        )  # fmt: skip

    def peer_contender(self, provider: str, block_mask: Tensor, block_kv: int) -> Contender:
        """A peer over all blocks, or one with block_mask, bool [B, H, Tm, ceil(N / block_kv)]."""
        if provider in DENSE_PEERS:
            attention = partial(PEERS[provider].attention, is_causal=False)
            return self.contender(provider, attention, self.judge_dense(), "attention")
        attention = SPARSE_PEERS[provider](block_mask, block_kv, self.shape.n)
        return self.contender(provider, attention, self.judge_softmax(block_mask, block_kv), "sla2")

    def judge_softmax(self, block_mask: Tensor, block_kv: int) -> tuple[Tensor, ...]:
        """`judge` of the softmax branch alone: with alpha = 1, O is O_s."""
        twin = copy.copy(self)
        twin.alpha = torch.ones_like(self.alpha)
        return twin.judge(self.narrow(block_mask, block_kv))

    def narrow(self, block_mask: Tensor, block_kv: int) -> Tensor:
        """The mask in our blocks of MASK_BLOCK_KV keys."""
        return block_mask.repeat_interleave(block_kv // MASK_BLOCK_KV, -1)[..., : self.columns]

    def row(
        self, scope: str, direction: str, entry: Entry, timing: Timing, host_us: float | None, *,
        part: str | None = None, mask: str = "router", peak_mb: float | None = None, protocol: str = "paired",
    ) -> dict:  # fmt: skip
        share = 1.0 if entry.op == "attention" else self.count / self.columns
        operations = 4 * math.prod(self.shape) * self.shape.n * share * OPERATIONS[direction]
        return {
            "op": entry.op, "level": entry.level, "provider": entry.provider,
            "dtype": str(self.dtype).removeprefix("torch."), "batch": self.shape.batch, "heads": self.shape.heads,
            "kv_heads": self.shape.heads, "n_q": self.shape.n, "n_k": self.shape.n, "head_dim": self.shape.head_dim,
            "causal": False, "layout": "bhnd", "sparsity": self.sparsity if entry.op == "sla2" else 0.0,
            "selected_blocks": self.count, "mask": mask, "scope": scope, "part": part, "direction": direction,
            "protocol": protocol, "cuda_graph": False, "peak_mb": peak_mb,
            **measured_columns(timing, None if scope == "part" else operations, entry.error, host_us),
        }  # fmt: skip


def judged(x: Tensor) -> Tensor:
    return x[:1, :1, :JUDGED_QUERIES]
