"""A video DiT learns by flow matching from made-up scenes: pre-training, and stage 2 of fine-tuning with SLA2.

Videos and noise are made on the device. Those of a step are a function of (purpose, seed, step), and the processes deal
them out among themselves (`sage_lab.training.processes`). Beside the weights an exponential moving average of them is
kept, which is what validates, samples and is fine-tuned.

A model can start from the weights of another: one that learned smaller videos, or one with another attention.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig, is_of_core, load_backbone
from sage_lab.records import Row, replaced
from sage_lab.training.loop import Diverged, TrainingSettings
from sage_lab.training.processes import WHOLE, ParallelTraining, Processes
from sage_lab.training.video import flow_matching_loss
from sage_lab.training.video_scenes import moving_scenes, seed_of

# First numbers of the seeds, so that no scene is drawn for two purposes.
PURPOSES = ("train", "finetune", "route", "validate", "judge", "sample", "restore", "watch")
PART_BYTES = 15 * 2**20
WORSE_THAN_NONE = 1.1  # times the loss of answering 0: a run there has diverged
# cuDNN's attention is the fastest that PyTorch has for a Hopper GPU.
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class FlowSettings(TrainingSettings):
    """batch_size: videos per step, over all processes. micro_batch_size: videos in one pass of one process.

    purpose: "train" or "finetune", for which the scenes are drawn. average: decay of the moving average at its slowest;
    it begins faster. alpha_rate: how many times as fast SLA2's alphas learn; 0: they stay as they are.
    autocast: matmuls in bfloat16; weights, gradients and all averages stay in float32. compile: hand the model's
    blocks, without their attention, to torch.compile.
    """

    micro_batch_size: int = 8
    purpose: str = "train"
    average: float = 0.999
    alpha_rate: float = 1.0
    validation_videos: int = 16
    autocast: bool = False
    compile: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("micro_batch_size", "validation_videos"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.purpose not in PURPOSES[:2]:
            raise ValueError(f"purpose: expected one of {PURPOSES[:2]}, got {self.purpose!r}")
        if not 0 <= self.average < 1:
            raise ValueError(f"average: expected a decay in [0, 1), got {self.average}")


def flow_batch(
    count: int, digits: Tensor, config: VideoDiTConfig, *, seed: Sequence[int], part: slice = slice(None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Videos [n, 3, T, size, size], noise levels [n] and noise like the videos: those `part` of `count`.

    On the device of the digits. The levels are uniform on [0, 1], one from each of `count` equal parts.
    """
    video, _ = moving_scenes(count, digits, config.frames, config.size, seed=seed, part=part)
    generator = torch.Generator(digits.device).manual_seed(seed_of((*seed, 1)))
    device = {"generator": generator, "device": digits.device}
    noise_level = (torch.arange(count, device=digits.device) + torch.rand(count, **device)) / count
    noise = torch.randn(count, *video.shape[1:], **device)
    return video, noise_level[part], noise[part]


def digest(weights: Weights) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name in sorted(weights):
        bits = weights[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(name.encode())
        found.update(bits.numpy().tobytes())
    return found.hexdigest()[:16]


@contextmanager
def fast_arithmetic(device: torch.device, autocast: bool):
    """bfloat16 if asked for, and the fastest attention that PyTorch has."""
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast), sdpa_kernel(FASTEST, set_priority=True):
        yield


def started_model(config: VideoDiTConfig, start: Weights | None) -> VideoDiT:
    """A model with those weights of `start` that it has a place for: all but a core's must be there."""
    model = VideoDiT(config)
    if start is not None:
        load_backbone(model, start)
        own = model.state_dict()
        of_cores = {name: x for name, x in start.items() if is_of_core(name) and name in own}
        model.load_state_dict(of_cores, strict=False)
    return model


