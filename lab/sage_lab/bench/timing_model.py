"""How long a kernel should take on a GPU that needn't be there: a prediction from counted instructions and data sheets.

Each of a multiprocessor's four schedulers has its own units and its own warps. For one tile a warp asks every unit for
some clocks (`clocks`): its `Demand` divided by the unit's rate. Inside a warp nothing overlaps: what comes next needs
the result. So one warp alone takes the sum of all clocks, and very many warps take those of the busiest unit, or one
clock per instruction if that is more. In between, `tiles_per_clock` is mean value analysis, the standard formula for
customers (warps) that queue at servers (units): a warp that arrives at a unit waits for those that would be there if it
did not exist.

Nothing is fitted: rates are those of gpus.json, how many warps share a scheduler follows from the compiled kernel's
registers and shared memory. Left out are latency (of memory, of one instruction waiting for the last), bank conflicts,
barriers, a start and an end per program, the half-empty last wave, and power: a GPU that reaches its limit lowers its
clock. All of these make a kernel slower than predicted, and the first of them is why pipeline stages can't be ranked.
"""

import json
import math
from functools import cache
from importlib import resources
from typing import NamedTuple

from sage_lab.bench.machine_loop import Demand

SCHEDULERS = 4
WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor
PROGRAM_BYTES = 1024  # of shared memory, which the system takes for every program


class Gpu(NamedTuple):
    """A data sheet. Rates are per clock and multiprocessor."""

    name: str
    capability: int
    multiprocessors: int
    clock_ghz: float
    memory_gb_s: float
    int8: float  # multiply-adds of the tensor cores
    float16: float  # with sums in float32
    float32: float
    integer: float
    special: float
    bytes: float  # of shared memory
    warps: int  # that a multiprocessor holds at most
    shared_memory: int  # bytes


class Kernel(NamedTuple):
    """A compiled kernel: a tile's size, what a warp asks for it, and what a program occupies."""

    block_q: int
    block_kv: int
    num_warps: int
    registers: int  # per thread
    shared: int  # bytes
    demand: Demand


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs of gpus.json by name."""
    content = json.loads((resources.files("sage_lab.bench") / "gpus.json").read_text())
    architectures = {row["capability"]: row for row in content["architectures"]}
    return {row["name"]: _gpu(row, architectures[row["capability"]]) for row in content["gpus"]}


def _gpu(sheet: dict, architecture: dict) -> Gpu:
    clocks = 2 * sheet["multiprocessors"] * sheet["clock_ghz"] / 1e3  # tera-operations per multiply-add and clock
    return Gpu(
        **{name: sheet[name] for name in ("name", "capability", "multiprocessors", "clock_ghz", "memory_gb_s")},
        **{name: architecture[name] for name in ("float32", "integer", "special", "bytes", "warps")},
        int8=sheet["int8_tops"] / clocks, float16=sheet["float16_tflops"] / clocks,
        shared_memory=architecture["shared_memory_kb"] << 10,
    )  # fmt: skip


def clocks(demand: Demand, gpu: Gpu) -> dict[str, float]:
    """Clocks of each unit of a scheduler that one warp needs for one tile."""
    units = ("int8", "float16", "float32", "integer", "special", "bytes")
    rate = {name: getattr(gpu, name) / SCHEDULERS for name in units}
    return {
        "tensor cores": demand.int8 / rate["int8"] + demand.float16 / rate["float16"],
        **{name: WARP * getattr(demand, name) / rate[name] for name in ("float32", "integer", "special")},
        "shared memory": demand.bytes / rate["bytes"],
        "other": float(demand.other),
    }


def warps_per_scheduler(kernel: Kernel, gpu: Gpu) -> float:
    """How many warps share a scheduler; as many programs as fit."""
    registers = math.ceil(kernel.registers / 8) * 8 * WARP * kernel.num_warps
    programs = min(
        REGISTERS // registers, gpu.shared_memory // (kernel.shared + PROGRAM_BYTES), gpu.warps // kernel.num_warps
    )
    return programs * kernel.num_warps / SCHEDULERS


def tiles_per_clock(demand: Demand, gpu: Gpu, warps: float) -> float:
    """Tiles that the warps of one scheduler finish in a clock, each warp with tiles of its own."""
    needed = clocks(demand, gpu)
    waiting, rate = dict.fromkeys(needed, 0.0), 0.0
    for present in range(1, max(1, round(warps)) + 1):
        taken = {unit: clocks * (1 + waiting[unit]) for unit, clocks in needed.items()}
        rate = present / sum(taken.values())
        waiting = {unit: rate * clocks for unit, clocks in taken.items()}
    return min(rate * min(1.0, warps), 1 / demand.instructions)


def milliseconds(kernel: Kernel, gpu: Gpu, heads: int, n: int, causal: bool) -> float:
    """Of all tiles of `heads` heads (of all samples) of n queries and n keys. inf if no program fits."""
    rows, columns = math.ceil(n / kernel.block_q), math.ceil(n / kernel.block_kv)
    tiles = (rows * columns + max(rows, columns)) / 2 if causal else rows * columns  # with those on the diagonal
    warps = warps_per_scheduler(kernel, gpu)
    if not warps:
        return math.inf
    rate = SCHEDULERS * tiles_per_clock(kernel.demand, gpu, warps) / kernel.num_warps
    return heads * tiles / (rate * gpu.multiprocessors * gpu.clock_ghz * 1e6)
