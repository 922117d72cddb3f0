"""Level 4, Hopper: split backward by warps with different jobs."""

import torch

from sage_kernels.hopper import declared
from sage_kernels.sagebwd.backward.level4 import programs
from sage_kernels.sagebwd.backward.level4.programs import LAUNCHES, kernels, program_of, run, run_kernel

__all__ = ["LAUNCHES", "kernels", "program_of", "run", "run_kernel", "signature"]


def signature(kernel: str, padded_head_dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    program, constants, _ = program_of(kernel)
    return declared.signature_of(program, constants, programs.tile_shapes(kernel, padded_head_dim), dtype)
