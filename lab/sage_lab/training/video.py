"""The small video model whose attention `capture-video` records, and the videos that it learns from.

The videos: textured shapes that move, turn and hide each other in front of a gradient of two colours. Nothing is
downloaded, and there is something for attention to find: a shape keeps its texture while it moves, so a noisy patch is
best recognised by the rest of its shape, in the same frame and in the others.
"""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.training.loop import ResumableTraining, TrainingSettings
from sage_lab.training.video_flow import flow_matching_loss

SHAPES = ("disc", "square", "ring")
VALIDATION_VIDEOS = 8
# First numbers of the seeds, so that no video is drawn for two purposes.
TRAINING, VALIDATION, CAPTURED = range(3)


def videos(count: int, frames: int, size: int, *, seed: Sequence[int]) -> Tensor:
    """Draw RGB videos, float32 [count, 3, frames, size, size] in [-1, 1]; a function of the arguments alone."""
    rng = np.random.default_rng(tuple(seed))
    drawn = np.stack([draw_video(rng, frames, size) for _ in range(count)])
    return torch.from_numpy(drawn).float()


def draw_video(rng: np.random.Generator, frames: int, size: int) -> np.ndarray:
    """Draw three to five shapes, each over those before it: [3, frames, size, size]."""
    time, y, x = np.meshgrid(np.arange(frames), *2 * [(np.arange(size) + 0.5) / size], indexing="ij")
    angle = rng.uniform(0, 2 * np.pi)
    along = (np.cos(angle) * (x - 0.5) + np.sin(angle) * (y - 0.5)) / np.sqrt(2) + 0.5
    video = mix(*colours(rng), along)
    for _ in range(rng.integers(3, 6)):
        video = draw_shape(rng, video, time, y, x)
    return video


def draw_shape(rng: np.random.Generator, video: np.ndarray, time: np.ndarray, y: np.ndarray, x: np.ndarray):
    """Draw one shape over the video: radius 1/8 to 1/4 of the frame's width, up to 1/16 of it and 0.4 rad a frame."""
    radius = rng.uniform(1 / 8, 1 / 4)
    start, velocity = rng.uniform(0, 1, 2), rng.uniform(-1 / 16, 1 / 16, 2)
    angle = rng.uniform(0, 2 * np.pi) + rng.uniform(-0.4, 0.4) * time
    dy, dx = y - start[0] - velocity[0] * time, x - start[1] - velocity[1] * time
    # The shape's own coordinates: its texture moves and turns with it.
    u, v = np.cos(angle) * dx + np.sin(angle) * dy, np.cos(angle) * dy - np.sin(angle) * dx
    distance = {
        "disc": np.hypot(u, v) - radius,
        "square": np.maximum(np.abs(u), np.abs(v)) - 0.8 * radius,
        "ring": np.abs(np.hypot(u, v) - 0.75 * radius) - 0.25 * radius,
    }[rng.choice(SHAPES)]
    covered = np.clip(0.5 - distance * x.shape[-1], 0, 1)  # a pixel on the edge is covered in part
    frequency = 2 * np.pi / rng.uniform(1 / 8, 1 / 4)
    stripes = np.sin(frequency * u)
    checks = stripes * np.sin(frequency * v)
    texture = np.clip(0.5 + 2 * (checks if rng.random() < 0.5 else stripes), 0, 1)
    return video * (1 - covered) + mix(*colours(rng), texture) * covered


def colours(rng: np.random.Generator) -> np.ndarray:
    """Draw two colours, [2, 3] in [-1, 1]."""
    return rng.uniform(-1, 1, (2, 3))


def mix(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Blend colours [3]: `first` where share [frames, size, size] is 0, `second` where it is 1."""
    return first[:, None, None, None] * (1 - share) + second[:, None, None, None] * share


class VideoTraining(ResumableTraining):
    """A video DiT that learns velocities. Every step draws new videos."""

    def __init__(self, config: VideoDiTConfig, settings: TrainingSettings, device: torch.device | str = "cpu"):
        super().__init__(lambda: VideoDiT(config), settings, asdict(config), device)
        self.config = config

    def passes(self) -> list[tuple[Tensor, ...]]:
        seed = (TRAINING, self.settings.seed, self.step)
        return [training_batch(self.config, self.settings.batch_size, seed=seed)]

    def loss(self, *batch: Tensor) -> Tensor:
        return self.losses_of(*batch).mean()

    def validation_loss(self) -> float:
        """Return the loss of VALIDATION_VIDEOS videos, over all noise levels."""
        return self.losses_of(*training_batch(self.config, VALIDATION_VIDEOS, seed=(VALIDATION,))).mean().item()

    def losses_of(self, video: Tensor, noise_level: Tensor, noise: Tensor) -> Tensor:
        """Return the model's `flow_matching_loss`, [B], of tensors on any device."""
        return flow_matching_loss(self.model, *(x.to(self.device) for x in (video, noise_level, noise)))


def training_batch(config: VideoDiTConfig, count: int, *, seed: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw videos and noise [count, C, T, H, W] and noise levels [count], on the CPU, so that all devices agree.

    The levels are uniform on [0, 1], one from each of `count` equal parts, which makes the loss of a batch less noisy.
    """
    video = videos(count, config.frames, config.size, seed=seed)
    rng = np.random.default_rng((*seed, 1))
    noise_level = torch.from_numpy((np.arange(count) + rng.random(count)) / count).float()
    return video, noise_level, torch.from_numpy(rng.standard_normal(video.shape, dtype=np.float32))
