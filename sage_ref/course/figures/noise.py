"""Gradient noise against the bias of quantisation."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_ref.course.figures.style import BLACK, BLUE, GREEN, ORANGE, RED, SKY, panels
from sage_ref.course.pretraining_results import PAPER_LOSSES, bias_to_noise, noise_of
from sage_ref.records import Row

# What `python -m sage_ref noise` compares with exact attention in float32, as far as figures show it.
VARIANT_STYLES = {
    "per block, nearest": ("o", RED), "per block, stochastic": ("s", ORANGE), "per row, nearest": ("^", BLUE),
    "per row, stochastic": ("v", SKY), "bf16": ("D", GREEN),
}  # fmt: skip
# Tokens per step of the paper's two main experiments.
PAPER_SIZES = tuple(PAPER_LOSSES)


def noise_figure(rows: Sequence[Row], groups: Sequence[str], *, title: str, caption: str) -> Figure:
    """For each group of parameters: lengths of noise and bias against the tokens of a step; dashed: the gradient's.

    rows: of one checkpoint. A band is two standard errors of |b|^2 either way; crosses mark T*.
    """
    figure, axes = panels(len(groups), width=3.0, height=3.5, sharey=True, title=title)
    sizes = [2.0**x for x in range(8, 31)]
    for ax, group in zip(axes, groups, strict=True):
        for variant, (_, color) in VARIANT_STYLES.items():
            row = noise_of(rows, group, variant)
            low, middle, high = (
                math.sqrt(max(row["bias_square"] + z * row["bias_square_error"], 0)) for z in (-2, 0, 2)
            )
            ax.axhspan(low, high, color=color, alpha=0.25, linewidth=0)
            ax.axhline(middle, color=color, label=f"bias: {variant}")
            if row["tokens_at_bias"]:
                ax.plot(row["tokens_at_bias"], middle, "x", color=BLACK, zorder=3)
        noise = [math.sqrt(row["noise_trace"] / tokens) for tokens in sizes]
        ax.plot(sizes, noise, color=BLACK, label="noise")
        if row["gradient_square"] > 0:
            ax.axhline(math.sqrt(row["gradient_square"]), color=BLACK, linestyle="--", label="the gradient itself")
        for size in PAPER_SIZES:
            ax.axvline(size, color=BLACK, linewidth=0.8, linestyle=":")
        ax.set(xscale="log", yscale="log", xlabel="tokens per step")
        ax.set_title(group, fontsize=10)
    axes[0].set_ylabel("length, in the gradient's units")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    figure.supxlabel(f"{caption}; dotted: the paper's {_millions(PAPER_SIZES)} tokens per step", fontsize=8)
    return figure


def _millions(sizes: Sequence[int]) -> str:
    return " and ".join(f"{size / 1e6:.2g}M" for size in sizes)


def tokens_at_bias_figure(
    rows: Sequence[Row], groups: Sequence[str], sizes: Sequence[int], *, title: str, caption: str
) -> Figure:
    """T*, the tokens per step at which bias reaches noise, of each group and variant; the bar ends at a cautious T*.

    sizes: tokens per step of our runs, dashed; the paper's are dotted.
    """
    figure, (ax,) = panels(1, width=8.6, height=0.75 + 0.62 * len(groups), title=title)
    for y, group in enumerate(groups):
        for shift, (variant, (marker, color)) in enumerate(VARIANT_STYLES.items()):
            row, place = noise_of(rows, group, variant), y + 0.15 * (shift - 2)
            low, middle = row["tokens_at_bias_low"], row["tokens_at_bias"]
            label = None if y else variant
            if middle:
                ax.plot([low, middle], [place, place], color=color, linewidth=1)
                ax.plot(middle, place, marker, color=color, markersize=5, label=label)
            elif low:
                ax.plot(low, place, ">", color=color, markersize=5, mfc="none", label=label)
    for size, line in [(size, "--") for size in sizes] + [(size, ":") for size in PAPER_SIZES]:
        ax.axvline(size, color=BLACK, linewidth=0.8, linestyle=line)
    ax.set(xscale="log", xlabel="T*: tokens per step at which bias = noise")
    ax.set_yticks(range(len(groups)), groups, fontsize=8)
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), fontsize=8, loc="outside right center")
    ours = ", ".join(f"{size:,}" for size in sizes)
    lines = f"dashed: our runs' {ours} tokens per step; dotted: the paper's {_millions(PAPER_SIZES)}"
    figure.supxlabel(f"{caption}\n{lines}", fontsize=8)
    return figure


def draw_balance(axes: Axes, rows: Sequence[Row], groups: Sequence[str], tokens_per_step: float) -> None:
    """|bias| / noise of every variant at a number of tokens per step; above the line bias is the larger.

    groups: of `score_groups`.
    """
    for shift, (variant, (_, color)) in enumerate(VARIANT_STYLES.items()):
        ratios = [bias_to_noise(noise_of(rows, group, variant), tokens_per_step) for group in groups]
        axes.bar([x + 0.16 * (shift - 2) for x in range(len(groups))], ratios, width=0.15, color=color, label=variant)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set(yscale="log", ylim=(1e-3, 100))
    axes.set_xticks(range(len(groups)), [group.partition(",")[0] for group in groups], fontsize=8)
    axes.set_xlabel("query and key weights of")
    axes.set_title(f"{tokens_per_step:,.0f} tokens per step", fontsize=10)


def balance_figure(rows: Sequence[Row], groups: Sequence[str], sizes: Sequence[float], *, title: str) -> Figure:
    """`draw_balance` for several numbers of tokens per step."""
    figure, axes = panels(len(sizes), width=3.4, height=3.4, sharey=True, title=title)
    for ax, size in zip(axes, sizes, strict=True):
        draw_balance(ax, rows, groups, size)
    axes[0].set_ylabel("|bias| / noise")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    return figure
