"""Films of ideas: a few pictures that play, and the same side by side for paper and for those who want rest."""

import base64
import html
from collections.abc import Callable, Sequence
from functools import cached_property
from io import BytesIO
from typing import NamedTuple

import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from sage_course.figures.diagrams import LETTERS, draw_note
from sage_course.figures.style import BLUE, GREEN

INCHES = 9.0  # of a notebook's column, which `columns` pictures of a film fill
PICTURE_MS, LAST_MS = 1500, 4000
COLOURS = 128
ENLARGED = 1.25  # a film's picture on the screen, against the same picture in the strip


class Idea(NamedTuple):
    """The title of a film, the key to its colours, and its text for those who cannot see it."""

    title: str
    key: str
    alt: str


IDEAS = {
    "softmax": Idea(
        "A constant added to a whole row leaves its softmax alone",
        "orange: what was added; in the last two pictures key 0 alone gets more",
        "Bars of four scores, of their exponentials and of their softmax. While one constant is added to all scores, "
        "all exponentials grow by one factor, and the softmax stays. When one key alone gets more, the softmax moves.",
    ),
    "delta": Idea(
        "A row of dP as a beam, with the probabilities as weights",
        "a disc: a key at its dP, its area is P; triangle: the point x on which the beam rests",
        "Five discs on a beam, at their dP and with their probability as weight. The beam tips until it rests on "
        "delta, the weighted mean. There the moments P times (dP minus delta), which are dS, add up to zero.",
    ),
    "scales": Idea(
        "One entry of a product of integers, with two kinds of scales",
        "one colour, one scale; outlined: the factors that are multiplied in this turn",
        "One entry of a product of integers, added up term by term. With a scale per row and per column, all terms "
        "share two scales, which wait until the end. With a scale per index of the sum, each term needs its own.",
    ),
    "forward": Idea(
        "The forward pass keeps m, l and O of one block of queries, and forgets each tile of S",
        "red: above 0, blue: below; grey: computed and forgotten; x old: factor exp(old m - new m)",
        "Tiles of S are computed one after the other, row of tiles by row of tiles. After each tile the numbers m, l "
        "and O of its queries change; when m grows, the old l and O shrink by a factor. After a row O is divided by l.",
    ),
    "backward": Idea(
        "Each tile adds to one dQ, one dK and one dV; here a block of keys stays until it is done",
        "orange: this turn; 1/3: one of three parts is in the sum; green: the sum is complete",
        "Tiles are visited column by column. The dK and dV of a column are complete after its last tile. "
        "Every column adds one part to each dQ, and all dQ are complete only in the last column.",
    ),
    "table": Idea(
        "A program reads its line of the look-up table, and the blocks of keys that stand in it",
        "blue: selected; orange: read in this turn; grey: read before by this program; hatched: never read by it",
        "A block mask, its look-up table, and the memory of the keys. Two programs walk along their lines of the "
        "table. Each number in the line is the place of one block in memory; the other blocks are not touched.",
    ),
    "ring": Idea(
        "Tiles go round a ring: the loader waits for empty places, the readers for ready ones",
        "green: a tile that is ready; ready, empty: the phase, 0 or 1, in which the two barriers of a place are",
        "One warp loads tiles into three places in turn, and two warpgroups read every tile. A reader waits until its "
        "tile is ready. When all places are full, the loader waits until both readers have released the oldest.",
    ),
}  # fmt: skip