class FlowTraining(ParallelTraining):
    """A video DiT that learns velocities. digits: `digit_images()`. start: weights to begin with.

    Raises ValueError if the processes and passes don't divide the videos of a step, or `start` is of another model.
    """

    def __init__(
        self,
        config: VideoDiTConfig,
        settings: FlowSettings,
        digits: Tensor,
        processes: Processes = Processes(),  # noqa: B008 (immutable)
        *,
        start: Weights | None = None,
        fsdp: bool = False,
    ):
        self.config, self.digits = config, digits.to(processes.device)
        arguments = asdict(config) | {"start": start and digest(start)}
        super().__init__(lambda: started_model(config, start), settings, arguments, processes, fsdp=fsdp)
        self.average = self.placed(VideoDiT(config)).requires_grad_(False)
        self.average.load_state_dict(self.model.state_dict())
        if settings.compile:
            self.average.compile_blocks()
        self.ahead: tuple[int | None, list[tuple[Tensor, ...]]] = (None, [])
        part = slice(settings.validation_videos)
        seed = (PURPOSES.index("validate"),)
        self.validation = flow_batch(settings.validation_videos, self.digits, config, seed=seed, part=part)

    def parameter_groups(self) -> list[dict[str, Any]]:
        alphas = [x for name, x in self.model.named_parameters() if name.endswith("alpha_logit")]
        for alpha in alphas:
            alpha.requires_grad_(self.settings.alpha_rate > 0)
        those = {id(x) for x in alphas}
        others = [x for x in self.model.parameters() if x.requires_grad and id(x) not in those]
        matrices, gains = ([x for x in others if (x.dim() > 1) == is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
        if alphas and self.settings.alpha_rate:
            groups.append({"params": alphas, "weight_decay": 0.0, "rate_factor": self.settings.alpha_rate})
        return groups

    def compiled(self, model: VideoDiT) -> nn.Module:
        if self.settings.compile:
            torch._dynamo.config.recompile_limit = 64  # one program for each size of a batch, with gradients or without
            model.compile_blocks()
        return model

    def passes(self) -> list[tuple[Tensor, ...]]:
        step, found = self.ahead
        return found if step == self.step else self.passes_of(self.step)

    def look_ahead(self) -> None:
        """The next step's videos: their many small operations are handed out while the device is busy."""
        self.ahead = self.step + 1, self.passes_of(self.step + 1)

    def passes_of(self, step: int) -> list[tuple[Tensor, ...]]:
        settings, group = self.settings, self.processes
        seed = (PURPOSES.index(settings.purpose), settings.seed, step)
        part = slice(group.rank, None, group.count)
        batch = flow_batch(settings.batch_size, self.digits, self.config, seed=seed, part=part)
        return list(zip(*(x.split(settings.micro_batch_size) for x in batch), strict=True))

    def loss(self, video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
        return self.loss_of(self.parallel, video, noise_level, noise)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        with fast_arithmetic(self.processes.device, self.settings.autocast):
            return flow_matching_loss(model, *batch).mean()

    def advance(self) -> float:
        loss = super().advance()
        decay = min(self.settings.average, self.step / (self.step + 9))
        if self.fsdp:
            self.average.reshard()  # which validation leaves gathered
        with torch.no_grad():
            for average, x in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.lerp_(x.detach(), 1 - decay)
        return loss

    def validation_loss(self) -> float:
        """Of the moving average, on videos and noise that are the same at every call."""
        size = self.settings.micro_batch_size
        parts = zip(*(x.split(size) for x in self.validation), strict=True)
        losses = [self.loss_of(self.average, *part) * len(part[0]) for part in parts]
        return (sum(losses) / self.settings.validation_videos).item()

    def report(self, train_losses: Sequence[float]) -> Row:
        """The base's row. Raises `Diverged` if the validation loss is not finite, or well above that of no model.

        A model that always answers 0 has the loss E (e - x)^2; one that has learned little may be near it.
        """
        row = super().report(train_losses)
        video, _, noise = self.validation
        guessing = (noise - video).square().mean().item()
        if not math.isfinite(row["validation_loss"]):
            raise Diverged(f"the validation loss after step {self.step} is not finite")
        if self.step > self.settings.warmup_steps and row["validation_loss"] > WORSE_THAN_NONE * guessing:
            raise Diverged(
                f"the validation loss after step {self.step} is {row['validation_loss']:.3f}, "
                f"that of answering 0 is {guessing:.3f}"
            )
        return row

    def weights(self) -> dict[str, Any]:
        return super().weights() | {"average": get_model_state_dict(self.average, options=WHOLE)}

    def restore_weights(self, state: dict[str, Any]) -> None:
        super().restore_weights(state)
        set_model_state_dict(self.average, state["average"], options=WHOLE)

    def averaged(self) -> Weights:
        """The moving average, whole, on the CPU."""
        return get_model_state_dict(self.average, options=WHOLE)


def write_weights(path: Path, weights: Weights, config: VideoDiTConfig, facts: dict[str, Any]) -> list[Path]:
    """bfloat16, in parts of 15 MiB at most: NAME.1.safetensors, NAME.2.safetensors, ... Each has config and facts."""
    halves = {name: x.to(torch.bfloat16).contiguous() for name, x in weights.items()}
    parts: list[Weights] = [{}]
    for name, x in halves.items():
        if sum(y.nbytes for y in (*parts[-1].values(), x)) > PART_BYTES:
            parts.append({})
        parts[-1][name] = x
    paths = []
    for number, part in enumerate(parts, start=1):
        says = {"config": asdict(config), "facts": facts, "part": number, "parts": len(parts), "of": digest(halves)}
        paths.append(path.with_suffix(f".{number}.safetensors"))
        with replaced(paths[-1]) as temporary:
            temporary.write_bytes(save(part, metadata={name: json.dumps(x) for name, x in says.items()}))
    return paths


def read_weights(paths: Sequence[Path]) -> tuple[Weights, VideoDiTConfig, dict[str, Any]]:
    """What `write_weights` wrote: weights in float32, the model's configuration, and the facts.

    ValueError if a part is missing, or belongs to other weights.
    """
    weights: Weights = {}
    says = []
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                says.append({name: json.loads(x) for name, x in file.metadata().items()})
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                first = says[0]
                is_one = says[-1]["of"] == first["of"]
        except (SafetensorError, TypeError, AttributeError, KeyError, ValueError):
            raise ValueError(f"weights: expected what `python -m sage_lab video train` wrote, got {path}") from None
        if not is_one:
            raise ValueError(f"weights: expected parts of one model, {path} is of another than {paths[0]}")
    numbers = sorted(x["part"] for x in says)
    if not says or numbers != list(range(1, says[0]["parts"] + 1)):
        asked = f"all {says[0]['parts']} parts" if says else "at least one file"
        raise ValueError(f"weights: expected {asked}, got numbers {numbers}")
    if digest(weights) != says[0]["of"]:
        raise ValueError(f"weights: expected those that were written, {paths[0]} and its parts have been changed")
    names = {field.name for field in fields(VideoDiTConfig)}
    config = {name: x for name, x in says[0]["config"].items() if name in names}
    config["cube"] = tuple(config["cube"])
    return {name: x.float() for name, x in weights.items()}, VideoDiTConfig(**config), says[0]["facts"]


@torch.no_grad()
def sample(model: nn.Module, noisy_video: Tensor, steps: int, noise_level: float = 1.0) -> Tensor:
    """Follow the velocity from x_t at t = noise_level to the video at t = 0, by Euler's rule. [B, 3, T, size, size]."""
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    x, levels = noisy_video, torch.linspace(noise_level, 0, steps + 1).tolist()
    for t, following in zip(levels, levels[1:], strict=False):
        velocity = model(x, torch.full((len(x),), t, device=x.device))
        x = x + (following - t) * velocity.to(x.dtype)
    return x


@torch.no_grad()
def graphed(model: nn.Module, video: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """model(video, noise_level) as a CUDA graph: the host starts one graph for a pass, and not each of its programs.

    It takes videos of the shape, type and device of `video`, [B, 3, T, size, size], of which no value is used, and it
    computes with the autocast that is on now. A call overwrites the velocity that the call before it returned. There
    are no gradients. ValueError for a video that is on no GPU, and, when called, for one of another shape.
    """
    if video.device.type != "cuda":
        raise ValueError(f"video: expected a tensor on a CUDA device, got one on {video.device}")
    inputs = torch.zeros_like(video), torch.ones(len(video), device=video.device)
    caches_casts = torch.is_autocast_cache_enabled()
    # The graph would go on reading casts of weights that autocast frees.
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.cuda.device(video.device):
            # A function, since of a module its own forward would be replaced.
            graph = torch.cuda.make_graphed_callables(lambda *given: model(*given), inputs)
    finally:
        torch.set_autocast_cache_enabled(caches_casts)

    @torch.no_grad()
    def replay(video: Tensor, noise_level: Tensor) -> Tensor:
        for name, held, given in zip(("video", "noise_level"), inputs, (video, noise_level), strict=True):
            if given.shape != held.shape:
                raise ValueError(f"{name}: expected {list(held.shape)} as captured, got {list(given.shape)}")
        return graph(video, noise_level)

    return replay
