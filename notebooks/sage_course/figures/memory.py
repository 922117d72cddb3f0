"""A figure of the memories of a GPU, and of the tensors that a fused attention kernel keeps in each."""

from typing import NamedTuple

from matplotlib.figure import Figure

from sage_course.figures.diagrams import Box, diagram, draw_arrow, draw_box, draw_note
from sage_course.figures.style import BLUE, GREEN, ORANGE, SKY
from sage_course.results.hopper_model import INT8_RATE, L2_RATES, MULTIPROCESSORS, PEAK

CLOCK = PEAK["INT8"] * 1e12 / (2 * INT8_RATE * MULTIPROCESSORS)  # Hz at which the data sheet's peak is reached
SHARED_RATE = 128 * MULTIPROCESSORS * CLOCK / 1e12  # 32 banks of 4 bytes
RATES = f"{SHARED_RATE:.0f} TB/s", f"{L2_RATES[8]:.1f} TB/s (measured)", "4.8 TB/s"  # from one memory to the next


class Memory(NamedTuple):
    """A memory: its name, its size, and the tensors that a fused forward kernel keeps there."""

    name: str
    size: str
    tensors: tuple[str, ...]
    color: str


MEMORIES = (
    Memory("registers", "132 x 256 KB = 33 MB", ("one tile of $S$ and $P$", "$O_i$, $m$, $l$"), ORANGE),
    Memory("shared memory", "132 x 228 KB = 29 MB", ("$Q_i$", "a few tiles $K_j$, $V_j$"), GREEN),
    Memory("L2 cache", "60 MB", ("$K$, $V$: many programs read them",), SKY),
    Memory("HBM", "141 GB", ("$Q$, $K$, $V$", "$O$, $L$", "never $S$ or $P$"), BLUE),
)


def memory_hierarchy() -> Figure:
    """Draw registers, shared memory, L2 cache and HBM of an H200: sizes, rates, tensors of a fused forward kernel.

    Sources: NVIDIA's data sheet of the H200 (141 GB, 4.8 TB/s; the clock from its 1979 TOPS); Hopper Tuning Guide and
    CUDA C++ Programming Guide, compute capability 9.0 (per multiprocessor, of which there are 132: 64K registers of 4
    bytes, 228 KB of shared memory, 32 banks of 4 bytes a clock); the L2 cache's size as PyTorch reports it, and
    its rate as we measured it, see `hopper_model`. No rate of the registers is published.
    """
    figure, axes = diagram(8.6, 4.5, "Large memories are slow: a fused kernel keeps S and P where memory is fastest")
    gap, middle = 1.15, 4.3
    for row, memory in enumerate(MEMORIES):
        y, width = 4.0 - gap * row, 5.2 + 1.0 * row
        draw_box(axes, Box(middle, y, width, 0.78), "", fill=memory.color, alpha=0.25)
        draw_note(axes, (middle - 1.55, y + 0.14), memory.name, fontweight="bold")
        draw_note(axes, (middle - 1.55, y - 0.15), memory.size)
        draw_chips(axes, middle - 0.45, y, memory)
    for row, rate in enumerate(RATES):
        y = 4.0 - gap * (row + 0.5)
        draw_arrow(axes, (middle - 1.55, y - 0.19), (middle - 1.55, y + 0.19), arrowstyle="<|-|>")
        draw_note(axes, (middle - 1.4, y), rate, ha="left")
    return figure


def draw_chips(axes, left: float, y: float, memory: Memory) -> None:
    """Draw the tensors that a memory holds, a box each, from `left` to the right."""
    for tensor in memory.tensors:
        width = 0.25 + 0.075 * len(tensor.replace("$", "").replace("_", ""))
        never = tensor.startswith("never")
        style = {"linestyle": "--", "ec": "0.3"} if never else {}
        draw_box(axes, Box(left + width / 2, y, width, 0.42), tensor, fill="white", **style)
        left += width + 0.1
