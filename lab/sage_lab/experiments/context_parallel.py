"""`python -m sage_lab context-parallel`: forward and backward of one long sequence on 1, 2, 4, ... devices.

Under torchrun, one process per device:
`torchrun --standalone --nproc-per-node 4 -m sage_lab context-parallel`.
The processes form groups of each size. All groups of a size do the same at once, so that no device is idle. A pass
takes as long as its slowest process, from a common start until its device is done. Attentions and sizes take turns.

What a device waits for the exchange is measured within each pass (`watched_exchanges`). "No attention" passes exchange
the same tensors and compute nothing. After the planned lengths, each pass is measured at the longest sequence that
should fit.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sage_lab.command_line import add_device_option, positive_number
from sage_lab.experiments.turns import orders, synchronized_time, time_columns
from sage_lab.records import Record, Row, markdown_table, write_record
from sage_lab.training.processes import Processes, processes
from sage_ref.parallel import ParallelSLA2, parallel_sagebwd_attention, ulysses
from sage_ref.parallel.exchange import Passing
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sla2 import SLA2
from sage_ref.tracing import relative_l2

ATTENTIONS = {
    "exact": "exact (PyTorch's pick), Ulysses",
    "sagebwd": "SageBwd, Ulysses",
    "sagebwd_ring": "SageBwd, ring",
    "sagebwd_both": "SageBwd, Ulysses in pairs, ring of pairs",
    "sla2_stage_1": "SLA2 stage 1, Ulysses",
    "sla2": "SLA2 stage 2, Ulysses",
    "none": "no attention, Ulysses",
}
LEAST_DEVICES = {"sagebwd_ring": 2, "sagebwd_both": 4, "none": 2}
ON_ONE = {"sagebwd_ring": "sagebwd", "sagebwd_both": "sagebwd"}  # the same attention on one device, if its name differs
TENSORS = ("O", "dQ", "dK", "dV")
MEMORY_SHARE = 0.9  # of a device that a pass may need, by what shorter ones needed
PART = 2**16  # the longest sequence is a multiple of this


@dataclass(frozen=True)
class ParallelPlan:
    """The passes to time.

    lengths: the shortest first. Shards are whole blocks of 128 tokens, which the ring quantises as one device does.
    affordable: seconds for the timed runs of a pass. If one run takes more, the first, untimed one counts instead: its
        programs were compiled for the shorter sequence.
    longest: leave out a pass that would take more seconds. Both follow from the time of a shorter sequence.
    """

    lengths: tuple[int, ...] = (2**16, 2**17, 2**19)
    heads: int = 16
    head_dim: int = 128
    sparsity: float = 0.97
    repetitions: int = 3
    affordable: float = 5.0
    longest: float = 25.0


# The second is too small to show anything, large enough to try the program.
PLANS = {"cuda": ParallelPlan(), "cpu": ParallelPlan((256, 512), heads=2, head_dim=16, repetitions=2)}


class Members(NamedTuple):
    """This process's group of one size. group: None for a size of one, where nothing is sent."""

    size: int
    rank: int
    group: dist.ProcessGroup | None


class Pass(NamedTuple):
    """One attention on groups of one size."""

    attention: str
    members: Members


def groups_of_each_size(world: Processes) -> list[Members]:
    """Make groups of 1, 2, 4, ... processes, as far as they divide all of them; every process must call this."""
    sizes = [2**power for power in range(world.count.bit_length()) if world.count % 2**power == 0]
    return [
        Members(size, world.rank % size, dist.new_subgroups(group_size=size)[0] if size > 1 else None) for size in sizes
    ]


class Measured(NamedTuple):
    """One run of a pass: the largest of each number over all processes, of `exchange_ms` the smallest.

    A process that is done early waits for the others; the one that waits least waits for the exchange alone.
    """

    ms: float
    peak_bytes: float
    sent_bytes: float
    exchange_ms: float


def rows_of(one: Pass, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["attention"] == one.attention and row["devices"] == one.members.size]


def byte_growth(rows: Sequence[Row]) -> tuple[float, float]:
    """Return (a, b) of bytes = a N + b N^2 through the two longest of one pass's rows, the longest last.

    b stands for SLA2's block masks, with an entry per 128 queries and 64 keys. It is 0 where only one length is known.
    """
    n, m = rows[-2:][0]["n"], rows[-1]["n"]
    x, y = (row["peak_bytes"] / row["n"] for row in (rows[-2:][0], rows[-1]))
    b = max(0.0, (y - x) / (m - n)) if m > n else 0.0
    return y - b * m, b


