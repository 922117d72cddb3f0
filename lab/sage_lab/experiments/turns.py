"""Times of candidates that take turns, in orders in which none always follows the same other."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from sage_lab.records import Row

Candidate = TypeVar("Candidate")


def orders(count: int, repetitions: int) -> Iterator[list[int]]:
    """Yield orders of `count` places; over 2 * count repetitions each place follows every other equally often.

    This is E. J. Williams' balanced design (1949): 0, n-1, 1, n-2, ..., shifted by one each time, then backwards.
    """
    zigzag = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    for repetition in range(repetitions):
        order = [(place + repetition) % count for place in zigzag]
        yield order[::-1] if repetition // count % 2 else order


def in_turn(candidates: Sequence[Candidate], repetitions: int) -> Iterator[Candidate]:
    """Yield each candidate `repetitions` times, in the `orders` of their places."""
    for order in orders(len(candidates), repetitions):
        yield from (candidates[place] for place in order)


def synchronized_time(device: torch.device) -> float:
    """Wait until the device is idle; return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_columns(times: Sequence[float], digits: int = 2) -> Row:
    """Return the columns of times in milliseconds: their median, 20th and 80th percentile."""
    fastest, *_, slowest = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else [*times] * 4
    figures = {"ms_median": statistics.median(times), "ms_p20": fastest, "ms_p80": slowest}
    return {name: round(x, digits) for name, x in figures.items()}
