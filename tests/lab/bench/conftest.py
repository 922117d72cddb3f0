"""A GPU that isn't there: a clock that goes on only while something works. Work is done when its call returns."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from sage_lab.bench import timing


class Clock:
    """A clock, and a log of what was done."""

    def __init__(self):
        self.ms, self.log = 0.0, []

    def perf_counter(self):
        return self.ms / 1e3

    def work(self, name, ms, compiling=0.0):
        """Return a call that takes `ms`, the first one longer: it compiles."""
        calls = []

        def call():
            self.log.append(name)
            calls.append(name)
            self.ms += ms + (compiling if len(calls) == 1 else 0.0)

        return call


@pytest.fixture
def clock(monkeypatch):
    """A Clock instead of the GPU's events and its L2 cache."""
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = clock.ms

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.log.append("synchronise"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "_flush_buffer", lambda: SimpleNamespace(zero_=clock.work("flush", 50)))
    monkeypatch.setattr(timing, "time", clock)
    return clock