def most_tokens(rows: Sequence[Row], memory: int) -> float:
    """Return the N whose bytes are `MEMORY_SHARE` of a device's memory, as `byte_growth` predicts."""
    (a, b), available = byte_growth(rows), MEMORY_SHARE * memory
    return 2 * available / (a + math.sqrt(a**2 + 4 * b * available))


def predicted_seconds(n: int, row: Row) -> float:
    """Predict a pass's time from that of a shorter sequence: every attention here computes a share of N^2 scores."""
    return row["ms_median"] / 1e3 * (n / row["n"]) ** 2


def why_left_out(one: Pass, n: int, plan: ParallelPlan, memory: int | None, rows: Sequence[Row]) -> str | None:
    """Return the reason to leave out a pass, None if it is measured.

    memory: bytes of a device. rows: of shorter sequences.
    """
    size = one.members.size
    if size > 1 and one.attention not in ON_ONE and plan.heads % size:
        return f"{size} devices don't divide {plan.heads} heads"
    if size < (least := LEAST_DEVICES.get(one.attention, 1)):
        return f"it takes {least} devices or more"
    shorter = rows_of(one, rows)
    if not shorter:
        return "a shorter one was left out" if rows else None
    if predicted_seconds(n, shorter[-1]) > plan.longest:
        return f"a pass would take more than {plan.longest:g} s"
    if memory and n > most_tokens(shorter, memory):
        return "it would need more memory than a device has"
    return None


def largest_length(one: Pass, memory: int, rows: Sequence[Row]) -> int | None:
    """Return the longest sequence that should fit, a multiple of `PART`; None if no longer one than measured fits."""
    measured = rows_of(one, rows)
    if not measured or one.attention == "none":
        return None
    n = int(most_tokens(measured, memory)) // PART * PART
    return n if n > measured[-1]["n"] else None


def length_rows(passes: Sequence[Pass], n: int, plan: ParallelPlan, world: Processes, rows: Sequence[Row]) -> list[Row]:
    """Run everything once to compile programs, then time what is short enough.

    rows: of shorter sequences. Without any, the results are compared with one device's.
    """
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # parts of it fit shorter sequences alone
    errors: dict[Pass, Row] = {one: {} for one in passes}
    runs: dict[Pass, list[Measured]] = {one: [] for one in passes}
    counts = dict.fromkeys(passes, plan.repetitions)
    alone: dict[str, tuple[Tensor, ...]] = {}
    for one in sorted(passes, key=lambda one: one.members.size):
        first, tensors = run_pass(one, n, plan, world)
        name = ON_ONE.get(one.attention, one.attention)
        if not rows and one.members.size == 1:
            alone[name] = tuple(x.cpu() for x in tensors)
        elif name in alone:
            errors[one] = compared(tensors, alone[name], one.members, world)
        del tensors
        if rows:
            affordable = int(plan.affordable / predicted_seconds(n, rows_of(one, rows)[-1]))
            counts[one] = min(plan.repetitions, affordable)
        if counts[one] == 0:
            runs[one].append(first)
    for repetition, order in enumerate(orders(len(passes), plan.repetitions)):
        for one in (passes[place] for place in order):
            if repetition < counts[one]:
                runs[one].append(run_pass(one, n, plan, world)[0])  # its tensors must be gone before the next
    return [_row(one, n, plan, runs[one]) | errors[one] for one in passes]


def run_pass(one: Pass, n: int, plan: ParallelPlan, world: Processes) -> tuple[Measured, tuple[Tensor, ...]]:
    """Run a pass; return what was measured, then this process's O, dQ, dK and dV."""
    on_gpu = world.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0  # such as workspaces, which do not grow with N
    inputs = inputs_of(one.members, n, plan, world)
    attention = attention_of(one, plan, world)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    if world.count > 1:
        dist.barrier()
    with watched_exchanges(world.device) as exchanges:
        started = synchronized_time(world.device)
        tensors = forward_and_backward(attention, *inputs)
        ms = 1e3 * (synchronized_time(world.device) - started)
    exchange_ms = sum(_milliseconds(*exchange[:2]) for exchange in exchanges)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    *largest, least = largest_of([ms, peak, sum(sent for _, _, sent in exchanges), -exchange_ms], world)
    return Measured(*largest, -least), tensors


