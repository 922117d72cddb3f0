"""`python -m sage_lab pretrain-speed`: time of a training step with exact attention and SageBwd, on one device and all.

Exact attention is timed with the kernel that PyTorch picks for the device, with FlashAttention-2, which the paper
compares with, and with FlashAttention-4 where it is installed. All take their steps in turn.

SageBwd's kernels apply QK-norm and rotary positions themselves. On a GPU torch.compile fuses that work for the others,
so that attentions are compared, and not one pass with PyTorch's many. SageBwd is timed that way as well, as "apart".
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from sage_lab.command_line import add_device_option, positive
from sage_lab.experiments.turns import orders
from sage_lab.models import flash_attention_4 as fa4
from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.plan import FinishedParts
from sage_lab.records import Record, Row, markdown_table, measured_by, only_writer, write_record
from sage_lab.training.corpus import Corpus
from sage_lab.training.pretrain import Pretraining, PretrainSettings
from sage_lab.training.processes import Processes, agreed, processes
from sage_ref.backend import why_not_importable
from sage_ref.prologue import before_attention

VOCABULARY = 32768


class Attention(NamedTuple):
    """A name's choices in the model."""

    attention: str  # of LlamaConfig
    backend: SDPBackend | None = None  # that PyTorch must take
    fused_prologue: bool = False


ATTENTIONS = {
    "exact": Attention("exact"),
    "flash_attention_2": Attention("exact", SDPBackend.FLASH_ATTENTION),
    "flash_attention_4": Attention("exact"),  # put into the model's place for attention
    "sagebwd_apart": Attention("sagebwd"),
    "sagebwd": Attention("sagebwd", fused_prologue=True),
}
EXACT = {
    "exact": "PyTorch's pick",
    "flash_attention_2": "FlashAttention-2",
    "flash_attention_4": "FlashAttention-4",
}
NAMES = EXACT | {"sagebwd_apart": "SageBwd, QK-norm and rotation apart", "sagebwd": "SageBwd"}
# By the node of the backward pass, which autograd makes for the kernel of the forward pass.
KERNELS = {
    "ScaledDotProductCudnnAttentionBackward0": "cuDNN",
    "ScaledDotProductFlashAttentionBackward0": "FlashAttention-2",
    "FlashAttnFuncBackward": "FlashAttention-4",
    "ScaledDotProductFlashAttentionForCpuBackward0": "PyTorch's CPU kernel",
    "GeneratedBackwardFor_sage_kernels_forward_defaultBackward": "sage_kernels",  # of earlier records
    "SageBwdOperationBackward": "sage_kernels",
    "SageBwdFunctionBackward": "reference",
}
WAY = ("context", "devices", "parallel")


@dataclass(frozen=True)
class SpeedPlan:
    """The steps to time. tokens_per_device: of a step, on each device. warmup, steps: untimed and timed ones."""

    contexts: tuple[int, ...] = (4096, 16384)
    layers: int = 24
    width: int = 1024
    heads: int = 16
    tokens_per_device: int = 2**16
    tokens_per_pass: int = 2**15
    warmup: int = 3
    steps: int = 10

    def __post_init__(self):
        if self.steps < 2:
            raise ValueError(f"steps: expected at least 2, got {self.steps}")
        per_pass = min(self.tokens_per_pass, self.tokens_per_device)
        for context in self.contexts:
            if per_pass % context or self.tokens_per_device % per_pass:
                raise ValueError(
                    f"contexts: expected numbers that divide {per_pass}, the tokens of a pass, which divide those of a "
                    f"device, {self.tokens_per_device}; got {context}"
                )


