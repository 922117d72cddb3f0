"""Processes that torchrun started, for measurements on several devices of one host."""

import os
from collections.abc import Iterator, Sequence
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
    finally:
        dist.destroy_process_group()


class Members(NamedTuple):
    """This process's group of one size. group: None for a size of one, where nothing is sent."""

    size: int
    rank: int
    group: dist.ProcessGroup | None


def groups_of_each_size(world: Processes) -> list[Members]:
    """Make groups of 1, 2, 4, ... processes, as far as they divide all of them; every process must call this."""
    sizes = [2**power for power in range(world.count.bit_length()) if world.count % 2**power == 0]
    return [
        Members(size, world.rank % size, dist.new_subgroups(group_size=size)[0] if size > 1 else None) for size in sizes
    ]


def largest_of(facts: Sequence[float], world: Processes) -> list[float]:
    """Return the largest of each fact over all processes."""
    largest = torch.tensor(facts, dtype=torch.float64, device=world.device)
    if world.count > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()