@contextmanager
def watched_exchanges(device: torch.device) -> Iterator[list[tuple]]:
    """Yield a list that gets an entry per exchange of `sage_ref.parallel`: its start, its end, and the bytes sent.

    On a GPU start and end are events on the stream that waits for the exchange, so what goes on meanwhile is not in it:
    of the ring's transfers only the time in which nothing is computed.
    """
    found: list[tuple] = []

    def watched(exchange: Callable, sent: Callable[..., float]) -> Callable:
        def call(*arguments, **options):
            start = _moment(device)
            result = exchange(*arguments, **options)
            found.append((start, _moment(device), sent(*arguments, **options)))
            return result

        return call

    def others(group) -> int:
        return dist.get_world_size(group) - 1

    sent_bytes = {  # by one process
        (dist, "all_to_all_single"): lambda _, x, group: x.nbytes * others(group) / (others(group) + 1),
        (dist, "all_reduce"): lambda x, group: 2 * x.nbytes * others(group) / (others(group) + 1),
        (dist, "all_gather"): lambda _, x, group: x.nbytes * others(group),
        (Passing, "wait"): lambda passing: sum(x.nbytes for x in passing.sent),
    }
    with ExitStack() as stack:
        for (owner, name), sent in sent_bytes.items():
            stack.enter_context(patch.object(owner, name, watched(getattr(owner, name), sent)))
        yield found


