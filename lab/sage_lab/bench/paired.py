"""How times are taken here: paired, so that every candidate sees the same clock, power and cache.

A GPU chooses its clock by the work it has just done. A kernel that is timed alone, in a loop, has its own clock; in a
model it shares one with everything else. So each repetition runs every candidate once, in turn, with the L2 cache
flushed before each. A time goes from the moment the GPU reaches a call to the moment it is through. Where the host is
slower than the GPU, the gaps between kernels count; a CUDA graph has none, and `host_microseconds` says what the host
needs for the call.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sage_lab.experiments.turns import orders

WARM_UPS = 3
FLUSHED_BYTES = 256 << 20  # more than the L2 cache of any GPU: 60 MB on an H200, 126 MB on Blackwell
REPETITIONS = 5  # of what is timed alone, at least


class Timing(NamedTuple):
    ms_median: float
    ms_p20: float
    ms_p80: float
    repetitions: int


def paired(runs: dict[str, Callable[[], object]], repetitions: int) -> dict[str, Timing]:
    """Times of each of `runs` in milliseconds: every repetition runs each once, in turn, in an order that changes."""
    flushed = _flush_buffer()
    for run in runs.values():
        for _ in range(WARM_UPS):
            run()
    events = {name: [] for name in runs}
    names = list(runs)
    for order in orders(len(names), repetitions):
        for name in (names[place] for place in order):
            flushed.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: timing([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def host_microseconds(run: Callable[[], object], repetitions: int = 20) -> float:
    """Median time until run() returns with the GPU idle before it: what one call costs the host."""
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


class Captured(NamedTuple):
    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]  # what every replay writes


def captured(run: Callable[[], tuple[Tensor, ...]]) -> Captured:
    """run() as a CUDA graph. It must make its outputs, gradients too, from tensors that stay where they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return Captured(graph.replay, outputs)


def measure(run: Callable[[], object]) -> Timing:
    """Times of run() in milliseconds, alone in a loop, over 60 ms or at least REPETITIONS repetitions.

    To choose between launches of one kernel, and for parts that nobody runs in turn; never to compare with a peer.
    """
    run()  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - start)
    times = []
    while len(times) < REPETITIONS:
        times += triton.testing.do_bench(run, warmup=20, rep=max(60, (REPETITIONS + 1) * ms), return_mode="all")
    return timing(times)


def timing(times: list[float]) -> Timing:
    """Median, 20th and 80th percentile of milliseconds."""
    quantiles = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return Timing(*quantiles.tolist(), len(times))


def _flush_buffer() -> Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
