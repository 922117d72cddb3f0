"""Runs of pre-training, by tokens per step and attention."""

from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from sage_lab.records import Record

from sage_course.figures.style import BLACK, BLUE, ORANGE, RED, panels
from sage_course.results.pretraining import (
    PAPER_LOSSES,
    RUN_KINDS,
    final_losses,
    mean_interval,
    pretrain_runs,
    relative_gaps,
)

MAIN_KINDS = {"exact": BLACK, "SageBwd, K smoothed": ORANGE}


def pretrain_curves_figure(record: Record, *, title: str) -> Figure:
    """Validation loss over training, with QK-norm: mean and range over seeds; below, the differences seed by seed.

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
    """Final loss of every kind of run, one dot per seed; grey: the range of exact attention with QK-norm."""
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
    """SageBwd's final loss less exact attention's, in percent: by seed, their mean with its 95% interval, the paper's.

    The paper's small and large number of tokens per step stand beside ours.
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
