"""The demand of a loop over tiles on each unit of a multiprocessor, counted in its machine code.

A warp's instructions go to units that work side by side, each at its own rate: the tensor cores, the unit for
exponentials and conversions, the ones for float and integer arithmetic, shared memory. Every instruction also takes one
of the slots in which a scheduler issues. `Demand` counts what one warp asks for, for one tile.
"""

import re

from sage_lab.bench.cost_model import Demand
from sage_lab.bench.instructions import kind_of, tile_loops

FLOAT = r"F(?:ADD|MUL|FMA)|IMAD|H(?:FMA|MUL|ADD)2"
SPECIAL = r"MUFU|F2I|I2F(?!P)|F2F(?!P)|FRND"
INTEGER = r"FMNMX|VIMNMX|FSEL|SEL|[FI]SETP|I?ADD|VIADD|IADD3|LOP3|PLOP3|PRMT|SHF|LEA|MOV|I2FP|F2FP|I2IP|SGXT|CS2R|IABS"


def demand(code: str, scores: int) -> Demand | None:
    """Return the demand of the loop without a mask: the shortest over tiles with an exponential per score; or None.

    scores: of a tile, per thread.
    """
    loops = [loop for loop in tile_loops(code) if sum(kind_of(x) == "exp2" for x in loop) >= scores]
    return demand_of(min(loops, key=len)) if loops else None


def demand_of(loop: list[str]) -> Demand:
    """Return the demand of these instructions."""
    counts = dict.fromkeys(Demand._fields, 0) | {"instructions": len(loop)}
    for instruction in loop:
        for name, pattern in (("float32", FLOAT), ("special", SPECIAL), ("integer", INTEGER)):
            if re.match(pattern, instruction):
                counts[name] += 2 if re.match(r"F(?:ADD|MUL|FMA)2", instruction) else 1  # two packed numbers
                break
        else:
            counts["other"] += 1
        counts["bytes"] += bytes_of(instruction)
        kind, multiply_adds = multiply_adds_of(instruction)
        if kind:
            counts[kind] += multiply_adds
    return Demand(**counts)


def multiply_adds_of(instruction: str) -> tuple[str | None, int]:
    """Return ("int8" or "float16", the multiply-adds of a warp), or (None, 0) for anything but a matmul."""
    if found := re.match(r"([IH])MMA\.(16)(8)(16|32)\b", instruction):
        sharing = 1
    elif found := re.match(r"([IH])GMMA\.(\d+)x(\d+)x(\d+)", instruction):
        sharing = 4  # warps
    else:
        return None, 0
    rows, columns, depth = (int(found[i]) for i in (2, 3, 4))
    return ("int8" if found[1] == "I" else "float16"), rows * columns * depth // sharing


def bytes_of(instruction: str) -> int:
    """Return the bytes that a warp's instruction moves through shared memory, at least 128: a whole clock of it."""
    if found := re.match(r"([IH])GMMA\.(\d+)x(\d+)x(\d+)\S* \S+ (\S+)", instruction):
        rows, columns, depth = (int(found[i]) for i in (2, 3, 4))
        left = rows if found[5].startswith("gdesc") else 0  # else the left operand is in registers
        width = 1 if found[1] == "I" else 2
        return (left + columns) * depth * width // 4
    found = re.match(r"(LDSM|STSM|LDS|STS|LDGSTS|LDG|STG|LDL|STL|SHFL)\b(\S*)", instruction)
    if not found:
        return 0
    if found[1] in ("LDSM", "STSM"):
        return 128 * int(found[2][-1])
    width = re.search(r"\.(64|128)\b", found[2])
    return 4 * int(width[1]) if width else 128
