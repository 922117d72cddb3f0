"""Measurements of every arm, on videos and noise that are the same for all.

grid        flow matching's loss for each (video, noise level), paired between arms
attention   |O' - O| / |O| per layer, where O' is the arm's and O full attention of the same Q, K and V
samples     videos from pure noise, compared with those of the full model from equal noise: PSNR and SSIM
restored    scenes with much noise, which the model removes: are their objects still there?
"""

import itertools
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
from sage_lab.training.video_scenes import Scenes, draw_scenes, render, seed_of
from sage_ref.tracing import relative_l2

HALF_WINDOW = 18  # pixels around an object's centre, in each direction: the largest object's radius
REACH = 4  # pixels around its true place in which an object is looked for
LEAST_VISIBLE = 0.5  # visible share of an object that is looked for
LEAST_DIFFERENCE = 0.05  # that an object makes to a pixel that is its own
LEAST_FOUND = 0.5  # share of an object that counts as kept


class Objects(NamedTuple):
    """The look of K objects in B scenes of T frames, in windows around their centres.

    where: int64 [B, K, T, 2], the windows' centres. picture, absence [B * K * T, 3, w, w]: the true video, and how it
    would change without the object. is_seen: bool [B, K, T], whether enough of it is visible to look for it.
    """

    where: Tensor
    picture: Tensor
    absence: Tensor
    is_seen: Tensor


class Questions(NamedTuple):
    """Videos and noise [n, 3, T, size, size] on the device, and the known objects of the scenes to restore."""

    scenes: Tensor
    scene_noise: Tensor
    sample_noise: Tensor
    restored: Tensor
    restored_noise: Tensor
    objects: Objects
    watched: tuple[Tensor, Tensor, Tensor]


def questions(plan: VideoPlan, config: VideoDiTConfig, digits: Tensor) -> Questions:
    """Make the questions, on the device of the digits."""
    place = {"device": digits.device}

    def noise(count: int, purpose: str, number: int) -> Tensor:
        generator = torch.Generator(**place).manual_seed(seed_of((PURPOSES.index(purpose), number)))
        return torch.randn((count, 3, config.frames, config.size, config.size), generator=generator, **place)

    def scenes(count: int, purpose: str) -> Scenes:
        return draw_scenes(count, len(digits), config.size, seed=(PURPOSES.index(purpose), 0), **place)

    shape = digits, config.frames, config.size
    restored, objects = known_objects(scenes(plan.restored, "restore"), *shape)
    return Questions(
        scenes=render(scenes(plan.videos, "judge"), *shape)[0],
        scene_noise=noise(plan.videos, "judge", 1),
        sample_noise=noise(plan.samples, "sample", 0),
        restored=restored,
        restored_noise=noise(plan.restored, "restore", 1),
        objects=objects,
        watched=flow_batch(plan.watched, digits, config, seed=(PURPOSES.index("watch"), 0)),
    )


class Answers(NamedTuple):
    """The answers of one model. row: for the record. samples, restored: videos, as many as the questions ask for."""

    row: Row
    samples: Tensor
    restored: Tensor


@torch.no_grad()
def answers(model: VideoDiT, asked: Questions, plan: VideoPlan, reference: Tensor | None) -> Answers:
    """Measure one model. reference: the full model's samples from equal noise, or None."""
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
        pair = samples, reference.to(device)
        found |= numbers_row("psnr", psnr(*pair)) | numbers_row("ssim", ssim(*pair))
    level = plan.restored_level
    steps = max(1, round(level * plan.sampling_steps))
    hidden = noisy(asked.restored, torch.full((plan.restored,), level, device=device), asked.restored_noise)
    restored = in_parts(lambda x: sample(model, x, steps, level), hidden).clamp(-1, 1)
    found |= numbers_row("restored_psnr", psnr(restored, asked.restored))
    return Answers(found | truth_row(restored, asked.objects), samples, restored)


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


