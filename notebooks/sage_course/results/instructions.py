"""Count the instructions in the loop of every level on Hopper, without a GPU: record instructions_levels_cpu.

The loop without a mask is counted, which takes nearly all of the time. A warp executes an instruction for 32 threads,
and each thread holds block_q * block_kv / (32 num_warps) of a tile's scores. In level 5 at D = 64 a third warpgroup
runs a loop of its own, in which a thread holds twice as many: half of its instructions are counted, too.

    python -m sage_course.results.instructions
"""

from collections import Counter

from sage_lab.bench.compile import Case, cases, compile_kernel, launch_of
from sage_lab.bench.instructions import KINDS, exponentials, kind_of, spans_of_loops
from sage_lab.command_line import process_pool
from sage_lab.records import RECORDED, Row, write_record


def case_rows(case: Case) -> list[Row]:
    """Return a row for each kind of instruction in a program's loop."""
    launch = launch_of(case)
    scores = launch.block_q * launch.block_kv // (32 * launch.num_warps)  # that a thread holds
    instructions, spans = spans_of_loops(compile_kernel(case)[0])
    loops = sorted((instructions[first:end] for first, end in spans), key=len)
    # A score costs an exponential, and a row a few more. A loop that waits for a barrier has none.
    over_tiles = next(loop for loop in loops if scores <= exponentials(loop) < 1.25 * scores)
    counts = Counter(map(kind_of, over_tiles))
    if case.kernel == "dqdkdv":
        adds_to_memory = next(loop for loop in loops if any(x.startswith("UTMAREDG") for x in loop))
        for instruction in adds_to_memory:
            counts[kind_of(instruction)] += 0.5
    program = {"kernel": case.kernel, "level": case.level, "head_dim": case.head_dim, **launch._asdict()}
    return [program | {"kind": kind, "per_score": round(counts[kind] / scores, 4)} for kind in KINDS]


if __name__ == "__main__":
    without_mask = [case._replace(is_causal=False) for case in cases(90)]
    with process_pool(2) as pool:
        rows = [row for found in pool.map(case_rows, without_mask) for row in found]
    write_record(RECORDED / "instructions_levels_cpu.json", rows, command="python -m sage_course.results.instructions")
