"""Contenders: those that computed the right result are timed; for the others the reason is noted."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_lab.bench.judge import LARGEST_ERROR, Results, worst_error
from sage_lab.bench.ratios import OURS
from sage_lab.bench.timing import captured
from sage_lab.records import Row


class Entry(NamedTuple):
    """One candidate of one turn."""

    op: str
    provider: str
    level: int | str | None
    call: Callable[[], object]
    error: float | None


class Contender:
    """One attention on one set of tensors, compared with the exact results before anything is timed."""

    def __init__(
        self, provider: str, attention: Callable[..., Tensor], tensors: Sequence[Tensor], exact: Results, *,
        op: str = "attention", level: int | str | None = None, largest_error: float = LARGEST_ERROR,
    ):  # fmt: skip
        """Call attention(query, key, value) and its backward pass, and compare.

        tensors: query, key, value, grad_output. exact: may have the first queries alone; dO is 0 for the others then.
        """
        self.op, self.provider, self.level = op, provider, level
        self.attention, self.exact, self.largest_error = attention, exact, largest_error
        *self.operands, self.grad_output = tensors
        self.leaves = [x.detach().requires_grad_() for x in self.operands]
        judged = self.grad_output.clone()
        judged[:, :, exact[0].shape[2] :] = 0
        output = attention(*self.leaves)
        self.error = self._judge(output.detach(), *torch.autograd.grad(output, self.leaves, judged))

    def _judge(self, *found: Tensor) -> float:
        return worst_error(found, self.exact, self.largest_error)

    def entry(self, direction: str) -> Entry:
        """Return the candidate of "fwd", "bwd" or "fwd+bwd", after one call."""
        call = self.both if direction == "fwd+bwd" else partial(self.attention, *self.operands)
        if direction == "bwd":
            output = self.attention(*self.leaves)
            call = partial(torch.autograd.grad, output, self.leaves, self.grad_output, retain_graph=True)
        call()
        return self._entry(call)

    def graph_entry(self) -> Entry:
        """Return forward and backward as a CUDA graph, whose gradients are judged too."""
        with torch.no_grad():
            output = self.attention(*self.operands)
        graph = captured(self.both)
        for gradient in graph.outputs:
            gradient.zero_()
        graph.replay()
        self._judge(output, *graph.outputs)
        return self._entry(graph.replay)

    def both(self) -> tuple[Tensor, ...]:
        """Compute the gradients, by both passes."""
        return torch.autograd.grad(self.attention(*self.leaves), self.leaves, self.grad_output)

    def _entry(self, call: Callable[[], object]) -> Entry:
        return Entry(self.op, self.provider, self.level, call, self.error)


def level_entries(
    op: str, levels: Iterable[int], prepare: Callable, run: Callable, error_of: Callable, scope: str
) -> dict[str, Callable[[], Entry]]:
    """Return the levels of a ladder by provider: run(prepare(level), level), or, in scope "kernel", `run` alone.

    error_of: the error of what `run` returns; RuntimeError if it is too large.
    """

    def entry(level: int) -> Entry:
        call = partial(run, prepare(level), level)
        error = error_of(call())
        return Entry(op, OURS, level, call if scope == "kernel" else lambda: run(prepare(level), level), error)

    return {f"{OURS}, level {level}": partial(entry, level) for level in levels}


class Absent:
    """Whoever could not take part: printed at once, and kept as a row without times. without: peers to leave out."""

    def __init__(self, without: Sequence[str] = ()):
        self.without, self.rows = without, []

    def tried(self, make: dict[str, Callable[[], Any]], where: Row) -> dict[str, Any]:
        """Return what `make` returns, by provider, without those that fail. where: columns of what is measured."""
        made = {}
        for provider, attempt in make.items():
            try:
                if provider in self.without:
                    raise RuntimeError("left out with --without")
                made[provider] = attempt()
            except Exception as error:  # whatever it is, the others are timed
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                print(f"not timed: {provider}, {reason}", flush=True)
                self.rows.append({"missing": reason, "provider": provider, **where})
        return made
