"""Figures the notebooks and the README share. A function that makes a Figure returns it; others draw on given axes."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, mean, stdev
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from sage_ref.attention import attention_forward
from sage_ref.quantization import INT8_MAX, fake_quantize, quantize
from sage_ref.recorded import Record, Row
from sage_ref.router import soft_top_k
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.sla import (
    BlockSettings,
    block_mass,
    heuristic_scores,
    linear_branch,
    selected_count,
    sparse_branch,
    top_blocks,
)
from sage_ref.sparse_linear import mix, per_query
from sage_ref.tables import PAPER_TABLE1, PAPER_TABLE2, table1_inputs
from sage_ref.tracing import exact_intermediates, relative_l2, rms, sagebwd_intermediates

# Okabe and Ito's palette: told apart by colour-blind readers, also in print.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
TENSOR_COLORS = {"O": BLUE, "dQ": ORANGE, "dK": GREEN, "dV": RED}


def panels(
    count: int, *, width: float = 3.4, height: float = 3.0, title: str = "", **options
) -> tuple[Figure, Sequence[Axes]]:
    """A row of `count` axes with one message over all of them."""
    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), squeeze=False, layout="constrained", **options
    )
    figure.suptitle(title, fontsize=11)
    return figure, axes[0]


def show_matrix(axes: Axes, matrix: Tensor, *, title: str, x: str, y: str, limit: float | None = None) -> None:
    """A matrix as an image with its own colour bar; signed values get a diverging map centred on zero."""
    matrix = matrix.detach().float().cpu().numpy()
    limit = limit or abs(matrix).max()
    signed = bool((matrix < 0).any())
    image = axes.imshow(
        matrix, cmap="RdBu_r" if signed else "viridis", vmin=-limit if signed else 0, vmax=limit, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.figure.colorbar(image, ax=axes, fraction=0.046)


def table1_figure(record: Record, setting: dict) -> Figure:
    """Relative L2 error against sigma for O, dQ, dK, dV: measured with one setting of the sweep, and the paper's."""
    figure, axes = panels(4, width=2.8, sharey=True, title="INT8 error grows with the logits, fastest in dQ and dK")
    for ax, tensor in zip(axes, TENSOR_COLORS, strict=True):
        rows = sorted(record.select(tensor=tensor, **setting), key=lambda row: row["sigma"])
        sigma = [row["sigma"] for row in rows]
        ax.plot(
            sigma,
            [row["paper_rel_l2"] for row in rows],
            "s--",
            color=BLACK,
            markersize=6,
            mfc="none",
            label="paper, Table 1",
        )
        ax.plot(sigma, [row["rel_l2"] for row in rows], "o-", color=TENSOR_COLORS[tensor], label="sage_ref")
        ax.set(title=tensor, xlabel="sigma of Q and K", yscale="log", xticks=sigma)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("relative L2 error")
    axes[0].legend(fontsize=8)
    return figure


# Where each tensor of the two passes stands in `error_map`, and what it is computed from.
_MAP_PLACES = {
    "P": (0, 1), "O": (1, 1), "delta": (2, 1), "dQ": (3, 1),
    "dV": (0, 0), "dP": (1, 0), "dS": (2, 0), "dK": (3, 0),
}  # fmt: skip
_MAP_ARROWS = (
    ("P", "O"), ("O", "delta"), ("P", "dV"), ("P", "dS"), ("dP", "dS"), ("delta", "dS"), ("dS", "dQ"), ("dS", "dK"),
)  # fmt: skip


def error_map(axes: Axes, errors: Mapping[str, float], *, title: str) -> None:
    """The tensors of the forward and the backward pass as boxes, an arrow from each to what is computed from it.

    errors: relative L2 error by name (`tracing.INTERMEDIATES`); the colour goes from 0.1% to 100%, logarithmically.
    """
    norm, colormap, boxes = LogNorm(1e-3, 1, clip=True), plt.get_cmap("OrRd"), {}
    for name, (x, y) in _MAP_PLACES.items():
        red, green, blue, _ = color = colormap(norm(max(errors[name], 1e-3)))
        ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        box = FancyBboxPatch((x - 0.3, y - 0.22), 0.6, 0.44, boxstyle="round,pad=0.04", fc=color, ec="0.6")
        boxes[name] = axes.add_patch(box)
        axes.text(x, y + 0.1, name, ha="center", va="center", color=ink)
        axes.text(x, y - 0.13, f"{errors[name]:.1%}", ha="center", va="center", color=ink, fontsize=9)
    for start, end in _MAP_ARROWS:
        arrow = {"arrowstyle": "-|>", "color": "0.4", "patchA": boxes[start], "patchB": boxes[end]}
        axes.annotate("", _MAP_PLACES[end], _MAP_PLACES[start], arrowprops=arrow)
    axes.set_title(title, fontsize=10)
    axes.set(xlim=(-0.45, 3.45), ylim=(-0.4, 1.4))
    axes.set_axis_off()


