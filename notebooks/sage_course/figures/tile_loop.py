"""Films of the loop over tiles: what each tile computes, and what has been added up so far."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from sage_course.figures.diagrams import LETTERS
from sage_course.figures.films import Film
from sage_course.figures.style import BLUE, GREEN, ORANGE, YELLOW, panels
from sage_ref.shapes import tiles

FORGOTTEN, TO_COME = "0.8", "white"


class ForwardStep(NamedTuple):
    """The state after one tile of S: its place, and m, l, O of its queries."""

    i: int
    j: int
    rescale: Tensor  # [Bq]: e^(m_old - m_new), by which the old l and O are multiplied
    m: Tensor  # [Bq]
    l: Tensor  # [Bq]
    o: Tensor  # [Bq, D]; divided by l after the row's last tile
    is_last: bool


def forward_steps(scores: Tensor, values: Tensor, block: int) -> list[ForwardStep]:
    """Compute the online softmax in tiles of block x block: scores [Nq, Nk], values [Nk, D]. -inf: a masked score.

    As in Algorithm 1, a tile without any score is left out.
    """
    steps = []
    for i, queries in enumerate(tiles(len(scores), block)):
        rows = scores[queries]
        seen = [(j, keys) for j, keys in enumerate(tiles(len(values), block)) if (rows[:, keys] > -math.inf).any()]
        m = torch.full_like(rows[:, 0], -math.inf)
        l, o = torch.zeros_like(m), values.new_zeros(len(rows), values.shape[-1])
        for j, keys in seen:
            m_new = torch.maximum(m, rows[:, keys].amax(-1))
            started = m_new > -math.inf
            rescale = torch.where(started, torch.exp(m - m_new), 1.0)
            p = torch.where(started[:, None], torch.exp(rows[:, keys] - m_new[:, None]), 0.0)
            m, l, o = m_new, rescale * l + p.sum(-1), rescale[:, None] * o + p @ values[keys]
            is_last = j == seen[-1][0]
            steps.append(ForwardStep(i, j, rescale, m, l, o / l[:, None] if is_last else o, is_last))
    return steps


def forward_film(scores: Tensor, values: Tensor, block: int) -> Film:
    """Draw the forward pass as a film: each tile of S, and m, l, O so far.

    scores [Nq, Nk] of at most 16 queries (-inf: masked), values [Nk, D].
    """
    steps = forward_steps(scores, values, block)

    def draw(figure: Figure, i: int) -> None:
        draw_forward(figure.subplots(), scores, values, block, steps[: i + 1], len(steps))

    return Film("forward", draw, len(steps), 0.25 * len(scores) + 0.7)


def draw_forward(
    axes: Axes, scores: Tensor, values: Tensor, block: int, steps: Sequence[ForwardStep], count: int
) -> None:
    """Draw the last of `steps`, of `count` in all: S, then a column each for the factor, m and l, then O."""
    (n_q, n_k), width, now = scores.shape, values.shape[-1], steps[-1]
    query_blocks, key_blocks = tiles(n_q, block), tiles(n_k, block)
    number_width = 0.16 * n_k + 1.3
    starts = [n_k + 0.6 + number_width * column for column in range(3)]
    o_start = starts[-1] + number_width + 0.2
    past = {(step.i, step.j) for step in steps[:-1]}
    for i, queries in enumerate(query_blocks):
        for j, keys in enumerate(key_blocks):
            place = (keys.start, queries.start), keys.stop - keys.start, queries.stop - queries.start
            hatch = "////" if not (scores[queries, keys] > -math.inf).any() else None
            color = FORGOTTEN if (i, j) in past else TO_COME
            axes.add_patch(Rectangle(*place, fc=color, ec="0.6", linewidth=0.6, hatch=hatch))
    queries, keys = query_blocks[now.i], key_blocks[now.j]
    limit = scores[scores > -math.inf].abs().max()
    draw_cells(axes, scores[queries, keys], (keys.start, queries.start), limit)
    outline = {"fill": False, "ec": ORANGE, "linewidth": 2.5, "zorder": 4}
    height = queries.stop - queries.start
    axes.add_patch(Rectangle((keys.start, queries.start), keys.stop - keys.start, height, **outline))
    for row in range(height):
        numbers = now.rescale[row], now.m[row], now.l[row]
        for start, number in zip(starts, numbers, strict=True):
            place = start + number_width / 2, queries.start + row + 0.5
            axes.text(*place, f"{number:.1f}", ha="center", va="center", fontsize=9)
    axes.add_patch(Rectangle((o_start, 0), width, n_q, fill=False, ec="0.6", linewidth=0.6))
    for step in {step.i: step for step in steps}.values():
        draw_cells(axes, step.o, (o_start, query_blocks[step.i].start), values.abs().max())
    axes.add_patch(Rectangle((o_start, queries.start), width, height, **outline))
    headings = ("S", n_k / 2), *zip(("x old", "m", "l"), (start + number_width / 2 for start in starts), strict=True)
    for name, x in (*headings, ("O / l" if now.is_last else "O", o_start + width / 2)):
        axes.text(x, -0.15, name, ha="center", va="bottom", fontsize=LETTERS)
    axes.set(xlim=(-0.6, o_start + width + 0.6), ylim=(n_q + 0.2, -1.2))
    axes.set_title(f"turn {len(steps)} of {count}: i = {now.i}, j = {now.j}", fontsize=10)
    axes.set_axis_off()


def draw_cells(axes: Axes, matrix: Tensor, corner: tuple[float, float], limit: float) -> None:
    """Draw a matrix as coloured cells of size 1 from `corner` on; -inf is hatched."""
    (x, y), (rows, columns) = corner, matrix.shape
    axes.add_patch(Rectangle(corner, columns, rows, fc="white", ec="0.6", linewidth=0, hatch="////"))
    shown = matrix.masked_fill(matrix == -math.inf, math.nan).numpy()
    axes.imshow(
        shown, cmap="RdBu_r", vmin=-limit, vmax=limit, extent=(x, x + columns, y + rows, y), aspect="auto", zorder=2,
        interpolation="nearest",
    )  # fmt: skip


def film_strip(count: int, columns: int, height: float, title: str) -> tuple[Figure, Sequence[Axes]]:
    """Return axes for `count` pictures, `height` inches high, `columns` in a row."""
    rows = math.ceil(count / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(9.0, rows * height + 0.75), layout="constrained", squeeze=False
    )  # fmt: skip
    figure.suptitle(title, fontsize=11)
    for ax in grid.flatten()[count:]:
        ax.set_axis_off()
    return figure, grid.flatten()[:count]


def backward_order(visible: Tensor) -> list[tuple[int, int]]:
    """Return the tiles (i, j) in Algorithm 2's order, keys outside, queries inside. visible: bool [Tm, Tn]."""
    return [(i, j) for j in range(visible.shape[1]) for i in range(visible.shape[0]) if visible[i, j]]


