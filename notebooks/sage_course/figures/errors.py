"""Figures of INT8's error: by tensor, by tile and by entry."""

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from sage_lab.experiments.table1 import table1_inputs
from torch import Tensor

from sage_course.figures.style import BLACK, BLUE, ORANGE, RED, SKY, panels
from sage_ref.quantization import INT8_MAX, fake_quantize, quantize
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, rms, sagebwd_intermediates

# Each tensor's place in `error_map`, and the tensors that it is computed from.
_MAP_PLACES = {
    "P": (0, 1), "O": (1, 1), "delta": (2, 1), "dQ": (3, 1),
    "dV": (0, 0), "dP": (1, 0), "dS": (2, 0), "dK": (3, 0),
}  # fmt: skip
_MAP_ARROWS = (
    ("P", "O"), ("O", "delta"), ("P", "dV"), ("P", "dS"), ("dP", "dS"), ("delta", "dS"), ("dS", "dQ"), ("dS", "dK"),
)  # fmt: skip


def error_map(axes: Axes, errors: Mapping[str, float], *, title: str) -> None:
    """Draw the tensors of both passes as boxes, with an arrow from each to what is computed from it.

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


def error_heatmap(axes: Axes, errors: Mapping[str, Mapping[str, float]]) -> None:
    """Draw relative L2 errors as a coloured table, errors[row][column]; exact ones (below 1e-9) stay blank."""
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
    axes.figure.colorbar(image, ax=axes, fraction=0.046, label="relative L2 error")


def sigma_figure(sigmas: Sequence[float]) -> Figure:
    """Draw every entry of P in SageBwd against the exact one, for each standard deviation of Q and K."""
    title = "An error in S multiplies P, and larger scores have larger errors"
    figure, axes = panels(len(sigmas), width=3.0, height=3.2, sharey=True, title=title)
    for ax, sigma in zip(axes, sigmas, strict=True):
        inputs, settings = table1_inputs(256, 64, sigma, seed=0), SageBwdSettings.printed()
        exact, quantized = exact_intermediates(*inputs, settings), sagebwd_intermediates(*inputs, settings)
        errors = {name: relative_l2(quantized[name], exact[name]) for name in ("P", "O", "dQ")}
        ax.plot(exact["P"].flatten(), quantized["P"].flatten(), ".", color=BLUE, markersize=2)
        ax.plot([1e-6, 1], [1e-6, 1], color=ORANGE, linewidth=1)
        ax.set(xscale="log", yscale="log", xlim=(1e-6, 1.5), ylim=(1e-6, 1.5), xlabel="exact P")
        ax.set_title(f"sigma = {sigma}\nerror of " + ", ".join(f"{n} {e:.3f}" for n, e in errors.items()), fontsize=9)
    axes[0].set_ylabel("P in SageBwd")
    return figure


def draw_block_sizes(axes: Axes, x: Tensor, *, where: Tensor, title: str) -> None:
    """Draw x's relative L2 error against the number of rows that share a scale: measured, and by s^2/12.

    x: [R, C]. where: bool [R, C], the entries whose error counts.
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
    """Draw how the entries of P~ = exp(S - rowmax(S)), [R, N], and their probability are spread over size.

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
