"""Processes that torchrun started, for measurements on several devices of one host."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Processes(NamedTuple):
    """This process's place among those that work together."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of every process's x."""
        if self.count == 1:
            return x
        dist.all_reduce(x)
        return x / self.count

    def agreed(self, decision: bool) -> bool:
        """Return what the first process decided."""
        if self.count == 1:
            return decision
        decisions = [decision]
        dist.broadcast_object_list(decisions)
        return decisions[0]

    def command(self, alone: str) -> str:
        """Return a command as it was typed for these processes, from how one of them would be started."""
        launcher = f"torchrun --standalone --nproc-per-node {self.count} -m"
        return alone.replace("python -m", launcher) if self.count > 1 else alone


ALONE = Processes()


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Join the group that torchrun started; without torchrun, this process is alone. device: "cpu" or "cuda"."""
    if "RANK" not in os.environ:
        yield Processes(device=torch.device(device))
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), place)
        # A process that left right after its last operation sometimes never ended: gloo may still hold its tensors.
        dist.barrier()
    finally:
        dist.destroy_process_group()
