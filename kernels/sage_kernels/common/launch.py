"""The choice of a kernel's launch settings: tile sizes, warps and pipeline stages.

They come from tables (`launch_tables`): what the user measured with `python -m sage_lab bench --tune`, what we
measured on Hopper, what was chosen by compiling for the GPU's compute capability. DEFAULTS are for the
rest. Nothing is tuned at import or at the first call.
"""

import torch

from sage_kernels.common.candidates import DEFAULTS, Launch
from sage_kernels.common.launch_tables import Case, table_for
from sage_kernels.common.quantize import SCALE_BLOCK


def choose_launch(kernel: str, level: int, padded_head_dim: int, is_causal: bool, device: torch.device) -> Launch:
    """Return the launch of a kernel of `DEFAULTS` from the tables for this GPU, else the default.

    Raises:
        ValueError: Its tile does not fit into the blocks that share a scale; the kernel would compute something else.
    """
    launch = DEFAULTS[kernel]
    if device.type == "cuda":
        launch = table_for(device).get(Case(kernel, level, max(padded_head_dim, 64), is_causal), launch)
    if not kernel.startswith("sla2_") and (SCALE_BLOCK % launch.block_q or SCALE_BLOCK % launch.block_kv):
        raise ValueError(
            f"{kernel}: expected a tile whose sides divide SCALE_BLOCK = {SCALE_BLOCK}, "
            f'got {launch.block_q} x {launch.block_kv}: see "Change the block size" in CONTRIBUTING.md'
        )
    return launch
