"""Times of a training step, and of sampling a whole video, with SLA2 and the attentions that it competes with.

Every repetition takes one step with each in turn, so that all share one clock; sampling likewise. A step includes
making the scenes, both passes, AdamW and the moving average. Sampling is `sampling_steps` forward passes. On a GPU it
is also timed with each pass as one CUDA graph: a short video's many small programs take longer to start than to run.

FlexAttention has the same share of selected keys, in blocks of 128 x 128 that are drawn once: its backward pass needs
such blocks. It has no router and no linear branch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sage_lab.experiments.turns import in_turn, protocol_of, synchronized_time, time_columns
from sage_lab.models import flash_attention_4 as fa4
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import Row, markdown_table
from sage_lab.training.video_flow import FlowSettings, FlowTraining, fast_arithmetic, graphed, sample
from sage_ref.backend import why_not_importable
from sage_ref.sla2 import block_count, selected_count

FLEX_BLOCK = 128
Velocity = Callable[[Tensor, Tensor], Tensor]  # of a noisy video at a noise level


class Core(nn.Module):
    """An attention core that calls a function of Q, K and V."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value)


def sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute full attention by one of PyTorch's kernels."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value)


def flex(config: VideoDiTConfig, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return softmax attention over the same share of the keys as SLA2 selects, in blocks that are drawn now."""
    blocks = block_count(config.tokens, FLEX_BLOCK)
    count = selected_count(config.sparsity, blocks)
    order = torch.rand(1, config.heads, blocks, blocks, generator=torch.Generator().manual_seed(0)).argsort(-1).int()
    order[..., :count] = order[..., :count].sort(-1).values
    order = order.to(device).contiguous()
    counts = torch.full(order.shape[:-1], count, dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=FLEX_BLOCK,
        seq_lengths=(config.tokens, config.tokens),
    )  # fmt: skip
    attention = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    return partial(attention, block_mask=mask)


class Contender(NamedTuple):
    """A contender. core: makes the function that replaces a block's attention core; None keeps the model's."""

    words: str
    attention: str = "exact"
    core: Callable[[VideoDiTConfig, torch.device], Callable] | None = None
    needs_gpu: bool = True


CONTENDERS = {
    "sla2": Contender("SLA2", "sla2", needs_gpu=False),
    "exact": Contender("PyTorch's pick", core=lambda *_: F.scaled_dot_product_attention, needs_gpu=False),
    "flash_attention_2": Contender("FlashAttention-2", core=lambda *_: partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    "cudnn": Contender("cuDNN", core=lambda *_: partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
    "flash_attention_4": Contender("FlashAttention-4", core=lambda *_: partial(fa4.flash_attention_4, is_causal=False)),
    "flex": Contender("FlexAttention, as many keys", core=flex),
}


@dataclass(frozen=True)
class VideoSpeedPlan:
    """A plan of timings.

    frames: of each size of a video. videos: of a step with the fewest frames; others have as many tokens.
    repetitions: of a step; sampled: of sampling one video. warmup: untimed steps.
    """

    frames: tuple[int, ...] = (16, 64)
    videos: int = 8
    warmup: int = 3
    repetitions: int = 8
    sampled: int = 4
    sampling_steps: int = 24
    autocast: bool = True
    compile: bool = True

    def videos_of(self, frames: int) -> int:
        return max(1, self.videos * min(self.frames) // frames)


SPEED_PLANS = {
    "cuda": VideoSpeedPlan(),
    "cpu": VideoSpeedPlan((4, 8), videos=2, warmup=1, sampling_steps=1, autocast=False, compile=False),
}


def why_missing(name: str, device: torch.device) -> str | None:
    """Return the reason why a contender can't be timed here, or None if it can."""
    if CONTENDERS[name].needs_gpu and device.type != "cuda":
        return "it needs a CUDA device"
    return why_not_importable(fa4.PACKAGE, fa4.MODULE) if name == "flash_attention_4" else None


def length_rows(
    plan: VideoSpeedPlan, config: VideoDiTConfig, digits: Tensor, device: torch.device, names: Sequence[str]
) -> list[Row]:
    """Time videos of the size that `config` has: a row per contender for a step and one or two for sampling.

    A contender that PyTorch can't capture as a CUDA graph has a row that says why, under "missing".
    """
    trainings = {name: new_training(plan, config, name, digits, device) for name in names}
    models = {name: training.average for name, training in trainings.items()}
    noise = torch.randn(1, 3, config.frames, config.size, config.size, device=device)

    def sampled(models: Mapping[str, Velocity], name: str) -> None:
        with fast_arithmetic(device, plan.autocast):
            sample(models[name], noise, plan.sampling_steps)

    place = {"frames": config.frames, "tokens": config.tokens, "sparsity": config.sparsity}
    step_place = place | {"what": "step", "videos": plan.videos_of(config.frames), "sampling_steps": None}
    steps = timed_rows(lambda name: trainings[name].advance(), names, plan.warmup, plan.repetitions, device)
    sample_place = place | {"what": "sampling", "videos": 1, "sampling_steps": plan.sampling_steps}
    samples = timed_rows(partial(sampled, models), names, 1, plan.sampled, device)
    rows = [step_place | row for row in steps] + [sample_place | row for row in samples]
    if device.type != "cuda":
        return rows
    graph_place = sample_place | {"what": "sampling, CUDA graph"}
    graphs: dict[str, Velocity] = {}
    for name, model in models.items():
        try:
            with fast_arithmetic(device, plan.autocast):
                graphs[name] = graphed(model, noise)
        except RuntimeError as error:
            rows.append(graph_place | {"provider": name, "missing": str(error).splitlines()[0]})
    timed = timed_rows(partial(sampled, graphs), list(graphs), 1, plan.sampled, device) if graphs else []
    # The graphs of all contenders keep their memory from one replay to the next, so no row can have its own.
    return rows + [graph_place | row | {"memory_gb": None} for row in timed]


def new_training(
    plan: VideoSpeedPlan, config: VideoDiTConfig, name: str, digits: Tensor, device: torch.device
) -> FlowTraining:
    """Return the training of a model with a contender's attention."""
    contender, videos = CONTENDERS[name], plan.videos_of(config.frames)
    settings = FlowSettings(
        steps=plan.warmup + plan.repetitions, batch_size=videos, validation_videos=1,
        autocast=plan.autocast, compile=plan.compile,
    )  # fmt: skip
    backend = "triton" if device.type == "cuda" else "reference"
    config = replace(config, attention=contender.attention, backend=backend)
    training = FlowTraining(config, settings, digits, device)
    if contender.core is not None:
        core = Core(contender.core(config, device))
        for block in (*training.model.blocks, *training.average.blocks):
            block.attention.core = core
    return training


def timed_rows(
    work: Callable[[str], object], names: Sequence[str], warmup: int, repetitions: int, device: torch.device
) -> list[Row]:
    """Time work(name) of all names in turn; return a row each, with the peak memory in GB.

    The memory includes the weights of all contenders, since they take turns.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    memory = dict.fromkeys(names, 0)
    for name in names:
        for _ in range(warmup):
            work(name)
    for name in in_turn(names, repetitions):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = synchronized_time(device)
        work(name)
        times[name].append(1e3 * (synchronized_time(device) - started))
        if device.type == "cuda":
            memory[name] = max(memory[name], torch.cuda.max_memory_allocated(device))
    return [
        {"provider": name, "protocol": protocol_of(names)}
        | time_columns(times[name])
        | {"memory_gb": round(memory[name] / 1e9, 2) or None}
        for name in names
    ]


def speed_table(rows: Sequence[Row]) -> str:
    """Return a table of milliseconds, and of how many times as long as SLA2 each takes."""
    lines = []
    for row in rows:
        alike = [x for x in rows if (x["what"], x["tokens"], x["provider"]) == (row["what"], row["tokens"], "sla2")]
        ratio = f"{row['ms_median'] / alike[0]['ms_median']:.2f}" if alike else ""
        words = CONTENDERS[row["provider"]].words
        lines.append((row["what"], row["tokens"], words, row["ms_median"], ratio, row["memory_gb"] or ""))
    return markdown_table(("", "tokens", "attention", "ms", "times as long as SLA2", "GB"), lines)
