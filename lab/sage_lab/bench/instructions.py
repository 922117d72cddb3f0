"""Instructions in the loop of every level, counted in its machine code for Hopper, without a GPU.

The loop without a mask is counted, which takes nearly all of the time. A warp executes an instruction for 32 threads,
and each thread holds block_q * block_kv / (32 num_warps) of a tile's scores. So instructions / scores per thread is the
cost of a score in issue slots, and a multiprocessor has 128 per clock. In dqdkdv a third warpgroup runs a loop of
its own, in which each thread holds twice as many scores: half of its instructions are counted too. An
instruction on a pair of float16 numbers counts once.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator

from sage_kernels.common.candidates import Launch

from sage_lab.bench.compile import Case, cases, compile_kernel, launch_of
from sage_lab.records import markdown_table, write_record

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


def case_rows(case: Case) -> Iterator[dict]:
    """Yield one row per kind of instruction."""
    launch = launch_of(case)
    settings = {name: value for name, value in launch._asdict().items() if value is not None}
    scores = scores_of(launch)
    code, _ = compile_kernel(case)
    counts = Counter(map(kind_of, hot_loop(code, scores)))
    for instruction in adding_loop(code) if case.kernel == "dqdkdv" else ():
        counts[kind_of(instruction)] += 0.5
    for kind in KINDS:
        yield {
            "kernel": case.kernel, "level": case.level, "head_dim": case.head_dim, **settings, "kind": kind,
            "instructions": counts[kind], "per_score": round(counts[kind] / scores, 4),
        }  # fmt: skip


def scores_of(launch: Launch) -> int:
    """Return how many of a tile's scores a thread holds."""
    return launch.block_q * launch.block_kv // (32 * launch.num_warps)


def hot_loop(code: str, scores: int) -> list[str]:
    """Return the loop over tiles: from a label to a branch back to it, the shortest with a tile's exponentials.

    scores: a tile's per thread; every one costs an exponential, and a row a few more. Without that a spin on a barrier
    could be taken for the loop, or the masked tile after it.
    """
    found = [loop for loop in loops(code) if scores <= exponentials(loop) < 1.25 * scores]
    if not found:
        raise ValueError(f"code: expected a loop with {scores} exponentials, found none")
    return min(found, key=len)


def exponentials(loop: list[str]) -> int:
    return sum(kind_of(instruction) == "exp2" for instruction in loop)


def adding_loop(code: str) -> list[str]:
    """Return the shortest loop in which the copy engine adds to memory: that of the warpgroup of dQ."""
    found = [loop for loop in loops(code) if any(x.startswith("UTMAREDG") for x in loop)]
    if not found:
        raise ValueError("code: expected a loop that adds to memory, found none")
    return min(found, key=len)


def loops(code: str) -> list[list[str]]:
    """Return the instructions from every label to every branch back to it."""
    instructions, spans = spans_of_loops(code)
    return [instructions[first:end] for first, end in spans]


def tile_loops(code: str) -> list[list[str]]:
    """Return the loops over tiles: with matmuls, but without an inner loop that has them, as one over heads has."""
    instructions, spans = spans_of_loops(code)
    whole = {first: max(end for start, end in spans if start == first) for first, _ in spans}
    found = [
        x for x in whole.items() if any(kind_of(instruction) == "matmul" for instruction in instructions[slice(*x)])
    ]
    inner = [x for x in found if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in found)]
    return [instructions[first:end] for first, end in inner]


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


def instructions_command(options: argparse.Namespace) -> None:
    """Count what the loop of every level executes: both head sizes, not causal."""
    found = [row for case in cases(90) for row in case_rows(case._replace(is_causal=False))]
    print(markdown_table(found[0], [row.values() for row in found]))
    write_record(options.json, found, command=options.command)
