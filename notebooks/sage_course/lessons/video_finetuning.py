"""Notebook 13: tokens in cubes, flow matching, sampling, what each stage trains, and a paired bootstrap."""

import math

import torch
from torch import Tensor

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes


def cube_order(grid, cube):
    frames, rows, columns = (side // c for side, c in zip(grid, cube, strict=True))
    places = torch.arange(math.prod(grid)).view(frames, cube[0], rows, cube[1], columns, cube[2])
    return places.permute(0, 2, 4, 1, 3, 5).flatten()


def noisy_and_velocity(video, noise, t):
    t = t.view(-1, 1, 1, 1, 1)
    return (1 - t) * video + t * noise, noise - video


def euler(velocity_at, x, levels):
    for i in range(len(levels) - 1):
        t, following = levels[i], levels[i + 1]
        x = x + (following - t) * velocity_at(x, t)
    return x


def trains(name, stage):
    is_router, is_alpha = "core.router" in name, name.endswith("alpha_logit")
    if stage == 1:
        return is_router or is_alpha
    return not is_router


def paired_bootstrap(losses, others, drawn):
    saved = others - losses
    means = saved[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype))
    return saved.mean(), low, high


def as_floats(function, *inputs: Tensor) -> list:
    """Return the function's result with numbers as floats: a reader may end with `.item()`."""
    found = function(*inputs)
    if not isinstance(found, tuple | list):
        return found
    return [x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in found]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _videos() -> list[tuple]:
    video, noise = _draw(2, 2, 3, 2, 4, 2)  # as many videos as columns: a t that isn't reshaped fits, and is wrong
    return [(video, noise, torch.tensor([0.25, 0.0], dtype=torch.float64))]


def _paths() -> list[tuple]:
    def velocity_at(x, t):
        return t * x + 1

    return [(velocity_at, _draw(4), [1.0, 0.6, 0.3, 0.0])]


NAMES = [
    "input.weight",
    "blocks.0.attention.query.weight",
    "blocks.0.attention.core.alpha_logit",
    "blocks.0.attention.core.router.proj_q.weight",
    "blocks.0.mlp.0.bias",
]


def _judged() -> list[tuple]:
    losses = torch.tensor([0.2, 0.31, 0.5, 0.9, 0.42], dtype=torch.float64)
    others = torch.tensor([0.24, 0.33, 0.49, 1.3, 0.53], dtype=torch.float64)
    drawn = torch.randint(5, (200, 5), generator=torch.Generator().manual_seed(0))
    return [(losses, others, drawn)]


GAPS = with_mistakes(
    __file__,
    {
        "cube_order": Gap(cube_order, lambda: [((4, 4, 6), (2, 2, 3)), ((6, 12, 15), (2, 4, 3))]),
        "noisy_and_velocity": Gap(noisy_and_velocity, _videos),
        "euler": Gap(euler, _paths),
        "trains": Gap(
            trains,
            lambda: [(NAMES, 1), (NAMES, 2)],
            run=lambda function, names, stage: {name: function(name, stage) for name in names},
        ),
        "paired_bootstrap": Gap(paired_bootstrap, _judged, run=as_floats),
    },
)
