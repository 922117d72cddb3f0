"""How a time is measured: on the CPU here, with a driver that stands in for the GPU's."""

import statistics
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
from sage_kernels.measure import bench


class Clock:
    """Goes on only while something works."""

    ms = 0.0

    def perf_counter(self):
        return self.ms / 1e3


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()

    class Event:
        """`torch.cuda.Event` for what ends before it returns."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = clock.ms

        def elapsed_time(self, end):
            return end.ms - self.ms

    driver = SimpleNamespace(
        get_device_interface=lambda: SimpleNamespace(Event=Event, synchronize=lambda: None),
        get_empty_cache_for_benchmark=lambda: None,
        clear_cache=lambda cache: None,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "time", clock)
    return clock


class Work:
    """A call that takes so many milliseconds, the first one longer: it compiles."""

    def __init__(self, clock, ms, compiling=0.0):
        self.clock, self.ms, self.compiling, self.calls = clock, ms, compiling, 0

    def __call__(self):
        self.calls += 1
        self.clock.ms += self.ms if self.calls > 1 else self.ms + self.compiling


@pytest.mark.parametrize("ms", [15, 40, 80])
def test_slow_work_is_repeated_five_times_and_not_much_more(clock, ms):
    work = Work(clock, ms, compiling=300)
    timing = bench.measure(work)
    assert bench.REPETITIONS <= timing.repetitions < 2 * bench.REPETITIONS
    assert work.calls < 4 * bench.REPETITIONS
    assert (timing.ms_median, timing.ms_p20, timing.ms_p80) == pytest.approx((ms, ms, ms))


def test_fast_work_fills_its_time(clock):
    assert bench.measure(Work(clock, 1)).repetitions == 60


def test_times_of_several_rounds_count_together(monkeypatch):
    """Of work that became slower after it was first timed."""
    rounds = iter([[9.0, 1.0], [8.0, 2.0], [5.0, 4.0, 3.0, 6.0]])
    monkeypatch.setattr(triton.testing, "do_bench", lambda run, **options: next(rounds))
    timing = bench.measure(lambda: None)
    times = [9, 1, 8, 2, 5, 4, 3, 6]
    p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
    assert timing == pytest.approx((statistics.median(times), p20, p80, 8))