def step_times(plan: SpeedPlan, group: Processes, done: Collection[str] = ()) -> Iterator[tuple[str, list[Row]]]:
    """Time every way to use the devices and every context; on the first process yield each one's name and rows.

    The attentions of one way and context take their steps in turn. With several processes the first one is timed alone
    before all are, while the others wait. done: names that need not be measured again, the same in all processes.
    """
    alone = Processes(0, 1, group.device)
    ways = [(alone, "none")] + [(group, parallel) for parallel in ("ddp", "fsdp")] * (group.count > 1)
    tokens = torch.randint(VOCABULARY, (2**22,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    corpus = Corpus("random tokens", tokens, VOCABULARY)
    here = [name for name in ATTENTIONS if why_missing(name, group.device) is None]
    for (members, parallel), context in itertools.product(ways, plan.contexts):
        name = f"{members.count} {parallel} {context}"
        if name in done:
            continue
        if group.is_first or members.count > 1:
            rows = _rows(Cell(plan, corpus, context, members, parallel), here)
            if group.is_first:
                yield name, rows
        if group.count > 1:
            dist.barrier()


def why_missing(attention: str, device: torch.device) -> str | None:
    """Return the reason why an attention can't be timed here, None if it can."""
    if attention == "sagebwd_apart" and device.type != "cuda":
        return "it needs a CUDA device, for which its work apart is compiled"
    if attention != "flash_attention_4":
        return None
    if device.type != "cuda":
        return f"{fa4.PACKAGE} needs a CUDA device"
    return why_not_importable(fa4.PACKAGE, fa4.MODULE)


class Cell(NamedTuple):
    """All that the compared attentions have in common."""

    plan: SpeedPlan
    corpus: Corpus
    context: int
    group: Processes
    parallel: str


class SpeedTraining(Pretraining):
    """Pre-training by one process, or by several together.

    parallel: "none"; "ddp": each process has a copy of the model; "fsdp": each has a part of its weights and of AdamW's
    averages. The processes deal out the sequences of a step among themselves.
    """

    def __init__(
        self, corpus: Corpus, config: LlamaConfig, settings: PretrainSettings, group: Processes, parallel: str
    ):
        self.group, self.parallel = group, parallel
        super().__init__(corpus, config, settings, group.device)
        if parallel == "ddp":
            self.called = DistributedDataParallel(self.model)

    def new_model(self) -> Llama:
        model = super().new_model().to(self.group.device)
        if self.parallel == "fsdp":
            for part in (*model.blocks, model):
                fully_shard(part)
        return model

    def passes(self) -> list[tuple[Any, ...]]:
        """Return this process's share of a step, and of each pass whether it is the last one."""
        size, group = self.settings.micro_batch_size, self.group
        batch = self.train_corpus.batch(
            self.settings.batch_size, self.config.context, seed=self.settings.seed, step=self.step
        )
        parts = list(zip(*(x[group.rank :: group.count].split(size) for x in batch), strict=True))
        return [(*part, number == len(parts)) for number, part in enumerate(parts, start=1)]

    def loss(self, inputs: Tensor, targets: Tensor, is_last: bool = True) -> Tensor:
        """Return the loss of a pass; the gradients are averaged over the processes after the last one alone."""
        if self.parallel == "ddp":
            self.called.require_backward_grad_sync = is_last
        elif self.parallel == "fsdp":
            self.model.set_requires_gradient_sync(is_last)
        return super().loss(inputs, targets)

    def clip_gradients(self) -> Tensor:
        norm = super().clip_gradients()
        return norm.full_tensor() if self.parallel == "fsdp" else norm


class Model:
    """A model with one attention, and the times of its steps in milliseconds."""

    def __init__(self, cell: Cell, attention: str):
        plan, group = cell.plan, cell.group
        shape = {"layers": plan.layers, "width": plan.width, "heads": plan.heads, "kv_heads": plan.heads}
        of_model, self.backend, fused = ATTENTIONS[attention]
        options = {"qk_norm": True, "attention": of_model, "fused_prologue": fused}
        config = LlamaConfig(VOCABULARY, context=cell.context, **shape, **options)
        settings = PretrainSettings(
            steps=plan.warmup + plan.steps,
            batch_size=plan.tokens_per_device * group.count // cell.context,
            micro_batch_size=min(plan.tokens_per_pass, plan.tokens_per_device) // cell.context,
            autocast=group.device.type == "cuda",
        )
        self.training = SpeedTraining(cell.corpus, config, settings, group, cell.parallel)
        nodes: set[str] = set()
        self.nodes, self.times = nodes, []  # the hook must not hold the model that holds it
        attentions = [block.attention for block in self.training.model.blocks]
        for module in attentions:
            module.before = before_attention_on(group.device)
            if attention == "flash_attention_4":
                module.core.forward = _flash_attention_4
        attentions[0].core.register_forward_hook(lambda module, inputs, output: nodes.add(_node(output)))
        for _ in range(plan.warmup):
            self.step()
        self.times.clear()

    def step(self) -> None:
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            started = time.perf_counter()
            self.training.advance()
            self.times.append(1e3 * (time.perf_counter() - started))


@cache
def before_attention_on(device: torch.device) -> Callable:
    """Return QK-norm and rotation as a function of their own, on a GPU compiled into one pass."""
    return torch.compile(before_attention, dynamic=False) if device.type == "cuda" else before_attention


def _flash_attention_4(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call FlashAttention-4 as autocast calls PyTorch's function: queries and keys are cast, too."""
    return fa4.flash_attention_4(query.to(value.dtype), key.to(value.dtype), value, is_causal=True)


def _node(output: Tensor) -> str:
    """Return the name of autograd's node for the attention, before a change of layout."""
    node = output.grad_fn
    while node.name().startswith("Transpose"):
        node = node.next_functions[0][0]
    return node.name()


def _rows(cell: Cell, attentions: Sequence[str]) -> list[Row]:
    """Measure every attention, with models that take one step each in turn."""
    models = {name: Model(cell, name) for name in attentions}
    for order in orders(len(attentions), cell.plan.steps):
        for place in order:
            models[attentions[place]].step()
    protocol = "paired" if len(attentions) > 1 else "alone"
    return [_row(cell, name, model, protocol) for name, model in models.items()]


def _row(cell: Cell, attention: str, model: Model, protocol: str) -> Row:
    (node,) = model.nodes
    fastest, *_, slowest = statistics.quantiles(model.times, n=5, method="inclusive")
    median, tokens_per_step = statistics.median(model.times), model.training.tokens_per_step
    parameters = sum(x.numel() for x in model.training.model.parameters())
    return (
        {"attention": attention, "autograd_node": node, "devices": cell.group.count, "parallel": cell.parallel}
        | {"context": cell.context, "tokens_per_step": tokens_per_step, "parameters": parameters}
        | {"protocol": protocol}
        | {"ms_median": round(median, 2), "ms_p20": round(fastest, 2), "ms_p80": round(slowest, 2)}
        | {"tokens_per_second": round(1e3 * tokens_per_step / median)}
    )


def speed_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple]]:
    """Return header and lines: what ran, its time and rate, and its rate over exact attention's and one device's.

    A cell is empty where there is no row to compare with; a column with nothing to compare is left out.
    """
    record = Record({}, list(rows))
    compared = {f"against {NAMES[name]}": {"attention": name} for name in EXACT}
    compared["against one device"] = {"devices": 1, "parallel": "none"}
    compared = {title: other for title, other in compared.items() if 0 < len(record.select(**other)) < len(rows)}
    attentions = list(ATTENTIONS)
    lines = []
    for row in sorted(rows, key=lambda row: (*(row[name] for name in WAY), attentions.index(row["attention"]))):
        ratios = (relative_rate(record, row, **other) for other in compared.values())
        cells = (_attention_name(row), row["ms_median"], f"{row['tokens_per_second']:,}")
        lines.append((*(row[name] for name in WAY), *cells, *("" if x is None else f"{x:.2f}" for x in ratios)))
    return ("N", "devices", "parallel", "attention", "ms per step", "tokens/s", *compared), lines


def relative_rate(record: Record, row: Row, **other: Any) -> float | None:
    """Return tokens per second over those of the row that differs in `other` alone; None if there is none."""
    found = record.select(**{name: row[name] for name in ("attention", *WAY)} | other)
    return row["tokens_per_second"] / found[0]["tokens_per_second"] if found else None


def _attention_name(row: Row) -> str:
    """Name the kernel, too, if the row knows it and the attention's name doesn't say it."""
    name, node = NAMES[row["attention"]], row.get("autograd_node")
    kernel = KERNELS.get(node, node)
    return name if kernel in (None, name) else f"{name} ({kernel})"


def add_options(parser: argparse.ArgumentParser) -> None:
    default = SpeedPlan()
    parser.add_argument("--contexts", type=positive, nargs="+", default=default.contexts, metavar="N")
    for name in ("layers", "width", "heads", "tokens_per_device", "warmup"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=getattr(default, name))
    parser.add_argument("--steps", type=positive, default=default.steps, help="timed, at least 2")
    add_device_option(parser)


def pretrain_speed_command(options: argparse.Namespace) -> None:
    names = ("layers", "width", "heads", "tokens_per_device", "warmup", "steps")
    plan = SpeedPlan(tuple(options.contexts), **{name: getattr(options, name) for name in names})
    path = options.json or Path("runs/pretrain_speed.json")
    with processes(options.device) as group, only_writer(path) if group.is_first else nullcontext():
        parts = FinishedParts(path, (plan, group.count, measured_by())) if group.is_first else None
        for name in ATTENTIONS if group.is_first else ():
            if reason := why_missing(name, group.device):
                print(f"not timed: {NAMES[name]}, {reason}")
        for name, rows in step_times(plan, group, agreed(parts and list(parts.parts), group)):
            parts.keep(name, rows)
        if group.is_first:
            rows = [row for found in parts.parts.values() for row in found]
            print(markdown_table(*speed_table(rows)))
            write_record(options.json, rows, command=options.command, plan=asdict(plan))
            parts.remove()