def ssim(video: Tensor, other: Tensor) -> Tensor:
    """Return the structural similarity, [B], mean over frames and channels (Wang et al. 2004, Gaussian of 1.5)."""
    half = min(5, (video.shape[-1] - 1) // 2)
    place = torch.arange(-half, half + 1, device=video.device)
    weight = torch.exp(-place.square() / (2 * 1.5**2))
    weight = weight / weight.sum()
    x, y = ((v.flatten(0, 2)[:, None] + 1) / 2 for v in (video, other))  # [B * 3 * T, 1, size, size]

    def blurred(z: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(z, weight.view(1, 1, -1, 1)), weight.view(1, 1, 1, -1))

    mean_x, mean_y = blurred(x), blurred(y)
    var_x, var_y = blurred(x * x) - mean_x**2, blurred(y * y) - mean_y**2
    covariance = blurred(x * y) - mean_x * mean_y
    c1, c2 = 0.01**2, 0.03**2
    value = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    value = value / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return value.flatten(1).mean(1).view(len(video), -1).mean(1)


def known_objects(scenes: Scenes, digits: Tensor, frames: int, size: int) -> tuple[Tensor, Objects]:
    """Render the scenes: videos [B, 3, frames, size, size], and their objects."""
    video, truths = render(scenes, digits, frames, size)
    where = truths.centre.round().long().clamp(0, size - 1)
    absences = []
    for k in range(where.shape[1]):
        is_there = scenes.is_there.clone()
        is_there[:, k] = False
        without, _ = render(scenes._replace(is_there=is_there), digits, frames, size)
        absences.append(windows(without - video, where[:, k : k + 1], HALF_WINDOW))
    absence = torch.cat(absences, 1)  # [B, K, T, 3, w, w]
    picture = windows(video, where, HALF_WINDOW)
    return video, Objects(where, picture.flatten(0, 2), absence.flatten(0, 2), truths.visible >= LEAST_VISIBLE)


def windows(video: Tensor, where: Tensor, half: int) -> Tensor:
    """Cut [B, K, T, 3, w, w], w = 2 half + 1, around where [B, K, T, 2]; the video's edge is repeated outside it."""
    around = torch.arange(-half, half + 1, device=video.device)
    y, x = ((where[..., axis, None] + around).clamp(0, video.shape[-1] - 1) for axis in (0, 1))  # [B, K, T, w]
    scene = torch.arange(len(video), device=video.device).view(-1, 1, 1, 1, 1)
    frame = torch.arange(where.shape[2], device=video.device).view(1, 1, -1, 1, 1)
    return video.movedim(1, -1)[scene, frame, y[..., :, None], x[..., None, :]].movedim(-1, 3)


def truth_row(video: Tensor, objects: Objects) -> Row:
    """Compare a video with the truth.

    kept: the share of the objects visible in the true video that are found in this one.
    """
    is_kept = objects.is_seen & (found_objects(video, objects) >= LEAST_FOUND)
    seen, kept = objects.is_seen.sum((1, 2)), is_kept.sum((1, 2))
    return {
        "kept": rounded(kept.sum() / seen.sum().clamp_min(1)),
        "kept_by_video": rounded(kept / seen.clamp_min(1)),
    }


def found_objects(video: Tensor, objects: Objects) -> Tensor:
    """Return the share of each object that is there, [B, K, T].

    It is 1 - |video - truth|^2 / |absence|^2 over the object's own pixels, the largest among offsets of up to
    REACH: 1 if the object looks as it should, 0 if the video shows what is behind it instead.
    """
    region = windows(video, objects.where, HALF_WINDOW + REACH).flatten(0, 2)
    own = (objects.absence.abs().amax(1, keepdim=True) > LEAST_DIFFERENCE).float()
    absence = (objects.absence.square() * own).sum((1, 2, 3)).clamp_min(1e-6)
    width, shares = objects.picture.shape[-1], []
    for row, column in itertools.product(range(2 * REACH + 1), repeat=2):
        part = region[..., row : row + width, column : column + width]
        shares.append(1 - ((part - objects.picture).square() * own).sum((1, 2, 3)) / absence)
    return torch.stack(shares, -1).amax(-1).view(objects.is_seen.shape)
