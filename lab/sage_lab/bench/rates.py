"""The rate at which all programs read from the L2 cache what others read, too, as those of a head read keys and values.

Every program reads tiles one after the other, and begins one tile behind its neighbour. So two programs seldom read the
same tile at the same time, except in buffers of fewer tiles than there are programs at work. Of a buffer of more than
38 MB only 38 MB are read, which fit into the L2 cache of an H200.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_lab.bench.timing import GPU, Gpu
from sage_lab.records import Row

TILE = 4096  # numbers of 4 bytes that a program reads at once
SIZES = tuple(2**power for power in range(21, 31))  # bytes: 2 MB to 1 GB
READ, PROGRAMS = 2**33, 2048  # bytes that all programs read together


@triton.jit
def read_kernel(buffer, sums, tiles, rounds, TILE: tl.constexpr):
    """Add up `rounds` tiles of `buffer`, past the L1 cache, and write this program's sums: buffer -> sums [P, TILE]."""
    program = tl.program_id(0)
    entries = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int32)
    for number in range(rounds):
        tile = (program + number) % tiles
        total += tl.load(buffer + tile * TILE + entries, cache_modifier=".cg")
    tl.store(sums + program * TILE + entries, total)


def read(buffer: Tensor, sums: Tensor, rounds: int) -> None:
    """Launch a program for each row of `sums`; buffer int32 [tiles, TILE]."""
    read_kernel[(len(sums),)](buffer, sums, len(buffer), rounds, TILE=TILE, num_warps=8)


def rate_rows(gpu: Gpu = GPU, sizes: Sequence[int] = SIZES, count: int = PROGRAMS, total: int = READ) -> Iterator[Row]:
    """Yield a row per size of the buffer. Raises RuntimeError if a sum is wrong: something was not read."""
    rounds = total // (count * TILE * 4)
    for size in sizes:
        buffer = torch.randint(-9, 9, (size // (4 * TILE), TILE), dtype=torch.int32, device=gpu.device)
        sums = torch.empty(count, TILE, dtype=torch.int32, device=gpu.device)
        timing = gpu.alone(lambda buffer=buffer, sums=sums: read(buffer, sums, rounds))
        tiles = (torch.arange(rounds, device=gpu.device) + count - 1) % len(buffer)
        if not torch.equal(sums[-1], buffer[tiles].sum(0, dtype=torch.int32)):
            raise RuntimeError(f"read_kernel: expected the last program's sums of {rounds} tiles, got other ones")
        terabytes = total / timing.ms_median / 1e9
        yield {"bytes": size, **timing._asdict(), "terabytes_per_second": round(terabytes, 3), "protocol": "alone"}
