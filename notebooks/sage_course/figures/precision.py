"""A map of the seven matmuls of attention, with the number format of each operand."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_course.figures.diagrams import Box, diagram, draw_arrow, draw_box, draw_note
from sage_course.figures.style import BLUE, ORANGE
from sage_ref.sagebwd.settings import MATMULS, SageBwdSettings

FORMAT_COLORS = {"INT8": BLUE, "16 bit": ORANGE}


class Operand(NamedTuple):
    name: str
    scale: str  # what shares a scale where the matmul is in INT8


class Matmul(NamedTuple):
    """A matmul of the map: its number in notebook 01, its formula, operands and place."""

    number: int
    formula: str
    left: Operand
    right: Operand
    box: Box


def matmuls_of(settings: SageBwdSettings) -> dict[str, Matmul]:
    """Return the matmuls by their names in `MATMULS`. The settings choose the scales of P and dS; others: per tile."""
    by_row = settings.granularity == "row"
    per_query, per_key = ("query", "key") if by_row else ("tile", "tile")

    def matmul(number, formula, left, left_scale, right, x, y):
        return Matmul(number, formula, Operand(left, left_scale), Operand(right, "tile"), Box(x, y, 2.8, 1.12))

    left, right = 1.55, 7.6
    rows = (
        matmul(1, "$S = c\\,Q K^T$", "$Q$", "tile", "$K$", left, 5.75),
        matmul(2, "$O = \\tilde P V / l$", "$\\tilde P$", "query", "$V$", right, 5.75),
        matmul(5, "$S = c\\,Q K^T$ again", "$Q$", "tile", "$K$", left, 3.85),
        matmul(3, "$dV = P^T dO$", "$P^T$", per_key, "$dO$", right, 3.85),
        matmul(4, "$dP = dO\\,V^T$", "$dO$", "tile", "$V$", left, 1.9),
        matmul(6, "$dQ = c\\,dS\\,K$", "$dS$", per_query, "$K$", right, 2.55),
        matmul(7, "$dK = c\\,dS^T Q$", "$dS^T$", per_key, "$Q$", right, 1.25),
    )
    return dict(zip(MATMULS, rows, strict=True))


def precision_map(settings: SageBwdSettings) -> Figure:
    """Draw both passes as a graph of seven matmuls: operands in INT8 or 16 bit, and what shares a scale.

    settings: `exact_matmuls` stay in 16 bit; `granularity` says what shares a scale in P and dS.
    """
    count = len(MATMULS) - len(set(settings.exact_matmuls))
    figure, axes = diagram(9.2, 6.75, f"The seven matmuls of attention, {count} of them in INT8")
    for y, name in ((6.5, "forward"), (4.65, "backward")):
        draw_note(axes, (0.15, y), name, ha="left", fontweight="bold")
    axes.axhline(4.88, color="0.6", linewidth=0.8, linestyle=":")
    matmuls = matmuls_of(settings)
    for name, matmul in matmuls.items():
        draw_matmul(axes, matmul, "16 bit" if name in settings.exact_matmuls else "INT8")
    draw_between(axes, matmuls)
    for x, (number_format, color) in zip((0.35, 1.6), FORMAT_COLORS.items(), strict=True):
        draw_box(axes, Box(x, 0.3, 0.3, 0.2), "", fill=color)
        draw_note(axes, (x + 0.25, 0.3), number_format, ha="left")
    mean = "; the mean key is taken from $K$ first" if settings.smooth_k else ""
    draw_note(axes, (2.6, 0.3), f"below an operand: what shares a scale{mean}", ha="left")
    return figure


def draw_matmul(axes: Axes, matmul: Matmul, number_format: str) -> None:
    """Draw a matmul: number and formula above its two operands, each with its format and what shares a scale."""
    box = matmul.box
    draw_box(axes, box, "", fill="0.96", ec="0.5")
    draw_note(axes, (box.x, box.y + 0.36), f"{matmul.number}   {matmul.formula}")
    for side, operand in ((-0.68, matmul.left), (0.68, matmul.right)):
        scale = f"\nscale per {operand.scale}" if number_format == "INT8" else "\nno scale"
        text = f"{operand.name}  {number_format}{scale}"
        draw_box(axes, Box(box.x + side, box.y - 0.17, 1.26, 0.62), text, fill=FORMAT_COLORS[number_format])


def draw_between(axes: Axes, matmuls: dict[str, Matmul]) -> None:
    """Draw the computations between the matmuls, entry by entry in float32, and the arrows."""
    boxes = {
        "softmax": (Box(4.55, 5.75, 2.2, 0.72), "$\\tilde P = e^{S - m}$, row sums $l$\n$L = m + \\ln l$"),
        "P": (Box(4.55, 3.85, 2.2, 0.5), "$P = e^{S - L}$"),
        "dS": (Box(4.55, 1.9, 2.2, 0.82), "$dS = P \\circ (dP - \\delta)$\n$\\delta$ = rowsum$(dO \\circ O)$"),
    }
    for box, text in boxes.values():
        draw_box(axes, box, text, fill="white")
    place = {name: box for name, (box, _) in boxes.items()} | {name: matmul.box for name, matmul in matmuls.items()}
    across = (
        ("S", "softmax"), ("softmax", "O"), ("S_backward", "P"), ("P", "dV"), ("dP", "dS"), ("dS", "dQ"), ("dS", "dK"),
    )  # fmt: skip
    for start, end in across:
        draw_arrow(axes, place[start].right, place[end].left)
    for start, end, name in (("softmax", "P", "$L$"), ("P", "dS", "$P$")):
        draw_arrow(axes, place[start].bottom, place[end].top)
        draw_note(axes, (4.7, (place[start].bottom[1] + place[end].top[1]) / 2 - 0.1), name, ha="left")
