"""The course's cost model of the kernels on a Hopper GPU: how many clocks a multiprocessor needs for one score.

The work of each unit comes from counted instructions, and its rate from NVIDIA's data sheets. The L2 cache's rate is
measured. One rule says what overlaps. A warp that has started a matmul waits for it, so the tensor cores take turns
with all the rest. The other units (exp2, ALU, issue slots, L2 cache) work at the same time, and the busiest of them
sets the pace:

    clocks of a program = tensor cores + the busiest other unit

The programs of a level run one after the other. Nothing is fitted. Latency, barriers, shared memory, and the start and
the end of a program are left out. The rule is a rule of thumb between two limits: no program can take less than its
busiest unit, and one that takes more than the sum of all units waits for something that is not in the model.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sage_lab.records import Record, Row, read_record

MULTIPROCESSORS = 132
# Rates of one multiprocessor of an H200 per clock: multiply-adds of the tensor cores, instructions of the other units.
INT8_RATE, SIXTEEN_BIT_RATE = 4096, 2048
EXP2_RATE, ALU_RATE, ISSUE_RATE = 16, 64, 128
EXP2_KINDS, ALU_KINDS = ("exp2", "rounding"), ("conversion", "maximum", "move")
UNIT_NAMES = {
    "tensor": "tensor cores", "exp2": "exp2 unit, float to integer too", "alu": "other conversions, maxima, moves",
    "issue": "issue slots", "l2": "L2 cache",
}  # fmt: skip
# Data sheet of the H200, dense, in TOPS. Per multiprocessor and clock these are 8192 and 4096 operations, so a second
# has PEAK / 4096 of 10^12 clocks, added over all multiprocessors.
PEAK = {"INT8": 1979, "bf16": 989}
# Measured TB/s by the MB that all programs read. Two heads' K and V, 8192 tokens of D=128 in bf16, have 8 MB.
L2_RATES = {row["bytes"] >> 20: row["terabytes_per_second"] for row in read_record("rates_h200").rows}
L2_RATE = L2_RATES[8] * 4096 / PEAK["bf16"]


class Work(NamedTuple):
    """The work of a program for a score, in units of D."""

    int8: int  # multiply-adds in INT8
    sixteen_bit: int  # and in 16 bit
    streamed: int  # bytes read, or added to, per token of the other side, of which a program's rows share one stream


FORWARD_WORK = {0: Work(0, 2, 4), 1: Work(1, 1, 3)}  # S and O = P V; later levels have both in INT8
BACKWARD_WORK = {
    "dq_16bit": Work(0, 3, 4), "dkdv_16bit": Work(0, 4, 4),
    "dq": Work(2, 1, 4), "dk": Work(2, 1, 4), "dv": Work(2, 0, 2), "dkdv": Work(3, 1, 5), "dkdv_pairs": Work(3, 1, 5),
    "dqdkdv": Work(4, 1, 13), "dqdkdv_wide": Work(4, 1, 13),  # 8 of them for an addition to dQ: a read and a write
}  # fmt: skip


def work_of(kernel: str, level: int) -> Work:
    if kernel == "forward":
        return FORWARD_WORK.get(level, Work(2, 0, 2))
    return BACKWARD_WORK[kernel.removesuffix("_per_block")]


def demand(rows: Sequence[Row]) -> dict[str, float]:
    """Return what one score of a program asks of the units: multiply-adds, instructions, bytes.

    rows: one program's rows of the record instructions_levels_cpu.
    """
    kernel, level, head_dim = (rows[0][name] for name in ("kernel", "level", "head_dim"))
    count = {row["kind"]: row["per_score"] for row in rows}
    work = work_of(kernel, level)
    exp2, alu = (sum(count[kind] for kind in kinds) for kinds in (EXP2_KINDS, ALU_KINDS))
    streams_keys = kernel == "forward" or kernel.split("_")[0] == "dq"
    own_rows = rows[0]["block_q" if streams_keys else "block_kv"]
    return {
        "int8": head_dim * work.int8,
        "sixteen_bit": head_dim * work.sixteen_bit,
        "exp2": exp2,
        "alu": alu,
        "issue": sum(count.values()),
        "l2": head_dim * work.streamed / own_rows,
    }


def unit_clocks(rows: Sequence[Row]) -> dict[str, float]:
    """Compute the clocks that each unit needs for one score of a program, if nothing holds it up.

    "sum" is the time if no two units ever worked at once: all of them, with the issue slots of those instructions that
    neither exp2 nor ALU execute.
    """
    needed = demand(rows)
    clocks = {
        "tensor": needed["int8"] / INT8_RATE + needed["sixteen_bit"] / SIXTEEN_BIT_RATE,
        "exp2": needed["exp2"] / EXP2_RATE,
        "alu": needed["alu"] / ALU_RATE,
        "issue": needed["issue"] / ISSUE_RATE,
        "l2": needed["l2"] / L2_RATE,
    }
    others = (needed["issue"] - needed["exp2"] - needed["alu"]) / ISSUE_RATE
    return clocks | {"sum": sum(clocks.values()) - clocks["issue"] + others}


def programs(instructions: Record, level: int, head_dim: int, direction: str = "fwd") -> dict[str, list[Row]]:
    """Return a level's programs by name, each with its rows; the split "dk" and "dv" where "dkdv" is there, too."""
    found = {}
    for row in instructions.select(level=level, head_dim=head_dim):
        if (row["kernel"] == "forward") == (direction == "fwd"):
            found.setdefault(row["kernel"], []).append(row)
    if {"dk", "dv", "dkdv"} <= set(found):
        del found["dkdv"]
    return found


