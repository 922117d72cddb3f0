"""A training step, and the sampling of a whole video, with SLA2 and with the attentions that it competes with.

Every repetition takes one step with each in turn, so that all share one clock; sampling likewise. A step is all of it:
the scenes made, both passes, AdamW, the moving average. Sampling is `sampling_steps` forward passes. On a GPU it is
also timed with each pass as one CUDA graph: a short video's many small programs take longer to start than to run.

FlexAttention has the same share of selected keys, in blocks of 128 x 128 that are drawn once: its backward pass needs
such blocks. It has no router and no linear branch.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sage_lab.experiments.turns import orders
from sage_lab.experiments.video.measures import synchronized_time
from sage_lab.models import flash_attention_4 as fa4
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import Row, markdown_table
from sage_lab.training.processes import Processes
from sage_lab.training.video_flow import FlowSettings, FlowTraining, fast_arithmetic, graphed, sample
from sage_ref.backend import why_not_importable
from sage_ref.sla2 import block_count, selected_count

FLEX_BLOCK = 128
Velocity = Callable[[Tensor, Tensor], Tensor]  # of a noisy video at a noise level


class SdpaCore(nn.Module):
    """Full attention by one of PyTorch's kernels; None: by that which it picks."""

    def __init__(self, backend: SDPBackend | None):
        super().__init__()
        self.backend = backend

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.backend is None:
            return F.scaled_dot_product_attention(query, key, value)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(query, key, value)


class FlashAttention4Core(nn.Module):
    """Full attention by FlashAttention-4."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fa4.flash_attention_4(query, key, value, is_causal=False)


class FlexCore(nn.Module):
    """Softmax attention over as large a share of the keys as SLA2 selects, in blocks drawn once."""

    def __init__(self, config: VideoDiTConfig, device: torch.device):
        super().__init__()
        blocks = block_count(config.tokens, FLEX_BLOCK)
        count = selected_count(config.sparsity, blocks)
        generator = torch.Generator().manual_seed(0)
        order = torch.rand(1, config.heads, blocks, blocks, generator=generator).argsort(-1).int()
        order[..., :count] = order[..., :count].sort(-1).values
        order = order.to(device).contiguous()
        counts = torch.full(order.shape[:-1], count, dtype=torch.int32, device=device)
        self.mask = BlockMask.from_kv_blocks(
            torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=FLEX_BLOCK,
            seq_lengths=(config.tokens, config.tokens),
        )  # fmt: skip
        on_gpu = device.type == "cuda"
        self.attention = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, block_mask=self.mask)


class Contender(NamedTuple):
    """core: what takes the place of a block's attention core, given configuration and device; None: it stays."""

    words: str
    attention: str = "exact"
    core: Callable[[VideoDiTConfig, torch.device], nn.Module] | None = None
    needs_gpu: bool = True


CONTENDERS = {
    "sla2": Contender("SLA2", "sla2", needs_gpu=False),
    "exact": Contender("PyTorch's pick", core=lambda *_: SdpaCore(None), needs_gpu=False),
    "flash_attention_2": Contender("FlashAttention-2", core=lambda *_: SdpaCore(SDPBackend.FLASH_ATTENTION)),
    "cudnn": Contender("cuDNN", core=lambda *_: SdpaCore(SDPBackend.CUDNN_ATTENTION)),
    "flash_attention_4": Contender("FlashAttention-4", core=lambda *_: FlashAttention4Core()),
    "flex": Contender("FlexAttention, as many keys", core=FlexCore),
}


@dataclass(frozen=True)
class VideoSpeedPlan:
    """frames: of each size of a video. videos: of a step with the fewest frames; others have as many tokens.

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


def why_missing(name: str, device: torch.device) -> str | None:
    """Why a contender can't be timed here, None if it can."""
    if CONTENDERS[name].needs_gpu and device.type != "cuda":
        return "it needs a CUDA device"
    return why_not_importable(fa4.PACKAGE, fa4.MODULE) if name == "flash_attention_4" else None


