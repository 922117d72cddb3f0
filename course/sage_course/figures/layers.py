"""The errors of every layer of a model in training."""

from collections.abc import Sequence
from statistics import mean

from matplotlib.figure import Figure
from sage_lab.experiments.table2 import PAPER_TABLE2
from sage_lab.records import Record

from sage_course.figures.errors import error_heatmap
from sage_course.figures.style import BLACK, TENSOR_COLORS, panels
from sage_course.results.pretraining import last_errors


def layer_errors_figure(record: Record, tokens_per_step: int, *, title: str) -> Figure:
    """Errors of every intermediate in every layer of the model with QK-norm, at the end of training."""
    figure, (ax,) = panels(1, width=7.2, height=3.6, title=title)
    errors = last_errors(record, tokens_per_step, qk_norm=True)
    error_heatmap(ax, {layer: {name: found[name] for name in PAPER_TABLE2} for layer, found in errors.items()})
    ax.set_xlabel("error in")
    figure.supxlabel(f"{record.caption}; {tokens_per_step:,} tokens per step, QK-norm", fontsize=9)
    return figure


def layer_training_figure(record: Record, tokens_per_step: int, tensors: Sequence[str], *, title: str) -> Figure:
    """Over training, with QK-norm: the error of each of `tensors`, its mean over the layers and their range."""
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
