"""A cost model: what a kernel's loop asks of each unit, from its instructions, and the rates of data sheets.

Nothing is fitted. The model leaves out latency, bank conflicts, barriers, the start and the end of a program, the last
wave that is half empty, and the lower clock of a GPU at its power limit.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from sage_lab.records import Row

SCHEDULERS = 4
WARP = 32  # threads
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
    memory: float  # bytes of the GPU's memory, per clock and multiprocessor


# By compute capability: A100 of 80 GB, RTX 3090, RTX 4090, H200, RTX 5090. From NVIDIA's white papers on A100, GA102,
# Ada, Hopper and RTX Blackwell (tensor cores, memory, clock), and the CUDA programming guide ("Throughput of Native
# Arithmetic Instructions").
GPUS = {
    80: Gpu(64, 64, 16, 128, 2048, 1024, 13.4),
    86: Gpu(128, 64, 16, 128, 1024, 256, 6.7),
    89: Gpu(128, 64, 16, 128, 1024, 256, 3.1),
    90: Gpu(128, 64, 16, 128, 4096, 2048, 19.9),
    120: Gpu(128, 64, 16, 128, 1024, 256, 4.4),
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


def by_the_rule(needed: Row, gpu: Gpu) -> tuple[float, float]:
    """Return the clocks of the tensor cores, and of the busiest other unit: notebook 08's rule is their sum.

    needed: of `demand`, a warp's, divided by what it is asked for.
    """
    threads = (WARP * needed[unit] / getattr(gpu, unit) for unit in ("special", "integer", "float32"))
    others = (*threads, needed["instructions"] / SCHEDULERS, needed["bytes"] / gpu.bytes)
    return needed["int8"] / gpu.int8 + needed["float16"] / gpu.float16, max(others)