def length_rows(
    plan: VideoSpeedPlan, config: VideoDiTConfig, digits: Tensor, device: torch.device, names: Sequence[str]
) -> list[Row]:
    """Of videos as config has them: a row for a step and one or two for sampling, of every contender. All take turns.

    What PyTorch can't capture as a CUDA graph has a row that says why, under "missing".
    """
    trainings = {name: new_training(plan, config, name, digits, device) for name in names}
    models = {name: training.average for name, training in trainings.items()}
    noise = torch.randn(1, 3, config.frames, config.size, config.size, device=device)

    def step(name: str) -> None:
        trainings[name].advance()

    def sampled(name: str, models: Mapping[str, Velocity] = models) -> None:
        with fast_arithmetic(device, plan.autocast):
            sample(models[name], noise, plan.sampling_steps)

    place = {"frames": config.frames, "tokens": config.tokens, "sparsity": config.sparsity}
    step_place = place | {"what": "step", "videos": plan.videos_of(config.frames), "sampling_steps": None}
    rows = [step_place | row for row in in_turn(step, names, plan.warmup, plan.repetitions, device)]
    sample_place = place | {"what": "sampling", "videos": 1, "sampling_steps": plan.sampling_steps}
    rows += [sample_place | row for row in in_turn(sampled, names, 1, plan.sampled, device)]
    if device.type != "cuda":
        return rows
    graphs, missing = captured(models, noise, plan.autocast)
    # Their memory is kept from one replay to the next, of all contenders: no row's own.
    graph_place = sample_place | {"what": "sampling, CUDA graph"}
    timed = in_turn(partial(sampled, models=graphs), list(graphs), 1, plan.sampled, device) if graphs else []
    rows += [graph_place | row | {"memory_gb": None} for row in timed]
    return rows + [graph_place | {"provider": name, "missing": reason} for name, reason in missing.items()]


def captured(
    models: Mapping[str, nn.Module], noise: Tensor, autocast: bool
) -> tuple[dict[str, Velocity], dict[str, str]]:
    """Each model's pass as a CUDA graph; and of those that PyTorch can't capture, why."""
    graphs: dict[str, Velocity] = {}
    missing: dict[str, str] = {}
    for name, model in models.items():
        try:
            with fast_arithmetic(noise.device, autocast):
                graphs[name] = graphed(model, noise)
        except RuntimeError as error:
            missing[name] = str(error).splitlines()[0]
    return graphs, missing


def new_training(
    plan: VideoSpeedPlan, config: VideoDiTConfig, name: str, digits: Tensor, device: torch.device
) -> FlowTraining:
    contender = CONTENDERS[name]
    videos = plan.videos_of(config.frames)
    settings = FlowSettings(
        steps=plan.warmup + plan.repetitions, batch_size=videos, micro_batch_size=videos, validation_videos=1,
        autocast=plan.autocast, compile=plan.compile,
    )  # fmt: skip
    backend = "triton" if device.type == "cuda" else "reference"
    config = replace(config, attention=contender.attention, backend=backend)
    training = FlowTraining(config, settings, digits, Processes(device=device))
    for model in (training.model, training.average):
        core = contender.core and contender.core(config, device)
        for block in model.blocks if core else ():
            block.attention.core = core
    return training


def in_turn(
    work: Callable[[str], None], names: Sequence[str], warmup: int, repetitions: int, device: torch.device
) -> list[Row]:
    """Milliseconds of work(name): median, 20th and 80th percentile, and the most memory in use meanwhile, in GB.

    All contenders' weights are among it, since they take turns.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    memory = dict.fromkeys(names, 0)
    for name in names:
        for _ in range(warmup):
            work(name)
    for order in orders(len(names), repetitions):
        for place in order:
            name = names[place]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            started = synchronized_time(device)
            work(name)
            times[name].append(1e3 * (synchronized_time(device) - started))
            if device.type == "cuda":
                memory[name] = max(memory[name], torch.cuda.max_memory_allocated(device))
    rows = []
    for name in names:
        fastest, *_, slowest = statistics.quantiles(times[name], n=5, method="inclusive")
        median = statistics.median(times[name])
        figures = {"ms_median": median, "ms_p20": fastest, "ms_p80": slowest}
        row = {"provider": name, "protocol": "paired" if len(names) > 1 else "alone"}
        gigabytes = round(memory[name] / 1e9, 2) or None
        rows.append(row | {key: round(x, 2) for key, x in figures.items()} | {"memory_gb": gigabytes})
    return rows


def speed_table(rows: Sequence[Row]) -> str:
    """Milliseconds, and how many times as long as SLA2 each takes."""
    lines = []
    for row in rows:
        alike = [x for x in rows if (x["what"], x["tokens"], x["provider"]) == (row["what"], row["tokens"], "sla2")]
        ratio = f"{row['ms_median'] / alike[0]['ms_median']:.2f}" if alike else ""
        words = CONTENDERS[row["provider"]].words
        lines.append((row["what"], row["tokens"], words, row["ms_median"], ratio, row["memory_gb"] or ""))
    return markdown_table(("", "tokens", "attention", "ms", "times SLA2", "GB"), lines)
