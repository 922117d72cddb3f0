"""Figures of Table 1 of the SageBwd paper, measured and swept."""

from collections.abc import Iterable
from statistics import geometric_mean

from matplotlib.figure import Figure
from sage_lab.experiments.table1 import PAPER_TABLE1
from sage_lab.records import Record, Row

from sage_course.figures.style import BLACK, COLORS, TENSOR_COLORS, panels


def table1_figure(record: Record, setting: dict) -> Figure:
    """Draw the relative L2 error of O, dQ, dK and dV against sigma: with one setting of the sweep, and the paper's."""
    figure, axes = panels(4, width=2.8, sharey=True, title="INT8 error grows with the scores, fastest in dQ and dK")
    for ax, tensor in zip(axes, TENSOR_COLORS, strict=True):
        rows = sorted(record.select(tensor=tensor, **setting), key=lambda row: row["sigma"])
        sigma = [row["sigma"] for row in rows]
        paper = [row["paper_rel_l2"] for row in rows]
        ax.plot(sigma, paper, "s--", color=BLACK, markersize=6, mfc="none", label="paper, Table 1")
        ax.plot(sigma, [row["rel_l2"] for row in rows], "o-", color=TENSOR_COLORS[tensor], label="sage_ref")
        ax.set(title=tensor, xlabel="sigma of Q and K", yscale="log", xticks=sigma)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative L2 error")
    axes[0].legend(fontsize=9)
    return figure


def table1_choices_figure(record: Record) -> Figure:
    """Draw Table 1's sweep, a panel per open choice: here / paper, geometric mean over tensors and other choices."""
    choices = {
        "N": lambda row: row["n"],
        "D": lambda row: row["head_dim"],
        "tiles": lambda row: f"{row['block_q']}x{row['block_kv']}",
        "one scale for P, dS per": lambda row: row["granularity"],
    }
    title = "N and D hardly matter; at sigma = 1 it matters how many entries of P and dS share a scale"
    figure, axes = panels(len(choices), width=2.8, sharey=True, title=title)
    for ax, (name, choice) in zip(axes, choices.items(), strict=True):
        for value, color, marker in zip(dict.fromkeys(map(choice, record.rows)), COLORS, "osD^v*", strict=False):
            ratios = [_mean_ratio(row for row in record.select(sigma=s) if choice(row) == value) for s in PAPER_TABLE1]
            ax.plot(list(PAPER_TABLE1), ratios, f"{marker}-", color=color, label=value, markersize=5)
        ax.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
        ax.set(xlabel="sigma of Q and K", xticks=list(PAPER_TABLE1), ylim=(0.8, 2.4))
        ax.legend(fontsize=9, title=name, title_fontsize=9)
    axes[0].set_ylabel("relative L2 error, here / paper")
    return figure


def _mean_ratio(rows: Iterable[Row]) -> float:
    return geometric_mean(row["rel_l2"] / row["paper_rel_l2"] for row in rows)
