"""`python -m sage_lab pretrain-speed`: time of a training step with exact attention and SageBwd.

Exact attention is timed with the kernel that PyTorch picks for the device, with FlashAttention-2, which the paper
compares with, and with FlashAttention-4 where it is installed. All take their steps in turn.

SageBwd's kernels apply QK-norm and rotary positions themselves. On a GPU torch.compile fuses that work for the others,
so that attentions are compared, and not one pass with PyTorch's many. SageBwd is also timed that way, as "separate".

Under torchrun, one process per device:
`torchrun --standalone --nproc-per-node 4 -m sage_lab pretrain-speed`.
First each process trains alone. Then groups of 2, 4, ... train with DDP and with FSDP2, all groups of a size at once. A
step takes as long as its slowest process. All read the same tokens, so their losses must be those of one device. What
DDP's communication adds is measured by steps without it. FSDP2 cannot do without it.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from sage_lab.command_line import add_device_option, positive
from sage_lab.experiments.turns import in_turn, protocol_of, synchronized_time, time_columns
from sage_lab.models import flash_attention_4 as fa4
from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.records import Record, Row, markdown_table, write_record
from sage_lab.training.corpus import Corpus
from sage_lab.training.pretrain import Pretraining, PretrainSettings
from sage_lab.training.processes import Members, Processes, groups_of_each_size, largest_of, processes
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
NAMES = EXACT | {"sagebwd_apart": "SageBwd, QK-norm and rotation separate", "sagebwd": "SageBwd"}
WAYS = {"none": "", "ddp": ", DDP", "fsdp2": ", FSDP2"}
# By the node of the backward pass, which autograd makes for the kernel of the forward pass.
KERNELS = {
    "ScaledDotProductCudnnAttentionBackward0": "cuDNN",
    "ScaledDotProductFlashAttentionBackward0": "FlashAttention-2",
    "FlashAttnFuncBackward": "FlashAttention-4",
    "ScaledDotProductFlashAttentionForCpuBackward0": "PyTorch's CPU kernel",
    "SageBwdOperationBackward": "sage_kernels",
    "SageBwdFunctionBackward": "reference",
}


@dataclass(frozen=True)
class SpeedPlan:
    """The steps to time. tokens_per_device: of a step. warmup, steps: untimed and timed ones."""

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
        wholes = [("context", n, "tokens_per_pass") for n in self.contexts]
        for part, size, name in (*wholes, ("tokens_per_pass", self.tokens_per_pass, "tokens_per_device")):
            if getattr(self, name) % size:
                raise ValueError(f"{name}: expected a multiple of {part}={size}, got {getattr(self, name)}")


# The second is too small to show anything, large enough to try the program.
PLANS = {
    "cuda": SpeedPlan(),
    "cpu": SpeedPlan((16, 32), layers=1, width=16, heads=2, tokens_per_device=64, tokens_per_pass=32),
}


def why_missing(attention: str, device: torch.device) -> str | None:
    """Return the reason why an attention can't be timed here, None if it can."""
    if attention == "sagebwd_apart" and device.type != "cuda":
        return "it needs a CUDA device, for which its work apart is compiled"
    if attention != "flash_attention_4":
        return None
    if device.type != "cuda":
        return f"{fa4.PACKAGE} needs a CUDA device"
    return why_not_importable(fa4.PACKAGE, fa4.MODULE)


class Place(NamedTuple):
    """Where and how models train. parallel: a key of `WAYS`. members: the processes that share a model."""

    world: Processes
    members: Members = Members(1, 0, None)
    parallel: str = "none"

    def build(self, config: LlamaConfig) -> nn.Module:
        """Make a model that is the same in every place, spread over this one's devices."""
        with self.world.device:  # draws weights there
            model = Llama(config)
        if self.parallel == "ddp":
            return DistributedDataParallel(model, process_group=self.members.group, gradient_as_bucket_view=True)
        if self.parallel == "fsdp2":
            mesh = DeviceMesh.from_group(self.members.group, self.world.device.type)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        return model


