"""A plan: every run is measured once, in its order, however often the work is killed, stopped or broken."""

import random
import threading
import time
from dataclasses import dataclass

import pytest
from sage_lab.command_line import Failed
from sage_lab.plan import FinishedParts, OutOfTime, Plan, Run, Work, deadline, opened
from sage_lab.records import read_record


@dataclass(frozen=True)
class Draw(Run):
    arm: str
    seed: int
    rate: float = 0.5


RUNS = [Draw(arm, seed) for seed in (0, 1) for arm in ("exact", "INT8, K smoothed")]
PLAN = Plan("draws", RUNS)


def drawn(run, device=None):
    return [{"name": run.name, "value": random.Random(run.name).random()}]


def test_a_name_has_every_field_and_is_a_files():
    assert RUNS[1].name == "INT8_K_smoothed_seed0_rate0.5"
    assert Draw("a/b: 5%", 0, 1e-3).name == "a_b_5_seed0_rate0.001"
    with pytest.raises(ValueError, match="runs: expected a different name for each, got a_seed0_rate0.5 twice"):
        Plan("x", [Draw("a", 0), Draw("a%", 0)])


def test_nobody_else_does_the_work_meanwhile(tmp_path):
    expected = "path: expected a file that no other process is writing"
    with opened(PLAN, tmp_path, None), pytest.raises(ValueError, match=expected), opened(PLAN, tmp_path, None):
        pass


def test_work_with_other_arguments_takes_nothing_over(tmp_path):
    with opened(PLAN, tmp_path, ("arguments", 1)) as work:
        work.finish(drawn)
    assert Work(PLAN, tmp_path, ("arguments", 1)).rows == [row for run in RUNS for row in drawn(run)]
    assert Work(PLAN, tmp_path, ("arguments", 2)).rows == []


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OutOfTime, ValueError, Failed])
def test_a_stop_keeps_what_is_finished(tmp_path, stop, devices):
    """A deadline ends a run alone, a failed one is reported in the end; Ctrl-C and errors end the work at once."""

    def stopped(run, device):
        if run == RUNS[1]:
            raise stop
        return drawn(run)

    with opened(PLAN, tmp_path, None, range(devices)) as work:
        if stop is OutOfTime:
            assert work.finish(stopped) == [RUNS[1]]
        else:
            with pytest.raises(stop):
                work.finish(stopped)
    finished = Work(PLAN, tmp_path, None).finished
    assert RUNS[0] in finished
    assert (list(finished) == [RUNS[0], *RUNS[2:]]) == (stop in (OutOfTime, Failed))
    with opened(PLAN, tmp_path, None) as work:
        assert work.finish(drawn) == []
    assert work.rows == [row for run in RUNS for row in drawn(run)]


def test_when_the_time_is_over_no_run_begins_and_finished_ones_cost_nothing(tmp_path):
    assert not deadline(None)()
    assert not deadline(60)()
    is_over = deadline(1e-9)
    time.sleep(0.001)
    with opened(PLAN, tmp_path, None, is_over=lambda: len(work.rows) == 3) as work:
        assert work.finish(drawn) == RUNS[3:]
    with opened(PLAN, tmp_path, None, is_over=is_over) as work:
        assert work.finish(drawn) == RUNS[3:]
    assert len(work.rows) == 3


def test_every_device_works_on_one_run_at_a_time(tmp_path):
    busy, order, both = set(), [], threading.Barrier(2)

    def measure(run, device):
        assert device not in busy
        busy.add(device)
        both.wait(10)  # two runs are under way, always
        order.append(device)
        busy.remove(device)
        return drawn(run)

    seen = []
    with opened(PLAN, tmp_path, None, devices=("first", "second")) as work:
        assert work.finish(measure, seen.append) == []
    assert sorted(order) == ["first"] * 2 + ["second"] * 2
    assert set(seen) == set(RUNS)
    assert work.rows == [row for run in RUNS for row in drawn(run)]


def test_a_record_names_what_is_left_and_every_commit_that_measured(tmp_path, monkeypatch):
    for count, commit in ((2, "a"), (3, "b")):
        monkeypatch.setenv("SAGE_REF_COMMIT", commit)
        with opened(PLAN, tmp_path, None, is_over=lambda: len(work.rows) == count) as work:  # noqa: B023
            work.finish(drawn)
            work.record(tmp_path / f"{commit}.json", "command", seed=0)
    first, both = (read_record(tmp_path / f"{commit}.json") for commit in "ab")
    assert (first.provenance["commit"], both.provenance["commit"]) == ("a", ["a", "b"])
    assert (first.rows, both.rows) == (both.rows[:2], [row for run in RUNS[:3] for row in drawn(run)])
    assert (both.provenance["unfinished"], both.provenance["seed"]) == ([RUNS[3].name], 0)


def test_unfinished_parts_that_are_no_json_are_named_and_left(tmp_path):
    for content in ("", "[]", '{"part": [{"n": 1'):
        path = FinishedParts(tmp_path / "x.json", 1).path
        path.write_text(content)
        with pytest.raises(ValueError, match="path: expected finished parts of a measurement in JSON, got .*partial"):
            FinishedParts(tmp_path / "x.json", 1)
        assert path.read_text() == content
        path.unlink()
