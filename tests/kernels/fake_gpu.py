"""A clock, and the timing functions of a GPU, for tests without one. Work is done when its call returns."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
from sage_lab.bench import contenders, paired
from sage_lab.bench.paired import Captured


class Clock:
    """Goes on only while something works. log: what was done, by name; tick: what every event adds."""

    def __init__(self):
        self.ms, self.log, self.tick = 0.0, [], 0.0

    def perf_counter(self):
        return self.ms / 1e3

    def work(self, name, ms, compiling=0.0):
        """A call that takes `ms`, the first one longer: it compiles."""
        calls = []

        def run():
            self.log.append(name)
            calls.append(name)
            self.ms += ms + (compiling if len(calls) == 1 else 0.0)

        return run

    def note(self, name):
        return lambda *arguments: self.log.append(name)


def fake_gpu(monkeypatch):
    """A Clock instead of the GPU's events, its L2 cache, its streams and its CUDA graphs."""
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            clock.ms += clock.tick
            self.ms = clock.ms

        def elapsed_time(self, end):
            return end.ms - self.ms

    driver = SimpleNamespace(
        get_device_interface=lambda: SimpleNamespace(Event=Event, synchronize=lambda: None),
        get_empty_cache_for_benchmark=lambda: None,
        clear_cache=lambda cache: None,
    )

    def captured(run):
        outputs = run()

        def replay():
            clock.log.append("replay")
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new)

        return Captured(replay, outputs)

    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.note("synchronise"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(paired, "_flush_buffer", lambda: SimpleNamespace(zero_=clock.note("flush")))
    monkeypatch.setattr(paired, "time", clock)
    monkeypatch.setattr(contenders, "captured", captured)
    return clock
