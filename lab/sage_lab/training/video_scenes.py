"""Videos made on the device that trains on them: digits and shapes that move, bounce and hide each other.

Behind them a textured background passes by as the camera pans. Everything follows from numbers drawn on the CPU from a
seed, 16 for each object, so that a scene is the same on every device. Its pixels are arithmetic on those numbers, made
where the model trains. Nothing waits: the numbers are copied while the device works on the step before.

"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

OBJECTS = 5  # at most, in a scene
NUMBERS = 16  # drawn for each object, and for the background
KINDS = ("digit", "disc", "square", "ring")
RADIUS = (9.0, 18.0)  # pixels
SPEED = 3.0  # at most, pixels per frame in height and in width
CAMERA_SPEED = 1.5
FIRST_EDGE = 0.5  # of a pixel: an edge is soft over one


class Scenes(NamedTuple):
    """Scenes [B] of K objects, with lengths in pixels; objects with a larger index are nearer.

    is_there: bool [B, K]; kind [B, K], index in KINDS; digit [B, K], which image; radius [B, K]; start, velocity
    [B, K, 2], of the centre, height first; colours [B, K, 2, 3] in [-1, 1]; wave [B, K], radians per radius.
    camera [B, 2], pixels per frame; background_colours [B, 2, 3]; background_wave [B, 2], radians per pixel.
    """

    is_there: Tensor
    kind: Tensor
    digit: Tensor
    radius: Tensor
    start: Tensor
    velocity: Tensor
    colours: Tensor
    wave: Tensor
    camera: Tensor
    background_colours: Tensor
    background_wave: Tensor


def digit_images() -> Tensor:
    """Return scikit-learn's digits, float32 [1797, 8, 8] in [0, 1]."""
    from sklearn.datasets import load_digits  # takes seconds

    return torch.from_numpy(load_digits().images / 16).float()


def draw_scenes(count: int, digits: int, size: int, *, seed: Sequence[int], device: torch.device | str) -> Scenes:
    """Draw scenes of `size` x `size` pixels, a function of the arguments alone. digits: the number of images."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    numbers = torch.rand(count, OBJECTS + 1, NUMBERS, generator=generator)
    if torch.device(device).type == "cuda":
        numbers = numbers.pin_memory()
    numbers = numbers.to(device, non_blocking=True)
    # One draw for each use; the background has the last place among the objects.
    of_objects, of_background = numbers[:, :OBJECTS], numbers[:, OBJECTS]
    least, most = RADIUS
    index = torch.arange(OBJECTS, device=device)
    return Scenes(
        is_there=index < (3 + (of_background[:, :1] * (OBJECTS - 2)).floor()),
        kind=(of_objects[..., 0] * 2 * (len(KINDS) - 1)).floor().sub(len(KINDS) - 2).clamp_min(0),  # half are digits
        digit=(of_objects[..., 1] * digits).long().clamp_max(digits - 1),
        radius=least + (most - least) * of_objects[..., 2],
        start=size * of_objects[..., 3:5],
        velocity=SPEED * (2 * of_objects[..., 5:7] - 1),
        colours=(2 * of_objects[..., 7:13] - 1).unflatten(-1, (2, 3)),
        wave=math.pi * (1 + 2 * of_objects[..., 13]),
        camera=CAMERA_SPEED * (2 * of_background[:, 1:3] - 1),
        background_colours=(2 * of_background[:, 3:9] - 1).unflatten(-1, (2, 3)),
        background_wave=0.05 + 0.2 * of_background[:, 9:11],
    )


def seed_of(seed: Sequence[int]) -> int:
    """Return one number for several, as torch's generators take it for a seed."""
    return int(np.random.SeedSequence(tuple(seed)).generate_state(1, np.uint64)[0] >> 1)


