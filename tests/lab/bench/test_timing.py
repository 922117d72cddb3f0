"""How a time is measured: on the CPU here, with a clock that stands in for the GPU's."""

from collections import Counter
from itertools import pairwise

import pytest
from sage_lab.bench.timing import ALONE_REPETITIONS, WARM_UPS, alone, host_microseconds, paired
from sage_lab.experiments.turns import orders


def test_every_repetition_runs_each_candidate_once_after_a_flush(clock):
    paired({name: clock.work(name, ms=1) for name in "abc"}, repetitions=4)
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
    """Neither the flush nor the others nor a compilation counts."""
    steps = iter([100.0] * WARM_UPS + [3.0, 1.0, 2.0, 5.0, 4.0])

    def uneven():
        clock.ms += next(steps)

    found = paired({"uneven": uneven, "even": clock.work("even", ms=7, compiling=300)}, repetitions=5)
    assert found["uneven"] == pytest.approx((3.0, 1.8, 4.2, 5))
    assert found["even"] == pytest.approx((7, 7, 7, 5))


def test_the_hosts_time_begins_with_an_idle_gpu(clock):
    assert host_microseconds(clock.work("call", ms=0.25), repetitions=3) == pytest.approx(250)
    assert clock.log == ["synchronise", "call"] * 3 + ["synchronise"]


@pytest.mark.parametrize(("ms", "repetitions"), [(1, 60), (15, ALONE_REPETITIONS), (80, ALONE_REPETITIONS)])
def test_work_that_is_timed_alone_is_repeated_often_enough(clock, ms, repetitions):
    assert alone(clock.work("work", ms, compiling=300)) == pytest.approx((ms, ms, ms, repetitions))
