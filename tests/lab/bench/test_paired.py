"""How a time is measured: on the CPU here, with a clock that stands in for the GPU's."""

import statistics
from collections import Counter
from itertools import pairwise

import pytest
from fake_gpu import fake_gpu
from sage_lab.bench import bench
from sage_lab.bench import paired as timing
from sage_lab.bench.paired import REPETITIONS, WARM_UPS, host_microseconds, measure, orders, paired


@pytest.fixture
def clock(monkeypatch):
    return fake_gpu(monkeypatch)


def test_every_repetition_runs_each_candidate_once_after_a_flush(clock):
    runs = {name: clock.work(name, ms=1) for name in "abc"}
    paired(runs, repetitions=4)
    assert clock.log[: 3 * WARM_UPS] == ["a"] * WARM_UPS + ["b"] * WARM_UPS + ["c"] * WARM_UPS
    timed = clock.log[3 * WARM_UPS : -1]
    assert timed[::2] == ["flush"] * 12
    for repetition in range(4):
        assert sorted(timed[6 * repetition + 1 : 6 * repetition + 6 : 2]) == ["a", "b", "c"]
    assert clock.log[-1] == "synchronise"


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_each_follows_every_other_equally_often(count):
    followed = Counter(pair for order in orders(count, 2 * count) for pair in pairwise(order))
    assert followed == {(a, b): 2 for a in range(count) for b in range(count) if a != b}


def test_times_are_those_of_the_calls_alone_and_without_the_first(clock):
    """Not of the flush, not of the others, not of a compilation."""
    steps = iter([100.0] * WARM_UPS + [3.0, 1.0, 2.0, 5.0, 4.0])

    def uneven():
        clock.ms += next(steps)

    flush = clock.work("flush", ms=50)
    clock.note = lambda name: lambda *arguments: flush()
    found = paired({"uneven": uneven, "even": clock.work("even", ms=7, compiling=300)}, repetitions=5)
    assert found["uneven"] == pytest.approx((3.0, 1.8, 4.2, 5))
    assert found["even"] == pytest.approx((7, 7, 7, 5))


def test_the_flush_is_larger_than_any_l2_cache(monkeypatch):
    made = []
    monkeypatch.setattr(timing.torch, "empty", lambda size, **options: made.append((size, options["dtype"].itemsize)))
    timing._flush_buffer()
    ((size, itemsize),) = made
    assert size * itemsize >= 2 * 126e6  # Blackwell's


def test_the_hosts_time_begins_with_an_idle_gpu(clock):
    clock.log.clear()
    assert host_microseconds(clock.work("call", ms=0.25), repetitions=3) == pytest.approx(250)
    assert clock.log == ["synchronise", "call"] * 3 + ["synchronise"]


@pytest.mark.parametrize("ms", [15, 40, 80])
def test_slow_work_alone_is_repeated_five_times_and_not_much_more(clock, ms):
    found = measure(clock.work("work", ms, compiling=300))
    assert REPETITIONS <= found.repetitions < 2 * REPETITIONS
    assert clock.log.count("work") < 4 * REPETITIONS
    assert (found.ms_median, found.ms_p20, found.ms_p80) == pytest.approx((ms, ms, ms))


def test_fast_work_alone_fills_its_time(clock):
    assert measure(clock.work("work", 1)).repetitions == 60


def test_times_of_several_rounds_count_together(clock, monkeypatch):
    """Of work that became slower after it was first timed."""
    rounds = iter([[9.0, 1.0], [8.0, 2.0], [5.0, 4.0, 3.0, 6.0]])
    monkeypatch.setattr(timing.triton.testing, "do_bench", lambda run, **options: next(rounds))
    times = [9, 1, 8, 2, 5, 4, 3, 6]
    p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
    assert measure(lambda: None) == pytest.approx((statistics.median(times), p20, p80, 8))


@pytest.mark.gpu
def test_a_gpu_times_the_public_function_beside_its_peers_also_as_a_graph():
    rows = list(bench.bench_shape(bench.Shape(2, 16, 16, 1024, 128, True)))
    for cuda_graph in (False, True):
        found = {row["provider"]: row for row in rows if row["cuda_graph"] == cuda_graph}
        assert {"sage_kernels", "sdpa_flash", "sdpa_cudnn"} <= set(found)
        assert all(0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"] < 50 for row in found.values())
