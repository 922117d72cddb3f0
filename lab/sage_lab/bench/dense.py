"""SageBwd's measurements: the public function and its peers, and both ladders, level by level.

The scope "autograd" is the public function: from 16-bit tensors to the output and the gradients, with smoothing,
quantisation and copies. The ladders also have "kernel", with inputs already quantised, and "op", with everything around
the kernels. A peer has no such parts: its rows have the scope of the turn in which they were timed. Sequences of LONG
tokens have "autograd" alone. cuda_graph: forward and backward, captured once and replayed without the host.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from sage_kernels.sagebwd.backward.program import BackwardInputs
from sage_kernels.sagebwd.ladder import (
    BACKWARD_LEVELS,
    FORWARD_LEVELS,
    obstacle,
    prepare_backward,
    prepare_forward,
    run_backward,
    run_forward,
)
from sage_kernels.sagebwd.ops import backward_level, forward_level

import sage_ref
from sage_lab.bench.case import LONG, Case, Measurement, Shape
from sage_lab.bench.contenders import Absent, Contender, Entry, level_entries
from sage_lab.bench.judge import RESULTS, worst_error
from sage_lab.bench.peers import PEERS
from sage_lab.bench.ratios import OURS, UNBIASED
from sage_lab.records import Row

WIDTH, TOKENS = 2048, 32768  # heads times head size, batch times N


def _user_shapes() -> Iterator[Shape]:
    lengths = (1024, 2048, 4096, 8192, 16384)
    for head_dim, n, causal, layout in itertools.product((128, 64), lengths, (False, True), ("bhnd", "bnhd")):
        heads = WIDTH // head_dim
        yield Shape(TOKENS // n, heads, heads, n, head_dim, causal, layout)
    for n, causal in itertools.product((2048, 8192), (False, True)):  # four times the heads, a quarter of the batch
        yield Shape(TOKENS // n // 4, 64, 8, n, 128, causal)


def _ladder_shapes() -> Iterator[Shape]:
    lengths = (1024, 2048, 4096, 8192, 16384, LONG, 65536)
    for head_dim, n, causal in itertools.product((128, 64), lengths, (False, True)):
        heads = WIDTH // head_dim
        yield Shape(1 if n >= LONG else 4, heads, heads, n, head_dim, causal)


def user_rows(shape: Shape, absent: Absent) -> Iterator[Row]:
    """Time what a user gets: each direction in turn, then CUDA graphs."""
    case = Case(shape)
    found = contenders(case, absent)
    yield from case.user_turns(found, absent)
    if shape.layout == "bhnd":
        make = {name: contender.graph_entry for name, contender in found.items()}
        yield from case.turn(make, absent, scope="autograd", direction="fwd+bwd", cuda_graph=True)


def ladder_rows(shape: Shape, absent: Absent) -> Iterator[Row]:
    """Time every level and the peers, one turn per scope and direction; then what a user gets."""
    case = Case(shape)
    found = contenders(case, absent)
    peers = {name: found[name] for name in PEERS if name in found}
    for (direction, levels), scope in itertools.product(LADDERS.items(), ("kernel", "op") if shape.n < LONG else ()):
        make = {name: partial(peer.entry, direction) for name, peer in peers.items()}
        yield from case.turn(levels(case, scope) | make, absent, scope=scope, direction=direction)
    yield from case.user_turns(found, absent)


def contenders(case: Case, absent: Absent) -> dict[str, Contender]:
    """Return ours, with a biased and an unbiased O, and every peer that is here, all of them right."""
    make = {OURS: partial(ours, case, unbiased=False), UNBIASED: partial(ours, case, unbiased=True)}
    return absent.tried(make | {name: partial(case.peer, name) for name in PEERS}, case.columns)


def ours(case: Case, *, unbiased: bool) -> Contender:
    """Return the public function with its kernels."""
    options = {"is_causal": case.shape.causal, "enable_gqa": True, "unbiased": unbiased, "backend": "triton"}
    where = case.device, case.shape.head_dim
    level = f"{forward_level(*where)}/{backward_level(*where, case.shape.causal)}"
    attention = partial(sage_ref.sagebwd_attention, **options)
    return case.contender(UNBIASED if unbiased else OURS, attention, op="sagebwd", level=level)


def forward_levels(case: Case, scope: str) -> dict[str, Callable[[], Entry]]:
    """Return every forward level that runs here."""
    prepare = partial(prepare_forward, *case.tensors[:3], scale=case.scale, smooth_k=True)
    return _entries(case, scope, FORWARD_LEVELS, prepare, run_forward, slice(0, 1))


def backward_levels(case: Case, scope: str) -> dict[str, Callable[[], Entry]]:
    """Return every backward level that runs here."""
    return _entries(case, scope, BACKWARD_LEVELS, backward_preparation(case), run_backward, slice(1, 4))


def backward_preparation(case: Case) -> Callable[[int], BackwardInputs]:
    """Return the function that prepares a backward level.

    INT8 levels take the results of the best forward level, levels in 16 bit those of level 0.
    """
    *operands, grad_output = case.tensors
    best = forward_level(case.device, case.shape.head_dim)
    forward = {level: prepare_forward(*operands, level, scale=case.scale, smooth_k=True) for level in (0, best)}
    saved = {level: run_forward(inputs, level, **case.options) for level, inputs in forward.items()}
    hats = {name: getattr(forward[best], name) for name in ("q_hat", "k_hat", "v_range")}
    hats |= {"is_causal": case.shape.causal}

    def prepare(level: int) -> BackwardInputs:
        results = saved[best if BACKWARD_LEVELS[level].int8 else 0]
        return prepare_backward(grad_output, *operands, *results, level, **hats)

    return prepare


def _entries(
    case: Case, scope: str, levels: dict, prepare: Callable, run: Callable, which: slice
) -> dict[str, Callable[[], Entry]]:
    """Return the levels that can run here. which: of RESULTS, what `run` returns."""

    def error_of(found: tuple) -> float:
        return worst_error(found[: which.stop - which.start], case.exact[which], names=RESULTS[which])

    can_run = [x for x, chosen in levels.items() if obstacle(chosen, case.device, case.shape.head_dim) is None]
    return level_entries("sagebwd", can_run, prepare, partial(run, **case.options), error_of, scope)


LADDERS = {"fwd": forward_levels, "bwd": backward_levels}
USER = Measurement("sagebwd", tuple(_user_shapes()), user_rows)
LADDER = Measurement("sagebwd levels", tuple(_ladder_shapes()), ladder_rows)