def sigma_figure(sigmas: Sequence[float]) -> Figure:
    """For each standard deviation of Q and K: every entry of P as SageBwd computes it against the exact one."""
    title = "An error in S multiplies P: the same INT8 grid, larger logits"
    figure, axes = panels(len(sigmas), width=3.0, height=3.2, sharey=True, title=title)
    for ax, sigma in zip(axes, sigmas, strict=True):
        inputs, settings = table1_inputs(256, 64, sigma, seed=0), SageBwdSettings()
        exact, quantized = exact_intermediates(*inputs, settings), sagebwd_intermediates(*inputs, settings)
        errors = {name: relative_l2(quantized[name], exact[name]) for name in ("P", "O", "dQ")}
        ax.plot(exact["P"].flatten(), quantized["P"].flatten(), ".", color=BLUE, markersize=2)
        ax.plot([1e-6, 1], [1e-6, 1], color=ORANGE, linewidth=1)
        ax.set(xscale="log", yscale="log", xlim=(1e-6, 1.5), ylim=(1e-6, 1.5), xlabel="exact P")
        ax.set_title(f"sigma = {sigma}\nerror of " + ", ".join(f"{n} {e:.3f}" for n, e in errors.items()), fontsize=9)
    axes[0].set_ylabel("P in SageBwd")
    return figure


def table1_choices_figure(record: Record) -> Figure:
    """Table 1's sweep, one panel per open choice: here / paper, geometric mean over tensors and the other choices."""
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
        ax.legend(fontsize=8, title=name, title_fontsize=8)
    axes[0].set_ylabel("relative L2 error, here / paper")
    return figure


def _mean_ratio(rows: Iterable[Row]) -> float:
    return geometric_mean(row["rel_l2"] / row["paper_rel_l2"] for row in rows)


def show_letters(axes: Axes, rows: str, columns: str) -> None:
    """Label a [len(rows), len(columns)] matrix with the letters that are its tokens."""
    axes.set_yticks(range(len(rows)), rows, fontfamily="monospace", fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontfamily="monospace", fontsize=7)
    axes.tick_params(length=0)


def draw_block_sizes(axes: Axes, x: Tensor, *, where: Tensor, title: str) -> None:
    """Relative L2 error of x [R, C] against the number of rows that share a scale: measured, and s^2/12 averaged.

    where: bool [R, C], the entries whose error counts.
    """
    sizes = [2**i for i in range(x.shape[0].bit_length()) if 2**i <= x.shape[0]]
    measured = [relative_l2(fake_quantize(x, (rows, None))[where], x[where]) for rows in sizes]
    model = [rms(quantize(x, (rows, None)).scale) / math.sqrt(12) / rms(x[where]) for rows in sizes]
    axes.plot(sizes, measured, "o-", color=BLUE, label="measured")
    axes.plot(sizes, model, "--", color=ORANGE, label=r"model, $s/\sqrt{12}$")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", title=title, xlabel="tokens that share a scale", ylabel="relative L2 error")
    axes.grid(alpha=0.3)


def draw_probabilities(axes: Axes, p: Tensor, *, title: str) -> None:
    """How the entries of P~ = exp(S - rowmax(S)), [R, N], and the probability they hold are spread over size.

    With one scale per row, INT8 makes zeros of all entries left of the line at half a step, 1/254.
    """
    edges = [10 ** (-6 + i / 6) for i in range(37)]
    p = p.double()
    entries = p.flatten().clamp(min=edges[0]).numpy()
    probability = (p / p.sum(-1, keepdim=True) / len(p)).flatten().numpy()
    axes.hist(entries, edges, weights=[1 / len(entries)] * len(entries), color=SKY, label="entries")
    axes.hist(entries, edges, weights=probability, histtype="step", color=RED, linewidth=1.5, label="probability")
    axes.axvline(0.5 / INT8_MAX, color=BLACK, linewidth=1)
    axes.set(xscale="log", xlabel=r"entry of $\tilde{P}$ (largest of its row: 1)", ylabel="share per bin")
    axes.set_title(title, fontsize=10)


