"""The rate at which programs read from the L2 cache what others read, too, as those of a head read its keys and values.

Programs either begin at the same place, and read the same tiles at nearly the same time, or at places that are spread
evenly over the buffer. The programs of attention do the first, and drift apart.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from sage_lab.bench.timing import GPU, Gpu
from sage_lab.records import Row

TILE = 4096  # numbers of 4 bytes that a program reads at once
SIZES = tuple(2**power for power in range(22, 26))  # bytes of the buffer, 4 to 32 MB
PROGRAMS, ROUNDS = 2112, 256  # two waves of 8 programs on each of 132 multiprocessors; tiles that each one reads


@triton.jit
def read_kernel(buffer, sums, tiles, rounds, stride, TILE: tl.constexpr):
    """Add up `rounds` tiles of `buffer`, past the L1 cache: buffer [tiles, TILE] -> sums [programs, TILE].

    stride: tiles from the place where a program begins to that of the next one, 1/256 of a tile.
    """
    program = tl.program_id(0)
    entries = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int32)
    for number in range(rounds):
        tile = (program * stride // 256 + number) % tiles
        total += tl.load(buffer + tile * TILE + entries, cache_modifier=".cg")
    tl.store(sums + program * TILE + entries, total)


def rate_rows(gpu: Gpu = GPU, sizes: Sequence[int] = SIZES, programs: int = PROGRAMS) -> Iterator[Row]:
    """Yield two rows per size of the buffer. Raises RuntimeError if a sum is wrong: something was not read."""
    for size in sizes:
        tiles = size // (4 * TILE)
        buffer = torch.randint(-9, 9, (tiles, TILE), dtype=torch.int32, device=gpu.device)
        sums = torch.empty(programs, TILE, dtype=torch.int32, device=gpu.device)
        for begin, stride in (("together", 0), ("apart", 256 * tiles // programs)):
            arguments = buffer, sums, tiles, ROUNDS, stride
            timing = gpu.alone(lambda arguments=arguments: read_kernel[(programs,)](*arguments, TILE=TILE, num_warps=8))
            last = ((programs - 1) * stride // 256 + torch.arange(ROUNDS, device=gpu.device)) % tiles
            if not torch.equal(sums[-1], buffer[last].sum(0, dtype=torch.int32)):
                raise RuntimeError(f"read_kernel: expected the sums of {ROUNDS} tiles, got other ones")
            rate = 4 * sums.numel() * ROUNDS / timing.ms_median / 1e9
            yield {"bytes": size, "begin": begin, **timing._asdict(), "terabytes_per_second": round(rate, 3)}
