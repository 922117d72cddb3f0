"""A video DiT learns by flow matching from made-up scenes: pre-training, and stage 2 of fine-tuning with SLA2.

A noisy video is x_t = (1 - t) x + t e with noise e ~ N(0, 1) and noise level t: 0 is the video, 1 is noise alone. The
model learns the velocity d x_t / d t = e - x; the loss is the mean squared error over pixels, channels and frames.

Videos and noise are made on the device, and those of a step are a function of (purpose, seed, step). An exponential
moving average of the weights is kept as well: this average is validated and fine-tuned. A model can start from
the weights of a different one: one that learned smaller videos, or one with a different attention.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_lab.files import write_file
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig, load_weights
from sage_lab.records import Row
from sage_lab.training.loop import Diverged, ResumableTraining, TrainingSettings
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
    """Settings of a run.

    batch_size: videos per step. purpose: "train" or "finetune", for which the scenes are drawn. average: decay of the
    moving average at its slowest; it begins faster. alpha_rate: how many times as fast SLA2's alphas learn; 0: they
    stay as they are. autocast: matmuls in bfloat16; weights, gradients and all averages stay in float32.
    compile: pass the model's blocks, without their attention, to torch.compile.
    """

    purpose: str = "train"
    average: float = 0.999
    alpha_rate: float = 1.0
    validation_videos: int = 16
    autocast: bool = False
    compile: bool = False


def noisy(video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
    """Compute x_t = (1 - t) x + t e. video and noise [B, C, T, H, W], noise_level [B]."""
    t = noise_level.view(-1, 1, 1, 1, 1)
    return (1 - t) * video + t * noise


def flow_matching_loss(model: nn.Module, video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
    """Return (model(x_t, t) - (e - x))^2, mean over each video: [B]."""
    velocity = model(noisy(video, noise_level, noise), noise_level)
    return (velocity - (noise - video)).square().flatten(1).mean(1)


def flow_batch(
    count: int, digits: Tensor, config: VideoDiTConfig, *, seed: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Make videos [count, 3, T, size, size], noise levels [count] and noise like the videos, on the digits' device.

    The levels are uniform on [0, 1], one from each of `count` equal parts.
    """
    video = moving_scenes(count, digits, config.frames, config.size, seed=seed)
    generator = torch.Generator(digits.device).manual_seed(seed_of((*seed, 1)))
    device = {"generator": generator, "device": digits.device}
    noise_level = (torch.arange(count, device=digits.device) + torch.rand(count, **device)) / count
    return video, noise_level, torch.randn(video.shape, **device)


def in_parts(batch: Sequence[Tensor], size: int) -> list[tuple[Tensor, ...]]:
    """Split tensors into parts of at most `size` videos."""
    return list(zip(*(x.split(size) for x in batch), strict=True))


def digest(weights: Weights) -> str:
    """Return a digest of names and bits."""
    found = hashlib.sha256()
    for name in sorted(weights):
        bits = weights[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(name.encode())
        found.update(bits.numpy().tobytes())
    return found.hexdigest()[:16]


@contextmanager
def fast_arithmetic(device: torch.device, autocast: bool):
    """Compute in bfloat16 if asked for, and with the fastest attention that PyTorch has."""
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast), sdpa_kernel(FASTEST, set_priority=True):
        yield


def started_model(config: VideoDiTConfig, start: Weights | None) -> VideoDiT:
    """Make a model with the weights of `start`, see `load_weights`."""
    model = VideoDiT(config)
    if start is not None:
        load_weights(model, start)
    return model