def error_heatmap(axes: Axes, errors: Mapping[str, Mapping[str, float]], *, title: str = "") -> None:
    """Relative L2 errors as a coloured table, errors[row][column]; what is exact (below 1e-9) stays blank."""
    rows, columns = list(errors), list(next(iter(errors.values())))
    values = [[errors[row][column] for column in columns] for row in rows]
    largest = max(map(max, values))
    image = axes.imshow(values, cmap="OrRd", vmin=0, vmax=largest, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            ink = "white" if value > 0.6 * largest else "black"
            axes.text(x, y, f"{value:.3f}" if value > 1e-9 else "", ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, fontsize=10)
    axes.figure.colorbar(image, ax=axes, fraction=0.046, label="relative L2 error")


def overview_figure(table2: Record, bench: Record) -> Figure:
    """The course in one picture: where INT8's error grows in a trained model, and what each kernel idea gains.

    table2: rows of `tables.table2_rows`, of which the layer with the largest error in dQ is drawn; bench: rows of
    `python -m sage_kernels bench`, of which the forward kernels at the README's size are.
    """
    worst = max((row for row in table2.rows if row["tensor"] == "dQ"), key=lambda row: row["rel_l2"])["layer"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(1.15, 1))
    errors = {row["tensor"]: row["rel_l2"] for row in table2.select(layer=worst)}
    error_map(left, errors, title="INT8's error on its way to the gradients\n(relative L2, a trained language model)")
    size = {"n_q": 8192, "head_dim": 128, "causal": False, "direction": "fwd"}
    levels = sorted(bench.select(provider="sage_kernels", scope="kernel", **size), key=lambda row: row["level"])
    names = ("16 bit", "INT8\nQ K$^T$", "INT8\nP V too", "no con-\nversions", "no\nshuffles")
    right.bar(names, [row["tops"] for row in levels], color=[SKY] + [BLUE] * 4, width=0.6)
    for provider, name, color in (("sdpa_flash", "FlashAttention-2", RED), ("sdpa_cudnn", "cuDNN", GREEN)):
        tops = bench.select(provider=provider, **size)[0]["tops"]
        right.axhline(tops, color=color, linestyle="--", linewidth=1.2)
        right.text(4.4, tops + 8, name, color=color, fontsize=9)
    title = f"One idea per kernel level\n(forward, D=128, N=8192, {bench.provenance['gpu']})"
    right.set_title(title, fontsize=10)
    right.set(ylabel="TOPS", ylim=(0, 760), xlim=(-0.5, 6))
    return figure


LEVEL_NAMES = {
    "fwd": ("0\n16 bit", "1\nINT8\nQ K$^T$", "2\nINT8\nP V too", "3\nno con-\nversions", "4\nno\nshuffles"),
    "bwd": ("0\n16 bit", "1\nINT8,\nper row", "2\nINT8,\nper block", "3\nno con-\nversions"),
}


def ladder_figure(bench: Record, direction: str, *, title: str, here: Record | None = None) -> Figure:
    """TOPS of every level at N=8192, kernel alone and with quantisation, for head sizes 128 and 64; peers as lines.

    bench: rows of `python -m sage_kernels bench`; direction "fwd" or "bwd"; here: rows measured on this machine.
    """
    figure, axes = panels(2, width=5.2, height=3.9, sharey=True, title=title)
    size = {"n_q": 8192, "causal": False, "direction": direction}
    for ax, head_dim in zip(axes, (128, 64), strict=True):

        def tops(record, scope, head_dim=head_dim):
            rows = record.select(provider="sage_kernels", scope=scope, head_dim=head_dim, **size)
            return [row["tops"] for row in sorted(rows, key=lambda row: row["level"])]

        levels = range(len(tops(bench, "kernel")))
        ax.bar(levels, tops(bench, "kernel"), width=0.7, color=[SKY] + [BLUE] * len(levels[1:]), label="kernel alone")
        ax.plot(levels, tops(bench, "op"), "_", color=ORANGE, markersize=22, markeredgewidth=2, label="with quantising")
        if here:
            ax.plot(levels, tops(here, "kernel"), "D", color=BLACK, label=f"kernel, {here.provenance['gpu']}")
        for provider, name, color in (("sdpa_flash", "FlashAttention-2", RED), ("sdpa_cudnn", "cuDNN", GREEN)):
            peer = bench.select(provider=provider, head_dim=head_dim, **size)[0]["tops"]
            ax.axhline(peer, color=color, linestyle="--", linewidth=1.2, label=name)
        ax.set_title(f"D = {head_dim}", fontsize=10)
        ax.set_xticks(levels, LEVEL_NAMES[direction], fontsize=8)
    axes[0].set(ylabel="TOPS", ylim=(0, 1.35 * axes[0].dataLim.ymax))
    axes[0].legend(fontsize=8, ncols=2, loc="upper left")
    figure.supxlabel(bench.caption, fontsize=8)
    return figure


# The kinds of `python -m sage_kernels instructions`, in the order they are stacked.
KIND_COLORS = {
    "matmul": BLACK, "exp2": ORANGE, "maximum": GREEN, "arithmetic": BLUE, "conversion": RED, "move": PURPLE,
    "spill": YELLOW, "rest": "0.8",
}  # fmt: skip


def draw_instructions(axes: Axes, kernels: Mapping[str, Sequence[Row]], *, title: str) -> None:
    """One bar per name of `kernels`: instructions per score of its rows by kind, stacked."""
    bottom = [0.0] * len(kernels)
    for kind, color in KIND_COLORS.items():
        heights = [sum(row["per_score"] for row in rows if row["kind"] == kind) for rows in kernels.values()]
        axes.bar(list(kernels), heights, bottom=bottom, color=color, width=0.7, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelsize=8)


# Data sheet of the H200, dense, in TOPS. Per multiprocessor and clock these are 8192 and 4096 operations, beside 128
# issue slots; so a second has PEAK / 4096 * 128 slots.
PEAK = {"INT8": 1979, "bf16": 989}
TERA_SLOTS = PEAK["bf16"] / 4096 * 128


def roofline_figure(bench: Record, instructions: Record, *, title: str) -> Figure:
    """Forward levels' TOPS against matmul operations per instruction, under the roofs of an H200.

    Roofs: the tensor cores (flat), the issue slots (sloped); dashed: both one after the other instead of overlapped.
    """
    figure, (ax,) = panels(1, width=7.0, height=4.4, title=title)
    work = [PEAK["INT8"] / TERA_SLOTS * 1.1**i for i in range(-19, 10)]  # the ridge is one of them
    for name, peak in PEAK.items():
        color = BLUE if name == "INT8" else SKY
        ax.plot(work, [min(peak, TERA_SLOTS * x) for x in work], color=color, label=f"{name} roof")
        ax.plot(
            work, [1 / (1 / peak + 1 / (TERA_SLOTS * x)) for x in work], "--", color=color, label=f"{name}, no overlap"
        )
    for head_dim, marker, color in ((64, "o", ORANGE), (128, "s", RED)):
        for level in range(5):
            x = (
                4
                * head_dim
                / sum(row["per_score"] for row in instructions.select(kernel="forward", level=level, head_dim=head_dim))
            )
            (row,) = bench.select(
                provider="sage_kernels", level=level, head_dim=head_dim, n_q=8192, causal=False, scope="kernel",
                direction="fwd",
            )  # fmt: skip
            label = f"levels 0 to 4, D = {head_dim}" if level == 4 else None
            ax.plot(x, row["tops"], marker, color=color, mfc=color if level else "none", label=label)
            ax.annotate(str(level), (x, row["tops"]), (5, -10), textcoords="offset points", fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="matmul operations per instruction", ylabel="TOPS", ylim=(200, 2400))
    ax.set_xticks([10, 20, 50, 100], [10, 20, 50, 100])
    ax.set_yticks([200, 500, 1000, 2000], [200, 500, 1000, 2000])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="upper left")
    figure.supxlabel(bench.caption, fontsize=8)
    return figure


