"""Figures of the speed of SLA2's kernels."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from sage_lab.records import Record

from sage_course.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, panels
from sage_course.results.paired import PEER_NAMES, peer_ratios, turns

SLA2_LEVEL_NAMES = ("0\nas printed", "1\nlists, one\nproduct", "2\nlinear branch\nin the kernel", "3\nINT8")
DENSE_PEERS = (("sdpa_flash", "FlashAttention-2", RED), ("sdpa_cudnn", "cuDNN", GREEN))
PAIRED_COLORS = {"sdpa_flash": RED, "sdpa_cudnn": GREEN, "flex": ORANGE, "fa4": BLUE, "sla_triton": PURPLE, "vsa": SKY}


def sla2_time(bench: Record, n: int, sparsity: float, level: int | None, **changed: Any) -> float | None:
    """Return the milliseconds of a row of `python -m sage_lab bench --op sla2 --levels`; None where there is none.

    The row is the whole forward op of one of our levels, or that whose columns have the values in `changed`.
    """
    row = {"op": "sla2", "provider": "sage_kernels", "scope": "op", "direction": "fwd"} | changed
    rows = bench.select(n_q=n, sparsity=sparsity, level=level, **row)
    return rows[0]["ms_median"] if rows else None


def dense_time(bench: Record, n: int, provider: str) -> float:
    """Return the milliseconds of the forward pass of attention over all blocks, in the same record."""
    return sla2_time(bench, n, 0.0, None, op="attention", provider=provider, scope="autograd")


def sla2_ladder_figure(
    bench: Record, lengths: Sequence[int], sparsity: float, *, title: str, here: Record | None = None
) -> Figure:
    """Draw the milliseconds of every forward level's kernel; attention over all blocks as lines.

    here: rows measured on this machine.
    """
    figure, axes = panels(len(lengths), width=4.6, height=3.9, title=title)
    levels = range(len(SLA2_LEVEL_NAMES))
    for ax, n in zip(axes, lengths, strict=True):
        times = [sla2_time(bench, n, sparsity, level, scope="kernel") or math.nan for level in levels]
        ax.bar(levels, times, width=0.6, color=BLUE, label="our kernel")
        for level, time in zip(levels, times, strict=True):
            if not math.isnan(time):
                ax.annotate(f"{time:.2f}", (level, time), (0, 2), textcoords="offset points", ha="center", fontsize=9)
        if here:
            measured = [sla2_time(here, n, sparsity, level, scope="kernel") or math.nan for level in levels]
            ax.plot(levels, measured, "D", mec=BLACK, color=ORANGE, label=f"our kernel, {here.provenance['gpu']}")
        for provider, name, color in DENSE_PEERS:
            ax.axhline(dense_time(bench, n, provider), color=color, linestyle="--", linewidth=1.2, label=name)
        ax.set_title(f"N = {n}", fontsize=10)
        ax.set(ylim=(0, 1.1 * max(dense_time(bench, n, provider) for provider, *_ in DENSE_PEERS)))
        ax.set_xticks(levels, SLA2_LEVEL_NAMES, fontsize=9)
    axes[0].set_ylabel("milliseconds, forward")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, loc="outside right upper")
    figure.supxlabel(f"{bench.timed}; {bench.caption}", fontsize=9)
    return figure


def sla2_paired_figure(paired: Record, *, title: str) -> Figure:
    """Draw each peer's time over ours against N, forward and both passes, both kinds of mask. Ours is the line at 1.

    paired: rows of `python -m sage_lab bench --op sla2` that were timed in turn.
    Those of 4,096 tokens are left out, because the GPU waits for the host there.
    """
    figure, axes = panels(2, width=4.6, height=3.9, sharey=True, title=title)
    for ax, (direction, name) in zip(axes, (("fwd", "forward"), ("fwd+bwd", "forward and backward")), strict=True):
        ratios = {
            (where["mask"], where["n_q"]): peer_ratios(rows)
            for where, rows in turns(paired.select(scope="autograd", direction=direction))
            if where["n_q"] > 4096
        }
        lengths = sorted({n for _, n in ratios})
        for peer, color in PAIRED_COLORS.items():
            for mask, style in (("random", "o-"), ("skewed", "s:")):
                times = [ratios[mask, n].get(peer) for n in lengths]
                ax.plot(lengths, times, style, color=color, markersize=5, label=f"{PEER_NAMES[peer]}, {mask} mask")
        ax.axhline(1, color=BLACK, linewidth=1.2)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="N tokens", yscale="log")
        ax.set_title(name, fontsize=10)
        ax.set_xticks(lengths, lengths)
        ax.set_yticks([0.25, 0.5, 1, 2, 5, 10, 20], ["0.25", "0.5", "1", "2", "5", "10", "20"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("their time over ours")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, loc="outside right center")
    figure.supxlabel(paired.caption, fontsize=9)
    return figure
