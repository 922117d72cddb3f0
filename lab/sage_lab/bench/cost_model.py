"""A cost model: how long a kernel should take on a GPU, from the instructions of its loop and the rates of data sheets.

Each of a multiprocessor's four schedulers has its own units and its own warps. For one tile a warp needs every unit for
some clocks: what its loop asks for (`demand`), divided by the unit's rate. Inside a warp nothing overlaps, because each
step needs the result of the one before. One warp alone therefore takes the sum of all clocks, and very many warps take
the clocks of the busiest unit, or one clock per instruction if that is more. In between, mean value analysis is the
standard formula for customers (warps) that queue at servers (units): a warp that arrives at a unit waits for the warps
that would be there without it.

Nothing is fitted. The model leaves out latency, bank conflicts, barriers, the start and the end of a program, the last
wave that is half empty, and the lower clock of a GPU at its power limit. Latency is the reason why pipeline stages
can't be ranked.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from sage_lab.records import Row

SCHEDULERS = 4
WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor
PROGRAM_BYTES = 1024  # of shared memory, which the system takes for every program
# An instruction's unit is the first whose pattern matches. "other" does none of these three: loads, stores, matmuls,
# branches, addresses that all threads share. Integer multiplications run on the units of float32.
UNITS = {
    "float32": r"F(?:ADD|MUL|FMA)|IMAD|H(?:FMA|MUL|ADD)2",
    "special": r"MUFU|F2I|I2F(?!P)|F2F(?!P)|FRND",
    "integer": r"FMNMX|VIMNMX|FSEL|SEL|[FI]SETP|I?ADD|VIADD|IADD3|LOP3|PLOP3|PRMT|SHF|LEA|MOV|I2FP|F2FP|I2IP|SGXT|CS2R"
    "|IABS",
    "other": "",
}
MATMUL = r"([IHQ])G?MMA\.(?:64x(\d+)x(\d+)|168(\d+))"  # [64 x N x K] of four warps, or [16 x 8 x K] of one


class Gpu(NamedTuple):
    """A data sheet. Rates are per clock and multiprocessor."""

    float32: int
    integer: int
    special: int
    bytes: int  # of shared memory
    int8: int  # multiply-adds of the tensor cores
    float16: int  # with sums in float32
    warps: int  # that a multiprocessor holds at most
    shared_memory: int  # bytes
    memory: float  # bytes of the GPU's memory, per clock and multiprocessor


# By compute capability: A100 of 80 GB, RTX 3090, RTX 4090, H200, RTX 5090. From NVIDIA's white papers on A100, GA102,
# Ada, Hopper and RTX Blackwell (tensor cores, memory, clock), and the CUDA programming guide ("Throughput of Native
# Arithmetic Instructions", "Technical Specifications").
GPUS = {
    80: Gpu(64, 64, 16, 128, 2048, 1024, 64, 164 << 10, 13.4),
    86: Gpu(128, 64, 16, 128, 1024, 256, 48, 100 << 10, 6.7),
    89: Gpu(128, 64, 16, 128, 1024, 256, 48, 100 << 10, 3.1),
    90: Gpu(128, 64, 16, 128, 4096, 2048, 64, 228 << 10, 19.9),
    120: Gpu(128, 64, 16, 128, 1024, 256, 48, 100 << 10, 4.4),
}


def demand(loop: Sequence[str]) -> Row:
    """Return what one warp asks of the units for one tile: its instructions by unit, bytes, and multiply-adds."""
    found = {"instructions": len(loop)} | dict.fromkeys((*UNITS, "bytes", "int8", "float16"), 0)
    for instruction in loop:
        unit = next(name for name, pattern in UNITS.items() if re.match(pattern, instruction))
        found[unit] += 2 if re.match(r"F(?:ADD|MUL|FMA)2", instruction) else 1  # two packed numbers
        found["bytes"] += bytes_of(instruction)
        if matmul := re.match(MATMUL, instruction):
            letter, n, k, k_of_one = matmul.groups()
            count = 16 * int(n) * int(k) if n else 16 * 8 * int(k_of_one)
            found["float16" if letter == "H" else "int8"] += count * (2 if "TF32" in instruction else 1)
    return found


def bytes_of(instruction: str) -> int:
    """Return the bytes that a warp's instruction moves through shared memory, at least 128: a whole clock of it."""
    found = re.match(r"(LDSM|STSM|LDS|STS|LDGSTS|LDG|STG|LDL|STL|SHFL)\b(\S*)", instruction)
    if not found:
        return 0
    if found[1] in ("LDSM", "STSM"):
        return 128 * int(found[2][-1])
    width = re.search(r"\.(64|128)\b", found[2])
    return 4 * int(width[1]) if width else 128


def clocks_per_score(row: Row) -> float:
    """Predict the clocks of a multiprocessor for one score of a kernel, from its row in launch_compiled.json.

    0 if nothing can be said: of a GPU that is not in GPUS, of a program without a loop with exponentials. Infinite if
    no program fits.
    """
    gpu = GPUS.get(row["capability"])
    if gpu is None or "instructions" not in row:
        return 0.0
    needed = {name: WARP * row[name] / getattr(gpu, name) for name in ("float32", "integer", "special")}
    needed["tensor cores"] = row["int8"] / gpu.int8 + row["float16"] / gpu.float16
    needed["shared memory"] = row["bytes"] / gpu.bytes
    needed = {unit: SCHEDULERS * clocks for unit, clocks in needed.items()} | {"other": row["other"]}
    registers = math.ceil(row["registers"] / 8) * 8 * WARP * row["num_warps"]
    programs = min(
        REGISTERS // registers, gpu.shared_memory // (row["shared"] + PROGRAM_BYTES), gpu.warps // row["num_warps"]
    )
    if not programs:
        return math.inf
    warps = programs * row["num_warps"] / SCHEDULERS  # of one scheduler
    rate = min(tiles_per_clock(needed, warps), 1 / row["instructions"])
    return row["num_warps"] / (SCHEDULERS * rate * row["block_q"] * row["block_kv"])


def tiles_per_clock(needed: dict[str, float], warps: float) -> float:
    """Return the tiles that the warps of one scheduler finish in a clock, each warp with tiles of its own.

    needed: the clocks of each unit for one warp's tile.
    """
    waiting, rate = dict.fromkeys(needed, 0.0), 0.0
    for present in range(1, max(1, round(warps)) + 1):
        taken = {unit: clocks * (1 + waiting[unit]) for unit, clocks in needed.items()}
        rate = present / sum(taken.values())
        waiting = {unit: rate * clocks for unit, clocks in taken.items()}
    return rate * min(1.0, warps)


def by_the_rule(needed: Row, gpu: Gpu) -> tuple[float, float]:
    """Return the clocks of the tensor cores, and of the busiest other unit: notebook 08's rule is their sum.

    needed: of `demand`, a warp's, divided by what it is asked for.
    """
    threads = (WARP * needed[unit] / getattr(gpu, unit) for unit in ("special", "integer", "float32"))
    others = (*threads, needed["instructions"] / SCHEDULERS, needed["bytes"] / gpu.bytes)
    return needed["int8"] / gpu.int8 + needed["float16"] / gpu.float16, max(others)