def draw_block_mass(axes: Axes, mass: Tensor, *, block_mask: Tensor | None = None, title: str) -> None:
    """What each block of keys holds of its row's probability, [Tm, Tn], logarithmically; unselected blocks are pale."""
    opacity = None if block_mask is None else 0.2 + 0.8 * block_mask.double().numpy()
    norm = LogNorm(0.05 / mass.shape[-1], 20 / mass.shape[-1], clip=True)
    axes.imshow(mass.numpy(), cmap="viridis", norm=norm, alpha=opacity, aspect="auto", interpolation="nearest")
    axes.set(xlabel="block of keys", ylabel="block of queries")
    axes.set_title(title, fontsize=9)
    colors = plt.cm.ScalarMappable(norm, "viridis")
    axes.figure.colorbar(colors, ax=axes, fraction=0.046, extend="both", label="share of the row's mass")


def sparsity_figure(
    query: Tensor, key: Tensor, value: Tensor, sparsities: Sequence[float], settings: BlockSettings
) -> Figure:
    """For each sparsity: the blocks that SLA's heuristic selects in the first head, and what they hold in all heads.

    query, key, value [B, H, N, D]. Errors are those of O_s alone and of the mix with the true mass as alpha.
    """
    title = "The fewer blocks the softmax keeps, the more the linear branch has to say"
    figure, axes = panels(len(sparsities), width=3.5, height=3.2, title=title)
    exact = attention_forward(query, key, value, scale=settings.scale).output
    mass, scores = block_mass(query, key, settings), heuristic_scores(query, key, settings)
    for ax, sparsity in zip(axes, sparsities, strict=True):
        mask = top_blocks(scores, selected_count(sparsity, mass.shape[-1]))
        alpha = (mass * mask).sum(-1)
        o_s, _ = sparse_branch(query, key, value, mask, settings)
        o_l = linear_branch(query, key, value, ~mask, settings)
        mixed = mix(o_s, o_l, per_query(alpha, query.shape[-2], settings))
        errors = f"error: sparse {relative_l2(o_s, exact):.2f}, mixed {relative_l2(mixed, exact):.2f}"
        title = f"sparsity {sparsity:.0%}: {alpha.mean():.0%} of the mass\n{errors}"
        draw_block_mass(ax, mass[0, 0], block_mask=mask[0, 0], title=title)
    return figure


