"""Launches of kernels: those that are worth trying, and the ones for a GPU of which nothing is known.

A candidate must keep the quantiser's promise that a scale is constant along a contraction: tiles of at most SCALE_BLOCK
keys where keys are contracted (forward, dq), of at most as many queries where queries are (dk, dv). Since P and dS get
a scale per row of one tile, these two numbers also decide the results; so they are SCALE_BLOCK, 128, in every launch of
an INT8 level. The tests run every candidate. DEFAULTS fit the shared memory of every GPU from sm_80 on.
"""

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


def with_stages(*tiles: Launch, stages: tuple[int, ...] = (2, 3, 1)) -> tuple[Launch, ...]:
    """Return every tile with every number of stages. The most promising number comes first."""
    return tuple(tile._replace(num_stages=count) for count in stages for tile in tiles)


# What `bench --tune` tries. Small tiles are for GPUs on which a thread adds up in registers
# (mma.sync), where large ones spill.
CANDIDATES = {
    "forward": with_stages(
        Launch(64, 128, 4, 2), Launch(128, 128, 8, 2), Launch(32, 128, 2, 2), Launch(32, 128, 4, 2)
    ),
    "forward_16bit": with_stages(  # of level 0
        Launch(64, 128, 4, 2), Launch(128, 128, 8, 2), Launch(64, 64, 4, 2), Launch(128, 64, 8, 2),
        Launch(64, 32, 4, 2),
    ),
    "dq_16bit": with_stages(
        Launch(64, 128, 4, 2), Launch(128, 64, 8, 2), Launch(128, 128, 8, 2), Launch(64, 64, 4, 2),
        Launch(64, 32, 4, 2),
    ),
    "dkdv_16bit": with_stages(
        Launch(64, 64, 4, 2), Launch(64, 128, 8, 2), Launch(32, 64, 4, 2), Launch(32, 128, 8, 2),
    ),
    "dq": with_stages(
        Launch(64, 128, 4, 2), Launch(128, 128, 8, 2), Launch(32, 128, 4, 2), Launch(64, 128, 8, 2),
    ),
    **dict.fromkeys(("dkdv", "dk", "dv"), with_stages(
        Launch(128, 64, 4, 2), Launch(128, 128, 8, 2), Launch(128, 32, 4, 2), Launch(128, 32, 8, 2),
        Launch(128, 64, 8, 2),
    )),
    # One scale per tile of P and dS: the tile is the block.
    **dict.fromkeys(("dq_per_block", "dkdv_per_block"), with_stages(Launch(128, 128, 8, 2))),
    # SLA2: block_q is the part of a 128-query block that is worked on at a time; in linear_query, block_kv is a number
    # of columns.
    "sla2_as_printed": with_stages(
        Launch(64, 64, 4, 1), Launch(128, 64, 8, 1), Launch(32, 64, 4, 1), Launch(64, 64, 8, 1), stages=(1,)
    ),
    **dict.fromkeys(
        ("sla2_forward_16bit", "sla2_query"),
        with_stages(Launch(64, 64, 4, 2), Launch(128, 64, 8, 2), Launch(32, 64, 2, 2)),
    ),
    "sla2_forward": with_stages(
        Launch(64, 64, 4, 2), Launch(64, 64, 4, 2, 168), Launch(128, 64, 8, 2), Launch(32, 64, 2, 2)
    ),
    "sla2_mix": (Launch(64, 64, 4, 1), Launch(64, 64, 8, 1)),
    "sla2_linear_query": (
        Launch(128, 64, 8, 1), Launch(128, 64, 16, 1), Launch(128, 32, 8, 1), Launch(128, 32, 16, 1),
    ),
    "sla2_key": with_stages(
        Launch(64, 64, 4, 2), Launch(32, 64, 4, 2), Launch(32, 64, 8, 2), Launch(64, 64, 8, 2)
    ),
}  # fmt: skip
DEFAULTS = {
    "forward": Launch(64, 128, 4, 1),
    "dq": Launch(64, 128, 8, 1),
    **dict.fromkeys(("dkdv", "dk"), Launch(128, 64, 8, 1)),
    "dv": Launch(128, 64, 4, 1),
    **dict.fromkeys(("dq_per_block", "dkdv_per_block"), Launch(128, 128, 8, 1)),
    **dict.fromkeys(("dq_16bit", "dkdv_16bit", "sla2_as_printed"), Launch(64, 64, 4, 1)),
    **dict.fromkeys(("sla2_forward_16bit", "sla2_forward", "sla2_query"), Launch(64, 64, 4, 1)),
    "sla2_mix": Launch(64, 64, 8, 1),
    "sla2_linear_query": Launch(128, 32, 8, 1),
    "sla2_key": Launch(32, 64, 4, 1),
}


def candidates(kernel: str, level: int) -> tuple[Launch, ...]:
    """Return the launches worth trying for a kernel of a level. Level 0 quantises nothing, so its tiles are free."""
    return CANDIDATES["forward_16bit" if (kernel, level) == ("forward", 0) else kernel]
