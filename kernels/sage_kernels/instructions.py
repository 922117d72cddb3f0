"""What the loop of every level executes, read from its machine code for Hopper; no GPU is needed for that.

Counted is the loop without a mask, where nearly all time goes. A warp executes an instruction for 32 threads, and each
thread holds block_q * block_kv / (32 num_warps) of a tile's scores; so instructions / scores per thread is what one
score costs in issue slots, of which a multiprocessor has 128 per clock.
"""

import re
from collections import Counter
from collections.abc import Iterator

from sage_kernels.compile import Case, cases, compiled_kernel, launch_of, machine_code
from sage_kernels.ladder import BACKWARD_LEVELS

FROM_FLOAT16 = "HADD2.F32"  # the conversion from float16 to float32
# The first kind whose pattern matches the start of an instruction's name is its kind.
KINDS = {
    "matmul": "HGMMA|IGMMA",
    "exp2": "MUFU.EX2",
    "conversion": f"F2I|I2F|F2F|FRND|{FROM_FLOAT16}",
    "maximum": "FMNMX|VIMNMX",
    "arithmetic": "FADD|FMUL|FFMA",
    "move": "MOV|IMAD.MOV|PRMT|SEL|SHFL|LOP3",
    "spill": "LDL|STL",
    "rest": "",
}


def rows() -> Iterator[dict]:
    """One row per kernel and kind of instruction, head sizes 64 and 128, not causal."""
    for case in cases(capabilities=(90,)):
        case = case._replace(is_causal=False)
        yield from case_rows(case)


def case_rows(case: Case) -> Iterator[dict]:
    launch = launch_of(case)
    settings = {name: value for name, value in launch._asdict().items() if value is not None}
    scores = launch.block_q * launch.block_kv // (32 * launch.num_warps)
    of_each = FROM_FLOAT16 if case.kernel.startswith("dq") and BACKWARD_LEVELS[case.level].kept else "MUFU.EX2"
    counts = Counter(map(kind_of, hot_loop(machine_code(compiled_kernel(case)), scores, of_each)))
    for kind in KINDS:
        yield {
            "kernel": case.kernel, "level": case.level, "head_dim": case.head_dim, **settings, "kind": kind,
            "instructions": counts[kind], "per_score": round(counts[kind] / scores, 4),
        }  # fmt: skip


def hot_loop(code: str, scores: int, of_each: str = "MUFU.EX2") -> list[str]:
    """The instructions of the loop over tiles: of a label and a branch back to it, the shortest with a tile's scores.

    scores: a tile's per thread. of_each: an instruction that every score costs once; for most kernels the exponential,
    of which a row costs a few more. Without that a spin on a barrier could be taken for the loop, or the masked tile
    after it.
    """
    instructions, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;", line):
            instructions.append(instruction[1])
            target = re.match(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if target and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])
    loops = [loop for loop in loops if scores <= sum(x.startswith(of_each) for x in loop) < 1.25 * scores]
    if not loops:
        raise ValueError(f"code: expected a loop with {scores} instructions {of_each}, found none")
    return min(loops, key=len)


def kind_of(instruction: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, instruction))
