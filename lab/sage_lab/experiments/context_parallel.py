"""`python -m sage_lab context-parallel`: forward and backward of one long sequence on 1, 2, 4, ... devices.

Under torchrun, one process per device:
`torchrun --standalone --nproc-per-node 4 -m sage_lab context-parallel`.
The processes form groups of each size. All groups of a size do the same at once, so that no device is idle. A pass
takes as long as its slowest process, from a common start until its device is done. Attentions and sizes take turns.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sage_lab.command_line import add_device_option, positive_number
from sage_lab.experiments.turns import orders, synchronized_time, time_columns
from sage_lab.records import Record, Row, markdown_table, write_record
from sage_lab.training.processes import Processes, processes
from sage_ref.parallel import ParallelSLA2, parallel_sagebwd_attention, ulysses
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sla2 import SLA2
from sage_ref.tracing import relative_l2

ATTENTIONS = {
    "exact": "exact (PyTorch's pick), Ulysses",
    "sagebwd": "SageBwd, Ulysses",
    "sagebwd_ring": "SageBwd, ring",
    "sla2": "SLA2, Ulysses",
}
TENSORS = ("O", "dQ", "dK", "dV")
MEMORY_SHARE = 0.9  # of a device that a pass may need, by what a shorter one needed
# Bytes grow no faster than this power of N: SLA2's block mask has an entry per 128 queries and 64 keys.
GROWTH = {"exact": 1, "sagebwd": 1, "sagebwd_ring": 1, "sla2": 2}


@dataclass(frozen=True)
class ParallelPlan:
    """The passes to time.

    lengths: the shortest first. Shards are whole blocks of 128 tokens, which the ring quantises as one device does.
    longest: leave out a pass that would take more seconds, as a shorter sequence predicts.
    """

    lengths: tuple[int, ...] = (2**17, 2**18, 2**19, 2**20)
    heads: int = 16
    head_dim: int = 128
    sparsity: float = 0.97
    repetitions: int = 3
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


def why_left_out(one: Pass, n: int, plan: ParallelPlan, memory: int | None, rows: Sequence[Row]) -> str | None:
    """Return the reason to leave out a pass, None if it is measured.

    memory: bytes of a device. rows: of shorter sequences.
    """
    size = one.members.size
    if size > 1 and one.attention != "sagebwd_ring" and plan.heads % size:
        return f"{size} devices don't divide {plan.heads} heads"
    if one.attention == "sagebwd_ring" and size == 1:
        return "one device needs no ring"
    shorter = [row for row in rows if row["attention"] == one.attention and row["devices"] == size]
    if not shorter:
        return "a shorter one was left out" if rows else None
    ratio = n / shorter[-1]["n"]
    if shorter[-1]["ms_median"] * ratio**2 > 1e3 * plan.longest:
        return f"a pass would take more than {plan.longest:g} s"
    if memory and shorter[-1]["peak_bytes"] * ratio ** GROWTH[one.attention] > MEMORY_SHARE * memory:
        return "it would need more memory than a device has"
    return None


def length_rows(passes: Sequence[Pass], n: int, plan: ParallelPlan, world: Processes, *, is_first: bool) -> list[Row]:
    """Run everything once to compile programs, then time it. is_first: compare the results with one device's."""
    errors: dict[Pass, Row] = {one: {} for one in passes}
    alone: dict[str, tuple[Tensor, ...]] = {}
    for one in sorted(passes, key=lambda one: one.members.size):
        *_, tensors = run_pass(one, n, plan, world)
        name = one.attention.removesuffix("_ring")
        if is_first and one.members.size == 1:
            alone[name] = tuple(x.cpu() for x in tensors)
        elif name in alone:
            errors[one] = compared(tensors, alone[name], one.members, world)
        del tensors
    times: dict[Pass, list[float]] = {one: [] for one in passes}
    peaks: dict[Pass, float] = {}
    for repetition, order in enumerate(orders(len(passes), plan.repetitions)):
        if repetition and sum(map(median, times.values())) > 1e3 * plan.longest:
            break  # one repetition has taken long enough
        for one in (passes[place] for place in order):
            ms, peaks[one] = run_pass(one, n, plan, world)[:2]  # its tensors must be gone before the next
            times[one].append(ms)
    return [_row(one, n, plan, times[one], peaks[one]) | errors[one] for one in passes]


