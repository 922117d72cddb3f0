"""A problem: random tensors of one shape, and the right results of their first head."""

import math
from typing import NamedTuple

import torch
import triton
from sage_kernels.sla2.ladder import Prepared, prepare
from sage_kernels.sla2.ops import LEVEL_INT8
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from torch import Tensor

from sage_lab.bench.judge import Results, exact_head, peer_head, sparse_head
from sage_lab.bench.timing import GPU, Gpu
from sage_lab.records import Row
from sage_ref.sla2 import selected_count, top_blocks
from sage_ref.sla2.router import Routing

LONG = 32768  # tokens from which on matrices of scores don't fit, and FlashAttention-2 is the judge
JUDGED_QUERIES = 2048  # of a problem with a mask: its sequences are long
PEER_BLOCK_KV = 128  # keys of a block in the backward passes of peers; one of them is two of ours
ROUTER = "router"  # the mask that SLA2's router chooses


class Shape(NamedTuple):
    """The shape of query, key and value."""

    batch: int
    heads: int
    kv_heads: int
    n: int
    head_dim: int
    causal: bool = False
    layout: str = "bhnd"  # in memory; "bnhd": as a projection leaves them, given as views


class Problem:
    """Query, key, value and grad_output, standard normal."""

    sparsity, selected_blocks, mask = 0.0, None, None  # of a problem with a mask

    def __init__(self, shape: Shape, gpu: Gpu = GPU):
        torch.compiler.reset()  # it gives up after eight shapes
        torch.manual_seed(0)  # the same tensors whatever was measured before
        self.shape, self.gpu = shape, gpu
        self.query, self.grad_output = self._draw(shape.heads), self._draw(shape.heads)
        self.key, self.value = self._draw(shape.kv_heads), self._draw(shape.kv_heads)
        self.inputs = self.query, self.key, self.value
        self.scale, self.judged_queries = 1 / math.sqrt(shape.head_dim), shape.n
        self._exact: dict[str, Results] = {}

    def _draw(self, heads: int) -> Tensor:
        batch, n, head_dim = self.shape.batch, self.shape.n, self.shape.head_dim
        options = {"device": self.gpu.device, "dtype": self.gpu.dtype}
        if self.shape.layout == "bnhd":
            return torch.randn(batch, n, heads, head_dim, **options).transpose(1, 2)
        return torch.randn(batch, heads, n, head_dim, **options)

    @property
    def judged_grad_output(self) -> Tensor:
        """The gradient with which a pass is judged: 0 for queries that nobody judges."""
        if self.judged_queries == self.shape.n:
            return self.grad_output
        judged = self.grad_output.clone()
        judged[:, :, self.judged_queries :] = 0
        return judged

    def exact(self, op: str) -> Results:
        """Return the first head's results of an operation, for the queries that are judged."""
        op = "attention" if op == "sagebwd" else op
        if op not in self._exact:
            query, grad_output = (x[:, :, : self.judged_queries] for x in (self.query, self.grad_output))
            self._exact[op] = self._results(op, query, self.key, self.value, grad_output)
        return self._exact[op]

    def _results(self, op: str, *tensors: Tensor) -> Results:
        head = peer_head if self.judged_queries >= LONG else exact_head
        return head(*tensors, is_causal=self.shape.causal, scale=self.scale)

    def share(self, op: str) -> float:
        """Return the share of all scores that an operation needs."""
        return 0.5 if self.shape.causal else 1.0

    @property
    def columns(self) -> Row:
        """The columns of a row that say what was computed."""
        batch, heads, kv_heads, n, head_dim, causal, layout = self.shape
        size = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "n_q": n, "n_k": n, "head_dim": head_dim}
        found = {"dtype": str(self.gpu.dtype).removeprefix("torch."), **size, "causal": causal, "layout": layout}
        return found | {"sparsity": self.sparsity, "selected_blocks": self.selected_blocks, "mask": self.mask}


class MaskedProblem(Problem):
    """A problem with a block mask, and alpha.

    A router chooses the blocks, or they are drawn in blocks of 128 keys, which peers need in their backward passes. In
    a skewed mask every query selects the first block too: its list is as long as can be. Operations are "attention"
    over all blocks, "masked", the softmax over the selected ones, and "sla2", both branches.
    """

    def __init__(self, shape: Shape, sparsity: float, mask: str = ROUTER, gpu: Gpu = GPU):
        super().__init__(shape, gpu)
        self.sparsity, self.mask, self.judged_queries = sparsity, mask, min(shape.n, JUDGED_QUERIES)
        self.query_blocks = triton.cdiv(shape.n, MASK_BLOCK_Q)
        self.key_blocks = triton.cdiv(shape.n, MASK_BLOCK_KV)
        self.alpha = torch.rand(shape.batch, shape.heads, self.query_blocks, device=gpu.device)
        if mask == ROUTER:
            identity = torch.eye(shape.head_dim, device=gpu.device)
            self.selected_blocks = selected_count(sparsity, self.key_blocks)
            self.chooser = Routing(identity, identity, self.selected_blocks)
            self.block_mask = self.prepare(LEVEL_INT8).choice.block_mask
            self.peer_mask, self.peer_block_kv = self.block_mask, MASK_BLOCK_KV
        else:
            self.peer_mask, self.peer_block_kv = self._wide_mask(), PEER_BLOCK_KV
            in_one = PEER_BLOCK_KV // MASK_BLOCK_KV
            self.block_mask = self.peer_mask.repeat_interleave(in_one, -1)[..., : self.key_blocks]
            self.selected_blocks, self.chooser = in_one * int(self.peer_mask[0, 0, 0].sum()), self.block_mask

    def _wide_mask(self) -> Tensor:
        blocks = triton.cdiv(self.shape.n, PEER_BLOCK_KV)
        scores = torch.rand(self.shape.batch, self.shape.heads, self.query_blocks, blocks, device=self.gpu.device)
        if self.mask == "skewed":
            scores[..., 0] = 2  # above all others
        return top_blocks(scores, selected_count(self.sparsity, blocks))

    def prepare(self, level: int) -> Prepared:
        """Return the inputs of a forward level of SLA2."""
        return prepare(*self.inputs, self.chooser, self.alpha, level, scale=self.scale)

    def _results(self, op: str, *tensors: Tensor) -> Results:
        if op == "attention":
            return super()._results(op, *tensors)
        rows = triton.cdiv(self.judged_queries, MASK_BLOCK_Q)
        alpha = torch.ones_like(self.alpha) if op == "masked" else self.alpha
        return sparse_head(*tensors, self.block_mask[:, :, :rows], alpha[:, :, :rows])

    def share(self, op: str) -> float:
        """Return the share of all scores that an operation needs."""
        return super().share(op) if op == "attention" else self.selected_blocks / self.key_blocks
