"""Notebook 13: tokens in cubes, flow matching, sampling, what each stage trains, and a paired bootstrap."""

import math

import torch
from torch import Tensor

from sage_course.gaps import Gap, Mistake


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
    return [(video, noise, torch.tensor([0.25, 0.75], dtype=torch.float64))]


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


GAPS = {
    "cube_order": Gap(cube_order, lambda: [((4, 4, 6), (2, 2, 3)), ((6, 12, 15), (2, 4, 3))], (
        Mistake(".permute(0, 2, 4, 1, 3, 5)", "",
                "That is raster order. Put the axes that name the cube (0, 2, 4) before those inside it (1, 3, 5)."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(1, 3, 5, 0, 2, 4)",
                "The order is reversed: the axes that name the cube come first, those inside it last."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(0, 1, 2, 4, 3, 5)",
                "That makes squares of one frame. The frames of a cube belong together, so axis 1 comes "
                "after 2 and 4."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(0, 2, 4, 5, 3, 1)", "Inside a cube the order is frame, row, column as well."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(4, 2, 0, 1, 3, 5)",
                "The cubes themselves are in the order frame, row, column."),
        Mistake("view(frames, cube[0], rows, cube[1], columns, cube[2])",
                "view(cube[0], frames, cube[1], rows, cube[2], columns)",
                "Neighbouring patches are in the same cube, so the number of cubes comes before the side of a cube."),
        Mistake("view(frames, cube[0], rows, cube[1], columns, cube[2])\n    return places.permute(0, 2, 4, 1, 3, 5)",
                "view(cube[0], frames, cube[1], rows, cube[2], columns)\n    return places.permute(1, 3, 5, 0, 2, 4)",
                "`view` must fit the memory. Neighbours are in the same cube, so the number of cubes comes first."),
        Mistake(".permute(0, 2, 4, 1, 3, 5).flatten()", ".permute(0, 2, 4, 1, 3, 5).flatten().argsort()",
                "That is the inverse order: where each place of the raster went."),
    ), right=(
        ("places.permute(0, 2, 4, 1, 3, 5)", "torch.einsum('abcdef->acebdf', places)"),
    )),
    "noisy_and_velocity": Gap(noisy_and_velocity, _videos, (
        Mistake("noise - video", "video - noise",
                "t grows towards the noise, so the velocity points to the noise: noise - video."),
        Mistake("(1 - t) * video + t * noise, noise - video", "t * video + (1 - t) * noise, video - noise",
                "Many papers count t that way. Here t = 0 is the video and t = 1 is the noise."),
        Mistake("(1 - t) * video + t * noise", "t * video + (1 - t) * noise",
                "At t = 0 the result should be the video, and at t = 1 the noise."),
        Mistake("noise - video", "noise", "A denoiser predicts the noise. The velocity is the derivative d x_t / d t."),
        Mistake("noise - video", "(1 - t) * video + t * noise - video",
                "The derivative d x_t / d t of a straight line does not depend on t."),
        Mistake("noise - video", "t * noise - (1 - t) * video",
                "The derivative of t is 1, that of 1 - t is -1: no t remains."),
        Mistake("noise - video", "(1 - t) * (noise - video)",
                "That is the remaining distance. Take the derivative of x_t by t."),
        Mistake("(1 - t) * video", "(1 - t**2).sqrt() * video",
                "The path is a straight line from video to noise: its weights are 1 - t and t."),
        Mistake("t = t.view(-1, 1, 1, 1, 1)", "t = t",
                "t has one number per video. Give it four more axes, so that it broadcasts."),
    ), right=(
        ("(1 - t) * video + t * noise", "video + t * (noise - video)"),
        ("t.view(-1, 1, 1, 1, 1)", "t[:, None, None, None, None].double()"),
    )),
    "euler": Gap(euler, _paths, (
        Mistake("(following - t)", "(t - following)",
                "t falls on the way to the video, so the change of t is negative."),
        Mistake("x + (following - t) * velocity_at(x, t)", "x - velocity_at(x, t)",
                "That goes all the way at once. Go only as far as t changes."),
        Mistake("velocity_at(x, t)", "velocity_at(x, (t + following) / 2)",
                "That t belongs to a different x. Euler's rule takes the velocity at t."),
        Mistake("x + (following - t) *", "following *", "Add to the present x, and multiply by following - t."),
        Mistake("(following - t) *", "-t *", "That goes to t = 0 at once. Go only to the next level."),
        Mistake("(following - t) *", "", "Multiply the velocity by the change of t, which is negative and short."),
        Mistake("(following - t) *", "-1 / (len(levels) - 1) *",
                "The levels need not be evenly spaced: use following - t."),
        Mistake("(following - t) *", "-1 / len(levels) *", "The change of t is following - t."),
    ), right=(
        ("x + (following - t) * velocity_at(x, t)", "x - (t - following) * velocity_at(x, t)"),
        ("velocity_at(x, t)", "velocity_at(x, t).double()"),
    )),
    "trains": Gap(trains, lambda: [(NAMES, 1), (NAMES, 2)], (
        Mistake("return not is_router", "return False", "Stage 2 trains the model and alpha."),
        Mistake("return is_router or is_alpha", "return True", "Stage 1 leaves the model as it is."),
        Mistake("return is_router or is_alpha", "return is_router", "Stage 1 fits alpha as well."),
        Mistake("return is_router or is_alpha", "return is_alpha", "Stage 1 trains the router as well."),
        Mistake("return not is_router", "return True",
                "A hard Top-k gives the router no gradient. In stage 2 it stays as stage 1 left it."),
        Mistake("return not is_router", "return is_alpha", "Stage 2 trains the model as well: that is its purpose."),
        Mistake("return not is_router", "return not is_router and not is_alpha", "alpha learns in both stages."),
        Mistake("return not is_router", "return is_router or is_alpha",
                "Stage 2 trains the model, and the router learns in stage 1 alone."),
        Mistake("if stage == 1:", "if stage == 2:",
                "The stages are swapped: router and alpha learn first, then the model."),
    ), lambda function, names, stage: {name: function(name, stage) for name in names}, right=(
        ("is_router or is_alpha", "is_alpha or is_router"),
    )),
    "paired_bootstrap": Gap(paired_bootstrap, _judged, (
        Mistake("others - losses", "losses - others",
                "The result is what `losses` saves: it is positive where `losses` is the smaller one."),
        Mistake("saved[drawn].mean(1)", "others[drawn].mean(1) - losses[drawn.flip(0)].mean(1)",
                "That draws different videos for each model. Both must be judged on the same ones."),
        Mistake("means = saved[drawn].mean(1)", "means = saved",
                "That is the spread of single videos. You want the spread of the mean: saved[drawn].mean(1)."),
        Mistake("saved[drawn].mean(1)", "saved[drawn].mean(0)",
                "A row of `drawn` is one repetition, so take the mean over axis 1."),
        Mistake("[0.025, 0.975]", "[0.05, 0.95]", "95% lie between the ends, so 2.5% are cut off on each side."),
        Mistake("[0.025, 0.975]", "[0.0, 1.0]", "Those are the extremes. Cut off 2.5% on each side."),
        Mistake("[0.025, 0.975]", "[0.975, 0.025]", "The low end comes first."),
        Mistake("[0.025, 0.975]", "[0.95, 0.05]", "The low end comes first, and 2.5% are cut off on each side."),
        Mistake("[0.025, 0.975]", "[2.5, 97.5]", "`quantile` takes shares between 0 and 1, not per cents."),
        Mistake("[0.025, 0.975]", "[0.0, 0.95]", "Take the middle 95%: cut off as much below as above."),
        Mistake("others - losses", "(others - losses).mean()",
                "Keep one difference for each video. The mean comes later."),
        Mistake("saved.mean()", "means.median()", "Return the mean of the videos themselves, not the middle draw."),
        Mistake("saved.mean()", "means.mean()",
                "Return the mean of the videos themselves. The draws are for the interval only."),
        Mistake("others - losses", "others / losses - 1", "Return differences, not ratios."),
    ), as_floats, right=(
        ("saved[drawn].mean(1)", "saved[drawn].sum(1) / drawn.shape[1]"),
        ("return saved.mean(), low, high", "return saved.mean().item(), low.item(), high.item()"),
    )),
}  # fmt: skip
