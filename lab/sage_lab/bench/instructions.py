"""Instructions of machine code: their kinds, and the loops over tiles.

A warp executes an instruction for 32 threads, and each thread holds block_q * block_kv / (32 num_warps) of a tile's
scores. So instructions / scores per thread is the cost of a score in issue slots, and a multiprocessor has 128 per
clock. An instruction on a pair of float16 numbers counts once.
"""

import re

# The first kind whose pattern matches the start of an instruction's name is its kind.
KINDS = {
    "matmul": "HGMMA|IGMMA|HMMA|IMMA|UTC.MMA",
    "exp2": "MUFU.EX2",
    "rounding": "F2I(?!P)|I2F(?!P)|F2F(?!P)|FRND",  # on the unit of exp2; other conversions are not
    "conversion": "F2IP|I2FP|F2FP|HADD2.F32",
    "maximum": "FMNMX|VIMNMX|HMNMX2",
    "arithmetic": "FADD|FMUL|FFMA|HMUL2|HFMA2(?!.MMA)",
    "move": "MOV|IMAD.MOV|PRMT|SEL|SHFL|LOP3",
    "spill": "LDL|STL",
    "rest": "",
}


def exponentials(loop: list[str]) -> int:
    return sum(kind_of(instruction) == "exp2" for instruction in loop)


def tile_loops(code: str) -> list[list[str]]:
    """Return the loops over tiles: with matmuls, but without an inner loop that has them, as one over heads has."""
    instructions, spans = spans_of_loops(code)
    ends: dict[int, int] = {}
    for first, end in spans:
        ends[first] = max(end, ends.get(first, 0))

    def has_matmuls(first: int, end: int) -> bool:
        return any(kind_of(instruction) == "matmul" for instruction in instructions[first:end])

    def is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
        return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]

    loops = [loop for loop in ends.items() if has_matmuls(*loop)]
    innermost = [loop for loop in loops if not any(is_inside(other, loop) for other in loops)]
    return [instructions[first:end] for first, end in innermost]


def spans_of_loops(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return all instructions, and the spans (first, end) of loops: from a label to a branch back to it."""
    instructions, labels, spans = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;", line):
            instructions.append(instruction[1])
            target = re.match(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if target and target[1] in labels:
                spans.append((labels[target[1]], len(instructions)))
    return instructions, spans


def kind_of(instruction: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, instruction))