def level_clocks(instructions: Record, level: int, head_dim: int, direction: str = "fwd") -> dict[str, float]:
    """Add up `unit_clocks` of a level's programs, which run one after the other."""
    clocks = [unit_clocks(rows) for rows in programs(instructions, level, head_dim, direction).values()]
    return {unit: sum(each[unit] for each in clocks) for unit in clocks[0]} if clocks else {}


def predicted(instructions: Record, level: int, head_dim: int, direction: str = "fwd") -> dict[str, float]:
    """Predict a level's clocks per score by the rule: the tensor cores' part and those of the busiest other units."""
    parts = {"tensor": 0.0}
    for rows in programs(instructions, level, head_dim, direction).values():
        clocks = unit_clocks(rows)
        busiest = max((unit for unit in UNIT_NAMES if unit != "tensor"), key=clocks.get)
        parts["tensor"] += clocks["tensor"]
        parts[busiest] = parts.get(busiest, 0.0) + clocks[busiest]
    return parts


class Compared(NamedTuple):
    """Clocks per score of a level: predicted by the rule, in parts; the sum of all units; measured."""

    parts: dict[str, float]
    sum: float
    measured: float

    @property
    def ratio(self) -> float:
        """How many times as long as predicted the level takes."""
        return self.measured / sum(self.parts.values())


def compare_levels(bench: Record, instructions: Record, direction: str) -> dict[tuple[int, int], Compared]:
    """Return (head size, level) -> prediction and measurement, of all levels that were timed at N=8192 without a mask.

    A measured time becomes clocks by the data sheet's clock. The real clock was not recorded; it may differ by 8%.
    """
    found = {}
    size = {"provider": "sage_kernels", "scope": "kernel", "n_q": 8192, "causal": False, "direction": direction}
    for row in sorted(bench.select(**size), key=lambda row: (-row["head_dim"], row["level"])):
        head_dim, level = row["head_dim"], row["level"]
        scores = row["batch"] * row["heads"] * row["n_q"] * row["n_k"]
        measured = row["ms_median"] * 1e9 * PEAK["bf16"] / 4096 / scores
        total = level_clocks(instructions, level, head_dim, direction)["sum"]
        found[head_dim, level] = Compared(predicted(instructions, level, head_dim, direction), total, measured)
    return found


def busy(rows: Sequence[Row], ms: float, ghz: float, scores: float) -> dict[str, float]:
    """Return the per cent of a program's time that each unit must have been busy: `unit_clocks` / time."""
    available = ms * 1e6 * ghz * MULTIPROCESSORS / scores
    return {unit: 100 * clocks / available for unit, clocks in unit_clocks(rows).items() if unit in UNIT_NAMES}
