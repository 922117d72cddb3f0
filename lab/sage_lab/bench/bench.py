"""What a user gets: the public function and its peers, timed in turn, with the time that a call costs the host.

Scope "autograd": from 16-bit tensors to the output and the gradients, smoothing, quantisation and copies included.
Layouts: "bhnd" is [B, H, N, D] in memory; "bnhd" is [B, N, H, D], as a projection leaves them, given as views.
cuda_graph: forward and backward captured once and replayed, without the host.

TOPS = 4 B H Nq Nk D / seconds forward, 2.5 times that backward, half of it if causal.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from sage_kernels.sagebwd.ops import backward_level, forward_level
from torch import Tensor

import sage_ref
from sage_lab.bench.contenders import OPERATIONS, OURS, UNBIASED, Absent, Contender, Entry, measured_columns, turn
from sage_lab.bench.judge import LARGEST_ERROR, RESULTS, exact_head, peer_head, require_close
from sage_lab.bench.paired import Timing
from sage_lab.bench.peers import PEERS

TOKENS = 32768  # batch times N
LAYOUTS = ("bhnd", "bnhd")
LONG = 32768  # from here on matrices of scores don't fit, and FlashAttention-2 is the judge


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    n: int
    head_dim: int
    causal: bool
    layout: str = "bhnd"

    @property
    def columns(self) -> dict:
        """The columns of a row that say what was computed."""
        size = {"batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads, "n_q": self.n, "n_k": self.n}
        return size | {"head_dim": self.head_dim, "causal": self.causal, "layout": self.layout}


def _shapes() -> Iterator[Shape]:
    lengths = (1024, 2048, 4096, 8192, 16384)
    for head_dim, n, causal, layout in itertools.product((128, 64), lengths, (False, True), LAYOUTS):
        heads = 2048 // head_dim
        yield Shape(TOKENS // n, heads, heads, n, head_dim, causal, layout)
    for n, causal in itertools.product((2048, 8192), (False, True)):  # four times the heads, a quarter of the batch
        yield Shape(TOKENS // n // 4, 64, 8, n, 128, causal)


SHAPES = tuple(_shapes())


class Case:
    """Random tensors of one shape, and what their first head should give."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"):
        self.shape, self.dtype = shape, dtype
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        self.tensors = tuple(self._draw(count, device) for count in heads)  # query, key, value, grad_output
        self.options = {"is_causal": shape.causal, "scale": 1 / math.sqrt(shape.head_dim)}
        judge = peer_head if shape.n >= LONG else exact_head
        self.exact = judge(*self.tensors, **self.options)

    def _draw(self, heads: int, device: str) -> Tensor:
        batch, n, head_dim = self.shape.batch, self.shape.n, self.shape.head_dim
        if self.shape.layout == "bnhd":
            return torch.randn(batch, n, heads, head_dim, device=device, dtype=self.dtype).transpose(1, 2)
        return torch.randn(batch, heads, n, head_dim, device=device, dtype=self.dtype)

    def row(
        self, scope: str, direction: str, entry: Entry, timing: Timing, host_us: float, *, cuda_graph: bool = False
    ) -> dict:
        shape = self.shape
        operations = 4 * shape.batch * shape.heads * shape.n**2 * shape.head_dim / (2 if shape.causal else 1)
        return {
            "op": entry.op, "level": entry.level, "provider": entry.provider,
            "dtype": str(self.dtype).removeprefix("torch."), **shape.columns, "sparsity": 0.0, "scope": scope,
            "direction": direction, "protocol": "paired", "cuda_graph": cuda_graph,
            **measured_columns(timing, OPERATIONS[direction] * operations, entry.error, host_us),
        }  # fmt: skip

    def ours(self, *, unbiased: bool = False) -> Contender:
        where = self.tensors[0].device, self.shape.head_dim
        level = f"{forward_level(*where)}/{backward_level(*where, self.shape.causal)}"
        attention = partial(_sagebwd, unbiased=unbiased)
        return self._contender(UNBIASED if unbiased else OURS, attention, op="sagebwd", level=level)

    def peer(self, provider: str) -> Contender:
        return self._contender(provider, PEERS[provider].attention, largest_error=PEERS[provider].largest_error)

    def _contender(self, provider: str, attention, largest_error: float = LARGEST_ERROR, **names) -> Contender:
        def judge(found):
            results = zip(RESULTS, found, self.exact, strict=True)
            return max(require_close(x, exact, largest_error, name) for name, x, exact in results)

        *operands, grad_output = self.tensors
        causal = self.shape.causal
        return Contender(provider, lambda q, k, v: attention(q, k, v, causal), operands, grad_output, judge, **names)


def _sagebwd(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, *, unbiased: bool) -> Tensor:
    options = {"is_causal": is_causal, "enable_gqa": True, "unbiased": unbiased, "backend": "triton"}
    return sage_ref.sagebwd_attention(query, key, value, **options)


def bench_shape(shape: Shape, absent: Absent | None = None) -> Iterator[dict]:
    """Rows of one shape: each direction in turn, then CUDA graphs. absent: where missing peers are noted."""
    torch.compiler.reset()  # it gives up after eight shapes
    case, absent = Case(shape), absent or Absent()
    yield from user_rows(case, contenders(case, absent), absent, graphs=shape.layout == "bhnd")


def contenders(case: Case, absent: Absent) -> dict[str, Contender]:
    """Ours, with a biased and an unbiased O, and every peer that is here, all of them right."""
    make = {OURS: case.ours, UNBIASED: partial(case.ours, unbiased=True)}
    make |= {provider: partial(case.peer, provider) for provider in absent.present(tuple(PEERS), case.shape.columns)}
    return absent.tried(make, case.shape.columns)


def user_rows(case: Case, found: dict[str, Contender], absent: Absent, *, graphs: bool) -> Iterator[dict]:
    """The three directions. graphs: then CUDA graphs of forward and backward."""
    for direction in OPERATIONS:
        make = {name: partial(contender.entry, direction) for name, contender in found.items()}
        entries = absent.tried(make, case.shape.columns | {"direction": direction})
        yield from turn(entries, partial(case.row, "autograd", direction))
    if graphs:
        make = {name: contender.graph_entry for name, contender in found.items()}
        entries = absent.tried(make, case.shape.columns | {"direction": "fwd+bwd", "cuda_graph": True})
        yield from turn(entries, partial(case.row, "autograd", "fwd+bwd", cuda_graph=True))
