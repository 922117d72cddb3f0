"""Figures of a Hopper GPU: predicted and measured times, how busy each unit is, who works when."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sage_lab.records import Record

from sage_course.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, panels
from sage_course.results.hopper_model import UNIT_NAMES, Compared, busy

UNIT_COLORS = {"tensor": BLACK, "exp2": ORANGE, "alu": GREEN, "issue": BLUE, "l2": PURPLE}


def prediction_figure(bench: Record, levels: Mapping[tuple[int, int], Compared], *, title: str) -> Figure:
    """Draw each level's predicted clocks per score as a stacked bar, the measured ones as a line, the ratio below.

    bench: the record of the times; levels: `compare_levels` of it, or some of them. The legend names the units that
    some bar shows: a unit that no program waits for has no part in a prediction.
    """
    drawn = [unit for unit in UNIT_COLORS if any(of.parts.get(unit) for of in levels.values())]
    figure, axes = panels(2, width=5.6, height=3.9, sharey=True, title=title)
    for ax, head_dim in zip(axes, (128, 64), strict=True):
        found = {level: of for (d, level), of in levels.items() if d == head_dim}
        for x, of in enumerate(found.values()):
            low = 0.0
            for unit in drawn:
                height, label = of.parts.get(unit, 0.0), None if x else UNIT_NAMES[unit]
                ax.bar(x, height, bottom=low, width=0.62, color=UNIT_COLORS[unit], label=label)
                low += height
            ends = x - 0.42, x + 0.42
            ax.plot(ends, [of.sum] * 2, ":", color=BLACK, label=None if x else "sum of all units")
            ax.plot(ends, [of.measured] * 2, color=RED, linewidth=2.5, label=None if x else "measured")
        ax.set_xticks(range(len(found)), [f"{level}\n{of.ratio:.2f}x" for level, of in found.items()])
        ax.set(title=f"D = {head_dim}", xlabel="level, and measured / predicted")
    axes[0].set(ylabel="clocks of a multiprocessor per score", ylim=(0, 1.1 * axes[0].dataLim.ymax))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="outside right upper")
    figure.supxlabel(f"{bench.timed}; {bench.caption}", fontsize=9)
    return figure


def busy_figure(
    profile: Record, instructions: Record, kernels: Mapping[str, int], *, scores: Mapping[int, float], title: str
) -> Figure:
    """Draw how busy each unit was, by the profiler (bars) and by counting (diamonds), for head sizes 128 and 64.

    kernels: level of each program; those that a record lacks are left out. scores: number of scores of the profiled
    shape, by head size.
    """
    figure, axes = panels(2, width=5.2, height=3.6, sharey=True, title=title)
    for ax, head_dim in zip(axes, (128, 64), strict=True):
        found = [row for kernel in kernels for row in profile.select(kernel=kernel, head_dim=head_dim)]
        for x, row in enumerate(found):
            kernel = row["kernel"]
            counted = instructions.select(kernel=kernel, level=kernels[kernel], head_dim=head_dim)
            by_counting = busy(counted, row["profiled_ms"], row["profiled_ghz"], scores[head_dim]) if counted else {}
            for i, (unit, color) in enumerate(UNIT_COLORS.items()):
                place = x - 0.3 + 0.15 * i
                ax.bar(place, row[unit], width=0.15, color=color, label=None if x else UNIT_NAMES[unit])
                if counted:
                    label = None if x or i else "by counting"
                    ax.plot(place, by_counting[unit], "D", color=RED, mec="white", markersize=6, label=label)
        ax.set_xticks(range(len(found)), [row["kernel"].replace("_", "\n_") for row in found])
        ax.set_xlim(-0.6, len(found) - 0.4)
        ax.set_title(f"D = {head_dim}", fontsize=10)
    axes[0].set(ylabel="% of the time", ylim=(0, 100))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="outside right upper")
    figure.supxlabel(profile.caption, fontsize=9)
    return figure


def draw_activity(axes: Axes, log: Mapping[str, Sequence[str]], colors: Mapping[str, str], *, title: str) -> None:
    """Draw who does what when: a line per name of `log`, the first at the top, with its activity in each tick.

    An activity without a colour is left white.
    """
    for y, activities in enumerate(log.values()):
        start = 0
        for what, ticks in groupby(activities):
            end = start + len(list(ticks))
            if what in colors:
                axes.barh(y, end - start, left=start, color=colors[what], edgecolor="white", linewidth=0.5, height=0.8)
            start = end
    for what, color in colors.items():
        axes.barh(0, 0, color=color, label=what)
    axes.set_yticks(range(len(log)), list(log), fontsize=9)
    axes.set_ylim(len(log) - 0.4, -0.6)
    axes.set_title(title, fontsize=10)
