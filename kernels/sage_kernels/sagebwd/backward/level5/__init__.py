"""Level 5, Hopper: dS is computed once; dQ, dK and dV come from one pass over the tiles.

Level 3 computes S and dP in the program of dQ and again in that of keys. Here two warpgroups of keys make dK and dV
and hand dS^T over through shared memory to the one that makes dQ. At a head size of 64 that is a third warpgroup
(`narrow.py`). At 128 two gradients leave no registers for it, and the two make dQ, too (`wide.py`). How numbers are
kept, and what comes after, is the same for both (`units.py`); `backward/prepare.py` is what comes before.

Expect: five matmuls a tile instead of seven (at 128, instead of eight), fewer exponentials, and fewer instructions for
what is left.
"""

from torch import Tensor

from sage_kernels.common.launcher import Start
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.hopper import HEAD_DIMS
from sage_kernels.sagebwd.backward.level5 import narrow, units, wide
from sage_kernels.sagebwd.backward.program import BackwardInputs

LAUNCHES = {"dqdkdv": narrow.LAUNCH, "dqdkdv_wide": wide.LAUNCH}


def kernels(head_dim: int) -> tuple[str, ...]:
    """Return the program that a head size takes: a name in `LAUNCHES`."""
    return ("dqdkdv",) if padded_head_dim(head_dim) == HEAD_DIMS[0] else ("dqdkdv_wide",)


def run_hopper_backward(
    inputs: BackwardInputs, start: Start, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] from what `prepare_backward` makes for level 5."""
    if padded_head_dim(inputs.query.shape[3]) == HEAD_DIMS[0]:
        launch = narrow.dqdkdv_program, narrow.CONSTANTS, narrow.OPTIONS, narrow.QUERIES_ADDED
    else:
        launch = wide.dqdkdv_wide_program, wide.CONSTANTS, wide.OPTIONS, wide.QUERIES_ADDED
    return units.run_one_pass(inputs, *launch, start, is_causal=is_causal, scale=scale)
