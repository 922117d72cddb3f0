"""Options and checks that several commands share."""

import torch

from sage_lab.command_line import Failed


def require_gpu() -> None:
    """`Failed` without one; with one, seed it: what a command draws is always the same."""
    if not torch.cuda.is_available():
        raise Failed("device: expected a CUDA device, found none (recorded results are in notebooks/recorded)")
    torch.manual_seed(0)
