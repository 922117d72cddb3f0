"""Level 4, Hopper: level 3's split backward by warps with different jobs, as in the forward's level 5.

dQ by rows of queries (`queries.py`), dK and dV by rows of keys (`keys.py`). A warpgroup has 64 rows, one warp loads
tiles for all of them (`hopper/toolbox.py`), and scales are level 1's: one per row of P and dS in each tile. S, dP and a
gradient at once take 240 registers of a thread, so that there is room for two warpgroups; without dP, for three.

Expect: tensor cores and issue slots are each busy for half to two thirds of the time, for they still take turns more
than they overlap.
"""

from torch import Tensor

from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.hopper import HEAD_DIMS
from sage_kernels.hopper.toolbox import Fetched, fetched_rows
from sage_kernels.sagebwd.backward.level4 import keys, queries
from sage_kernels.sagebwd.backward.program import BackwardInputs

# num_warps / 4 warpgroups compute; num_stages: places of a ring; a computing thread has 240 registers, 160 with three.
LAUNCHES = queries.LAUNCHES | keys.LAUNCHES


def kernels(head_dim: int) -> tuple[str, ...]:
    """Return the programs that a head size takes: names in `LAUNCHES`."""
    return ("dq", "dkdv") if padded_head_dim(head_dim) == HEAD_DIMS[0] else ("dq", "dk", "dv")


def run_kernel(
    kernel: str,
    inputs: BackwardInputs,
    do: Fetched,
    v: Fetched,
    start: Start = start_with_triton,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Compute dQ [B, H, Nq, D], or dK, dV or both [B, Hkv, Nk, D]: the results of the program of that name.

    do, v: the inputs' dO and V, fetched once for all programs where it takes a copy.
    """
    if kernel == "dq":
        return queries.run_dq(inputs, do, v, start, is_causal=is_causal, scale=scale)
    return keys.run_dkdv(kernel, inputs, do, v, start, is_causal=is_causal)


def run_hopper_backward(
    inputs: BackwardInputs, start: Start = start_with_triton, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] from level 3's inputs."""
    do, v = fetched_rows(inputs.grad_output), fetched_rows(inputs.value)
    names, options = kernels(inputs.query.shape[3]), {"is_causal": is_causal, "scale": scale}
    return tuple(x for name in names for x in run_kernel(name, inputs, do, v, start, **options))
