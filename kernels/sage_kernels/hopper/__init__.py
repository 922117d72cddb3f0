"""The parts that the kernels for Hopper, written in Gluon, share; and where they can run."""

import torch
from triton import knobs

from sage_kernels.common.quantize import padded_head_dim

HEAD_DIMS = (64, 128)  # padded


def obstacle(device: torch.device, head_dim: int) -> str | None:
    """Return why these levels cannot run there, or None if they can."""
    if device.type != "cuda" or knobs.runtime.interpret:
        return f"it needs a Hopper GPU, and query is on {device}" + ", interpreted" * knobs.runtime.interpret
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), and this one has {capability[0]}.{capability[1]}"
    if padded_head_dim(head_dim) not in HEAD_DIMS:
        return f"it needs a head size from 33 to 128, and query has {head_dim}"
    return None


def multiprocessors(device: torch.device) -> int:
    """Return how many a GPU has: as many as there are programs that go from one piece of work to the next."""
    if device.type == "meta":  # nothing runs: programs are only noted
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
