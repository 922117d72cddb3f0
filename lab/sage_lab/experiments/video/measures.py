"""Measurements of every arm, on videos and noise that are the same for all.

grid        flow matching's loss for each (video, noise level), paired between arms: it decides
attention   |O' - O| / |O| per layer, where O' is the arm's and O full attention of the same Q, K and V
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_lab.experiments.video.plan import VideoPlan
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.records import Row
from sage_lab.training.capture import watched_attention
from sage_lab.training.video_flow import PURPOSES, fast_arithmetic, flow_batch, flow_matching_loss, noisy
from sage_lab.training.video_scenes import moving_scenes, seed_of
from sage_ref.tracing import relative_l2


class Questions(NamedTuple):
    """Videos and noise [n, 3, T, size, size] on the device."""

    scenes: Tensor
    noise: Tensor
    watched: tuple[Tensor, Tensor, Tensor]


def questions(plan: VideoPlan, config: VideoDiTConfig, digits: Tensor) -> Questions:
    """Make the questions, on the device of the digits."""
    judged = PURPOSES.index("judge")
    scenes = moving_scenes(plan.videos, digits, config.frames, config.size, seed=(judged, 0))
    generator = torch.Generator(digits.device).manual_seed(seed_of((judged, 1)))
    noise = torch.randn(scenes.shape, generator=generator, device=digits.device)
    return Questions(scenes, noise, flow_batch(plan.watched, digits, config, seed=(PURPOSES.index("watch"), 0)))


@torch.no_grad()
def answers(model: VideoDiT, asked: Questions, plan: VideoPlan) -> Row:
    """Return the row of one model."""
    levels = (torch.arange(plan.levels, device=asked.noise.device) + 0.5) / plan.levels
    parts = zip(asked.scenes.split(plan.judged_batch), asked.noise.split(plan.judged_batch), strict=True)
    with fast_arithmetic(asked.noise.device, plan.autocast):
        losses = torch.cat([grid_losses(model, *part, levels) for part in parts]).mean(1)
        errors = attention_errors(model, *asked.watched)
    found = {"loss": rounded(losses.mean().item()), "loss_by_video": [rounded(x) for x in losses.tolist()]}
    return found | {"attention_error": [round(x, 5) for x in errors]}


def grid_losses(model: nn.Module, video: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
    """Return flow matching's loss [B, levels] of videos and noise [B, 3, T, size, size] at every level."""
    return torch.stack([flow_matching_loss(model, video, t.expand(len(video)), noise) for t in levels], 1)


def rounded(x: float) -> float:
    """Return a number with six digits."""
    return float(f"{x:.6g}")


def attention_errors(model: VideoDiT, video: Tensor, noise_level: Tensor, noise: Tensor) -> list[float]:
    """Return |O' - O| / |O| of every layer, where O is exact attention of the same Q, K, V."""
    layers = range(model.config.layers)
    with watched_attention(model, layers) as (inputs, outputs):
        model(noisy(video, noise_level, noise), noise_level)
    exact = (F.scaled_dot_product_attention(*inputs[layer]) for layer in layers)
    return [relative_l2(outputs[layer].float(), o.float()) for layer, o in zip(layers, exact, strict=True)]
