"""The cost model: how long a kernel should take on a GPU, from counted instructions and the rates of data sheets.

Each of a multiprocessor's four schedulers has its own units and its own warps. For one tile a warp needs every unit for
some clocks (`clocks`): its `Demand` divided by the unit's rate. Inside a warp nothing overlaps, because each step needs
the result of the one before. One warp alone therefore takes the sum of all clocks, and very many warps take the clocks
of the busiest unit, or one clock per instruction if that is more. In between, `tiles_per_clock` is mean value analysis,
the standard formula for customers (warps) that queue at servers (units): a warp that arrives at a unit waits for the
warps that would be there without it.

Nothing is fitted. Rates come from gpus.json; how many warps share a scheduler follows from a program's registers and
shared memory. The model leaves out latency, bank conflicts, barriers, the start and the end of a program, the last wave
that is half empty, and the lower clock of a GPU at its power limit. All of these make a kernel slower than predicted.
Latency is the reason why pipeline stages can't be ranked.
"""

import json
import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from sage_lab.records import Row

TABLE = Path(str(resources.files("sage_kernels.common") / "launch_compiled.json"))  # written by `choose`
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


class Demand(NamedTuple):
    """Work of one warp for one tile, by the unit that does it."""

    instructions: int  # issue slots
    float32: int  # float arithmetic, and integer multiplications, which run on the same units
    integer: int  # comparisons, logic, additions of integers, conversions that only move bits
    special: int  # exponentials, reciprocals, conversions of a number
    other: int  # neither of these three: loads, stores, matmuls, branches, addresses that all threads share
    bytes: int  # to and from shared memory or the L1 cache, which is the same memory
    int8: int  # multiply-adds of the tensor cores
    float16: int


class Kernel(NamedTuple):
    """A compiled kernel: the size of its tile, the demand of a warp for a tile, and what a program occupies."""

    block_q: int
    block_kv: int
    num_warps: int
    registers: int  # per thread
    shared: int  # bytes
    demand: Demand


@cache
def gpus() -> dict[str, Gpu]:
    """Return the GPUs of gpus.json by name."""
    content = json.loads((resources.files("sage_lab.bench") / "gpus.json").read_text())
    architectures = {row["capability"]: row for row in content["architectures"]}
    return {row["name"]: _gpu(row, architectures[row["capability"]]) for row in content["gpus"]}


def _gpu(sheet: dict, architecture: dict) -> Gpu:
    tera_clocks = 2 * sheet["multiprocessors"] * sheet["clock_ghz"] / 1e3  # a multiply-add is two operations
    return Gpu(
        **{name: sheet[name] for name in ("name", "capability", "multiprocessors", "clock_ghz", "memory_gb_s")},
        **{name: architecture[name] for name in ("float32", "integer", "special", "bytes", "warps")},
        int8=sheet["int8_tops"] / tera_clocks, float16=sheet["float16_tflops"] / tera_clocks,
        shared_memory=architecture["shared_memory_kb"] << 10,
    )  # fmt: skip


def kernel_of(row: Row) -> Kernel | None:
    """Return the kernel of a row that `choose` recorded; None for a program without a loop with exponentials."""
    if row.get("instructions") is None:
        return None
    return Kernel(*map(row.get, Kernel._fields[:-1]), Demand(*map(row.get, Demand._fields)))


def clocks(demand: Demand, gpu: Gpu) -> dict[str, float]:
    """Return the clocks of each unit of a scheduler that one warp needs for one tile."""
    units = ("int8", "float16", "float32", "integer", "special", "bytes")
    rate = {name: getattr(gpu, name) / SCHEDULERS for name in units}
    return {
        "tensor cores": demand.int8 / rate["int8"] + demand.float16 / rate["float16"],
        **{name: WARP * getattr(demand, name) / rate[name] for name in ("float32", "integer", "special")},
        "shared memory": demand.bytes / rate["bytes"],
        "other": float(demand.other),
    }


def warps_per_scheduler(kernel: Kernel, gpu: Gpu) -> float:
    """Return how many warps share a scheduler when a multiprocessor holds as many programs as fit."""
    registers = math.ceil(kernel.registers / 8) * 8 * WARP * kernel.num_warps
    programs = min(
        REGISTERS // registers, gpu.shared_memory // (kernel.shared + PROGRAM_BYTES), gpu.warps // kernel.num_warps
    )
    return programs * kernel.num_warps / SCHEDULERS


def tiles_per_clock(demand: Demand, gpu: Gpu, warps: float) -> float:
    """Return the tiles that the warps of one scheduler finish in a clock, each warp with tiles of its own."""
    needed = clocks(demand, gpu)
    waiting, rate = dict.fromkeys(needed, 0.0), 0.0
    for present in range(1, max(1, round(warps)) + 1):
        taken = {unit: clocks * (1 + waiting[unit]) for unit, clocks in needed.items()}
        rate = present / sum(taken.values())
        waiting = {unit: rate * clocks for unit, clocks in taken.items()}
    return min(rate * min(1.0, warps), 1 / demand.instructions)


def milliseconds(kernel: Kernel, gpu: Gpu, heads: int, n: int, causal: bool) -> float:
    """Predict the time for n queries and n keys of `heads` heads (of all samples); inf if no program fits."""
    rows, columns = math.ceil(n / kernel.block_q), math.ceil(n / kernel.block_kv)
    tiles = (rows * columns + max(rows, columns)) / 2 if causal else rows * columns  # with those on the diagonal
    warps = warps_per_scheduler(kernel, gpu)
    if not warps:
        return math.inf
    rate = SCHEDULERS * tiles_per_clock(kernel.demand, gpu, warps) / kernel.num_warps
    return heads * tiles / (rate * gpu.multiprocessors * gpu.clock_ghz * 1e6)