def draw_singular_values(axes: Axes, singular_values: Mapping[str, Tensor], *, rank: int, title: str) -> None:
    """Singular values of named matrices, largest first; right of the line a matrix of rank `rank` has none."""
    for (name, values), color in zip(singular_values.items(), COLORS, strict=False):
        axes.plot(range(1, len(values) + 1), values, color=color, label=name)
    axes.axvline(rank, color=BLACK, linewidth=1, linestyle=":", label=f"rank {rank}")
    axes.set(yscale="log", xscale="log", ylim=(1e-4, None), xlabel="number of the singular value")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def soft_mask_figure(logits: Tensor, count: int, temperatures: Sequence[float]) -> Figure:
    """SoftTop-k of one row of P_c and of log P_c at each temperature, blocks by rank; dotted: hard Top-k.

    logits [Tn], as the router gives them for a block of queries; count: how many blocks the row sums to.
    """
    title = "SoftTop-k is flat until tau is as small as the scores' differences"
    figure, axes = panels(len(temperatures), width=2.9, height=3.2, sharey=True, title=title)
    rank = range(1, len(logits) + 1)
    scores = {"P_c": (logits.softmax(-1), BLUE), "log P_c": (logits.log_softmax(-1), ORANGE)}
    for ax, temperature in zip(axes, temperatures, strict=True):
        for name, (x, color) in scores.items():
            weights = soft_top_k(x, count, temperature).sort(descending=True).values
            ax.plot(rank, weights.detach(), color=color, label=f"SoftTop-k of {name}")
        ax.step(rank, [float(i <= count) for i in rank], ":", where="mid", color=BLACK, label="hard Top-k")
        ax.set(xlabel="rank of the key block", xscale="log", ylim=(-0.03, 1.05))
        ax.set_title(f"tau = {temperature:g}", fontsize=10)
    axes[0].set_ylabel("weight of the block")
    axes[-1].legend(fontsize=8)
    return figure


def router_figure(record: Record, *, title: str) -> Figure:
    """Error of each method against k, on fitted and on held-out samples, mean over layers; dots are seeds.

    record: rows of `python -m sage_ref train-router` for several sparsities.
    """
    figure, axes = panels(2, width=4.6, height=4.2, title=title)
    styles = {
        ("heuristic, sparse only", None): ("s", BLACK, "heuristic router, sparse only"),
        ("SLA, best step", None): ("D", RED, "SLA (best step)"),
        ("SLA2", "soft, P_c / 0.1"): ("v", PURPLE, "SLA2, stage 1 as printed"),
        ("heuristic, alpha fitted", None): ("^", SKY, "heuristic router, fitted alpha"),
        ("SLA2", "straight-through, log P_c / 1"): ("o", BLUE, "SLA2, straight-through"),
        ("best mask, alpha fitted", None): ("*", GREEN, "best mask, fitted alpha"),
    }
    for ax, samples in zip(axes, ("fitted", "held out"), strict=True):
        for (method, relaxation), (marker, color, label) in styles.items():
            of_method = record.select(samples=samples, method=method)
            found = [row for row in of_method if row.get("relaxation") == relaxation]
            by_seed = {(row["sparsity"], row.get("seed")): [] for row in found}
            for row in found:
                by_seed[row["sparsity"], row.get("seed")].append(row["error"])
            percent = sorted({sparsity for sparsity, _ in by_seed})
            seeds = {s: [mean(x) for (of, _), x in by_seed.items() if of == s] for s in percent}
            ax.plot([100 * (1 - s) for s in percent], [mean(seeds[s]) for s in percent], color=color, linewidth=1)
            dots = [(100 * (1 - s), error) for s, errors in seeds.items() for error in errors]
            ax.plot(*zip(*dots, strict=True), marker, color=color, markersize=6, label=label)
        ax.set(xlabel="k: blocks selected, %", xticks=[3, 4, 5], ylim=(0, 1.4 * ax.dataLim.ymax))
        ax.set_title(f"{samples} samples", fontsize=10)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("squared error / squared length of O")
    axes[0].legend(fontsize=7, ncols=2, loc="upper right")
    figure.supxlabel(record.caption, fontsize=8)
    return figure


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
    figure.supxlabel(bench.caption, fontsize=8)
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
    figure.supxlabel(bench.caption, fontsize=8)
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
    figure.supxlabel(bench.caption, fontsize=8)
    return figure


def list_lengths_figure(block_mask: Tensor, *, title: str) -> Figure:
    """A block mask [Tm, Tn] and how long its lists are: by query block (right) and by key block (below)."""
    mask = block_mask.numpy()
    rows, columns = mask.shape
    figure, ((ax, right), (below, empty)) = plt.subplots(
        2, 2, figsize=(8, 4.6), layout="constrained", width_ratios=(4, 1), height_ratios=(3, 1), sharex="col"
    )
    figure.suptitle(title, fontsize=11)
    ax.imshow(mask, cmap="Blues", aspect="auto", interpolation="nearest")
    ax.set(ylabel="block of queries")
    right.barh(range(rows), mask.sum(1), color=BLUE, height=1.0)
    right.set(xlabel="blocks of keys\nin its list", ylim=(rows - 0.5, -0.5), xlim=(0, None))
    right.tick_params(labelbottom=True)
    below.bar(range(columns), mask.sum(0), color=ORANGE, width=1.0)
    below.set(xlabel="block of keys", ylabel="blocks of queries\nin its list")
    empty.set_axis_off()
    return figure


