"""Times, taken in turn, so that every candidate has the same clock, power and cache.

A GPU chooses its clock by the work that it has just done. A kernel that is timed alone, in a loop, has its own clock.
In a model it shares one with everything else. Therefore each repetition runs every candidate once, in turn, and flushes
the L2 cache before each. A time begins when the GPU reaches a call and ends when the GPU has finished it. If the host
is slower than the GPU, the gaps between kernels count. A CUDA graph has no gaps, and `host_microseconds` is the host's
time for the call.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sage_lab.command_line import Failed
from sage_lab.experiments.turns import in_turn, time_columns

WARM_UPS = 3
FLUSHED_BYTES = 256 << 20  # more than the L2 cache of any GPU: 60 MB on an H200, 126 MB on Blackwell
REPETITIONS = 16
ALONE_MS, ALONE_REPETITIONS = 60, 5  # of a candidate that is timed alone, at least

Name = TypeVar("Name", bound=Hashable)


class Timing(NamedTuple):
    """Median, 20th and 80th percentile of a candidate's times."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    repetitions: int


def require_gpu() -> None:
    """Raise `Failed` without a GPU; with one, seed it, so that a command always draws the same."""
    if not torch.cuda.is_available():
        raise Failed("device: expected a CUDA device, found none (recorded results are in notebooks/recorded)")
    torch.manual_seed(0)


def paired(candidates: dict[Name, Callable[[], object]], repetitions: int = REPETITIONS) -> dict[Name, Timing]:
    """Time each candidate in milliseconds: every repetition runs each once, in turn, in an order that changes."""
    flushed = _flush_buffer()
    for candidate in candidates.values():
        for _ in range(WARM_UPS):
            candidate()
    events = {name: [] for name in candidates}
    for name in in_turn(list(candidates), repetitions):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        candidates[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    times = {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}
    return {name: Timing(**time_columns(found, digits=5), repetitions=len(found)) for name, found in times.items()}


def alone(candidate: Callable[[], object]) -> Timing:
    """Time one candidate that has no turns: a launch of a kernel, or a part of an operation.

    Times that were taken alone must not be compared with those of a peer.
    """
    candidate()  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    candidate()
    torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - start)
    return paired({"": candidate}, max(ALONE_REPETITIONS, math.ceil(ALONE_MS / ms)))[""]


def host_microseconds(candidate: Callable[[], object], repetitions: int = 20) -> float:
    """Return the median time until a call returns with the GPU idle before it: what one call costs the host."""
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        candidate()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


class Captured(NamedTuple):
    """A CUDA graph, and the tensors that every replay writes."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]


def captured(candidate: Callable[[], tuple[Tensor, ...]]) -> Captured:
    """Capture a call as a CUDA graph; it must make its outputs from tensors that stay where they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            candidate()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = candidate()
    return Captured(graph.replay, outputs)


def peak_megabytes(candidate: Callable[[], object]) -> float:
    """Return the most memory that is allocated during a call, what was there before included; 10^6 bytes."""
    torch.cuda.reset_peak_memory_stats()
    candidate()
    return round(torch.cuda.max_memory_allocated() / 1e6, 1)


class Gpu:
    """The machine: where tensors are, and how a call on it is timed. Tests have one without a GPU."""

    device, dtype = "cuda", torch.bfloat16
    paired, alone, captured = staticmethod(paired), staticmethod(alone), staticmethod(captured)
    host_microseconds, peak_megabytes = staticmethod(host_microseconds), staticmethod(peak_megabytes)


GPU = Gpu()


def _flush_buffer() -> Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