class SpreadPretraining(Pretraining):
    """Pre-training in a place, whose processes add their gradients after a step's last pass, if they communicate."""

    communicates = True

    def passes(self) -> list[tuple]:
        *others, last = super().passes()
        return [*((*batch, False) for batch in others), (*last, True)]

    def loss(self, inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        is_shared = is_last and self.communicates
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = is_shared  # as its no_sync() does
        elif hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(is_shared)
        return super().loss(inputs, targets)


class Model:
    """A model with one attention in one place, and the times of its steps in milliseconds."""

    def __init__(self, plan: SpeedPlan, corpus: Corpus, context: int, attention: str, place: Place):
        of_model, self.backend, fused = ATTENTIONS[attention]
        device = place.world.device
        shape = {"context": context, "layers": plan.layers, "width": plan.width, "heads": plan.heads}
        config = LlamaConfig(VOCABULARY, **shape, qk_norm=True, attention=of_model, fused_prologue=fused)
        settings = PretrainSettings(
            steps=2 * (plan.warmup + plan.steps),
            batch_size=plan.tokens_per_device // context,
            micro_batch_size=plan.tokens_per_pass // context,
            autocast=device.type == "cuda",
        )
        self.world, self.training = place.world, SpreadPretraining(corpus, config, settings, device, build=place.build)
        nodes: set[str] = set()
        self.nodes, self.losses = nodes, []  # the hook must not hold the model that holds it
        self.times: dict[bool, list[float]] = {True: [], False: []}  # with communication, and without
        attentions = [block.attention for block in getattr(self.training.model, "module", self.training.model).blocks]
        for module in attentions:
            module.before = before_attention_on(device)
            if attention == "flash_attention_4":
                module.core.forward = _flash_attention_4
        attentions[0].core.register_forward_hook(lambda module, inputs, output: nodes.add(_node(output)))
        for _ in range(plan.warmup):
            self.step()
        self.times[True].clear()

    def step(self, communicates: bool = True) -> None:
        self.training.communicates = communicates
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            if self.world.count > 1:
                dist.barrier()
            started = synchronized_time(self.world.device)
            self.losses.append(self.training.advance())
            ms = 1e3 * (synchronized_time(self.world.device) - started)
        self.times[communicates] += largest_of([ms], self.world)


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


def speed_rows(plan: SpeedPlan, corpus: Corpus, context: int, names: Sequence[str], place: Place) -> list[Row]:
    """Measure attentions with models that take one step each in turn."""
    models = {name: Model(plan, corpus, context, name, place) for name in names}
    kinds = [(name, communicates) for communicates in (True, False)[: 1 + (place.parallel == "ddp")] for name in names]
    for name, communicates in in_turn(kinds, plan.steps):
        models[name].step(communicates)
    rows = []
    for name, model in models.items():
        (node,), size = model.nodes, place.members.size
        tokens, times, silent = (
            size * model.training.tokens_per_step,
            time_columns(model.times[True]),
            model.times[False],
        )
        row = {"attention": name, "autograd_node": node}
        row |= {"devices": size, "parallel": place.parallel, "context": context}
        row |= {"tokens_per_step": tokens, "tokens_per_pass": plan.tokens_per_pass}
        row |= {"parameters": sum(x.numel() for x in model.training.model.parameters())}
        row |= {"protocol": protocol_of(kinds)} | times
        row |= {"tokens_per_second": round(1e3 * tokens / times["ms_median"])}
        row |= {"ms_without_communication": round(median(silent), 2) if silent else None}
        rows.append(row | {"first_timed_loss": model.losses[plan.warmup]})
    return rows


def speed_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple]]:
    """Return header and lines: what ran, its time and rate, and its rate over those of others.

    Columns about several devices are there if a row needs them.
    """
    record = Record({}, list(rows))
    compared = {
        f"times as fast as {NAMES[name]}": {"attention": name} for name in EXACT if record.select(attention=name)
    }
    if is_spread := any(row["devices"] > 1 for row in rows):
        compared["of one device's rate, each"] = {"devices": 1, "parallel": "none"}
    lines = []
    for row in sorted(rows, key=lambda row: (row["context"], row["devices"], list(ATTENTIONS).index(row["attention"]))):
        ratios = [relative_rate(record, row, **other) for other in compared.values()]
        way = f"{row['devices']}{WAYS[row['parallel']]}"
        cells = row["context"], way, _attention_name(row), row["ms_median"], f"{row['tokens_per_second']:,}"
        cells += (*("" if x is None else f"{x:.2f}" for x in ratios),)
        silent = row.get("ms_without_communication")
        cells += (f"{1 - silent / row['ms_median']:.1%}" if silent else "",) if is_spread else ()
        lines.append(cells)
    header = ("N", "devices", "attention", "ms per step", "tokens/s", *compared)
    return (*header, "communication") if is_spread else header, lines


def relative_rate(record: Record, row: Row, **other: str | int) -> float | None:
    """Return tokens per second and device over those of a row that differs in `other` alone; None if there is none."""
    same = {name: row[name] for name in ("attention", "devices", "parallel", "context")}
    found = record.select(**same | other)
    mine, *others = (x["tokens_per_second"] / x["devices"] for x in (row, *found[:1]))
    return mine / others[0] if others else None


def _attention_name(row: Row) -> str:
    """Name the kernel, too, if the row knows it and the attention's name doesn't say it."""
    name, node = NAMES[row["attention"]], row.get("autograd_node")
    kernel = KERNELS.get(node, node)
    return name if kernel in (None, name) else f"{name} ({kernel})"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warmup", type=positive, default=SpeedPlan.warmup, help="steps that are not timed")
    parser.add_argument("--steps", type=positive, default=SpeedPlan.steps, help="steps that are timed, at least 2")
    parser.add_argument("--contexts", type=positive, nargs="+", metavar="N", help="tokens of a sequence")
    parser.add_argument("--attentions", choices=ATTENTIONS, nargs="+", default=list(ATTENTIONS), help="what to time")
    parser.add_argument("--tokens-per-pass", type=positive, help="tokens of a forward and backward pass")
    parser.add_argument("--tokens-per-device", type=positive, help="tokens of a step")
    add_device_option(parser)


def pretrain_speed_command(options: argparse.Namespace) -> None:
    kind = torch.device(options.device).type
    names = ("warmup", "steps", "contexts", "tokens_per_pass", "tokens_per_device")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    plan = replace(PLANS[kind], **{name: tuple(x) if isinstance(x, list) else x for name, x in chosen.items()})
    tokens = torch.randint(VOCABULARY, (2**22,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    corpus, rows = Corpus("random tokens", tokens, VOCABULARY), []
    with processes(options.device) as world:
        reasons = {name: why_missing(name, world.device) for name in options.attentions}
        here = [name for name, reason in reasons.items() if reason is None]
        for name, reason in reasons.items():
            if reason and world.is_first:
                print(f"not timed: {NAMES[name]}, {reason}")
        alone, *groups = groups_of_each_size(world)
        places = [Place(world, alone), *(Place(world, of, way) for of in groups for way in ("ddp", "fsdp2"))]
        facts = {"command": world.command(options.command), "plan": asdict(plan), "devices": world.count}
        for context in plan.contexts:
            for place in places:
                rows += speed_rows(plan, corpus, context, here, place)
                if world.is_first:
                    write_record(options.json, rows, **facts)
        if world.is_first:
            print(markdown_table(*speed_table(rows)))