def quantization_aware_figure(record: Record, *, title: str) -> Figure:
    """Error of the quantised layer against the outlier in V, by way of training: mean and standard deviation.

    record: rows of `sage_ref.training.quantization_aware.study_rows`. One panel per layer and video.
    """
    layers, ways, outliers = (
        list(dict.fromkeys(row[name] for row in record.rows)) for name in ("layer", "way", "value_outlier")
    )
    figure, axes = panels(2 * len(layers), width=2.9, height=3.4, sharey=True, title=title)
    places = [(layer, video) for layer in layers for video in ("fitted", "other")]
    for ax, (layer, video) in zip(axes, places, strict=True):
        exact = mean(row[f"{video}_16bit"] for row in record.select(layer=layer, way="afterwards"))
        ax.axhline(exact, color="0.5", linestyle=":", label="trained and run in 16 bit")
        for i, (way, color) in enumerate(zip(ways, (BLACK, RED, BLUE), strict=True)):
            found = [[row[f"{video}_int8"] for row in record.select(layer=layer, way=way, value_outlier=x)]
                     for x in outliers]  # fmt: skip
            x = [place + 0.15 * (i - 1) for place in range(len(outliers))]
            style = {"fmt": "os^"[i], "color": color, "capsize": 3, "markersize": 5, "label": way}
            ax.errorbar(x, list(map(mean, found)), yerr=list(map(stdev, found)), **style)
        ax.set_title(f"layer {layer}, {video} video", fontsize=10)
        ax.set_xlabel("outlier in V, times")
        ax.set_xticks(range(len(outliers)), [f"{x:g}" for x in outliers])
    axes[0].set_ylabel("relative L2 error of the INT8 layer")
    axes[0].legend(fontsize=7)
    figure.supxlabel(record.caption, fontsize=8)
    return figure


# Figure 1 of the SageBwd paper: tokens per step -> final loss of its 325M model with QK-norm, in nats per GPT-2 token.
PAPER_LOSSES = {2**18: {"exact": 2.563, "sagebwd": 2.561}, 2**21: {"exact": 2.586, "sagebwd": 2.640}}
# The kinds of runs of `python -m sage_ref pretrain-grid`: attention, smoothing, granularity.
RUN_KINDS = {
    "exact": ("exact", None, None),
    "SageBwd, K smoothed": ("sagebwd", "k", None),
    "SageBwd, nothing smoothed": ("sagebwd", "none", None),
    "SageBwd, Q and K smoothed": ("sagebwd", "qk", "row"),
    "SageBwd, one scale per tile": ("sagebwd", "k", "block"),
}
MAIN_KINDS = {"exact": BLACK, "SageBwd, K smoothed": ORANGE}
# Student's t, 97.5%, for 1, 2, ... degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip


class Interval(NamedTuple):
    """Of the mean of `count` values: its standard error, and half the width of its 95% interval (Student's t)."""

    mean: float
    error: float
    half: float
    count: int


def mean_interval(values: Sequence[float]) -> Interval:
    """ValueError for fewer than two values, or more than the table of quantiles serves."""
    count = len(values)
    if not 2 <= count <= len(T_QUANTILES) + 1:
        raise ValueError(f"values: expected 2 to {len(T_QUANTILES) + 1} of them, got {count}")
    error = stdev(values) / math.sqrt(count)
    return Interval(mean(values), error, T_QUANTILES[count - 2] * error, count)


def pretrain_runs(record: Record, kind: str, tokens_per_step: int, qk_norm: bool = True) -> dict[int, Row]:
    """seed -> run of one of RUN_KINDS, at the learning rate that was chosen for its tokens per step."""
    attention, smoothing, granularity = RUN_KINDS[kind]
    rate = record.provenance["learning_rate"][str(tokens_per_step)]
    rows = record.select(
        attention=attention, smoothing=smoothing, granularity=granularity, qk_norm=qk_norm,
        tokens_per_step=tokens_per_step, learning_rate=rate,
    )  # fmt: skip
    return {row["seed"]: row for row in sorted(rows, key=lambda row: row["seed"])}


def final_losses(runs: Mapping[int, Row]) -> dict[int, float]:
    """seed -> final validation loss, of the runs that did not diverge."""
    return {seed: row["final_val_loss"] for seed, row in runs.items() if not row["diverged"]}


def paired_differences(
    record: Record, kind: str, tokens_per_step: int, *, qk_norm: bool = True, baseline: str = "exact"
) -> dict[int, float]:
    """seed -> final loss of that kind less that of the baseline: same weights at the start, same batches."""
    losses, others = (final_losses(pretrain_runs(record, x, tokens_per_step, qk_norm)) for x in (kind, baseline))
    return {seed: losses[seed] - others[seed] for seed in losses if seed in others}