def backward_film(visible: Tensor) -> Film:
    """Draw the backward pass as a film: each tile, and how much of dQ_i, dK_j, dV_j has been added up.

    visible: bool [Tm, Tn], the tiles that are not masked, at most 3 along keys.
    """
    order = backward_order(visible)

    def draw(figure: Figure, i: int) -> None:
        draw_backward(figure.subplots(), visible, order[: i + 1], len(order))

    return Film("backward", draw, len(order), 0.36 * (visible.shape[0] + 3) + 0.3, columns=3)


def draw_backward(axes: Axes, visible: Tensor, order: Sequence[tuple[int, int]], count: int) -> None:
    """Draw the last tile of `order`, of `count` in all, and the parts that each sum has received."""
    now_i, now_j = order[-1]
    colors = dict.fromkeys(order[:-1], FORGOTTEN) | {order[-1]: ORANGE}
    draw_tiles(axes, visible, colors)
    rows, columns = visible.shape
    for i in range(rows):
        parts = sum(tile[0] == i for tile in order)
        draw_sum(axes, (columns + 0.5, i), f"$dQ_{i}$", parts, int(visible[i].sum()), is_now=i == now_i)
    for j in range(columns):
        parts, total = sum(tile[1] == j for tile in order), int(visible[:, j].sum())
        for name, y in (("dK", rows + 0.4), ("dV", rows + 1.4)):
            draw_sum(axes, (j, y), f"${name}_{j}$", parts, total, is_now=j == now_j)
    axes.set(xlim=(-0.1, columns + 1.6), ylim=(rows + 2.5, -0.1))
    axes.set_title(f"turn {len(order)} of {count}: j = {now_j}, i = {now_i}", fontsize=10)
    axes.set_axis_off()


