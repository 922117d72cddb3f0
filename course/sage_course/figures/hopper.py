"""Figures of a Hopper GPU: how busy each unit is, by counting and by a profiler, at what power; who works when."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sage_lab.records import Record

from sage_course.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, panels
from sage_course.results.hopper_model import UNIT_NAMES, busy

UNIT_COLORS = {"tensor": BLACK, "exp2": ORANGE, "alu": GREEN, "issue": BLUE, "l2": PURPLE}


def draw_units(axes: Axes, levels: Mapping[object, Mapping[str, float]], measured: Mapping, *, title: str) -> None:
    """Draw each level's clocks per score, a bar per unit. Lines: all units by turns, and the measured time."""
    for x, (level, clocks) in enumerate(levels.items()):
        for i, (unit, color) in enumerate(UNIT_COLORS.items()):
            label = UNIT_NAMES[unit] if x == 0 else None
            axes.bar(x - 0.3 + 0.15 * i, clocks[unit], width=0.15, color=color, label=label)
        ends = x - 0.4, x + 0.4
        axes.plot(ends, [clocks["turns"]] * 2, ":", color=BLACK, label=None if x else "if no two worked at once")
        axes.plot(ends, [measured[level]] * 2, color=RED, linewidth=2.5, label=None if x else "measured")
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_title(title, fontsize=10)
    axes.set_ylim(0, None)


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


def power_figure(profile: Record, *, limit: float, title: str) -> Figure:
    """Draw each program's watts and clock in a long run; open circles where power held the clock down."""
    figure, (watts, clocks) = panels(2, width=5.2, height=3.6, title=title)
    names = dict.fromkeys(row["kernel"] for row in profile.rows)
    names = sorted(names, key=lambda name: "cuDNN" in name)  # ours first
    for offset, head_dim, color in ((-0.1, 128, BLUE), (0.1, 64, SKY)):
        for row in profile.select(head_dim=head_dim):
            x = names.index(row["kernel"]) + offset
            style = {"color": color, "markersize": 9, "mfc": "white" if row["power_capped"] else color}
            watts.plot(x, row["sustained_watts"], "o", **style)
            clocks.plot(x, row["sustained_ghz"], "o", **style)
        watts.plot([], [], "o", color=color, markersize=9, label=f"D = {head_dim}")
    watts.plot([], [], "o", color="0.5", mfc="white", markersize=9, label="clock held down by power")
    watts.axhline(limit, color=RED, linestyle="--", linewidth=1.2, label="the GPU's power limit")
    watts.legend(fontsize=9, loc="lower left")
    watts.set(ylabel="watts", ylim=(0, 1.1 * limit))
    clocks.set_ylabel("GHz")
    clocks.margins(y=0.4)
    for ax in (watts, clocks):
        ax.set_xticks(range(len(names)), [name.replace(" ", "\n").replace("_", "\n_") for name in names], fontsize=9)
        ax.set_xlim(-0.5, len(names) - 0.5)
        ax.grid(axis="y", alpha=0.3)
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
