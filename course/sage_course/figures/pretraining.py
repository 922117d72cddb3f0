"""Figures of pre-training runs, by tokens per step and attention, and of the errors in their layers."""

from collections.abc import Sequence
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from sage_lab.experiments.table2 import PAPER_TABLE2
from sage_lab.records import Record

from sage_course.figures.errors import error_heatmap
from sage_course.figures.style import BLACK, BLUE, ORANGE, RED, TENSOR_COLORS, panels
from sage_course.results.pretraining import (
    PAPER_LOSSES,
    RUN_KINDS,
    final_losses,
    last_errors,
    mean_interval,
    pretrain_runs,
    relative_gaps,
)

MAIN_KINDS = {"exact": BLACK, "SageBwd, K smoothed": ORANGE}


def pretrain_curves_figure(record: Record, *, title: str) -> Figure:
    """Draw validation losses over training, with QK-norm: mean and range; below, the differences seed by seed.

    record: rows of `python -m sage_lab pretrain-grid`. Drawn from the end of the warm-up on.
    """
    plan = record.provenance["plan"]
    sizes, warm = plan["tokens_per_step"], plan["warmup"] * plan["tokens"]
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(4.5 * len(sizes), 4.6), layout="constrained", height_ratios=(3, 2), sharex=True,
        sharey="row",
    )  # fmt: skip
    figure.suptitle(title, fontsize=11)
    for (upper, lower), size in zip(axes.T, sizes, strict=True):
        curves = {}
        for kind, color in MAIN_KINDS.items():
            runs = pretrain_runs(record, kind, size)
            curves[kind] = {
                seed: [(tokens / 1e6, loss) for tokens, loss in row["curve"] if tokens >= warm]
                for seed, row in runs.items()
                if not row["diverged"]
            }
            millions = [tokens for tokens, _ in next(iter(curves[kind].values()))]
            by_report = [[loss for _, loss in points] for points in zip(*curves[kind].values(), strict=True)]
            label = f"{kind}: mean and range of {len(curves[kind])} seeds"
            upper.plot(millions, [mean(losses) for losses in by_report], color=color, label=label)
            upper.fill_between(millions, list(map(min, by_report)), list(map(max, by_report)), color=color, alpha=0.25)
        exact, sagebwd = curves.values()
        differences = [
            [y - x for (_, x), (_, y) in zip(points, sagebwd[seed], strict=True)]
            for seed, points in exact.items()
            if seed in sagebwd
        ]
        for number, difference in enumerate(differences):
            lower.plot(millions, difference, color=BLUE, linewidth=0.7, label=None if number else "one seed")
        lower.plot(millions, list(map(mean, zip(*differences, strict=True))), color=RED, label="their mean")
        lower.axhline(0, color=BLACK, linewidth=0.8)
        lower.set(xlabel="tokens, millions")
        upper.set_title(f"{size:,} tokens per step", fontsize=10)
        upper.legend(fontsize=9, loc="upper right")
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high + (high - low) / 3)  # room for the legends above the curves
    axes[1, 0].legend(fontsize=9, ncols=2, loc="lower left")
    axes[0, 0].set_ylabel("validation loss,\nnats per byte")
    axes[1, 0].set_ylabel("SageBwd less exact,\nnats per byte")
    figure.supxlabel(record.caption, fontsize=9)
    return figure


def final_losses_figure(record: Record, *, title: str) -> Figure:
    """Draw the final loss of every kind of run, a dot per seed; grey: the range of exact attention with QK-norm."""
    sizes = record.provenance["plan"]["tokens_per_step"]
    figure, axes = panels(len(sizes), width=4.8, height=3.6, sharey=True, title=title)
    kinds = [
        (kind, qk_norm)
        for qk_norm in (True, False)
        for kind in RUN_KINDS
        if any(pretrain_runs(record, kind, size, qk_norm) for size in sizes)
    ]
    for ax, size in zip(axes, sizes, strict=True):
        exact = final_losses(pretrain_runs(record, "exact", size)).values()
        ax.axvspan(min(exact), max(exact), color="0.85")
        for y, (kind, qk_norm) in enumerate(kinds):
            runs = pretrain_runs(record, kind, size, qk_norm)
            losses = final_losses(runs)
            color = MAIN_KINDS.get(kind, BLUE)
            ax.plot(list(losses.values()), [y] * len(losses), "o" if qk_norm else "D", color=color, mfc="none")
            diverged = len(runs) - len(losses)
            text = f"{diverged} diverged" if diverged else "" if runs else "not run"
            ax.text(0.99, y, text, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=9)
        ax.set(xlabel="final validation loss, nats per byte")
        ax.set_title(f"{size:,} tokens per step", fontsize=10)
        ax.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(kinds)), [kind + ("" if norm else ", no QK-norm") for kind, norm in kinds], fontsize=9)
    axes[0].set_ylim(len(kinds) - 0.5, -0.5)
    figure.supxlabel(record.caption, fontsize=9)
    return figure


