"""Films of four ideas, from small tensors: the softmax, delta, the scales of a product, the look-up table."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sage_course.figures.diagrams import draw_arrow, draw_note
from sage_course.figures.films import Film, draw_cell, sheet
from sage_course.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW
from sage_ref.quantization import quantize

ADDED = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [1, 0, 0, 0], [3, 0, 0, 0]])


def softmax_film(scores: Tensor) -> Film:
    """Draw a row of four positive scores and its softmax, while numbers are added to the scores."""
    rows = scores + ADDED

    def draw(figure: Figure, i: int) -> None:
        powers, whose = rows[i].exp(), "key 0 alone" if ADDED[i, 0] > ADDED[i, 1] else "every key"
        figure.suptitle(f"{ADDED[i, 0]} added to the score of {whose}", fontsize=10)
        panels = (
            ("score", rows[i], rows.max().item(), SKY, ".1f"),
            (f"exp(score), sum {powers.sum():.1f}", powers, rows.exp().max().item(), SKY, ".1f"),
            ("exp(score) / sum", powers / powers.sum(), 1.0, BLUE, ".2f"),
        )
        for ax, (name, numbers, most, color, digits) in zip(figure.subplots(1, 3), panels, strict=True):
            bars = ax.bar(range(4), numbers.tolist(), color=color)
            ax.bar_label(bars, [format(number, digits) for number in numbers.tolist()], fontsize=9)
            if name == "score":
                ax.bar(range(4), ADDED[i].tolist(), bottom=scores.tolist(), color=ORANGE)
            ax.set(ylim=(0, 1.15 * most), yticks=[], xlabel="key")
            ax.set_title(name, fontsize=9.5)
            ax.set_xticks(range(4))
            ax.spines[["left", "right", "top"]].set_visible(False)

    return Film("softmax", draw, len(ADDED), 2.4)


def delta_film(p: Tensor, dp: Tensor) -> Film:
    """Draw a row of dP as a beam with weights P, which rests on one point after the other and balances on delta."""
    delta, mean, low, span = (p @ dp).item(), dp.mean().item(), dp.min().item(), (dp.max() - dp.min()).item()
    points = [low, (low + mean) / 2, mean, (mean + delta) / 2, delta, delta]

    def draw(figure: Figure, i: int) -> None:
        ax, x, is_last = figure.subplots(), points[i], i == len(points) - 1
        moments = p * (dp - x)
        slope = 0 if i >= 4 else -1.8 * moments.sum().item() / span
        ax.axline((x, 0), slope=slope / span, color=BLACK, zorder=1)
        ax.plot([x, x], [0, -0.65], color=ORANGE, linewidth=2, zorder=0)
        ax.plot(x, -0.7, "^", ms=14, color=ORANGE)
        ax.scatter(dp, slope * (dp - x) / span, s=1800 * p, color=BLUE, zorder=2)
        for place, weight, moment in zip(dp.tolist(), p.tolist(), moments.tolist(), strict=True):
            y, text = slope * (place - x) / span + 0.28, f"{weight:.2f}"
            if is_last:
                tip = 0.6 * moment / moments.abs().max().item()
                draw_arrow(ax, (place, 0), (place, tip), color=ORANGE, linewidth=2)
                y, text = max(0.28, tip + 0.05), f"{moment:+.2f}"
            ax.text(place, y, text, ha="center", fontsize=9)
        name = {low: " (the smallest dP)", mean: " (the plain mean)", delta: " (delta)"}.get(x, "")
        title = f"x = {x:.2f}{name}: P (dP - x) adds up to {round(moments.sum().item(), 2) + 0:.2f}"
        ax.set_title("dS = P (dP - delta) of each key: together 0" if is_last else title, fontsize=10)
        ax.set(xlim=(low - 0.2 * span, low + 1.2 * span), ylim=(-0.85, 0.8), yticks=[], xlabel="dP")
        ax.spines[["left", "right", "top"]].set_visible(False)

    return Film("delta", draw, len(points), 2.5)


def scales_film(a: Tensor, b: Tensor) -> Film:
    """Draw how entry (0, 0) of A B is added up from integers. a: [2, 3]; b: [3, 2], which has a scale per column.

    Three pictures have a scale per row of A, and three a scale per column of A, along the sum.
    """
    kinds, b_quantized, exact = (quantize(a, (1, None)), quantize(a, (None, 1))), quantize(b, (None, 1)), (a @ b)[0, 0]
    b_hat, s_b = b_quantized.values.tolist(), b_quantized.scale.flatten().tolist()

    def draw(figure: Figure, i: int) -> None:
        along_sum, last = divmod(i, 3)
        a_hat, s_a = kinds[along_sum].values.tolist(), kinds[along_sum].scale.flatten().tolist()
        axes = sheet(figure, 9, 5.8, f"A has one scale for each {'column' if along_sum else 'row'}")
        for k in range(3):
            for x, color in enumerate((PURPLE, GREEN)):
                now = {"ec": BLACK, "linewidth": 2.5, "zorder": 4} if k == last and x == 0 else {}
                fill = (SKY, YELLOW, ORANGE)[k if along_sum else x]
                draw_cell(axes, (1.8 + k, 2.6 + 0.6 * x), (1, 0.6), str(a_hat[x][k]), fill, **now)
                draw_cell(axes, (5.2 + x, 0.6 + 0.6 * k), (1, 0.6), str(b_hat[k][x]), color, **now)
        for x, color in enumerate((PURPLE, GREEN)):
            draw_note(axes, (5.7 + x, 0.35), f"{s_b[x]:.3f}", fontsize=9)
            for y in range(2):
                fill, text = ("white", "?") if along_sum else ((SKY, YELLOW)[y], "")
                draw_cell(axes, (5.2 + x, 2.6 + 0.6 * y), (0.5, 0.6), text, fill)
                draw_cell(axes, (5.7 + x, 2.6 + 0.6 * y), (0.5, 0.6), "", color)
        for n, scale in enumerate(s_a):
            draw_note(axes, (2.3 + n, 4.05) if along_sum else (1.35, 2.9 + 0.6 * n), f"{scale:.3f}", fontsize=9)
        for place, name in (((0.4, 3.2), "A"), ((7.6, 1.5), "B"), ((7.6, 3.2), "AB")):
            draw_note(axes, place, name)
        pairs = [(a_hat[0][k], b_hat[k][0]) for k in range(last + 1)]
        total = sum(x * y for x, y in pairs)
        terms = [(f"{s_a[k]:.3f} " if along_sum else "") + f"({x})({y})" for k, (x, y) in enumerate(pairs)]
        draw_note(axes, (4.5, 4.7), " + ".join(terms) + ("" if along_sum else f" = {total}"), fontsize=9)
        if last == 2:
            scale, words = (sum(s_a) / 3, f"{sum(s_a) / 3:.4f} (the mean)") if along_sum else (s_a[0], f"{s_a[0]:.3f}")
            found = f"{total} x {words} x {s_b[0]:.3f} = {total * scale * s_b[0]:.2f}, exact {exact:.2f}"
            draw_note(axes, (4.5, 5.35), found, fontsize=9)

    return Film("scales", draw, 6, 2.9)


def table_film(block_mask: Tensor, block_bytes: int) -> Film:
    """Draw which blocks of keys the first two programs read. block_mask: bool [Tm, Tn], with one length of all lists.

    block_bytes: of one block of K.
    """
    rows, columns = block_mask.shape
    table = block_mask.nonzero()[:, 1].view(rows, -1).tolist()
    width = len(table[0])

    def draw(figure: Figure, turn: int) -> None:
        i, place = divmod(turn, width)
        j, read = table[i][place], table[i][:place]
        axes = sheet(figure, 18, 10.8, f"program {i}: j = table[{i}, {place}] = {j}")
        for x, name in ((5, "block mask"), (13.7, "look-up table")):
            draw_note(axes, (x, 0.5), name)
        now = {"ec": BLACK, "linewidth": 2.5, "zorder": 4}
        for row in range(rows):
            draw_note(axes, (0.4, 1.6 + row), str(row), fontsize=9)
            for column in range(columns):
                style = now if (row, column) == (i, j) else {}
                fill = BLUE if block_mask[row, column] else "white"
                draw_cell(axes, (1 + column, 1.1 + row), (1, 1), "", fill, **style)
            for column, block in enumerate(table[row]):
                style = now if (row, column) == (i, place) else {}
                draw_cell(axes, (11.6 + 1.4 * column, 1.1 + row), (1.4, 1), str(block), "white", **style)
        for block in range(columns):
            fill = ORANGE if block == j else "0.8" if block in read else "white"
            hatch = None if block_mask[i, block] else "////"
            draw_cell(axes, (1 + 2 * block, 7.1), (2, 1.2), "" if hatch else f"$K_{block}$", fill, hatch=hatch)
        draw_arrow(axes, (12.3 + 1.4 * place, 1.3 + rows), (2 + 2 * j, 7.0), color=ORANGE, linewidth=2)
        draw_note(axes, (9, 9.1), f"block {j} begins at byte {j} x {block_bytes:,} = {j * block_bytes:,}")
        read_bytes = (place + 1) * block_bytes
        draw_note(axes, (9, 10.2), f"program {i} has read {place + 1} of {columns} blocks: {read_bytes:,} bytes of K")

    return Film("table", draw, 2 * width, 2.7)
