"""Launches of kernels, from `candidates.json`: those worth trying, and the ones for a GPU of which nothing is known.

A candidate must keep the quantiser's promise that a scale is constant along a contraction: tiles of at most SCALE_BLOCK
keys where keys are contracted (forward, dq), of at most as many queries where queries are (dk, dv). Since P and dS get
a scale per row of one tile, these two numbers also decide the results; so they are SCALE_BLOCK, 128, in every launch of
an INT8 level. A kernel whose name ends in per_block has one scale per tile: the tile is the block. In SLA2, block_q is
the part of a 128-query block that is worked on at a time; in linear_query, block_kv is a number of columns.

The file has tiles as [block_q, block_kv, num_warps], sometimes with a limit of registers, each to be tried with every
number of stages, the most promising number first. Small tiles are for GPUs on which a thread adds up in registers
(mma.sync), where large ones spill. The tests run every candidate. Defaults, the four numbers of a `Launch`, fit the
shared memory of every GPU from sm_80 on.
"""

import json
from pathlib import Path
from typing import NamedTuple


class Launch(NamedTuple):
    """Launch settings. In a Hopper program: warps that compute, places of a ring, registers of such a thread."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; fewer let more programs share a multiprocessor

    @property
    def options(self) -> dict[str, int | None]:
        """Return what Triton's compiler is told besides the tile's size, for a program in plain Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CANDIDATES = {  # what `bench --tune` tries
    kernel: tuple(
        Launch(block_q, block_kv, num_warps, num_stages, *max_registers)
        for num_stages in row["num_stages"]
        for block_q, block_kv, num_warps, *max_registers in row["tiles"]
    )
    for row in TABLE["candidates"]
    for kernel in row["kernels"]
}
DEFAULTS = {kernel: Launch(*launch) for kernel, launch in TABLE["defaults"].items()}


def candidates(kernel: str, level: int) -> tuple[Launch, ...]:
    """Return the launches worth trying for a kernel of a level. Level 0 quantises nothing, so its tiles are free."""
    return CANDIDATES["forward_16bit" if (kernel, level) == ("forward", 0) else kernel]