def run_pass(one: Pass, n: int, plan: ParallelPlan, world: Processes) -> tuple[float, float, tuple[Tensor, ...]]:
    """Return milliseconds and most bytes in use, both the largest of any process, then O, dQ, dK and dV here."""
    inputs = inputs_of(one.members, n, plan, world)
    attention = attention_of(one, plan, world)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    if world.count > 1:
        dist.barrier()
    started = synchronized_time(world.device)
    tensors = forward_and_backward(attention, *inputs)
    ms = 1e3 * (synchronized_time(world.device) - started)
    return *largest_of([ms, torch.cuda.max_memory_allocated() if on_gpu else 0], world), tensors


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
    if name == "sla2":
        module = SLA2 if is_alone else partial(ParallelSLA2, group=group)
        return module(plan.head_dim, plan.heads, sparsity=plan.sparsity).to(world.device)
    if is_alone:
        return sagebwd_attention
    method = "ring" if name == "sagebwd_ring" else "ulysses"
    return partial(parallel_sagebwd_attention, method=method, group=group)


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


def _row(one: Pass, n: int, plan: ParallelPlan, times: Sequence[float], peak: float) -> Row:
    return (
        {"attention": one.attention, "devices": one.members.size, "n": n, "batch": 1, "heads": plan.heads}
        | {"head_dim": plan.head_dim, "causal": False, "direction": "fwd+bwd", "protocol": "paired"}
        | {"sparsity": plan.sparsity if one.attention == "sla2" else None, "repetitions": len(times)}
        | time_columns(times, digits=3)
        | {"peak_bytes": int(peak)}
    )


def scaling_table(rows: Sequence[Row], memory: int | None) -> tuple[tuple[str, ...], list[tuple]]:
    """Return header and lines. memory: bytes of a device, of which a pass may need `MEMORY_SHARE`; None: not known.

    "fits up to": N whose pass needs that much if bytes grow from those of this line as `GROWTH` says.
    """
    record, lines = Record({}, list(rows)), []
    for row in sorted(rows, key=lambda row: (row["n"], list(ATTENTIONS).index(row["attention"]), row["devices"])):
        one = record.select(attention=row["attention"].removesuffix("_ring"), devices=1, n=row["n"])
        ratio = f"{one[0]['ms_median'] / row['ms_median']:.2f}" if one and row["devices"] > 1 else ""
        peak = row["peak_bytes"]
        power = 1 / GROWTH[row["attention"]]
        fits = f"{row['n'] * (MEMORY_SHARE * memory / peak) ** power:,.0f}" if memory and peak else ""
        agreement = ""
        if "same_bits" in row:
            error = max(row[f"rel_l2_{name}"] for name in TENSORS)
            agreement = "same bits" if row["same_bits"] else f"rel. L2 {error:.1e}"
        cells = f"{row['ms_median']:,.1f}", ratio, f"{peak / 2**30:.1f}" if peak else "", fits, agreement
        lines.append((f"{row['n']:,}", ATTENTIONS[row["attention"]], row["devices"], *cells))
    compared = ("times as fast as one", "GiB each", "fits up to", "result against one device")
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
        launcher = f"torchrun --standalone --nproc-per-node {world.count} -m" if world.count > 1 else "python -m"
        command = options.command.replace("python -m", launcher)
        facts = {"plan": asdict(plan), "devices": world.count, "memory_bytes": memory}
        groups, rows = groups_of_each_size(world), []
        for n in plan.lengths:
            passes = [Pass(name, members) for name in ATTENTIONS for members in groups]
            reasons = {one: why_left_out(one, n, plan, memory, rows) for one in passes}
            left = [one for one, reason in reasons.items() if reason is None]
            rows += length_rows(left, n, plan, world, is_first=not rows) if left else []
            if world.is_first:
                print(f"N = {n:,}: {len(left)} passes measured", flush=True)
                for one, reason in reasons.items():
                    if reason:
                        print(f"  not measured: {ATTENTIONS[one.attention]} on {one.members.size} device(s), {reason}")
                write_record(options.json, rows, command=command, **facts)
        if world.is_first:
            print(markdown_table(*scaling_table(rows, memory)))
