"""Who is timed together: every candidate whose result was right, and why the others could not take part."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_lab.bench.paired import Timing, captured, host_microseconds, paired
from sage_lab.bench.peers import PEERS

OURS = "sage_kernels"
UNBIASED = f"{OURS}, unbiased"  # the same with the option of that name
REPETITIONS = 16
# Operations of a direction over those of the forward pass: two matmuls, five, and both.
OPERATIONS = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}

Judge = Callable[[tuple[Tensor, ...]], float]  # of O, dQ, dK, dV: their largest error, or RuntimeError


class Entry(NamedTuple):
    """One candidate in one turn."""

    op: str
    provider: str
    level: int | str | None
    run: Callable[[], object]
    error: float | None


class Contender:
    """One attention on one set of tensors, judged before anything is timed."""

    def __init__(
        self, provider: str, attention: Callable, operands: Sequence[Tensor], grad_output: Tensor, judge: Judge, *,
        op: str = "attention", level: int | str | None = None, judged_grad_output: Tensor | None = None,
    ):  # fmt: skip
        """judged_grad_output: the dO of the comparison, where that is another one than the dO of the timing."""
        self.op, self.provider, self.level = op, provider, level
        self.attention, self.operands, self.grad_output, self.judge = attention, operands, grad_output, judge
        self.leaves = [x.detach().requires_grad_() for x in operands]
        output = attention(*self.leaves)
        judged = grad_output if judged_grad_output is None else judged_grad_output
        self.error = judge((output.detach(), *torch.autograd.grad(output, self.leaves, judged)))

    def entry(self, direction: str) -> Entry:
        """The run of a direction, tried once."""
        run = {"fwd": self.forward, "bwd": self.backward, "fwd+bwd": lambda: self.both}[direction]()
        run()
        return self._entry(run)

    def graph_entry(self) -> Entry:
        """Forward and backward as a CUDA graph, whose gradients are judged too."""
        with torch.no_grad():
            output = self.attention(*self.operands)
        graph = captured(self.both)
        for gradient in graph.outputs:
            gradient.zero_()
        graph.replay()
        self.judge((output, *graph.outputs))
        return self._entry(graph.replay)

    def forward(self) -> Callable[[], object]:
        return lambda: self.attention(*self.operands)

    def backward(self) -> Callable[[], object]:
        output = self.attention(*self.leaves)
        return lambda: torch.autograd.grad(output, self.leaves, self.grad_output, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.attention(*self.leaves), self.leaves, self.grad_output)

    def _entry(self, run: Callable[[], object]) -> Entry:
        return Entry(self.op, self.provider, self.level, run, self.error)


class Absent:
    """Who could not take part: each is said at once, and kept as a row without times.

    without: peers to leave out.
    """

    def __init__(self, without: Sequence[str] = ()):
        self.without, self.rows = without, []

    def present(self, providers: Sequence[str], where: dict) -> list[str]:
        """Those that are not left out and whose package can be imported. where: the columns of what is measured."""
        reasons = {
            provider: "left out with --without" if provider in self.without else PEERS[provider].why_missing()
            for provider in providers
        }
        for provider, reason in reasons.items():
            if reason is not None:
                self.note(provider, reason, where)
        return [provider for provider, reason in reasons.items() if reason is None]

    def tried(self, make: dict[str, Callable[[], Any]], where: dict) -> dict[str, Any]:
        """What `make` returns, by provider, without those that fail."""
        made = {}
        for provider, attempt in make.items():
            try:
                made[provider] = attempt()
            except Exception as error:  # whatever it is, the others are timed
                self.note(provider, " ".join(f"{type(error).__name__}: {error}".split())[:300], where)
        return made

    def note(self, provider: str, reason: str, where: dict) -> None:
        print(f"not timed: {provider}, {reason}", flush=True)
        self.rows.append({"missing": reason, "provider": provider, **where})


def turn(
    entries: dict[str, Entry], row: Callable[[Entry, Timing, float], dict], repetitions: int = REPETITIONS
) -> Iterator[dict]:
    """All entries timed in turn: row(entry, its timing, its host time in microseconds) of each."""
    times = paired({name: entry.run for name, entry in entries.items()}, repetitions)
    for name, entry in entries.items():
        yield row(entry, times[name], host_microseconds(entry.run))


def measured_columns(timing: Timing, operations: float | None, error: float | None, host_us: float | None) -> dict:
    """The columns of a row that were measured. operations: of one run, for TOPS."""
    return {
        **{name: round(value, 5) for name, value in timing._asdict().items()},
        "tops": None if operations is None else round(operations / timing.ms_median / 1e9, 1),
        "rel_l2": None if error is None else float(f"{error:.3g}"),
        "host_us": None if host_us is None else round(host_us, 1),
    }
