"""How fast the kernels of SLA2 are."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from sage_ref.course.figures.style import BLACK, BLUE, COLORS, GREEN, ORANGE, RED, SKY, YELLOW, panels
from sage_ref.records import Record

SLA2_LEVEL_NAMES = ("0\nas printed", "1\nlists, one\nproduct", "2\nlinear branch\nin the kernel", "3\nINT8")
DENSE_PEERS = (("sdpa_flash", "FlashAttention-2", RED), ("sdpa_cudnn", "cuDNN", GREEN))


def sla2_time(bench: Record, n: int, sparsity: float, level: int | None, **changed: Any) -> float | None:
    """Milliseconds of one row of `python -m sage_kernels bench --op sla2`; None where nothing was measured.

    The whole forward op of one of our levels, or the row whose columns have the values in `changed`.
    """
    row = {"op": "sla2", "provider": "sage_kernels", "scope": "op", "direction": "fwd", "part": None} | changed
    rows = bench.select(n_q=n, sparsity=sparsity, level=level, **row)
    return rows[0]["ms_median"] if rows else None


def dense_time(bench: Record, n: int, provider: str, direction: str = "fwd") -> float:
    """Milliseconds of attention over all blocks, in the same record."""
    return sla2_time(bench, n, 0.0, None, op="attention", provider=provider, scope="autograd", direction=direction)


def flex_time(bench: Record, n: int, sparsity: float, direction: str = "fwd") -> float:
    """Milliseconds of FlexAttention: forward with blocks of 64 keys, else with half as many blocks of 128."""
    rows = bench.select(n_q=n, sparsity=sparsity, provider="flex", direction=direction)
    return min(rows, key=lambda row: row["part"] is not None)["ms_median"]


def sla2_parts(bench: Record, n: int, sparsity: float) -> dict[str, float]:
    """Milliseconds of the op's steps, by name; what was measured beside them, "... alone", is left out."""
    rows = bench.select(scope="part", n_q=n, sparsity=sparsity)
    return {row["part"]: row["ms_median"] for row in rows if not row["part"].endswith("alone")}


def sla2_ladder_figure(
    bench: Record, lengths: Sequence[int], sparsity: float, *, title: str, here: Record | None = None
) -> Figure:
    """Milliseconds of every forward level, kernel alone and whole op; attention over all blocks as lines.

    here: rows measured on this machine.
    """
    figure, axes = panels(len(lengths), width=5.2, height=3.9, title=title)
    levels = range(len(SLA2_LEVEL_NAMES))
    for ax, n in zip(axes, lengths, strict=True):
        for scope, name, color, shift in (
            ("kernel", "kernel alone", BLUE, -0.2),
            ("op", "op, from Q, K, V", ORANGE, 0.2),
        ):
            x = [level + shift for level in levels]
            times = [sla2_time(bench, n, sparsity, level, scope=scope) or math.nan for level in levels]
            ax.bar(x, times, width=0.38, color=color, label=name)
            if here:
                times = [sla2_time(here, n, sparsity, level, scope=scope) or math.nan for level in levels]
                ax.plot(x, times, "D", mec=BLACK, color=color, label=f"{name}, {here.provenance['gpu']}")
        for provider, name, color in DENSE_PEERS:
            ax.axhline(dense_time(bench, n, provider), color=color, linestyle="--", linewidth=1.2, label=name)
        ax.set_title(f"N = {n}", fontsize=10)
        ax.set(yscale="log")
        ax.set_xticks(levels, SLA2_LEVEL_NAMES, fontsize=8)
    axes[0].set_ylabel("milliseconds, forward")
    axes[-1].legend(fontsize=8)
    figure.supxlabel(f"{bench.timed}; {bench.caption}", fontsize=8)
    return figure


def sla2_parts_figure(bench: Record, lengths: Sequence[int], sparsity: float, *, title: str) -> Figure:
    """The INT8 op's steps, each timed alone and stacked, beside the op itself: per length, in percent of the op."""
    figure, (ax,) = panels(1, width=8.6, height=3.6, title=title)
    names = list(sla2_parts(bench, lengths[0], sparsity))
    ops = [sla2_time(bench, n, sparsity, len(SLA2_LEVEL_NAMES) - 1) for n in lengths]
    bottom = [0.0] * len(lengths)
    for name, color in zip(names, (*COLORS, YELLOW, "0.5"), strict=False):
        shares = [100 * sla2_parts(bench, n, sparsity)[name] / op for n, op in zip(lengths, ops, strict=True)]
        ax.bar(range(len(lengths)), shares, bottom=bottom, color=color, width=0.55, label=name)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    ax.axhline(100, color=BLACK, linestyle="--", linewidth=1.2, label="the op")
    ax.set_xticks(range(len(lengths)), [f"N = {n}\nop {op:.2f} ms" for n, op in zip(lengths, ops, strict=True)])
    ax.set(ylabel="% of the op's time")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], fontsize=8, loc="outside right center")
    figure.supxlabel(f"{bench.timed}; {bench.caption}", fontsize=8)
    return figure


def sla2_sparsity_figure(
    bench: Record, lengths: Sequence[int], direction: str, *, title: str, here: Record | None = None
) -> Figure:
    """Speed against sparsity, FlashAttention-2 over all blocks = 1: the SLA2 module, FlexAttention, cuDNN.

    direction: "fwd" or "fwd+bwd". here: rows measured on this machine, of which the INT8 ones are drawn.
    """
    figure, axes = panels(len(lengths), width=3.6, height=3.8, sharey=True, title=title)
    for ax, n in zip(axes, lengths, strict=True):
        sparsities = sorted({row["sparsity"] for row in bench.select(op="sla2", n_q=n)})
        x = [100 * sparsity for sparsity in sparsities]

        def speed(record, level, n=n, sparsities=sparsities):
            flash = dense_time(record, n, "sdpa_flash", direction)
            times = [sla2_time(record, n, s, level, scope="autograd", direction=direction) for s in sparsities]
            return [flash / time for time in times]

        flash = dense_time(bench, n, "sdpa_flash", direction)
        ax.plot(x, [1 / (1 - s) for s in sparsities], ":", color=BLACK, label="1 / (1 - sparsity)")
        flex = [flash / flex_time(bench, n, s, direction) for s in sparsities]
        ax.plot(x, flex, "^--", color=ORANGE, label="FlexAttention, mask given")
        ax.plot(x, speed(bench, 3), "o-", color=BLUE, label="SLA2, INT8")
        ax.plot(x, speed(bench, 2), "s-", color=SKY, label="SLA2, 16 bit")
        if here:
            ax.plot(x, speed(here, 3), "D", color=BLACK, label=f"SLA2, INT8, {here.provenance['gpu']}")
        ax.axhline(flash / dense_time(bench, n, "sdpa_cudnn", direction), color=GREEN, linestyle="--", label="cuDNN")
        ax.set(xlabel="sparsity, %", yscale="log")
        ax.set_title(f"N = {n}", fontsize=10)
        ax.set_xticks(x, [f"{value:.0f}" for value in x])
        ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("times as fast as FlashAttention-2")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    figure.supxlabel(f"{bench.timed}; {bench.caption}", fontsize=8)
    return figure
