"""Colours, rows of axes and matrices, shared by all figures."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

# Every PNG of the course, in a notebook or saved: sharp on today's screens.
plt.rcParams["figure.dpi"] = 150

# Okabe and Ito's palette: colour-blind readers can tell its colours apart, also in print.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
TENSOR_COLORS = {"O": BLUE, "dQ": ORANGE, "dK": GREEN, "dV": RED}


def panels(
    count: int, *, width: float = 3.4, height: float = 3.0, title: str = "", **options
) -> tuple[Figure, Sequence[Axes]]:
    """Return a row of `count` axes with one title over all of them."""
    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), squeeze=False, layout="constrained", **options
    )
    figure.suptitle(title, fontsize=11)
    return figure, axes[0]


def show_matrix(
    axes: Axes,
    matrix: Tensor,
    *,
    title: str,
    x: str,
    y: str,
    limit: float | None = None,
) -> None:
    """Draw a matrix as an image with its own colour bar; signed values get a diverging map centred on zero."""
    matrix = matrix.detach().float().cpu()
    limit = limit or matrix.abs().max().item()
    signed = bool((matrix < 0).any())
    image = axes.imshow(
        matrix.numpy(), cmap="RdBu_r" if signed else "viridis", vmin=-limit if signed else 0, vmax=limit,
        aspect="auto", interpolation="nearest",
    )  # fmt: skip
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.figure.colorbar(image, ax=axes, fraction=0.046)


def show_letters(axes: Axes, rows: str, columns: str) -> None:
    """Label a [len(rows), len(columns)] matrix with the letters that are its tokens."""
    axes.set_yticks(range(len(rows)), rows, fontfamily="monospace", fontsize=9)
    axes.set_xticks(range(len(columns)), columns, fontfamily="monospace", fontsize=9)
    axes.tick_params(length=0)
