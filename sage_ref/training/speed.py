"""How long a step of pre-training takes with exact attention and with SageBwd, on one device and on all."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sage_ref.models.llama import LlamaConfig
from sage_ref.recorded import Row
from sage_ref.training.corpus import Corpus
from sage_ref.training.pretrain import Pretraining, PretrainSettings, Processes

VOCABULARY = 32768


@dataclass(frozen=True)
class SpeedPlan:
    """tokens_per_device: of a step; more devices mean more tokens per step. warmup, steps: untimed and timed."""

    contexts: tuple[int, ...] = (4096, 16384)
    layers: int = 24
    width: int = 1024
    heads: int = 16
    tokens_per_device: int = 2**16
    tokens_per_pass: int = 2**15
    warmup: int = 3
    steps: int = 10


def step_times(plan: SpeedPlan, group: Processes) -> Iterator[Row]:
    """One row per context, attention and way to use the devices: median, 20th and 80th percentile of the step's time.

    With several processes the first one is timed alone, too, while the others wait. Only the first yields rows.
    """
    alone = Processes(0, 1, group.device)
    ways = [(alone, False)] + [(group, fsdp) for fsdp in (False, True)] * (group.count > 1)
    tokens = torch.randint(VOCABULARY, (2**22,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    corpus = Corpus("random tokens", tokens, VOCABULARY)
    for context, attention, (members, fsdp) in itertools.product(plan.contexts, ("exact", "sagebwd"), ways):
        if group.is_first or members.count > 1:
            row = _row(plan, corpus, context, attention, members, fsdp)
            if group.is_first:
                yield row
        if group.count > 1:
            dist.barrier()


def _row(plan: SpeedPlan, corpus: Corpus, context: int, attention: str, group: Processes, fsdp: bool) -> Row:
    shape = {"layers": plan.layers, "width": plan.width, "heads": plan.heads, "kv_heads": plan.heads}
    config = LlamaConfig(VOCABULARY, context=context, **shape, qk_norm=True, attention=attention)
    settings = PretrainSettings(
        steps=plan.warmup + plan.steps,
        batch_size=plan.tokens_per_device * group.count // context,
        micro_batch_size=min(plan.tokens_per_pass, plan.tokens_per_device) // context,
        autocast=group.device.type == "cuda",
    )
    training = Pretraining(corpus, config, settings, group, fsdp=fsdp)
    times = []
    for _ in range(settings.steps):
        started = time.perf_counter()
        training.advance()
        times.append(1e3 * (time.perf_counter() - started))
    fastest, *_, slowest = statistics.quantiles(times[plan.warmup :], n=5, method="inclusive")
    median = statistics.median(times[plan.warmup :])
    sizes = {"context": context, "tokens_per_step": training.tokens_per_step}
    parallel = "none" if group.count == 1 else "fsdp" if fsdp else "ddp"
    return (
        {"attention": attention, "devices": group.count, "parallel": parallel}
        | sizes
        | {"parameters": sum(x.numel() for x in training.model.parameters())}
        | {"ms_median": round(median, 2), "ms_p20": round(fastest, 2), "ms_p80": round(slowest, 2)}
        | {"tokens_per_second": round(1e3 * training.tokens_per_step / median)}
    )


def speed_table(rows: Sequence[Row]) -> list[tuple]:
    """Lines of a table: what ran, its time and rate, and both against the same with exact attention."""
    lines = []
    for row in rows:
        same = ("context", "devices", "parallel")
        (exact,) = (x for x in rows if x["attention"] == "exact" and all(x[name] == row[name] for name in same))
        ratio = row["tokens_per_second"] / exact["tokens_per_second"]
        rate = f"{row['tokens_per_second']:,}"
        lines.append((*(row[name] for name in same), row["attention"], row["ms_median"], rate, f"{ratio:.2f}"))
    return lines
