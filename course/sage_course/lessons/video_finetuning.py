"""Notebook 13: tokens in cubes, flow matching, sampling, what each stage trains, PSNR, and a paired bootstrap."""

import math

import torch
from torch import Tensor

from sage_course.check import Gap, Mistake


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


def kept_blocks(sparsity, blocks):
    return max(1, round((1 - sparsity) * blocks))


def trains(name, stage):
    is_router, is_alpha = "core.router" in name, name.endswith("alpha_logit")
    if stage == 1:
        return is_router or is_alpha
    return not is_router


def psnr(video, other):
    error = (video - other).square().flatten(1).mean(1)
    return 10 * torch.log10(2**2 / error)


def paired_bootstrap(losses, others, drawn):
    saved = others - losses
    means = saved[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype))
    return saved.mean(), low, high


def for_each_name(function, names: list[str], stage: int) -> dict[str, bool]:
    return {name: function(name, stage) for name in names}


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
    "cube_order": Gap(cube_order, lambda: [((4, 4, 6), (2, 2, 3))], (
        Mistake(".permute(0, 2, 4, 1, 3, 5)", "",
                "That is raster order. First which cube (axes 0, 2, 4), then where in it (1, 3, 5)."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(1, 3, 5, 0, 2, 4)", "The cube comes first, the place inside it last."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(0, 1, 2, 4, 3, 5)",
                "Squares of one frame: a cube's frames belong together, so axis 1 comes after 2 and 4."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(0, 2, 4, 5, 3, 1)", "Inside a cube, too, frame before row before column."),
        Mistake("(0, 2, 4, 1, 3, 5)", "(4, 2, 0, 1, 3, 5)", "Cubes, too, go by frame, then row, then column."),
        Mistake("view(frames, cube[0], rows, cube[1], columns, cube[2])",
                "view(cube[0], frames, cube[1], rows, cube[2], columns)",
                "A side is so many cubes of so many patches: the number of cubes comes before a cube's side."),
        Mistake("view(frames, cube[0], rows, cube[1], columns, cube[2])\n    return places.permute(0, 2, 4, 1, 3, 5)",
                "view(cube[0], frames, cube[1], rows, cube[2], columns)\n    return places.permute(1, 3, 5, 0, 2, 4)",
                "view must fit the memory: neighbours are in the same cube, so the number of cubes comes first."),
        Mistake(".permute(0, 2, 4, 1, 3, 5).flatten()", ".permute(0, 2, 4, 1, 3, 5).flatten().argsort()",
                "That is the way back: where each place of the raster went."),
    )),
    "noisy_and_velocity": Gap(noisy_and_velocity, _videos, (
        Mistake("noise - video", "video - noise", "t grows towards the noise: so does the velocity, noise - video."),
        Mistake("(1 - t) * video + t * noise, noise - video", "t * video + (1 - t) * noise, video - noise",
                "Many papers count t that way. Here t = 0 is the video and t = 1 the noise, as in the library."),
        Mistake("(1 - t) * video + t * noise", "t * video + (1 - t) * noise", "t = 0 is the video, t = 1 the noise."),
        Mistake("noise - video", "noise", "That is what a denoiser predicts. The velocity is d x_t / d t."),
        Mistake("noise - video", "(1 - t) * video + t * noise - video", "d x_t / d t does not depend on t at all."),
        Mistake("noise - video", "(1 - t) * (noise - video)", "That is the way still to go. Take the derivative by t."),
        Mistake("(1 - t) * video", "(1 - t**2).sqrt() * video", "A straight line from video to noise, no circle."),
        Mistake("t = t.view(-1, 1, 1, 1, 1)", "t = t", "t has one number per video: give it four more axes."),
        Mistake("(1 - t) * video + t * noise", "video + t * noise", "The video fades as the noise comes: (1 - t)."),
    )),
    "euler": Gap(euler, _paths, (
        Mistake("(following - t)", "(t - following)", "t falls on the way to the video: the step is negative."),
        Mistake("velocity_at(x, t)", "velocity_at(x, following)",
                "The velocity where x is now: at t, not at the next."),
        Mistake("x + (following - t) * velocity_at(x, t)", "x - velocity_at(x, t)",
                "That is all the way in one step. Go only as far as t changes."),
        Mistake("x + (following - t) *", "(following - t) *", "A step is added to where x is."),
        Mistake("velocity_at(x, t)", "velocity_at(x, (t + following) / 2)",
                "That t belongs to another x: Euler takes t."),
        Mistake("(following - t) *", "following *", "The step is how far t changes, following - t."),
        Mistake("(following - t) *", "-t *", "That goes to t = 0 at once. Go only to the next level."),
        Mistake("(following - t) *", "", "Two things: t falls, and a step is only as long as t changes."),
        Mistake("(following - t) *", "-1 / (len(levels) - 1) *", "The levels need not be evenly spaced."),
        Mistake("(following - t) *", "-1 / len(levels) *", "How far t changes is following - t."),
    )),
    "kept_blocks": Gap(kept_blocks, lambda: [(0.97, 256), (0.9, 32), (0.97, 8), (0.95, 32), (0.7, 10)], (
        Mistake("(1 - sparsity) *", "sparsity *", "Sparsity is the share that is left out."),
        Mistake("max(1, round((1 - sparsity) * blocks))", "round((1 - sparsity) * blocks)",
                "A softmax over no block at all is 0 / 0: keep at least one."),
        Mistake("max(1, round((1 - sparsity) * blocks))", "max(1, int((1 - sparsity) * blocks))",
                "int cuts off: 7.68 blocks become 7. Round."),
        Mistake("round((1 - sparsity) * blocks)", "math.ceil((1 - sparsity) * blocks)", "Round, not up."),
        Mistake("round((1 - sparsity) * blocks)", "(1 - sparsity) * blocks", "A whole number of blocks."),
    )),
    "trains": Gap(trains, lambda: [(NAMES, 1), (NAMES, 2)], (
        Mistake("is_router or is_alpha", "is_router and is_alpha", "No parameter is both: one or the other."),
        Mistake("return not is_router", "return False", "Stage 2 trains the model and alpha."),
        Mistake("return is_router or is_alpha", "return True", "Stage 1 leaves the model as it is."),
        Mistake("return is_router or is_alpha", "return is_router", "Stage 1 fits alpha, too."),
        Mistake("return is_router or is_alpha", "return is_alpha", "Stage 1 is there for the router."),
        Mistake("return not is_router", "return True",
                "A hard Top-k gives the router no gradient. In stage 2 it stays as stage 1 left it."),
        Mistake("return not is_router", "return is_alpha", "Stage 2 trains the model, too: that is what it is for."),
        Mistake("return not is_router", "return not is_router and not is_alpha", "alpha learns in both stages."),
        Mistake("if stage == 1:", "if stage == 2:", "The other way round: router and alpha first, then the model."),
    ), for_each_name),
    "psnr": Gap(psnr, lambda: [tuple(_draw(2, 3, 3, 2, 4, 4).clamp(-0.9, 0.8))], (
        Mistake("2**2 / error", "1 / error", "From -1 to 1 is a range of 2, and its square stands above the error."),
        Mistake("2**2 / error", "2 / error", "The range is squared, as the error is."),
        Mistake("2**2 / error", "255**2 / error", "255 is for 8 bits. Here the range is 2, from -1 to 1."),
        Mistake("10 * torch.log10(2**2 / error)", "20 * torch.log10(2**2 / error)", "10 log10 of squares."),
        Mistake("torch.log10", "torch.log", "A decibel is of log10."),
        Mistake("2**2 / error", "error / 2**2", "A smaller error is a larger PSNR."),
        Mistake(".flatten(1).mean(1)", ".mean()", "One number for each video: mean over all axes but the first."),
        Mistake(".flatten(1).mean(1)", ".flatten(1).sum(1)", "The mean of the squares, not their sum."),
        Mistake(".square()", ".abs()", "The mean of the squares."),
        Mistake(".mean(1)", ".mean(1).sqrt()", "The mean squared error, without a root."),
        Mistake("2**2", "(video.max() - video.min()) ** 2",
                "The range that pixels may have, from -1 to 1, whatever this video has."),
    )),
    "paired_bootstrap": Gap(paired_bootstrap, _judged, (
        Mistake("others - losses", "losses - others", "What `losses` saves: above 0 where it is the smaller one."),
        Mistake("saved[drawn].mean(1)", "others[drawn].mean(1) - losses[drawn.flip(0)].mean(1)",
                "That draws other videos for each model. Both must be judged on the same ones."),
        Mistake("means = saved[drawn].mean(1)", "means = saved",
                "That is the spread of videos. Wanted is that of the mean: of saved[drawn].mean(1)."),
        Mistake("saved[drawn].mean(1)", "saved[drawn].mean(0)",
                "A row of `drawn` is one repetition: its mean, axis 1."),
        Mistake("[0.025, 0.975]", "[0.05, 0.95]", "95% lie between: 2.5% are cut off on each side."),
        Mistake("[0.025, 0.975]", "[0.0, 1.0]", "Not the extremes: 2.5% are cut off on each side."),
        Mistake("[0.025, 0.975]", "[0.975, 0.025]", "The low end first."),
        Mistake("[0.025, 0.975]", "[0.95, 0.05]", "The low end first, and 2.5% are cut off on each side."),
        Mistake("[0.025, 0.975]", "[2.5, 97.5]", "quantile takes shares, from 0 to 1."),
        Mistake("[0.025, 0.975]", "[0.0, 0.95]", "The middle 95%: as much is cut off below as above."),
        Mistake("others - losses", "(others - losses).mean()", "One difference for each video; the mean comes later."),
        Mistake("saved[drawn].mean(1)", "saved[drawn]", "One mean for each draw: over axis 1."),
        Mistake("saved[drawn].mean(1)", "saved[drawn].mean()", "One mean for each draw: over axis 1 only."),
        Mistake("saved.mean()", "means.median()", "The mean of the videos themselves, not the middle draw."),
        Mistake("saved.mean()", "means.mean()", "The mean of the videos themselves; the draws are for the interval."),
        Mistake("others - losses", "(others - losses).abs()", "The sign says which is better: keep it."),
        Mistake("others - losses", "others / losses - 1", "Differences, not ratios."),
    ), as_floats),
}  # fmt: skip
