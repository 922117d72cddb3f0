"""Every level of both ladders, timed in turn with each other and with the peers.

Scopes: "kernel" (inputs already quantised), "op" (with smoothing, quantisation and every copy), "autograd" (the public
function). A peer has no such parts: its rows carry the scope of the turn that they were timed in. Sequences of LONG
tokens take the last scope alone.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from sage_kernels.sagebwd.ladder import (
    BACKWARD_LEVELS,
    FORWARD_LEVELS,
    obstacle,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)
from sage_kernels.sagebwd.ops import forward_level

from sage_lab.bench.bench import LONG, Case, Shape, contenders, user_rows
from sage_lab.bench.contenders import OURS, Absent, Entry, turn
from sage_lab.bench.judge import require_close


def _shapes() -> Iterator[Shape]:
    for head_dim, n, causal in itertools.product(
        (128, 64), (1024, 2048, 4096, 8192, 16384, LONG, 65536), (False, True)
    ):
        heads = 2048 // head_dim
        yield Shape(1 if n >= LONG else 4, heads, heads, n, head_dim, causal)


SHAPES = tuple(_shapes())


def bench_shape(shape: Shape, absent: Absent | None = None) -> Iterator[dict]:
    """Rows of one shape, one turn per scope and direction. absent: where missing peers are noted."""
    torch.compiler.reset()  # it gives up after eight shapes
    case, absent = Case(shape), absent or Absent()
    found = contenders(case, absent)
    if shape.n < LONG:
        peers = {name: contender for name, contender in found.items() if not name.startswith(OURS)}
        for (direction, levels), scope in itertools.product(LADDERS.items(), ("kernel", "op")):
            make = {name: partial(peer.entry, direction) for name, peer in peers.items()}
            entries = absent.tried(make, case.shape.columns | {"scope": scope, "direction": direction})
            yield from turn(levels(case, scope) | entries, partial(case.row, scope, direction))
    yield from user_rows(case, found, absent, graphs=False)


def forward_entries(case: Case, scope: str) -> dict[str, Entry]:
    """Every forward level that runs here, by a name of its own."""
    query, key, value, _ = case.tensors
    prepare = partial(prepare_forward, query, key, value, scale=case.options["scale"], smooth_k=True)
    entries = {}
    for level, chosen in enumerate(FORWARD_LEVELS):
        if obstacle(chosen, query.device, case.shape.head_dim) is not None:
            continue
        run = partial(run_forward, prepare(level), level, **case.options)
        error = require_close(run()[0], case.exact[0])
        if scope == "op":
            run = _whole(prepare, run_forward, level, case)
        entries[f"level {level}"] = Entry("sagebwd", OURS, level, run, error)
    return entries


def backward_entries(case: Case, scope: str) -> dict[str, Entry]:
    """Every backward level that runs here. INT8 levels take the best forward level's results, 16-bit ones level 0's."""
    query, key, value, grad_output = case.tensors
    best = forward_level(query.device, case.shape.head_dim)
    forward = {
        level: prepare_forward(query, key, value, level, scale=case.options["scale"], smooth_k=True)
        for level in (0, best)
    }
    saved = {level: run_forward(inputs, level, **case.options) for level, inputs in forward.items()}
    options = {name: getattr(forward[best], name) for name in ("q_hat", "k_hat", "v_range")}
    options |= {"is_causal": case.shape.causal}
    entries = {}
    for level, chosen in enumerate(BACKWARD_LEVELS):
        if obstacle(chosen, query.device, case.shape.head_dim) is not None:
            continue
        results = saved[best if chosen.int8 else 0]

        def prepare(level, results=results):
            return prepare_backward(grad_output, query, key, value, *results, level, **options)

        run = partial(run_backward, prepare(level), level, **case.options)
        error = max(require_close(found, exact) for found, exact in zip(run(), case.exact[1:], strict=True))
        if scope == "op":
            run = _whole(prepare, run_backward, level, case)
        entries[f"level {level}"] = Entry("sagebwd", OURS, level, run, error)
    return entries


def _whole(prepare: Callable, run: Callable, level: int, case: Case) -> Callable[[], object]:
    """A level with the preparation of its inputs."""
    return lambda: run(prepare(level), level, **case.options)


LADDERS = {"fwd": forward_entries, "bwd": backward_entries}
