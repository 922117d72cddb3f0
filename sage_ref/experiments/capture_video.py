"""Train a small video diffusion transformer by flow matching, then save what enters its attention: Q, K and V.

A noisy video is x_t = (1 - t) x + t e with noise e ~ N(0, 1) and noise level t: 0 is the video, 1 is noise alone. The
model learns the velocity d x_t / d t = e - x; the loss is the mean squared error over pixels, channels and frames.
"""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor, nn

from sage_ref.models.video_dit import VideoDiT, VideoDiTConfig
from sage_ref.records import Row
from sage_ref.sla2 import BlockSettings, block_mass, selected_count
from sage_ref.training.capture import watched_attention
from sage_ref.training.loop import ResumableTraining, TrainingSettings
from sage_ref.training.video import videos

TENSORS = ("query", "key", "value")
VALIDATION_VIDEOS = 8
# What `concentration` looks at: block_q x block_kv, and shares of the blocks of keys.
TILES = ((32, 16), (16, 8))
SHARES = (0.05, 0.1, 0.2)
# First numbers of the seeds, so that no video is drawn for two purposes.
TRAINING, VALIDATION, CAPTURED = range(3)


class VideoTraining(ResumableTraining):
    """A video DiT that learns velocities. Every step draws new videos: there is no data set to go through twice."""

    def __init__(self, config: VideoDiTConfig, settings: TrainingSettings, device: torch.device | str = "cpu"):
        super().__init__(lambda: VideoDiT(config), settings, asdict(config), device)
        self.config, self.device = config, device

    def accumulate_gradients(self) -> Tensor:
        video, noise_level, noise = training_batch(
            self.config, self.settings.batch_size, seed=(TRAINING, self.settings.seed, self.step)
        )
        loss = self.losses_of(video, noise_level, noise).mean()
        loss.backward()
        return loss.detach()

    def validation_loss(self) -> float:
        """Of VALIDATION_VIDEOS videos, over all noise levels."""
        return self.losses_of(*training_batch(self.config, VALIDATION_VIDEOS, seed=(VALIDATION,))).mean().item()

    def losses_of(self, video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
        """`flow_matching_loss` of the model on its device, [B]."""
        return flow_matching_loss(self.model, *(x.to(self.device) for x in (video, noise_level, noise)))


def training_batch(config: VideoDiTConfig, count: int, *, seed: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Videos and noise [count, C, T, H, W], and noise levels [count], drawn on the CPU: alike on every device.

    The levels are uniform on [0, 1], one from each of `count` equal parts, which makes the loss of a batch less noisy.
    """
    video = videos(count, config.frames, config.size, seed=seed)
    rng = np.random.default_rng((*seed, 1))
    noise_level = torch.from_numpy((np.arange(count) + rng.random(count)) / count).float()
    return video, noise_level, torch.from_numpy(rng.standard_normal(video.shape, dtype=np.float32))


def noisy(video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
    """x_t = (1 - t) x + t e. video and noise [B, C, T, H, W], noise_level [B]."""
    t = noise_level.view(-1, 1, 1, 1, 1)
    return (1 - t) * video + t * noise


def flow_matching_loss(model: nn.Module, video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
    """(model(x_t, t) - (e - x))^2, mean over each video: [B]."""
    velocity = model(noisy(video, noise_level, noise), noise_level)
    return (velocity - (noise - video)).square().flatten(1).mean(1)


@torch.no_grad()
def video_attention_tensors(
    training: VideoTraining, noise_levels: Sequence[float], layers: Sequence[int]
) -> tuple[list[float], dict[int, dict[str, Tensor]]]:
    """The loss of one new video per noise level, and Q, K, V of each layer's attention, all [B, H, N, D].

    Q and K are those that are multiplied: after QK-norm and rotation.
    """
    depth = training.config.layers
    if not layers or min(layers) < 0 or max(layers) >= depth:
        raise ValueError(f"layers: expected numbers from 0 to {depth - 1}, got {list(layers)}")
    if not noise_levels or min(noise_levels) < 0 or max(noise_levels) > 1:
        raise ValueError(f"noise_levels: expected numbers from 0 to 1, got {list(noise_levels)}")
    video, _, noise = training_batch(training.config, len(noise_levels), seed=(CAPTURED,))
    with watched_attention(training.model, layers) as (inputs, _):
        losses = training.losses_of(video, torch.tensor(noise_levels), noise)
    tensors = {layer: dict(zip(TENSORS, inputs[layer], strict=True)) for layer in layers}
    return losses.tolist(), tensors


def concentration(layers: dict[int, dict[str, Tensor]]) -> list[Row]:
    """The share of the softmax mass that the best blocks of keys hold, mean over blocks of queries.

    Best by the mass itself: no block mask with as many blocks holds more. Flat attention has mass = blocks / Tn.
    """
    rows = []
    for layer, tensors in layers.items():
        for block_q, block_kv in TILES:
            mass = block_mass(tensors["query"].float(), tensors["key"].float(), BlockSettings(block_q, block_kv))
            mass = mass.sort(-1, descending=True).values.mean(-2)  # [B, H, Tn]
            for share in SHARES:
                count = selected_count(1 - share, mass.shape[-1])
                for (sample, head), held in np.ndenumerate(mass[..., :count].sum(-1).numpy(force=True)):
                    rows.append(
                        {"layer": layer, "sample": sample, "head": head, "block_q": block_q, "block_kv": block_kv}
                        | {"share": share, "blocks": count, "mass": float(held)}
                    )
    return rows
