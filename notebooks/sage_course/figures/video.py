"""Figures of videos: strips and films, a router's selection on the frames, a fine-tuning's arms with intervals."""

import base64
import html
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sage_lab.experiments.video.pictures import film
from torch import Tensor

from sage_course.figures.sparse import outline_blocks
from sage_course.figures.style import BLACK, BLUE, ORANGE, SKY

FILM_WIDTH = 160  # pixels
DIMMED = 0.35  # of the brightness, where nothing is selected


def shown(frame: Tensor) -> Tensor:
    """Turn [3, size, size] in [-1, 1] into matplotlib's [size, size, 3] in [0, 1]."""
    return ((frame + 1) / 2).clamp(0, 1).permute(1, 2, 0)


def film_strips_figure(videos: Mapping[str, Tensor], *, title: str, frames: int = 4) -> Figure:
    """Draw a row of frames for each video [3, T, size, size] in [-1, 1], spread over its length."""
    length = next(iter(videos.values())).shape[1]
    times = torch.linspace(0, length - 1, frames).round().long().tolist()
    figure, grid = plt.subplots(
        len(videos), frames, figsize=(1.3 * frames + 1.3, 1.3 * len(videos) + 0.6), squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    for axes, (name, video) in zip(grid, videos.items(), strict=True):
        for ax, t in zip(axes, times, strict=True):
            ax.imshow(shown(video[:, t]).numpy(), interpolation="nearest")
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    for ax, t in zip(grid[-1], times, strict=True):
        ax.set_xlabel(f"frame {t}", fontsize=9)
    return figure


class Films:
    """Films side by side, each over its name. A notebook shows them as GIFs that play; as text, their names.

    gifs: bytes by name, as `sage_lab.experiments.video.pictures.film` makes them.
    """

    def __init__(self, gifs: Mapping[str, bytes]):
        self.gifs = gifs

    def __repr__(self) -> str:
        return f"films: {', '.join(self.gifs)}"

    def _repr_html_(self) -> str:
        figures = []
        for name, gif in self.gifs.items():
            data, words = base64.b64encode(gif).decode(), html.escape(name)
            image = f'<img alt="{words}" width="{FILM_WIDTH}" src="data:image/gif;base64,{data}">'
            figures.append(f'<figure style="display: inline-block">{image}<figcaption>{words}</figcaption></figure>')
        return "".join(figures)


def films_of(videos: Mapping[str, Tensor]) -> Films:
    """Make films of videos [3, T, size, size] in [-1, 1], by name."""
    return Films({name: film(video) for name, video in videos.items()})


def draw_selected(axes: Sequence[Axes], frames: Tensor, selected: Tensor, queries: Tensor) -> None:
    """Draw frames with all but the selected blocks dimmed; outline these, and the block of queries.

    frames [3, S, size, size] in [-1, 1], one for each axes: the first of each cube. selected, queries: bool [S, R, C],
    cubes of a video in time, height and width.
    """
    slices, rows, columns = selected.shape
    for ax, frame, chosen, asks in zip(axes, frames.unbind(1), selected, queries, strict=True):
        sides = (frame.shape[-2] // rows, frame.shape[-1] // columns)
        light = torch.where(chosen, 1.0, DIMMED).repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)  # a cube is a unit, as `outline_blocks` has it
        ax.imshow((shown(frame) * light[..., None]).numpy(), extent=extent, interpolation="nearest")
        outline_blocks(ax, chosen, color=ORANGE)
        if asks.any():
            outline_blocks(ax, asks, color=SKY)
        ax.set(xticks=[], yticks=[])


def selected_figure(frames: Tensor, choices: Mapping[str, Tensor], queries: Tensor, *, title: str) -> Figure:
    """Draw a row for each choice of blocks, bool [S, R, C] by name, as `draw_selected` does."""
    slices = frames.shape[1]
    figure, grid = plt.subplots(
        len(choices), slices, figsize=(1.8 * slices + 1.4, 1.8 * len(choices) + 0.5), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    figure.suptitle(title, fontsize=11)
    for axes, (name, selected) in zip(grid, choices.items(), strict=True):
        draw_selected(axes, frames, selected, queries)
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    return figure


def arms_figure(differences: Mapping[str, tuple[float, float, float, int]], *, title: str) -> Figure:
    """Draw by how much each arm's loss is above full attention's, with the same fine-tuning.

    differences: arm -> (mean, low, high, seeds). An interval that holds 0 is grey: nothing is decided. A circle is open
    where there is one seed, so that the interval does not include the scatter of seeds.
    """
    figure, ax = plt.subplots(figsize=(7.2, 0.32 * len(differences) + 1.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    ax.axvline(0, color=BLACK, linewidth=1)
    for y, (*difference, seeds) in enumerate(differences.values()):
        mean, low, high = (1000 * x for x in difference)
        color = "0.5" if low <= 0 <= high else BLUE if high < 0 else ORANGE
        ax.plot([low, high], [y, y], color=color, linewidth=2)
        ax.plot(mean, y, "o", color=color, markerfacecolor=color if seeds > 1 else "white")
    ax.set_yticks(range(len(differences)), list(differences), fontsize=9)
    ax.set_ylim(len(differences) - 0.5, -0.5)
    ax.set_xlabel("loss above that of full attention, 1/1000", fontsize=9)
    return figure