class FlowTraining(ResumableTraining):
    """A video DiT that learns velocities. digits: `digit_images()`. start: weights to begin with."""

    def __init__(
        self,
        config: VideoDiTConfig,
        settings: FlowSettings,
        digits: Tensor,
        device: torch.device | str = "cpu",
        *,
        start: Weights | None = None,
    ):
        self.config, self.digits = config, digits.to(device)
        arguments = asdict(config) | {"start": start and digest(start)}
        super().__init__(lambda: started_model(config, start), settings, arguments, device)
        self.average = VideoDiT(config).to(device).requires_grad_(False)
        self.average.load_state_dict(self.model.state_dict())
        if settings.compile:
            torch._dynamo.config.recompile_limit = 64  # one program per batch size, with gradients or without
            self.model.compile_blocks()
            self.average.compile_blocks()
        self.ahead: tuple[int | None, list[tuple[Tensor, ...]]] = (None, [])
        seed = (PURPOSES.index("validate"),)
        self.validation = flow_batch(settings.validation_videos, self.digits, config, seed=seed)

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

    def passes(self) -> list[tuple[Tensor, ...]]:
        step, found = self.ahead
        return found if step == self.step else self.passes_of(self.step)

    def look_ahead(self) -> None:
        """Make the next step's videos: the device works on this step while it is sent their many small operations."""
        self.ahead = self.step + 1, self.passes_of(self.step + 1)

    def passes_of(self, step: int) -> list[tuple[Tensor, ...]]:
        seed = (PURPOSES.index(self.settings.purpose), self.settings.seed, step)
        return [flow_batch(self.settings.batch_size, self.digits, self.config, seed=seed)]

    def loss(self, *batch: Tensor) -> Tensor:
        return self.loss_of(self.model, *batch)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        with fast_arithmetic(self.device, self.settings.autocast):
            return flow_matching_loss(model, *batch).mean()

    def advance(self) -> float:
        loss = super().advance()
        decay = min(self.settings.average, self.step / (self.step + 9))
        with torch.no_grad():
            for average, x in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.lerp_(x.detach(), 1 - decay)
        return loss

    def validation_loss(self) -> float:
        """Return the moving average's loss, on videos and noise that are the same at every call."""
        parts = in_parts(self.validation, self.settings.batch_size)
        losses = [self.loss_of(self.average, *part) * len(part[0]) for part in parts]
        return (sum(losses) / self.settings.validation_videos).item()

    def report(self, train_losses: Sequence[float]) -> Row:
        """Report as the base does. Raises `Diverged` as well if the validation loss is well above no model's.

        A model that always answers 0 has the loss E (e - x)^2; one that has learned little may be near it.
        """
        row = super().report(train_losses)
        video, _, noise = self.validation
        guessing = (noise - video).square().mean().item()
        if self.step > self.settings.warmup_steps and row["validation_loss"] > WORSE_THAN_NONE * guessing:
            raise Diverged(
                f"the validation loss after step {self.step} is {row['validation_loss']:.3f}, "
                f"that of answering 0 is {guessing:.3f}"
            )
        return row

    def state(self) -> dict[str, Any]:
        return super().state() | {"average": self.average.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.average.load_state_dict(state["average"])

    def averaged(self) -> Weights:
        """Return the moving average, on the CPU."""
        return {name: x.cpu() for name, x in self.average.state_dict().items()}


def write_weights(path: Path, weights: Weights, config: VideoDiTConfig, facts: dict[str, Any]) -> list[Path]:
    """Write bfloat16 in parts of at most 15 MiB: NAME.1.safetensors, NAME.2.safetensors, ..., with config and facts."""
    halves = {name: x.to(torch.bfloat16).contiguous() for name, x in weights.items()}
    parts: list[Weights] = [{}]
    for name, x in halves.items():
        if sum(y.nbytes for y in (*parts[-1].values(), x)) > PART_BYTES:
            parts.append({})
        parts[-1][name] = x
    about = {"config": json.dumps(asdict(config)), "facts": json.dumps(facts), "of": json.dumps(digest(halves))}
    paths = [path.with_suffix(f".{number}.safetensors") for number in range(1, len(parts) + 1)]
    for path, part in zip(paths, parts, strict=True):
        write_file(path, save(part, metadata=about))
    return paths


def read_weights(paths: Sequence[Path]) -> tuple[Weights, VideoDiTConfig, dict[str, Any]]:
    """Read the parts that `write_weights` wrote: weights in float32, the model's configuration, and the facts.

    Raises ValueError if a part is missing, changed, or of other weights.
    """
    weights: Weights = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                about = {name: json.loads(file.metadata()[name]) for name in ("config", "facts", "of")}
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, TypeError, AttributeError, KeyError, ValueError):
            raise ValueError(f"weights: expected a file of `python -m sage_lab video train`, got {path}") from None
    if not paths or digest(weights) != about["of"]:
        raise ValueError(f"weights: expected all parts of one model, unchanged, got {', '.join(map(str, paths))}")
    names = {field.name for field in fields(VideoDiTConfig)}
    config = {name: x for name, x in about["config"].items() if name in names}
    config["cube"] = tuple(config["cube"])
    return {name: x.float() for name, x in weights.items()}, VideoDiTConfig(**config), about["facts"]