def draw_sum(axes: Axes, corner: tuple[float, float], name: str, parts: int, total: int, *, is_now: bool) -> None:
    """Draw a gradient of one block, with the number of its parts that are in the sum."""
    color = GREEN if parts == total else YELLOW if parts else TO_COME
    edge = {"ec": ORANGE, "linewidth": 2.5, "zorder": 3} if is_now else {"ec": "0.6", "linewidth": 0.6}
    axes.add_patch(Rectangle(corner, 1, 0.92, fc=color, **edge))
    ink = "white" if color == GREEN else "black"
    place = corner[0] + 0.5, corner[1] + 0.46
    axes.text(*place, f"{name} {parts}/{total}", ha="center", va="center", fontsize=9, color=ink, zorder=5)


def draw_tiles(axes: Axes, visible: Tensor, colors: dict[tuple[int, int], str]) -> None:
    """Draw a grid of tiles (i, j), white except for `colors`; masked ones are hatched."""
    rows, columns = visible.shape
    for i in range(rows):
        for j in range(columns):
            hatch = None if visible[i, j] else "////"
            color = colors.get((i, j), TO_COME)
            axes.add_patch(Rectangle((j, i), 1, 1, fc=color, ec="0.6", linewidth=0.6, hatch=hatch))


class Owner(NamedTuple):
    """A program of the backward pass: the tiles it visits, the sums it keeps, and whether it adds to dQ in memory."""

    title: str
    matmuls: tuple[str, ...]
    row: int | None = None
    column: int | None = None
    adds_dq: bool = False


OWNERS = (
    Owner("split: dQ's program owns a row", ("S", "dP", "dQ"), row=1),
    Owner("split: dK, dV's owns a column", ("S", "dP", "dV", "dK"), column=2),
    Owner("one pass: a column, dQ shared", ("S", "dP", "dV", "dK", "dQ"), column=2, adds_dq=True),
)


def owners() -> Figure:
    """Draw who adds up dQ_i, dK_j and dV_j: the two programs of the split backward pass, and the one-pass program."""
    title = "Split, each sum has one owner, which adds in a fixed order; in one pass, programs share dQ"
    figure, axes = panels(len(OWNERS), width=3.05, height=3.8, title=title)
    for ax, owner in zip(axes, OWNERS, strict=True):
        draw_owner(ax, owner, 4)
    return figure


