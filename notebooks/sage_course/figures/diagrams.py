"""Boxes and arrows of the drawn diagrams. One unit of a diagram is one inch, so letters keep their size."""

from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

LETTERS = 9.5  # points


class Box(NamedTuple):
    """A rectangle in inches; x and y are its middle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> tuple[float, float]:
        return self.x - self.width / 2, self.y

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def top(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x, self.y - self.height / 2


def diagram(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Return an empty sheet of `width` x `height` inches, with its title in the half inch above."""
    figure = plt.figure(figsize=(width, height + 0.5))
    axes = figure.add_axes((0, 0, 1, height / (height + 0.5)))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    figure.suptitle(title, fontsize=11)
    return figure, axes


def draw_box(axes: Axes, box: Box, text: str, *, fill: str, **style) -> FancyBboxPatch:
    """Draw a box with text in its middle, black or white, whichever can be read on `fill`. style: the patch's."""
    corner = box.x - box.width / 2, box.y - box.height / 2
    shape = "round,pad=0,rounding_size=0.06"
    patch = FancyBboxPatch(corner, box.width, box.height, boxstyle=shape, **({"fc": fill, "ec": "0.3"} | style))
    axes.add_patch(patch)
    if text:
        draw_note(axes, (box.x, box.y), text, color=ink_on(patch))
    return patch


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style) -> FancyArrowPatch:
    """Draw an arrow between two points."""
    look = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 1, "shrinkB": 1, "color": "0.25", "linewidth": 1.2}
    arrow = FancyArrowPatch(start, end, **(look | style))
    axes.add_patch(arrow)
    return arrow


def draw_note(axes: Axes, place: tuple[float, float], text: str, **style) -> None:
    """Write text without a box."""
    axes.text(*place, text, **({"ha": "center", "va": "center", "fontsize": LETTERS} | style))


def ink_on(patch: FancyBboxPatch) -> str:
    """Return the colour of letters on a patch, black or white."""
    red, green, blue, _ = patch.get_facecolor()
    return "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