def _moment(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def largest_of(facts: Sequence[float], world: Processes) -> list[float]:
    """Return the largest of each fact over all processes."""
    largest = torch.tensor(facts, dtype=torch.float64, device=world.device)
    if world.count > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def inputs_of(members: Members, n: int, plan: ParallelPlan, world: Processes) -> tuple[Tensor, ...]:
    """Draw Q, K, V and dO: this process's tokens of a sequence that is the same for groups of all sizes."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    parts = world.count // members.size  # of a process: each is drawn by itself
    tensors = []
    for seed in range(4):
        drawn = []
        for part in range(members.rank * parts, (members.rank + 1) * parts):
            generator = torch.Generator(world.device).manual_seed(1000 * seed + part)
            shape = (1, plan.heads, n // world.count, plan.head_dim)
            drawn.append(torch.randn(shape, generator=generator, device=world.device, dtype=dtype))
        tensors.append(torch.cat(drawn, 2))
    return tuple(tensors)


def attention_of(one: Pass, plan: ParallelPlan, world: Processes) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return one device's attention where the group is one process, else its parallel form."""
    name, group, is_alone = one.attention, one.members.group, one.members.size == 1
    if name == "exact":
        exact = F.scaled_dot_product_attention
        return exact if is_alone else partial(ulysses, exact, group=group)
    if name == "none":
        return partial(ulysses, NoAttention.apply, group=group)
    if name in ("sla2", "sla2_stage_1"):
        module = SLA2 if is_alone else partial(ParallelSLA2, group=group)
        made = module(plan.head_dim, plan.heads, sparsity=plan.sparsity).to(world.device)
        return made.stage(1 if name == "sla2_stage_1" else 2)
    if is_alone:
        return sagebwd_attention
    if name != "sagebwd_both":
        method = "ring" if name == "sagebwd_ring" else "ulysses"
        return partial(parallel_sagebwd_attention, method=method, group=group)
    between, inside = pairs(one.members.size, world)
    return partial(ulysses, partial(parallel_sagebwd_attention, method="ring", group=between), group=inside)


@cache
def pairs(size: int, world: Processes) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return, of each group of `size`, the ring of one process per pair, and this process's pair."""
    shape, names = (world.count // size, size // 2, 2), ("groups", "between", "inside")
    mesh = dist.init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    return mesh["between"].get_group(), mesh["inside"].get_group()


class NoAttention(torch.autograd.Function):
    """O = V, and dO for the gradient of each input: it takes no time, so the exchange is all that is left."""

    @staticmethod
    def forward(ctx, query, key, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, grad_output, grad_output


def forward_and_backward(
    attention: Callable, query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Return O, dQ, dK, dV."""
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = attention(*inputs)
    output.backward(grad_output)
    return output.detach(), *(x.grad for x in inputs)


def compared(tensors: Sequence[Tensor], alone: Sequence[Tensor], members: Members, world: Processes) -> Row:
    """Return the largest relative L2 of any process to one device's result, and whether all bits are equal."""
    mine = [x.chunk(members.size, 2)[members.rank].to(world.device) for x in alone]
    facts = [float(relative_l2(x, y)) for x, y in zip(tensors, mine, strict=True)]
    facts.append(float(any(not x.equal(y) for x, y in zip(tensors, mine, strict=True))))
    *errors, differ = largest_of(facts, world)
    return {f"rel_l2_{name}": error for name, error in zip(TENSORS, errors, strict=True)} | {"same_bits": not differ}


def _row(one: Pass, n: int, plan: ParallelPlan, runs: Sequence[Measured]) -> Row:
    is_alone = one.members.size == 1
    return (
        {"attention": one.attention, "devices": one.members.size, "n": n, "batch": 1, "heads": plan.heads}
        | {"head_dim": plan.head_dim, "causal": False, "direction": "fwd+bwd", "protocol": "paired"}
        | {"sparsity": plan.sparsity if one.attention.startswith("sla2") else None, "repetitions": len(runs)}
        | time_columns([run.ms for run in runs], digits=3)
        | {"exchange_ms": None if is_alone else round(median(run.exchange_ms for run in runs), 3)}
        | {"sent_bytes": None if is_alone else int(runs[-1].sent_bytes), "peak_bytes": int(runs[-1].peak_bytes)}
    )


def scaling_table(rows: Sequence[Row], memory: int | None, shortest: int = 0) -> tuple[tuple[str, ...], list[tuple]]:
    """Return header and lines, those of N >= shortest.

    memory: bytes of a device, of which a pass may need `MEMORY_SHARE`; None: not known.
    "waits for the exchange": the time in which a device computes nothing, and its share of the pass.
    "fits up to": the longest sequence, as `most_tokens` predicts it from all rows of a pass.
    """
    places = {name: place for place, name in enumerate(ATTENTIONS)}
    record, lines = Record({}, sorted(rows, key=lambda row: (row["n"], places[row["attention"]], row["devices"]))), []
    for row in (row for row in record.rows if row["n"] >= shortest):
        one = record.select(attention=ON_ONE.get(row["attention"], row["attention"]), devices=1, n=row["n"])
        ratio = f"{one[0]['ms_median'] / row['ms_median']:.2f}" if one and row["devices"] > 1 else ""
        exchange, peak = row["exchange_ms"], row["peak_bytes"]
        waits = "" if exchange is None else f"{exchange:,.1f} ms, {exchange / row['ms_median']:.1%}"
        same = record.select(attention=row["attention"], devices=row["devices"])
        fits = f"{most_tokens(same, memory):,.0f}" if memory and peak else ""
        agreement = ""
        if agreeing := [x for x in same if "same_bits" in x]:  # of the shortest sequence
            error = max(agreeing[0][f"rel_l2_{name}"] for name in TENSORS)
            agreement = "same bits" if agreeing[0]["same_bits"] else f"rel. L2 {error:.1e}"
        cells = f"{row['ms_median']:,.1f}", ratio, waits, f"{peak / 2**30:.1f}" if peak else "", fits, agreement
        lines.append((f"{row['n']:,}", ATTENTIONS[row["attention"]], row["devices"], *cells))
    compared = ("times as fast as one", "waits for the exchange", "GiB each", "fits up to", "result against one device")
    return ("N", "attention", "devices", "ms", *compared), lines


def add_options(parser: argparse.ArgumentParser) -> None:
    words = "leave out passes that take more seconds than this"
    parser.add_argument("--longest", type=positive_number, default=ParallelPlan.longest, help=words)
    add_device_option(parser)


def context_parallel_command(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    plan = replace(PLANS[device.type], longest=options.longest)
    with processes(options.device) as world:
        memory = torch.cuda.get_device_properties(world.device).total_memory if device.type == "cuda" else None
        command = world.command(options.command)
        facts = {"plan": asdict(plan), "devices": world.count, "memory_bytes": memory}
        rows: list[Row] = []

        def measure(passes: Sequence[Pass], n: int) -> None:
            reasons = {one: why_left_out(one, n, plan, memory, rows) for one in passes}
            left = [one for one, reason in reasons.items() if reason is None]
            rows.extend(length_rows(left, n, plan, world, rows) if left else [])
            if world.is_first:
                print(f"N = {n:,}: {len(left)} passes measured", flush=True)
                for one, reason in reasons.items():
                    if reason:
                        print(f"  not measured: {ATTENTIONS[one.attention]} on {one.members.size} device(s), {reason}")
                write_record(options.json, rows, command=command, **facts)

        passes = [Pass(name, members) for members in groups_of_each_size(world) for name in ATTENTIONS]
        for n in plan.lengths:
            measure(passes, n)
        for one in passes if memory else ():
            if n := largest_length(one, memory, rows):
                measure([one], n)
        if world.is_first:
            print(markdown_table(*scaling_table(rows, memory)))