def pretrain_curves_figure(record: Record, *, title: str) -> Figure:
    """Validation loss over training, with QK-norm: mean and range over seeds; below, the differences seed by seed.

    record: rows of `python -m sage_ref pretrain-grid`. Drawn from the end of the warm-up on.
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
        for (seed, points), line in zip(exact.items(), itertools.cycle(("-", "--", ":", "-.")), strict=False):
            if seed in sagebwd:
                difference = [y - x for (_, x), (_, y) in zip(points, sagebwd[seed], strict=True)]
                lower.plot(millions, difference, line, color=BLUE, linewidth=1.2, label=f"seed {seed}")
        lower.axhline(0, color=BLACK, linewidth=0.8)
        lower.set(xlabel="tokens, millions")
        upper.set_title(f"{size:,} tokens per step", fontsize=10)
        upper.legend(fontsize=8)
        lower.legend(fontsize=7, ncols=3)
    axes[0, 0].set_ylabel("validation loss,\nnats per byte")
    axes[1, 0].set_ylabel("SageBwd less exact,\nnats per byte")
    figure.supxlabel(record.caption, fontsize=8)
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
            ax.text(0.99, y, text, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=8)
        ax.set(xlabel="final validation loss, nats per byte")
        ax.set_title(f"{size:,} tokens per step", fontsize=10)
        ax.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(kinds)), [kind + ("" if norm else ", no QK-norm") for kind, norm in kinds], fontsize=8)
    axes[0].set_ylim(len(kinds) - 0.5, -0.5)
    figure.supxlabel(record.caption, fontsize=8)
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
        ax.plot(x + 0.12, gap, "D", color=RED, label=None if x else "paper, one run each")
        ax.annotate(f"{paper_size / 1e6:.2g}M", (x + 0.12, gap), (7, 5), textcoords="offset points", fontsize=8)
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set_xticks(range(len(sizes)), [f"ours: {size:,} tokens per step" for size in sizes])
    ax.set(ylabel="SageBwd's loss less exact's,\n% of exact's", xlim=(-0.5, len(sizes) - 0.5))
    ax.legend(fontsize=8, loc="upper left")
    figure.supxlabel(record.caption, fontsize=8)
    return figure


def relative_gaps(record: Record, tokens_per_step: int) -> list[float]:
    """By seed: SageBwd's final loss less exact attention's, as a share of the mean of the latter."""
    exact = mean(final_losses(pretrain_runs(record, "exact", tokens_per_step)).values())
    return [gap / exact for gap in paired_differences(record, "SageBwd, K smoothed", tokens_per_step).values()]


# What `python -m sage_ref noise` compares with exact attention in float32, as far as figures show it.
VARIANT_STYLES = {
    "per block, nearest": ("o", RED), "per block, stochastic": ("s", ORANGE), "per row, nearest": ("^", BLUE),
    "per row, stochastic": ("v", SKY), "bf16": ("D", GREEN),
}  # fmt: skip
# Tokens per step of the paper's two main experiments.
PAPER_SIZES = tuple(PAPER_LOSSES)


def noise_checkpoints(record: Record) -> dict[str, list[Row]]:
    """The rows of every checkpoint of a noise record by a name for it, in the order they were measured."""
    found: dict[str, list[Row]] = {}
    for row in record.rows:
        norm = "QK-norm" if row["qk_norm"] else "no QK-norm"
        name = "step {step}, {tokens_per_step:,} tokens per step, {attention}, ".format(**row)
        found.setdefault(f"{name}{norm}, seed {row['seed']}", []).append(row)
    return found


def noise_of(rows: Iterable[Row], group: str, variant: str) -> Row:
    """The one row of a checkpoint that has this group and variant."""
    (row,) = (row for row in rows if (row["group"], row["variant"]) == (group, variant))
    return row


def bias_to_gradient(row: Row) -> float:
    """|b| / |G|; zero where no bias was found, NaN where no gradient was."""
    return math.sqrt(max(row["bias_square"], 0) / row["gradient_square"]) if row["gradient_square"] > 0 else math.nan


def score_groups(rows: Iterable[Row]) -> list[str]:
    """The groups of parameters that make Q and K, layer by layer."""
    return [group for group in dict.fromkeys(row["group"] for row in rows) if group.endswith("query and key")]


def bias_to_noise(row: Row, tokens_per_step: float) -> float:
    """|b| / sqrt(tr(Sigma) / T); NaN where no bias was found."""
    return math.sqrt(tokens_per_step / row["tokens_at_bias"]) if row["tokens_at_bias"] else math.nan


def noise_figure(rows: Sequence[Row], groups: Sequence[str], *, title: str, caption: str) -> Figure:
    """For each group of parameters: lengths of noise and bias against the tokens of a step; dashed: the gradient's.

    rows: of one checkpoint. A band is two standard errors of |b|^2 either way; crosses mark T*.
    """
    figure, axes = panels(len(groups), width=3.0, height=3.5, sharey=True, title=title)
    sizes = [2.0**x for x in range(8, 31)]
    for ax, group in zip(axes, groups, strict=True):
        for variant, (_, color) in VARIANT_STYLES.items():
            row = noise_of(rows, group, variant)
            low, middle, high = (
                math.sqrt(max(row["bias_square"] + z * row["bias_square_error"], 0)) for z in (-2, 0, 2)
            )
            ax.axhspan(low, high, color=color, alpha=0.25, linewidth=0)
            ax.axhline(middle, color=color, label=f"bias: {variant}")
            if row["tokens_at_bias"]:
                ax.plot(row["tokens_at_bias"], middle, "x", color=BLACK, zorder=3)
        noise = [math.sqrt(row["noise_trace"] / tokens) for tokens in sizes]
        ax.plot(sizes, noise, color=BLACK, label="noise")
        if row["gradient_square"] > 0:
            ax.axhline(math.sqrt(row["gradient_square"]), color=BLACK, linestyle="--", label="the gradient itself")
        for size in PAPER_SIZES:
            ax.axvline(size, color=BLACK, linewidth=0.8, linestyle=":")
        ax.set(xscale="log", yscale="log", xlabel="tokens per step")
        ax.set_title(group, fontsize=10)
    axes[0].set_ylabel("length, in the gradient's units")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    figure.supxlabel(f"{caption}; dotted: the paper's {_millions(PAPER_SIZES)} tokens per step", fontsize=8)
    return figure


def _millions(sizes: Sequence[int]) -> str:
    return " and ".join(f"{size / 1e6:.2g}M" for size in sizes)


def tokens_at_bias_figure(
    rows: Sequence[Row], groups: Sequence[str], sizes: Sequence[int], *, title: str, caption: str
) -> Figure:
    """T*, the tokens per step at which bias reaches noise, of each group and variant; the bar ends at a cautious T*.

    sizes: tokens per step of our runs, dashed; the paper's are dotted.
    """
    figure, (ax,) = panels(1, width=8.6, height=0.75 + 0.62 * len(groups), title=title)
    for y, group in enumerate(groups):
        for shift, (variant, (marker, color)) in enumerate(VARIANT_STYLES.items()):
            row, place = noise_of(rows, group, variant), y + 0.15 * (shift - 2)
            low, middle = row["tokens_at_bias_low"], row["tokens_at_bias"]
            label = None if y else variant
            if middle:
                ax.plot([low, middle], [place, place], color=color, linewidth=1)
                ax.plot(middle, place, marker, color=color, markersize=5, label=label)
            elif low:
                ax.plot(low, place, ">", color=color, markersize=5, mfc="none", label=label)
    for size, line in [(size, "--") for size in sizes] + [(size, ":") for size in PAPER_SIZES]:
        ax.axvline(size, color=BLACK, linewidth=0.8, linestyle=line)
    ax.set(xscale="log", xlabel="T*: tokens per step at which bias = noise")
    ax.set_yticks(range(len(groups)), groups, fontsize=8)
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), fontsize=8, loc="outside right center")
    ours = ", ".join(f"{size:,}" for size in sizes)
    lines = f"dashed: our runs' {ours} tokens per step; dotted: the paper's {_millions(PAPER_SIZES)}"
    figure.supxlabel(f"{caption}\n{lines}", fontsize=8)
    return figure


def draw_balance(axes: Axes, rows: Sequence[Row], groups: Sequence[str], tokens_per_step: float) -> None:
    """|bias| / noise of every group and variant at a number of tokens per step; above the line bias is the larger."""
    for shift, (variant, (_, color)) in enumerate(VARIANT_STYLES.items()):
        ratios = [bias_to_noise(noise_of(rows, group, variant), tokens_per_step) for group in groups]
        axes.bar([x + 0.16 * (shift - 2) for x in range(len(groups))], ratios, width=0.15, color=color, label=variant)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set(yscale="log", ylim=(1e-3, 100))
    axes.set_xticks(range(len(groups)), [group.replace(", ", "\n") for group in groups], fontsize=8)
    axes.set_title(f"{tokens_per_step:,.0f} tokens per step", fontsize=10)


def balance_figure(rows: Sequence[Row], groups: Sequence[str], sizes: Sequence[float], *, title: str) -> Figure:
    """`draw_balance` for several numbers of tokens per step."""
    figure, axes = panels(len(sizes), width=3.4, height=3.4, sharey=True, title=title)
    for ax, size in zip(axes, sizes, strict=True):
        draw_balance(ax, rows, groups, size)
    axes[0].set_ylabel("|bias| / noise")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    return figure


def last_errors(record: Record, tokens_per_step: int, qk_norm: bool) -> dict[str, dict[str, float]]:
    """ "layer 0" -> tensor -> relative L2 error at the end of training; rows of `pretrain-grid --traces`."""
    rows = record.select(tokens_per_step=tokens_per_step, qk_norm=qk_norm)
    last = max(row["step"] for row in rows)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["step"] == last:
            found.setdefault(f"layer {row['layer']}", {})[row["tensor"]] = row["rel_l2"]
    return found


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
