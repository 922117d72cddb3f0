"""A diagram of SLA2's data flow, from Q, K, V to O."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from sage_course.figures.diagrams import Box, diagram, draw_arrow, draw_box, draw_note
from sage_course.figures.style import BLUE, GREEN, ORANGE, YELLOW

SPARSE, LINEAR = BLUE, ORANGE
ROUTER_BOXES = {
    "Q": (Box(0.45, 5.45, 0.5, 0.45), "$Q$", "white"),
    "K": (Box(0.45, 4.65, 0.5, 0.45), "$K$", "white"),
    "pool Q": (Box(1.85, 5.45, 1.6, 0.55), "pool: mean of\nevery 128 rows", "0.92"),
    "pool K": (Box(1.85, 4.65, 1.6, 0.55), "pool: mean of\nevery 64 rows", "0.92"),
    "proj_q": (Box(3.55, 5.45, 0.9, 0.45), "proj_q", GREEN),
    "proj_k": (Box(3.55, 4.65, 0.9, 0.45), "proj_k", GREEN),
    "P_c": (Box(5.5, 5.05, 1.7, 0.9), "router's scores\n$P_c$  [Tm, Tn],\nrow by row softmax", "0.92"),
}
ROUTER_ARROWS = (
    ("Q", "pool Q"), ("K", "pool K"), ("pool Q", "proj_q"), ("pool K", "proj_k"), ("proj_q", "P_c"), ("proj_k", "P_c"),
)  # fmt: skip


def sla2_flow(block_mask: Tensor) -> Figure:
    """Draw router, block mask, the two branches and their mix.

    block_mask: bool [Tm, Tn], drawn with its look-up table; 4 x 8 blocks can be read well. The sparse branch is
    blue, the linear one orange; learned parts are green.
    """
    title = "SLA2: the router gives a few blocks to softmax attention, all others to linear attention"
    figure, axes = diagram(9.2, 5.95, title)
    for box, text, fill in ROUTER_BOXES.values():
        draw_box(axes, box, text, fill=fill)
    for start, end in ROUTER_ARROWS:
        draw_arrow(axes, ROUTER_BOXES[start][0].right, ROUTER_BOXES[end][0].left)
    mask = Box(5.5, 3.15, 2.4, 1.2)
    draw_mask(axes, mask, block_mask)
    table = Box(1.95, 3.15, 3.2, 1.35)
    draw_box(axes, table, table_text(block_mask), fill="white", ec=SPARSE, linewidth=2)
    complement = Box(8.05, 3.15, 1.6, 0.75)
    draw_box(axes, complement, "complement:\nall white blocks", fill="white", ec=LINEAR, linewidth=2)
    sparse, linear = Box(1.95, 1.6, 3.4, 0.85), Box(7.35, 1.6, 3.5, 0.85)
    text = "sparse branch, can run in INT8\n$O_s$ = softmax$(c\\,Q_i K_j^T)\\,V_j$\nover the blocks $j$ of the table"
    draw_box(axes, sparse, text, fill=SPARSE)
    text = "linear branch, $\\phi$ = softmax over features\n$H_i = \\Sigma_j\\,\\phi(K_j)^T V_j$,  $Z_i$ likewise\n"
    draw_box(axes, linear, text + "$O_l = \\phi(Q_i) H_i\\,/\\,\\phi(Q_i) Z_i$", fill=LINEAR)
    mix = Box(4.65, 0.4, 3.0, 0.5)
    draw_box(axes, mix, "$O = \\alpha\\,O_s + (1 - \\alpha)\\,O_l$", fill=YELLOW)
    draw_arrow(axes, ROUTER_BOXES["P_c"][0].bottom, (mask.x, mask.y + mask.height / 2 + 0.22))
    draw_note(axes, (5.65, 4.29), "hard Top-k: the k% largest of each row", ha="left")
    draw_arrow(axes, mask.left, table.right, color=SPARSE)
    draw_arrow(axes, mask.right, complement.left, color=LINEAR)
    draw_arrow(axes, table.bottom, sparse.top, color=SPARSE)
    draw_arrow(axes, complement.bottom, (complement.x, linear.top[1]), color=LINEAR)
    draw_arrow(axes, sparse.bottom, mix.left, color=SPARSE)
    draw_arrow(axes, linear.bottom, mix.right, color=LINEAR)
    draw_box(axes, Box(7.0, 5.43, 0.3, 0.2), "", fill=GREEN)
    draw_note(axes, (7.25, 5.35), "learned, as is $\\alpha$:\none per block of queries", ha="left")
    return figure


def table_text(block_mask: Tensor) -> str:
    """Return three lists of the look-up table, shortened where they are long."""
    lines = ["look-up table: selected blocks"]
    for i, selected in enumerate(block_mask[:3]):
        blocks = selected.nonzero().flatten().tolist()
        lines.append(f"queries {i}: " + ", ".join(map(str, blocks[:6])) + (", ..." if blocks[6:] else ""))
    return "\n".join(lines + ["..."] * (len(block_mask) > 3))


def draw_mask(axes: Axes, box: Box, block_mask: Tensor) -> None:
    """Draw the mask block by block in `box`, selected ones in the colour of the sparse branch."""
    rows, columns = block_mask.shape
    width, height = box.width / columns, box.height / rows
    for i, selected in enumerate(block_mask.tolist()):
        for j, color in enumerate(SPARSE if is_selected else "white" for is_selected in selected):
            corner = box.x - box.width / 2 + j * width, box.y + box.height / 2 - (i + 1) * height
            axes.add_patch(Rectangle(corner, width, height, fc=color, ec="0.5", linewidth=0.6))
    draw_note(axes, (box.x, box.y + box.height / 2 + 0.12), "mask $M$: Tm blocks of queries, Tn of keys")
