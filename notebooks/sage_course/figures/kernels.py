"""Figures of the kernels' levels: their speed and their instructions."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sage_lab.bench.ratios import OURS, PEER_NAMES
from sage_lab.experiments.table2 import most_error_prone
from sage_lab.records import Record, Row

from sage_course.figures.errors import error_map
from sage_course.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, YELLOW


def overview_figure(table2: Record, paired: Record) -> Figure:
    """Draw the course in one picture: where INT8's error grows in a trained model, and what both passes cost.

    table2: rows of `python -m sage_lab tables 2`; the most error-prone layer with QK-norm is drawn. paired: rows of
    `python -m sage_lab bench`; both passes at D=128, N=8192 are drawn.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(1.15, 1))
    errors = {row["tensor"]: row["rel_l2"] for row in most_error_prone(table2.select(qk_norm=True))}
    error_map(left, errors, title="INT8's error on its way to the gradients\n(relative L2, a trained language model)")
    size = {"n_q": 8192, "head_dim": 128, "causal": False, "layout": "bhnd", "cuda_graph": False, "scope": "autograd"}
    rows = {
        row["provider"]: row for row in paired.select(direction="fwd+bwd", **size) if row["heads"] == row["kv_heads"]
    }
    names = {name: PEER_NAMES[name] for name in ("sdpa_flash", "sdpa_cudnn", "cudnn_fp8", "fa4")} | {
        OURS: "SageBwd, INT8"
    }
    names = dict(sorted(names.items(), key=lambda item: rows[item[0]]["ms_median"]))
    times = [rows[name]["ms_median"] for name in names]
    bars = right.barh(list(names.values()), times, color=[BLUE if name == OURS else SKY for name in names], height=0.62)
    labels = [f"{rows[name]['ms_median']:.1f} ms, error {rows[name]['rel_l2']:.1%}" for name in names]
    right.bar_label(bars, labels, padding=4, fontsize=9)
    right.invert_yaxis()
    right.set_title(
        f"Both passes, timed in turn; error: the largest of O, dQ, dK, dV\n"
        f"(random inputs, D=128, N=8192, {paired.provenance['gpu']})",
        fontsize=10,
    )
    right.set(xlabel="milliseconds (shorter is better)", xlim=(0, 1.45 * max(times)))
    right.tick_params(axis="y", labelsize=9)
    return figure


# The kinds of instructions, in stacking order.
KIND_COLORS = {
    "matmul": BLACK, "exp2": ORANGE, "rounding": SKY, "conversion": RED, "maximum": GREEN, "move": PURPLE,
    "arithmetic": BLUE, "spill": YELLOW, "rest": "0.8",
}  # fmt: skip


def draw_instructions(axes: Axes, kernels: Mapping[str, Sequence[Row]], *, title: str) -> None:
    """Draw a bar per name of `kernels`: the instructions per score in its rows by kind, stacked."""
    bottom = [0.0] * len(kernels)
    for kind, color in KIND_COLORS.items():
        heights = [sum(row["per_score"] for row in rows if row["kind"] == kind) for rows in kernels.values()]
        axes.bar(list(kernels), heights, bottom=bottom, color=color, width=0.7, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelsize=9)