def draw_owner(axes: Axes, owner: Owner, count: int) -> None:
    """Draw a program: its tiles and sums in blue (row) or green (column), integers added in memory in orange."""
    color = BLUE if owner.column is None else GREEN
    own = {(i, j): color for i in range(count) for j in range(count) if owner.row == i or owner.column == j}
    draw_tiles(axes, torch.ones(count, count, dtype=torch.bool), own)
    right, below = count + 0.7, count + 0.7
    for k in range(count):
        fill = BLUE if owner.row == k else ORANGE if owner.adds_dq else TO_COME
        label_box(axes, (right, k), f"$dQ_{k}$", fill)
        for name, y in (("dK", below), ("dV", below + 1)):
            label_box(axes, (k, y), f"${name}_{k}$", GREEN if owner.column == k else TO_COME)
    style = {"arrowprops": {"arrowstyle": "-|>", "linewidth": 1.8, "color": "0.15"}}
    if owner.row is not None:
        axes.annotate("", (right, owner.row + 0.5), (0.2, owner.row + 0.5), **style)
    if owner.column is not None:
        axes.annotate("", (owner.column + 0.5, below), (owner.column + 0.5, 0.2), **style)
    if owner.adds_dq:
        for i in range(count):
            arrow = {"arrowstyle": "-|>", "linewidth": 1.5, "color": ORANGE}
            axes.annotate("", (right, i + 0.5), (owner.column + 0.8, i + 0.5), arrowprops=arrow)
    where = "dQ: integers, added in memory" if owner.adds_dq else "all sums in registers"
    lines = f"{len(owner.matmuls)} matmuls per tile:\n{', '.join(owner.matmuls)}\n{where}"
    axes.text(count / 2 + 0.5, below + 2.2, lines, ha="center", va="top", fontsize=LETTERS)
    axes.set(xlim=(-0.1, count + 1.8), ylim=(below + 4.0, -0.1))
    axes.set_title(owner.title, fontsize=10)
    axes.set_axis_off()


def sparse_owners(block_mask: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Figure:
    """Draw what programs of sparse attention read: a row of a block mask for dQ_i, a column for dK_j and dV_j.

    block_mask: bool [Tm, Tn], at most 6 x 10. rows, columns: the programs that are shown.
    """
    title = "A row lists the keys that a program for dQ reads; a column lists the queries for dK and dV"
    height = 0.36 * (block_mask.shape[0] + 3) + 0.3
    figure, axes = film_strip(len(rows) + len(columns), 2, height, title)
    owned = [(row, None) for row in rows] + [(None, column) for column in columns]
    for ax, (row, column) in zip(axes, owned, strict=True):
        draw_sparse_owner(ax, block_mask, row, column)
    return figure


def draw_sparse_owner(axes: Axes, block_mask: Tensor, row: int | None, column: int | None) -> None:
    """Draw selected tiles in grey, one program's in blue (row) or green (column), and the sums it owns."""
    tile_rows, tile_columns = block_mask.shape
    selected = [tuple(tile) for tile in block_mask.nonzero().tolist()]
    color = BLUE if column is None else GREEN
    own = [(i, j) for i, j in selected if row == i or column == j]
    colors = dict.fromkeys(selected, FORGOTTEN) | dict.fromkeys(own, color)
    draw_tiles(axes, torch.ones_like(block_mask), colors)
    for i in range(tile_rows):
        label_box(axes, (tile_columns + 0.5, i), f"$dQ_{i}$", BLUE if row == i else TO_COME)
    for j in range(tile_columns):
        for name, y in (("dK", tile_rows + 0.4), ("dV", tile_rows + 1.4)):
            label_box(axes, (j, y), f"${name}_{j}$", GREEN if column == j else TO_COME)
    listed = ", ".join(str(j if column is None else i) for i, j in own) or "nothing"
    name, kind = (f"$dQ_{row}$", "key") if column is None else (f"$dK_{column}$ and $dV_{column}$", "query")
    axes.set_title(f"{name}: {kind} blocks {listed}", fontsize=10)
    axes.set(xlim=(-0.1, tile_columns + 1.6), ylim=(tile_rows + 2.5, -0.1))
    axes.set_axis_off()


def label_box(axes: Axes, corner: tuple[float, float], name: str, fill: str) -> None:
    """Draw a block of a gradient."""
    axes.add_patch(Rectangle(corner, 0.95, 0.92, fc=fill, ec="0.6", linewidth=0.6))
    ink = "white" if fill in (BLUE, GREEN) else "black"
    axes.text(corner[0] + 0.475, corner[1] + 0.46, name, ha="center", va="center", fontsize=9, color=ink)
