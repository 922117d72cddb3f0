"""Measurements of every arm, on videos and noise that are the same for all.

grid        flow matching's loss for each (video, noise level), paired between arms: it decides
attention   |O' - O| / |O| per layer, where O' is the arm's and O full attention of the same Q, K and V
samples     videos from pure noise, compared with those of the full model from equal noise by PSNR
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_lab.experiments.video.plan import VideoPlan
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.records import Row
from sage_lab.training.capture import watched_attention
from sage_lab.training.video_flow import PURPOSES, fast_arithmetic, flow_batch, flow_matching_loss, noisy, sample
from sage_lab.training.video_scenes import moving_scenes, seed_of
from sage_ref.tracing import relative_l2


class Questions(NamedTuple):
    """Videos and noise [n, 3, T, size, size] on the device."""

    scenes: Tensor
    scene_noise: Tensor
    sample_noise: Tensor
    watched: tuple[Tensor, Tensor, Tensor]


def questions(plan: VideoPlan, config: VideoDiTConfig, digits: Tensor) -> Questions:
    """Make the questions, on the device of the digits."""
    place = {"device": digits.device}

    def noise(count: int, purpose: str, number: int) -> Tensor:
        generator = torch.Generator(**place).manual_seed(seed_of((PURPOSES.index(purpose), number)))
        return torch.randn((count, 3, config.frames, config.size, config.size), generator=generator, **place)

    judged = PURPOSES.index("judge"), 0
    return Questions(
        scenes=moving_scenes(plan.videos, digits, config.frames, config.size, seed=judged)[0],
        scene_noise=noise(plan.videos, "judge", 1),
        sample_noise=noise(plan.samples, "sample", 0),
        watched=flow_batch(plan.watched, digits, config, seed=(PURPOSES.index("watch"), 0)),
    )


@torch.no_grad()
def answers(model: VideoDiT, asked: Questions, plan: VideoPlan, reference: Tensor | None) -> tuple[Row, Tensor]:
    """Return the row of one model and its samples. reference: the full model's samples from equal noise, or None."""
    device = asked.scenes.device

    def in_parts(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        parts = zip(*(x.split(plan.judged_batch) for x in tensors), strict=True)
        with fast_arithmetic(device, plan.autocast):
            return torch.cat([compute(*part) for part in parts])

    levels = (torch.arange(plan.levels, device=device) + 0.5) / plan.levels
    losses = in_parts(lambda *grid: grid_losses(model, *grid, levels), asked.scenes, asked.scene_noise)
    found = numbers_row("loss", losses.mean(1))
    with fast_arithmetic(device, plan.autocast):
        found["attention_error"] = [round(x, 5) for x in attention_errors(model, *asked.watched)]
    samples = in_parts(lambda noise: sample(model, noise, plan.sampling_steps), asked.sample_noise).clamp(-1, 1)
    if reference is not None:
        found |= numbers_row("psnr", psnr(samples, reference.to(device)))
    return found, samples


def grid_losses(model: nn.Module, video: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
    """Return flow matching's loss [B, levels] of videos and noise [B, 3, T, size, size] at every level."""
    return torch.stack([flow_matching_loss(model, video, t.expand(len(video)), noise) for t in levels], 1)


def numbers_row(name: str, x: Tensor) -> Row:
    """Return the mean of x [videos], and x itself."""
    return {name: rounded(x.mean()), f"{name}_by_video": rounded(x)}


def rounded(x: Tensor) -> Any:
    """Return a float or a list of floats with six digits."""
    values = x.double().tolist()
    return [float(f"{v:.6g}") for v in values] if isinstance(values, list) else float(f"{values:.6g}")


def attention_errors(model: VideoDiT, video: Tensor, noise_level: Tensor, noise: Tensor) -> list[float]:
    """Return |O' - O| / |O| of every layer, where O is exact attention of the same Q, K, V."""
    layers = range(model.config.layers)
    with watched_attention(model, layers) as (inputs, outputs):
        model(noisy(video, noise_level, noise), noise_level)
    exact = (F.scaled_dot_product_attention(*inputs[layer]) for layer in layers)
    return [relative_l2(outputs[layer].float(), o.float()) for layer, o in zip(layers, exact, strict=True)]


def psnr(video: Tensor, other: Tensor) -> Tensor:
    """Return the PSNR in decibels, [B], of videos in [-1, 1]; 100 where they are equal."""
    error = (video - other).square().flatten(1).mean(1)
    return (10 * torch.log10(4 / error.clamp_min(4e-10))).clamp(max=100)
