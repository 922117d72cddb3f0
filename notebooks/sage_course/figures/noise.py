"""Figures of gradient noise and of the bias of quantisation."""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sage_lab.records import Row

from sage_course.figures.style import BLACK, BLUE, COLORS, GREEN, ORANGE, RED, SKY, panels
from sage_course.results.pretraining import noise_of

# The variants of `python -m sage_lab noise` that figures show: marker and colour.
VARIANT_STYLES = {
    "per block, nearest": ("o", RED), "per block, stochastic": ("s", ORANGE), "per row, nearest": ("^", BLUE),
    "per row, stochastic": ("v", SKY), "bf16": ("D", GREEN),
}  # fmt: skip
# A made-up model with two weights, whose bias is as long as the noise of 1,024 tokens.
TWO_WEIGHTS, THEIR_BIAS, THEIR_TOKENS_AT_BIAS = (1.0, 0.6), (0.18, -0.12), 1024


def draw_gradients(axes: Axes, tokens_per_step: int) -> None:
    """Draw gradients of a model with two weights: of 100 batches, exact and with a bias, and their means."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.tensor(THEIR_BIAS)
    deviation = (bias.square().sum() * THEIR_TOKENS_AT_BIAS / tokens_per_step / 2).sqrt()  # of each of the two
    noise = deviation * torch.randn(2, 100, 2, generator=generator)
    for name, mean, dots, color in (
        ("exact", torch.tensor(TWO_WEIGHTS), noise[0], BLUE),
        ("rounded", torch.tensor(TWO_WEIGHTS) + bias, noise[1], RED),
    ):
        axes.plot(*(mean + dots).mT, ".", color=color, alpha=0.5, markersize=4)
        axes.plot(*mean, "P", color=color, markeredgecolor=BLACK, markersize=10, label=f"{name}: dots, and their mean")
    axes.set(xlim=(-0.6, 2.6), ylim=(-1.0, 2.2), xlabel="gradient of weight 1")
    axes.set_title(f"{tokens_per_step:,} tokens per batch", fontsize=10)


def gradients_figure(sizes: Sequence[int], *, title: str) -> Figure:
    """Draw gradients for several numbers of tokens per batch."""
    figure, axes = panels(len(sizes), width=3.3, height=3.5, sharey=True, title=title)
    for ax, size in zip(axes, sizes, strict=True):
        draw_gradients(ax, size)
    axes[0].set_ylabel("gradient of weight 2")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=2)
    return figure


def noise_figure(row_of: Mapping[str, Row], sizes: Mapping[str, int], *, title: str, caption: str) -> Figure:
    """Draw the lengths of noise and bias against the tokens of a batch; crosses mark T*.

    row_of: variant -> its row, all of one group of parameters of one checkpoint. A band is two standard errors of |b|^2
    either way. sizes: name -> tokens per batch, marked by dotted lines.
    """
    figure, (ax,) = panels(1, width=7.2, height=4.2, title=title)
    tokens = [2.0**x for x in range(12, 33)]
    noise_trace = next(iter(row_of.values()))["noise_trace"]
    ax.plot(tokens, [math.sqrt(noise_trace / x) for x in tokens], color=BLACK, label="noise")
    for variant, row in row_of.items():
        low, middle, high = (math.sqrt(max(row["bias_square"] + z * row["bias_square_error"], 0)) for z in (-2, 0, 2))
        color = VARIANT_STYLES[variant][1]
        ax.axhspan(low, high, color=color, alpha=0.25, linewidth=0)
        ax.axhline(middle, color=color, label=f"bias: {variant}")
        if row["tokens_at_bias"]:
            ax.plot(row["tokens_at_bias"], middle, "x", color=BLACK, markersize=8, zorder=3)
    ax.set(xscale="log", yscale="log", xlim=(tokens[0], tokens[-1]), ylim=(1e-5, None))
    ax.set(xlabel="tokens per batch", ylabel="length, in the gradient's units")
    _mark(ax, sizes)
    ax.legend(fontsize=9, loc="upper right")
    figure.supxlabel(caption, fontsize=9)
    return figure


def tokens_at_bias_figure(
    checkpoints: Mapping[str, Sequence[Row]], sizes: Mapping[str, int], *, title: str, caption: str
) -> Figure:
    """Draw T*, at which bias reaches noise, of the whole model: a line per variant, a mark per checkpoint.

    checkpoints: name -> rows. sizes: name -> tokens per batch, marked by dotted lines.
    """
    figure, (ax,) = panels(1, width=8.6, height=3.6, title=title)
    for (name, rows), color, marker in zip(checkpoints.items(), COLORS, "osD^v<", strict=False):
        stars = [noise_of(rows, "whole", variant)["tokens_at_bias"] for variant in VARIANT_STYLES]
        found = [(star, y) for y, star in enumerate(stars) if star]
        ax.plot(*zip(*found, strict=True), marker, color=color, mfc="none", markersize=8, mew=1.5, label=name)
    ax.set(xscale="log", xlim=(1e4, 3e9), xlabel="T*: tokens per batch at which bias = noise")
    ax.set_yticks(range(len(VARIANT_STYLES)), list(VARIANT_STYLES), fontsize=10)
    ax.set_ylim(len(VARIANT_STYLES) - 0.5, -0.5)
    ax.grid(axis="y", alpha=0.3)
    _mark(ax, sizes)
    figure.legend(*ax.get_legend_handles_labels(), fontsize=9, loc="outside right upper")
    figure.supxlabel(caption, fontsize=9)
    return figure


def _mark(axes: Axes, sizes: Mapping[str, int]) -> None:
    """Draw a dotted line with a name for each number of tokens per batch."""
    for name, size in sizes.items():
        axes.axvline(size, color=BLACK, linewidth=1, linestyle=":")
        place = {"rotation": 90, "fontsize": 9, "va": "bottom", "ha": "right"}
        axes.text(size, 0.02, name, transform=axes.get_xaxis_transform(), **place)
