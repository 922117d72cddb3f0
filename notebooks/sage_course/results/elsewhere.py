"""Whether INT8 pays on GPUs that we don't have: what the rule of notebook 08 predicts."""

from importlib import resources
from pathlib import Path

from sage_kernels.common.launch_tables import SAME_CODE
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS
from sage_lab.bench.cost_model import GPUS, by_the_rule, demand
from sage_lab.bench.count import MEASURED, Problem
from sage_lab.records import markdown_table, read_record

from sage_course.results.count import clocks_of
from sage_course.results.kernels import BENCH, MAIN_N

TABLE = Path(str(resources.files("sage_kernels.common") / "launch_compiled.json"))
# The cards that a prediction is for. Others of the same compute capability (A10, L40S) multiply 16 bit at another rate.
PREDICTED = {80: "A100", 86: "GeForce RTX 30", 89: "GeForce RTX 40", 120: "GeForce RTX 50"}
PORTABLE = {"fwd": 4, "bwd": 3}  # the INT8 level that runs by itself where there is none of Hopper's; 0 is in 16 bit
COLUMNS = [(head_dim, direction) for head_dim in (128, 64) for direction in PORTABLE]
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def predicted(capability: int, head_dim: int, direction: str) -> float:
    """Predict the time of our kernels in 16 bit over that of our INT8 kernels, for a card of PREDICTED, by the rule."""
    own = PORTABLE[direction]
    if direction == "fwd":
        clocks = clocks_of(Problem(capability, head_dim, False))
        return clocks["level 0"] / clocks[f"level {own}"]
    code, table = SAME_CODE.get(capability, capability), read_record(TABLE)

    def clocks_of_level(level: int) -> float:
        total = 0.0
        for kernel in BACKWARD_LEVELS[level].kernels(head_dim):
            (row,) = table.select(kernel=kernel, capability=code, level=level, head_dim=head_dim)
            scores = row["block_q"] * row["block_kv"] / row["num_warps"]
            total += sum(by_the_rule({name: row[name] / scores for name in demand([])}, GPUS[capability]))
        return total

    return clocks_of_level(0) / clocks_of_level(own)


def predictions() -> str:
    """Return the table of predictions by generation of GPUs, and what was measured on Hopper with the same kernels."""
    lines = []
    for capability, cards in PREDICTED.items():
        found = (predicted(capability, *column) for column in COLUMNS)
        lines.append((f"{cards} ({capability / 10})", *(f"{ratio:.2f}" for ratio in found)))
    record = read_record(BENCH)
    measured = []
    for head_dim, direction in COLUMNS:
        where = {"n_q": MAIN_N, "head_dim": head_dim, "direction": direction, "causal": False, "scope": "kernel"}
        ms = (record.select(level=level, **where)[0]["ms_median"] for level in (0, PORTABLE[direction]))
        measured.append(f"{next(ms) / next(ms):.2f}")
    by_rule = (f"{predicted(MEASURED, *column):.2f}" if column[1] == "fwd" else "" for column in COLUMNS)
    lines.append(("H200 (9.0), the same kernels", *by_rule))
    lines.append((f"H200 (9.0): measured, {record.timed}", *measured))
    header = ("card (compute capability)", *(f"D={d} {DIRECTIONS[direction]}" for d, direction in COLUMNS))
    return f"{markdown_table(header, lines)}\n\nThe last line: {record.caption}."