def render(scenes: Scenes, digits: Tensor, frames: int, size: int) -> Tensor:
    """Return videos, float32 [B, 3, frames, size, size] in [-1, 1], on the device of the scenes.

    digits: `digit_images()`. The arithmetic does not depend on how many videos are rendered together.
    """
    device = scenes.start.device
    time = torch.arange(frames, device=device, dtype=torch.float32)
    y, x = torch.meshgrid(*2 * [torch.arange(size, device=device) + 0.5], indexing="ij")  # [size, size]
    camera = scenes.camera[:, None] * (time[:, None] - (frames - 1) / 2)  # [B, T, 2]
    video = background(scenes, y + camera[..., :1, None], x + camera[..., 1:, None])
    centres = object_paths(scenes, time, size) - camera[:, None]  # on the screen, [B, K, T, 2]
    for k in range(OBJECTS):
        centre = centres[:, k, :, :, None, None]  # [B, T, 2, 1, 1]
        radius = scenes.radius[:, k, None, None, None]
        # The object's own coordinates [B, T, size, size]: -1 to 1 across it.
        v, u = (y - centre[:, :, 0]) / radius, (x - centre[:, :, 1]) / radius
        cover = coverage(scenes, digits, k, v, u) * scenes.is_there[:, k, None, None, None]
        texture = 0.5 + 0.5 * torch.sin(scenes.wave[:, k, None, None, None] * (u + v))
        video = torch.lerp(video, mix(scenes.colours[:, k], texture), cover[:, None])
    return video


def background(scenes: Scenes, y: Tensor, x: Tensor) -> Tensor:
    """Return waves of two colours, [B, 3, T, size, size]. y, x [B, T, size, size]: places in the world."""
    wave = scenes.background_wave[..., None, None, None]
    return mix(scenes.background_colours, 0.5 + 0.25 * (torch.sin(wave[:, 0] * y) + torch.sin(wave[:, 1] * x)))


def mix(colours: Tensor, share: Tensor) -> Tensor:
    """Blend colours [B, 2, 3]: the first where share [B, T, size, size] is 0, the second where it is 1."""
    first, second = colours[..., None, None, None].unbind(1)
    return torch.lerp(first, second, share[:, None])


def object_paths(scenes: Scenes, time: Tensor, size: int) -> Tensor:
    """Return centres in the world, [B, K, T, 2]: straight on, and back where they would leave [0, size]."""
    straight = scenes.start[:, :, None] + scenes.velocity[:, :, None] * time[:, None]
    return size - (straight.remainder(2 * size) - size).abs()


def coverage(scenes: Scenes, digits: Tensor, k: int, v: Tensor, u: Tensor) -> Tensor:
    """Return the share of each pixel that object k covers, [B, T, size, size]. v, u: the object's own coordinates."""
    kind = scenes.kind[:, k, None, None, None]
    images = digits[scenes.digit[:, k]][:, None]  # [B, 1, 8, 8]
    grid = torch.stack((u, v), -1).flatten(1, 2)  # [B, T * size, size, 2]
    ink = F.grid_sample(images, grid, align_corners=False)[:, 0].view_as(u)
    cover = (2 * ink).clamp(max=1)
    radius = scenes.radius[:, k, None, None, None]
    distance = torch.hypot(u, v)
    shapes = {
        "disc": distance - 1,
        "square": torch.maximum(u.abs(), v.abs()) - 0.85,
        "ring": (distance - 0.75).abs() - 0.25,
    }
    for name, outside in shapes.items():  # negative inside, in radii
        cover = torch.where(kind == KINDS.index(name), (FIRST_EDGE - outside * radius).clamp(0, 1), cover)
    return cover


def moving_scenes(count: int, digits: Tensor, frames: int, size: int, *, seed: Sequence[int]) -> Tensor:
    """Render `count` scenes that are drawn from `seed`, on the device of the digits."""
    scenes = draw_scenes(count, len(digits), size, seed=seed, device=digits.device)
    return render(scenes, digits, frames, size)
