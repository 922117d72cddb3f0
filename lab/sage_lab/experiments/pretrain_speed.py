"""`python -m sage_lab pretrain-speed`: time of a training step with exact attention and SageBwd.

Exact attention is timed with the kernel that PyTorch picks for the device, with FlashAttention-2, which the paper
compares with, and with FlashAttention-4 where it is installed. All take their steps in turn.

SageBwd's kernels apply QK-norm and rotary positions themselves. On a GPU torch.compile fuses that work for the others,
so that attentions are compared, and not one pass with PyTorch's many. SageBwd is also timed that way, as "separate".
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_lab.command_line import add_device_option, positive
from sage_lab.experiments.turns import in_turn, protocol_of, time_columns
from sage_lab.models import flash_attention_4 as fa4
from sage_lab.models.llama import LlamaConfig
from sage_lab.records import Record, Row, markdown_table, write_record
from sage_lab.training.corpus import Corpus
from sage_lab.training.pretrain import Pretraining, PretrainSettings
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


class Model:
    """A model with one attention, and the times of its steps in milliseconds."""

    def __init__(self, plan: SpeedPlan, corpus: Corpus, context: int, attention: str, device: torch.device):
        of_model, self.backend, fused = ATTENTIONS[attention]
        shape = {"context": context, "layers": plan.layers, "width": plan.width, "heads": plan.heads}
        config = LlamaConfig(VOCABULARY, **shape, qk_norm=True, attention=of_model, fused_prologue=fused)
        settings = PretrainSettings(
            steps=plan.warmup + plan.steps,
            batch_size=plan.tokens_per_device // context,
            micro_batch_size=plan.tokens_per_pass // context,
            autocast=device.type == "cuda",
        )
        self.training = Pretraining(corpus, config, settings, device)
        nodes: set[str] = set()
        self.nodes, self.times = nodes, []  # the hook must not hold the model that holds it
        attentions = [block.attention for block in self.training.model.blocks]
        for module in attentions:
            module.before = before_attention_on(device)
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


def speed_rows(plan: SpeedPlan, corpus: Corpus, context: int, device: torch.device) -> list[Row]:
    """Measure every attention that can be timed here, with models that take one step each in turn."""
    here = [name for name in ATTENTIONS if why_missing(name, device) is None]
    models = {name: Model(plan, corpus, context, name, device) for name in here}
    for name in in_turn(here, plan.steps):
        models[name].step()
    rows = []
    for name, model in models.items():
        (node,) = model.nodes
        tokens, times = model.training.tokens_per_step, time_columns(model.times)
        row = {"attention": name, "autograd_node": node, "devices": 1, "parallel": "none", "context": context}
        row |= {"tokens_per_step": tokens, "parameters": sum(x.numel() for x in model.training.model.parameters())}
        row |= {"protocol": protocol_of(here)} | times
        rows.append(row | {"tokens_per_second": round(1e3 * tokens / times["ms_median"])})
    return rows


def speed_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple]]:
    """Return header and lines: what ran, its time and rate, and its rate over those of exact attention."""
    record = Record({}, list(rows))
    compared = [name for name in EXACT if record.select(attention=name)]
    lines = []
    for row in sorted(rows, key=lambda row: (row["context"], list(ATTENTIONS).index(row["attention"]))):
        ratios = (relative_rate(record, row, name) for name in compared)
        cells = row["context"], row["devices"], row["parallel"], _attention_name(row), row["ms_median"]
        lines.append((*cells, f"{row['tokens_per_second']:,}", *("" if x is None else f"{x:.2f}" for x in ratios)))
    against = (f"times as fast as {NAMES[name]}" for name in compared)
    return ("N", "devices", "parallel", "attention", "ms per step", "tokens/s", *against), lines


def relative_rate(record: Record, row: Row, attention: str) -> float | None:
    """Return tokens per second over those of a different attention at the same context; None if it wasn't timed."""
    found = record.select(attention=attention, context=row["context"])
    return row["tokens_per_second"] / found[0]["tokens_per_second"] if found else None


def _attention_name(row: Row) -> str:
    """Name the kernel, too, if the row knows it and the attention's name doesn't say it."""
    name, node = NAMES[row["attention"]], row.get("autograd_node")
    kernel = KERNELS.get(node, node)
    return name if kernel in (None, name) else f"{name} ({kernel})"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warmup", type=positive, default=SpeedPlan.warmup, help="steps that are not timed")
    parser.add_argument("--steps", type=positive, default=SpeedPlan.steps, help="steps that are timed, at least 2")
    add_device_option(parser)


def pretrain_speed_command(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    plan = replace(PLANS[device.type], warmup=options.warmup, steps=options.steps)
    for name in ATTENTIONS:
        if reason := why_missing(name, device):
            print(f"not timed: {NAMES[name]}, {reason}")
    tokens = torch.randint(VOCABULARY, (2**22,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    corpus = Corpus("random tokens", tokens, VOCABULARY)
    rows = [row for context in plan.contexts for row in speed_rows(plan, corpus, context, device)]
    print(markdown_table(*speed_table(rows)))
    write_record(options.json, rows, command=options.command, plan=asdict(plan))
