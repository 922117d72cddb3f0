"""Figures the notebooks and the README share. Every function returns the Figure it drew."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from sage_ref.recorded import Record

# Okabe and Ito's palette: told apart by colour-blind readers, also in print.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
TENSOR_COLORS = {"O": BLUE, "dQ": ORANGE, "dK": GREEN, "dV": RED}


def panels(
    count: int, *, width: float = 3.4, height: float = 3.0, title: str = "", **options
) -> tuple[Figure, Sequence[Axes]]:
    """A row of `count` axes with one message over all of them."""
    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), squeeze=False, layout="constrained", **options
    )
    figure.suptitle(title, fontsize=11)
    return figure, axes[0]


def show_matrix(axes: Axes, matrix: Tensor, *, title: str, x: str, y: str, limit: float | None = None) -> None:
    """A matrix as an image with its own colour bar; signed values get a diverging map centred on zero."""
    matrix = matrix.detach().float().cpu()
    limit = limit or matrix.abs().max().item()
    signed = bool((matrix < 0).any())
    image = axes.imshow(
        matrix, cmap="RdBu_r" if signed else "viridis", vmin=-limit if signed else 0, vmax=limit, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.figure.colorbar(image, ax=axes, fraction=0.046)


def table1_figure(record: Record, setting: dict) -> Figure:
    """Relative L2 error against sigma for O, dQ, dK, dV: measured with one setting of the sweep, and the paper's."""
    figure, axes = panels(4, width=2.8, sharey=True, title="INT8 error grows with the logits, fastest in dQ and dK")
    for ax, tensor in zip(axes, TENSOR_COLORS, strict=True):
        rows = sorted(record.select(tensor=tensor, **setting), key=lambda row: row["sigma"])
        sigma = [row["sigma"] for row in rows]
        ax.plot(
            sigma,
            [row["paper_rel_l2"] for row in rows],
            "s--",
            color=BLACK,
            markersize=6,
            mfc="none",
            label="paper, Table 1",
        )
        ax.plot(sigma, [row["rel_l2"] for row in rows], "o-", color=TENSOR_COLORS[tensor], label="sage_ref")
        ax.set(title=tensor, xlabel="sigma of Q and K", yscale="log", xticks=sigma)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative L2 error")
    axes[0].legend(fontsize=8)
    return figure
