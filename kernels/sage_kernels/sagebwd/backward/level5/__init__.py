"""Level 5, Hopper: one pass over the tiles."""

import torch

from sage_kernels.hopper import declared
from sage_kernels.sagebwd.backward.level5 import narrow
from sage_kernels.sagebwd.backward.level5.narrow import LAUNCHES, kernels, program_of, run

__all__ = ["LAUNCHES", "kernels", "program_of", "run", "signature"]


def signature(kernel: str, padded_head_dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    program, constants, _ = program_of(kernel)
    return declared.signature_of(program, constants, narrow.tile_shapes(kernel, padded_head_dim), dtype)