def gap_figure(record: Record, *, title: str) -> Figure:
    """Draw SageBwd's final loss minus exact attention's, in percent: by seed, their mean with its 95% interval.

    The paper's differences at its small and large number of tokens per step stand next to ours.
    """
    sizes = record.provenance["plan"]["tokens_per_step"]
    figure, (ax,) = panels(1, width=6.4, height=3.4, title=title)
    for x, (size, (paper_size, paper)) in enumerate(zip(sizes, PAPER_LOSSES.items(), strict=True)):
        percent = [100 * gap for gap in relative_gaps(record, size)]
        found = mean_interval(percent)
        ax.plot([x - 0.12] * len(percent), percent, "o", color=BLUE, mfc="none", label=None if x else "ours, one seed")
        ax.errorbar(
            x, found.mean, found.half, fmt="s", color=BLUE, capsize=5, label=None if x else "ours, mean, 95% interval"
        )
        gap = 100 * (paper["sagebwd"] / paper["exact"] - 1)
        ax.plot(x + 0.12, gap, "D", color=RED, label=None if x else "paper, one run each, with its tokens per step")
        ax.annotate(f"{paper_size / 1e6:.2g}M", (x + 0.12, gap), (7, 5), textcoords="offset points", fontsize=9)
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set_xticks(range(len(sizes)), [f"ours: {size:,} tokens per step" for size in sizes])
    ax.set(ylabel="SageBwd's loss less exact's,\n% of exact's", xlim=(-0.5, len(sizes) - 0.5))
    ax.legend(fontsize=9, loc="lower left")
    figure.supxlabel(record.caption, fontsize=9)
    return figure


def layer_errors_figure(record: Record, tokens_per_step: int, *, title: str) -> Figure:
    """Draw the error of every intermediate in every layer of the model with QK-norm, at the end of training."""
    figure, (ax,) = panels(1, width=7.2, height=3.6, title=title)
    errors = last_errors(record, tokens_per_step, qk_norm=True)
    error_heatmap(ax, {layer: {name: found[name] for name in PAPER_TABLE2} for layer, found in errors.items()})
    ax.set_xlabel("error in")
    figure.supxlabel(f"{record.caption}; {tokens_per_step:,} tokens per step, QK-norm", fontsize=9)
    return figure


def layer_training_figure(record: Record, tokens_per_step: int, tensors: Sequence[str], *, title: str) -> Figure:
    """Draw each tensor's error over training, with QK-norm: its mean over the layers and their range."""
    figure, (ax,) = panels(1, width=6.4, height=3.6, title=title)
    for tensor in tensors:
        rows = record.select(tokens_per_step=tokens_per_step, qk_norm=True, tensor=tensor)
        errors: dict[float, list[float]] = {}
        for row in rows:
            errors.setdefault(row["step"] * tokens_per_step / 1e6, []).append(row["rel_l2"])
        color = TENSOR_COLORS.get(tensor, BLACK)
        ax.plot(list(errors), [mean(found) for found in errors.values()], color=color, label=tensor)
        ax.fill_between(
            list(errors), [min(found) for found in errors.values()], [max(found) for found in errors.values()],
            color=color, alpha=0.2, linewidth=0,
        )  # fmt: skip
    ax.set(xlabel="tokens, millions", ylabel="relative L2 error")
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])  # room for the legend
    ax.legend(fontsize=10, title="mean and range over layers", title_fontsize=9, ncols=len(tensors), loc="upper center")
    figure.supxlabel(f"{record.caption}; {tokens_per_step:,} tokens per step, QK-norm", fontsize=9)
    return figure
