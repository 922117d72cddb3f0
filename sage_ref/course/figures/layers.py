"""The errors of every layer of a model in training."""

from collections.abc import Iterable

from matplotlib.figure import Figure

from sage_ref.course.figures.errors import error_heatmap
from sage_ref.course.figures.style import BLUE, COLORS, ORANGE, RED, panels
from sage_ref.course.pretraining_results import last_errors
from sage_ref.experiments.table2 import PAPER_TABLE2
from sage_ref.records import Record, Row


def layer_errors_figure(record: Record, tokens_per_step: int, *, title: str) -> Figure:
    """Errors of every intermediate in every layer at the end of training; below, those of the paper's layer 11."""
    figure, axes = panels(2, width=4.9, height=2.9, title=title)
    for ax, qk_norm in zip(axes, (True, False), strict=True):
        errors = last_errors(record, tokens_per_step, qk_norm)
        ordered = {layer: {name: found[name] for name in PAPER_TABLE2} for layer, found in errors.items()}
        error_heatmap(ax, ordered, title="with QK-norm" if qk_norm else "without QK-norm")
        names = [f"{name}\n({rel_l2:.2f})" for name, (_, rel_l2) in PAPER_TABLE2.items()]
        ax.set_xticks(range(len(names)), names, fontsize=8)
    below = "in brackets: the paper's layer 11, with QK-norm"
    figure.supxlabel(f"{below}\n{record.caption}; {tokens_per_step:,} tokens per step", fontsize=8)
    return figure


def layer_training_figure(record: Record, tokens_per_step: int, *, title: str) -> Figure:
    """Over training: errors of dS and dQ in every layer with and without QK-norm, and RMS of P, dP and dS."""
    figure, axes = panels(3, width=3.5, height=3.2, title=title)
    norms = {True: "with QK-norm", False: "without QK-norm"}
    layers = sorted({row["layer"] for row in record.rows})
    for ax, (qk_norm, name) in zip(axes, norms.items(), strict=False):
        for layer, color in zip(layers, COLORS, strict=False):
            for tensor, line in (("dQ", "-"), ("dS", "--")):
                rows = record.select(tokens_per_step=tokens_per_step, qk_norm=qk_norm, layer=layer, tensor=tensor)
                ax.plot(*_over_training(rows, "rel_l2"), line, color=color, label=f"{tensor}, layer {layer}")
        ax.set(ylim=(0, 0.13), ylabel="relative L2 error")
        ax.set_title(name, fontsize=10)
    axes[0].legend(fontsize=7, ncols=2, loc="upper left")
    for tensor, color in (("P", BLUE), ("dP", ORANGE), ("dS", RED)):
        for qk_norm, line in zip(norms, ("-", "--"), strict=True):
            for layer in layers:
                rows = record.select(tokens_per_step=tokens_per_step, qk_norm=qk_norm, layer=layer, tensor=tensor)
                label = f"{tensor}, {norms[qk_norm]}" if layer == layers[0] else None
                axes[2].plot(*_over_training(rows, "rms"), line, color=color, linewidth=1, label=label)
    axes[2].set(ylabel="RMS", yscale="log", ylim=(1e-7, 10))
    axes[2].set_title("sizes, a line per layer", fontsize=10)
    axes[2].legend(fontsize=7, ncols=2, loc="upper center")
    for ax in axes:
        ax.set_xlabel("tokens, millions")
    figure.supxlabel(f"{record.caption}; {tokens_per_step:,} tokens per step", fontsize=8)
    return figure


def _over_training(rows: Iterable[Row], column: str) -> tuple[list[float], list[float]]:
    """Millions of tokens trained on, and the column's value there."""
    points = [(row["step"] * row["tokens_per_step"] / 1e6, row[column]) for row in rows]
    return tuple(map(list, zip(*points, strict=True)))
