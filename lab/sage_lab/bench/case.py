"""A case: random tensors of one shape, the right result of their first head, and a row for everybody timed on it.

TOPS = 4 B H Nq Nk D / seconds forward, and 2.5 times that backward. Causal attention counts half of it, and sparse
attention the share of the selected blocks.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from sage_lab.bench.contenders import Absent, Contender, Entry
from sage_lab.bench.judge import Results, exact_head, peer_head
from sage_lab.bench.peers import PEERS
from sage_lab.bench.timing import REPETITIONS, Timing, host_microseconds, paired
from sage_lab.records import Row

# Operations of a direction over those of the forward pass: two matmuls, five, and both.
OPERATIONS = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}
LONG = 32768  # tokens from which on matrices of scores don't fit, and FlashAttention-2 is the judge
# The columns of a row, in this order; a case has all of them or all but those of sparse attention.
COLUMNS = (
    *("op", "level", "provider", "dtype", "batch", "heads", "kv_heads", "n_q", "n_k", "head_dim", "causal", "layout"),
    *("sparsity", "selected_blocks", "mask", "scope", "part", "direction", "protocol", "cuda_graph", "peak_mb"),
    *(*Timing._fields, "tops", "rel_l2", "host_us"),
)


class Shape(NamedTuple):
    """The shape of query, key and value."""

    batch: int
    heads: int
    kv_heads: int
    n: int
    head_dim: int
    causal: bool = False
    layout: str = "bhnd"  # in memory; "bnhd": as a projection leaves them, given as views


class Measurement(NamedTuple):
    """A measurement of `bench`."""

    name: str
    shapes: tuple[Shape, ...]
    measure: Callable[[Shape, Absent], Iterator[Row]]

    def rows(self, shape: Shape, absent: Absent | None = None) -> Iterator[Row]:
        """Yield the rows of one shape; absent notes who could not take part."""
        return self.measure(shape, absent or Absent())


class Case:
    """Random tensors of one shape, and everybody who is timed on them."""

    sparsity, share = 0.0, 1.0  # of sparse attention: what is left out, and the share of the selected blocks
    repetitions = REPETITIONS

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"):
        """Draw query, key, value and grad_output."""
        torch.compiler.reset()  # it gives up after eight shapes
        self.shape, self.dtype = shape, dtype
        heads = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
        self.tensors = tuple(self._draw(count, device) for count in heads)
        self.device = self.tensors[0].device
        self.scale, self.judged_queries = 1 / math.sqrt(shape.head_dim), shape.n
        self.options = {"is_causal": shape.causal, "scale": self.scale}

    def _draw(self, heads: int, device: str) -> Tensor:
        batch, n, head_dim = self.shape.batch, self.shape.n, self.shape.head_dim
        if self.shape.layout == "bnhd":
            return torch.randn(batch, n, heads, head_dim, device=device, dtype=self.dtype).transpose(1, 2)
        return torch.randn(batch, heads, n, head_dim, device=device, dtype=self.dtype)

    @property
    def columns(self) -> Row:
        """The columns of a row that say what was computed."""
        batch, heads, kv_heads, n, head_dim, causal, layout = self.shape
        size = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "n_q": n, "n_k": n, "head_dim": head_dim}
        return size | {"causal": causal, "layout": layout, "sparsity": self.sparsity}

    @property
    def judged_tensors(self) -> list[Tensor]:
        """Query, key, value and grad_output, with the queries that are judged."""
        query, key, value, grad_output = self.tensors
        return [query[:, :, : self.judged_queries], key, value, grad_output[:, :, : self.judged_queries]]

    @cached_property
    def exact(self) -> Results:
        """The first head's results of attention over all keys."""
        is_long = self.judged_queries >= LONG
        return (peer_head if is_long else exact_head)(*self.judged_tensors, **self.options)

    def contender(self, provider: str, attention: Callable, exact: Results | None = None, **options) -> Contender:
        """Return attention(query, key, value) on these tensors; see `Contender`."""
        return Contender(provider, attention, self.tensors, self.exact if exact is None else exact, **options)

    def peer(self, name: str) -> Contender:
        """Return a peer over all keys."""
        peer = PEERS[name].required()
        attention = partial(peer.attention, is_causal=self.shape.causal)
        return self.contender(name, attention, largest_error=peer.largest_error)

    def turn(
        self, make: dict[str, Callable[[], Entry]], absent: Absent, *, scope: str, direction: str, **columns
    ) -> Iterator[Row]:
        """Time all that can be made in turn. columns: further ones of their rows."""
        columns |= {"scope": scope, "direction": direction}
        entries = absent.tried(make, self.columns | columns)
        times = paired({name: entry.call for name, entry in entries.items()}, self.repetitions) if entries else {}
        for name, entry in entries.items():
            yield self.row(entry, times[name], host_microseconds(entry.call), **columns)

    def user_turns(
        self, found: dict[str, Contender], absent: Absent, backward: dict[str, Callable[[], Entry]] | None = None
    ) -> Iterator[Row]:
        """Time the three directions of all contenders in turn. backward: who joins the turn of the backward pass."""
        for direction in OPERATIONS:
            make = {name: partial(contender.entry, direction) for name, contender in found.items()}
            make |= (backward or {}) if direction == "bwd" else {}
            yield from self.turn(make, absent, scope="autograd", direction=direction)

    def row(
        self, entry: Entry, timing: Timing, host_us: float | None = None, *, scope: str, direction: str, **columns
    ) -> Row:
        """Return the row of one time; COLUMNS, without those that this case has not."""
        is_sparse = entry.op == "sla2"
        scores = self.shape.batch * self.shape.heads * self.shape.n**2 / (2 if self.shape.causal else 1)
        operations = 4 * scores * self.shape.head_dim * (self.share if is_sparse else 1.0) * OPERATIONS[direction]
        values = {
            **entry._asdict(), "dtype": str(self.dtype).removeprefix("torch."), "protocol": "paired",
            "cuda_graph": False, **self.columns, "scope": scope, "direction": direction, **columns,
            "sparsity": self.sparsity if is_sparse else 0.0,
            **timing._asdict(),
            "tops": None if scope == "part" else round(operations / timing.ms_median / 1e9, 1),
            "rel_l2": None if entry.error is None else float(f"{entry.error:.3g}"),
            "host_us": None if host_us is None else round(host_us, 1),
        }  # fmt: skip
        return {name: values[name] for name in COLUMNS if name in values}
