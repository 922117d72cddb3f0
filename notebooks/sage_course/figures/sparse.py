"""Figures of sparse-linear attention: block masks, the linear branch, routers, training for INT8."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from sage_lab.records import Record
from torch import Tensor

from sage_course.figures.style import BLACK, BLUE, COLORS, RED, panels
from sage_ref.sla2 import soft_top_k


def outline_blocks(axes: Axes, block_mask: Tensor, *, color: str = RED) -> None:
    """Outline the selected blocks of an image of [Tm, Tn] blocks; neighbours share one outline."""
    rows, columns = block_mask.shape
    width = 0.8 if max(rows, columns) > 64 else 1.5  # points; small blocks would vanish under a thick line
    padded = torch.zeros(rows + 2, columns + 2, dtype=torch.bool)
    padded[1:-1, 1:-1] = block_mask
    above = (padded[1:] != padded[:-1])[:, 1:-1].nonzero().tolist()  # an edge above block (i, j), i up to Tm
    beside = (padded[:, 1:] != padded[:, :-1])[1:-1].nonzero().tolist()  # left of block (i, j), j up to Tn
    edges = [((j - 0.5, i - 0.5), (j + 0.5, i - 0.5)) for i, j in above]
    edges += [((j - 0.5, i - 0.5), (j - 0.5, i + 0.5)) for i, j in beside]
    lines = LineCollection(edges, colors=color, linewidths=width, capstyle="projecting", clip_on=False)
    axes.add_collection(lines, autolim=False)


def draw_block_mass(axes: Axes, mass: Tensor, *, block_mask: Tensor | None = None, title: str) -> None:
    """Draw each key block's share of its row's probability, [Tm, Tn], logarithmically; outline selected blocks."""
    norm = LogNorm(0.05 / mass.shape[-1], 20 / mass.shape[-1], clip=True)
    axes.imshow(mass.numpy(), cmap="Greys", norm=norm, aspect="auto", interpolation="nearest")
    if block_mask is not None:
        outline_blocks(axes, block_mask)
    axes.set(xlabel="block of keys", ylabel="block of queries")
    axes.set_title(title, fontsize=10)
    colors = plt.cm.ScalarMappable(norm, "Greys")
    axes.figure.colorbar(colors, ax=axes, fraction=0.046, extend="both", label="share of the row's mass")


def soft_mask_figure(scores: Mapping[str, Tensor], count: int, temperatures: Sequence[float]) -> Figure:
    """Draw SoftTop-k of each argument at each temperature, blocks by rank; dotted: hard Top-k.

    scores: name -> [Tn], one row for a block of queries; count: how many blocks the row sums to.
    """
    title = "SoftTop-k is flat until tau is as small as the scores' differences"
    figure, axes = panels(len(temperatures), width=2.9, height=3.2, sharey=True, title=title)
    rank = range(1, len(next(iter(scores.values()))) + 1)
    for ax, temperature in zip(axes, temperatures, strict=True):
        for (name, x), color in zip(scores.items(), COLORS, strict=False):
            weights = soft_top_k(x, count, temperature).sort(descending=True).values
            ax.plot(rank, weights.detach(), color=color, label=f"SoftTop-k of {name}")
        ax.step(rank, [float(i <= count) for i in rank], ":", where="mid", color=BLACK, label="hard Top-k")
        ax.set(xlabel="rank of the key block", xscale="log", ylim=(-0.03, 1.05))
        ax.set_title(f"tau = {temperature:g}", fontsize=10)
    axes[0].set_ylabel("weight of the block")
    axes[-1].legend(fontsize=9)
    return figure


def quantization_aware_figure(record: Record, *, title: str) -> Figure:
    """Draw the quantised layer's error against the outlier in V, by way of training: mean and standard deviation.

    One panel per layer and video.
    """
    layers, ways, outliers = (
        list(dict.fromkeys(row[name] for row in record.rows)) for name in ("layer", "way", "value_outlier")
    )
    figure, axes = panels(2 * len(layers), width=2.9, height=3.4, sharey=True, title=title)
    places = [(layer, video) for layer in layers for video in ("fitted", "other")]
    for ax, (layer, video) in zip(axes, places, strict=True):
        exact = mean(row[f"{video}_16bit"] for row in record.select(layer=layer, way="afterwards"))
        ax.axhline(exact, color="0.5", linestyle=":", label="trained and run in 16 bit")
        for i, (way, color) in enumerate(zip(ways, (BLACK, RED, BLUE), strict=True)):
            found = [[row[f"{video}_int8"] for row in record.select(layer=layer, way=way, value_outlier=x)]
                     for x in outliers]  # fmt: skip
            x = [place + 0.15 * (i - 1) for place in range(len(outliers))]
            style = {"fmt": "os^"[i], "color": color, "capsize": 3, "markersize": 5, "label": way}
            ax.errorbar(x, list(map(mean, found)), yerr=list(map(stdev, found)), **style)
        ax.set_title(f"layer {layer}, {video} video", fontsize=10)
        ax.set_xlabel("outlier in V, times")
        ax.set_xticks(range(len(outliers)), [f"{x:g}" for x in outliers])
    axes[0].set_ylabel("relative L2 error of the INT8 layer")
    axes[0].legend(fontsize=9)
    figure.supxlabel(record.caption, fontsize=9)
    return figure