class Film:
    """Pictures of one idea. A notebook plays them, and below shows them side by side."""

    def __init__(self, name: str, draw: Callable[[Figure, int], None], count: int, height: float, columns: int = 2):
        """Keep what to draw.

        Args:
            name: one of IDEAS.
            draw: draws picture i on an empty figure.
            count: of pictures.
            height: of a picture in inches; the width is what `columns` of them share.
            columns: of the strip.
        """
        self.idea, self.draw, self.count, self.columns = IDEAS[name], draw, count, columns
        self.size = INCHES / columns, height

    def figure(self, i: int) -> Figure:
        """Draw picture i."""
        figure = Figure(figsize=self.size, layout="constrained")
        self.draw(figure, i)
        return figure

    @cached_property
    def pictures(self) -> list[Image.Image]:
        """All pictures."""
        return [as_picture(self.figure(i)) for i in range(self.count)]

    @cached_property
    def gif(self) -> bytes:
        """The film, which plays in a loop and rests on its last picture."""
        durations = [PICTURE_MS] * (self.count - 1) + [LAST_MS]
        whole, (width, height) = in_colours(beside(self.pictures, 1)), self.pictures[0].size
        first, *others = (whole.crop((0, i * height, width, (i + 1) * height)) for i in range(self.count))
        return saved(first, "GIF", save_all=True, append_images=others, duration=durations, loop=0)

    @cached_property
    def strip(self) -> bytes:
        """The static twin, a PNG: the pictures side by side under their title."""
        head = Figure(figsize=(INCHES, 0.6))
        head.text(0.5, 0.72, self.idea.title, ha="center", va="center", fontsize=11)
        head.text(0.5, 0.25, self.idea.key, ha="center", va="center", fontsize=LETTERS)
        whole = beside([as_picture(head), beside(self.pictures, self.columns)], 1)
        return saved(in_colours(whole), "PNG", optimize=True)

    def _ipython_display_(self) -> None:
        title, key, alt = map(html.escape, self.idea)
        last = saved(in_colours(self.pictures[-1]), "PNG", optimize=True)
        gif, still = (base64.b64encode(picture).decode() for picture in (self.gif, last))
        film = (
            f'<details open class="film"><summary>{title} (close to stop)</summary><picture>'
            f'<source media="(prefers-reduced-motion: reduce), print" srcset="data:image/png;base64,{still}">'
            f'<img alt="{alt}" width="{96 * ENLARGED * self.size[0]:.0f}" src="data:image/gif;base64,{gif}">'
            f"</picture><br>{key}</details>"
        )
        display({"text/html": film, "text/plain": f"film: {self.idea.title}"}, raw=True)
        twin = {"image/png": self.strip, "text/plain": f"its pictures: {self.idea.title}"}
        display(twin, metadata={"image/png": {"alt": self.idea.alt}}, raw=True)


def as_picture(figure: Figure) -> Image.Image:
    """Return a figure's pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def beside(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Paste pictures of one width into rows of `columns`, on white."""
    lines = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in line) for line in lines]
    whole = Image.new("RGB", (columns * pictures[0].width, sum(heights)), "white")
    for y, line in enumerate(lines):
        for x, picture in enumerate(line):
            whole.paste(picture, (x * picture.width, sum(heights[:y])))
    return whole


def in_colours(picture: Image.Image) -> Image.Image:
    """Return a picture in at most COLOURS of its colours; the lightest is white."""
    few = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colours = few.getpalette()
    lightest = max(range(0, len(colours), 3), key=lambda place: sum(colours[place : place + 3]))
    few.putpalette([*colours[:lightest], 255, 255, 255, *colours[lightest + 3 :]])
    return few


def saved(picture: Image.Image, kind: str, **options) -> bytes:
    found = BytesIO()
    picture.save(found, kind, **options)
    return found.getvalue()


def sheet(figure: Figure, width: float, height: float, title: str) -> Axes:
    """Return axes without a frame, `width` x `height` units large from the upper left corner."""
    axes = figure.subplots()
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_title(title, fontsize=10)
    axes.set_axis_off()
    return axes


def draw_cell(
    axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, fill: str, **style
) -> None:
    """Draw a rectangle with text in its middle, white where `fill` is dark."""
    axes.add_patch(Rectangle(corner, *size, fc=fill, **({"ec": "0.5", "linewidth": 0.6} | style)))
    place, ink = (corner[0] + size[0] / 2, corner[1] + size[1] / 2), "white" if fill in (BLUE, GREEN) else "black"
    draw_note(axes, place, text, fontsize=9, color=ink, zorder=5)
