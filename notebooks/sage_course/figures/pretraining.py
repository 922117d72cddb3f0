"""Figures of pre-training runs, by tokens per batch and attention."""

import math
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from sage_lab.records import Record

from sage_course.figures.style import BLACK, BLUE, ORANGE, RED, panels
from sage_course.results.pretraining import (
    LARGEST_GAP,
    PAPER_LOSSES,
    compared,
    highest_rate,
    judged,
    mean_interval,
    of_layers,
    pretrain_runs,
    relative_gaps,
)

MAIN_KINDS = {"exact": BLACK, "SageBwd, K smoothed": ORANGE}


def pretrain_curves_figure(record: Record, *, title: str) -> Figure:
    """Draw validation losses over training, with QK-norm: mean and range; below, the differences seed by seed.

    record: rows of the archived `pretrain-grid`. Drawn from the end of the warm-up on.
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
        upper.set_title(f"{size:,} tokens per batch", fontsize=10)
        upper.legend(fontsize=9, loc="upper right")
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high + (high - low) / 3)  # room for the legends above the curves
    axes[1, 0].legend(fontsize=9, ncols=2, loc="lower left")
    axes[0, 0].set_ylabel("validation loss,\nnats per byte")
    axes[1, 0].set_ylabel("SageBwd minus exact,\nnats per byte")
    figure.supxlabel(record.caption, fontsize=9)
    return figure


def gap_figure(record: Record, *, title: str) -> Figure:
    """Draw SageBwd's final loss minus exact attention's, in percent, against the tokens of a batch.

    Ours has a dot per seed and the mean with its 95% interval; the paper's is one pair of runs for each batch.
    """
    sizes = record.provenance["plan"]["tokens_per_step"]
    figure, (ax,) = panels(1, width=7.2, height=3.6, title=title)
    for number, size in enumerate(sizes):
        percent = [100 * gap for gap in relative_gaps(record, size)]
        found = mean_interval(percent)
        names = (None, None) if number else ("ours, one seed", "ours, mean and 95% interval")
        ax.plot([0.9 * size] * len(percent), percent, "o", color=BLUE, mfc="none", label=names[0])
        ax.errorbar(size, found.mean, found.half, fmt="s", color=BLUE, capsize=5, label=names[1])
    gaps = [100 * (losses["sagebwd"] / losses["exact"] - 1) for losses in PAPER_LOSSES.values()]
    ax.plot(list(PAPER_LOSSES), gaps, "D", color=RED, label="the paper's, one pair of runs each")
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(xscale="log", xlabel="tokens per batch", ylabel="SageBwd's loss minus exact's,\n% of exact's")
    ax.set_xticks([*sizes, *PAPER_LOSSES], [f"{size:,}" for size in (*sizes, *PAPER_LOSSES)], rotation=15)
    ax.minorticks_off()
    ax.legend(fontsize=9, loc="lower left")
    figure.supxlabel(record.caption, fontsize=9)
    return figure


def gaps_figure(record: Record, *, title: str) -> Figure:
    """Draw the lines of `gaps_table`: a dot per seed, and the mean with its 95% interval; on the right the verdict.

    A run that diverged has no dot. Where they differ, the rate is followed by tokens per batch, context and millions of
    tokens.
    """
    lines = compared(record)
    shown = 3 if len({line.cells[3:] for line in lines}) == 1 else None  # all that differs
    figure, (ax,) = panels(1, width=7.4 if shown else 9.4, height=1.2 + 0.24 * len(lines), title=title)
    for y, line in enumerate(lines):
        percent = [100 * gap for gap in line.gaps if math.isfinite(gap)]
        ax.plot(percent, [y] * len(percent), "o", color=BLUE, mfc="none")
        if len(percent) > 1:
            found = mean_interval(percent)
            ax.errorbar(found.mean, y, xerr=found.half, fmt="|", color=BLUE, capsize=4)
    names = ["{}, QK-norm {}, rate ".format(*line.cells) + " / ".join(line.cells[2:shown]) for line in lines]
    ax.set_yticks(range(len(lines)), names, fontsize=9)
    verdicts = ax.secondary_yaxis("right")
    verdicts.set_yticks(range(len(lines)), [judged(line.gaps) for line in lines], fontsize=9)
    ax.axvline(0, color=BLACK, linewidth=0.8)
    ax.axvline(100 * LARGEST_GAP, color=RED, linewidth=0.8)
    ax.set_xlabel(
        "difference of losses, %: seeds, and mean with 95% interval\n(orange: the paper's largest gap)", fontsize=9
    )
    ax.invert_yaxis()
    figure.supxlabel(record.caption, fontsize=9)
    return figure


def broken_gradient_figure(record: Record, *, title: str) -> Figure:
    """Draw how scores grow in GPTs, and how far off dQ of a layer is where its largest score is so large.

    record: rows of `python -m sage_lab pretrain --model gpt`, of which those of SageBwd and seed 0 are drawn.
    """
    figure, (scores, errors) = panels(2, width=4.8, height=3.6, title=title)
    for row in highest_rate(record).select(arm="sagebwd", seed=0):
        style = {"color": BLUE if row["qk_norm"] else RED, "label": "QK-norm" if row["qk_norm"] else "no QK-norm"}
        millions = [probe["step"] * row["tokens_per_step"] / 1e6 for probe in row["probes"]]
        scores.plot(millions, [max(probe["largest_score"]) for probe in row["probes"]], "o-", **style)
    scores.set(yscale="log", xlabel="tokens, millions", ylabel="largest score of all layers")
    for arm, color, name in (("sagebwd", ORANGE, "SageBwd"), ("exact", BLACK, "exact, in 16 bit")):
        for norm, points in of_layers(record, arm).items():
            marker, label = "x" if norm == "QK-norm" else "o", f"{name}, {norm}"
            errors.plot(*zip(*points, strict=True), marker, ms=4, color=color, mfc="none", label=label)
    errors.axhline(1, color="0.6", linewidth=0.8)
    errors.set(xscale="log", yscale="log", xlabel="largest score of the layer", ylabel="relative error of its dQ")
    for ax in (scores, errors):
        ax.legend(fontsize=9)
        ax.grid(alpha=0.3)
    figure.supxlabel(record.caption, fontsize=9)
    return figure
