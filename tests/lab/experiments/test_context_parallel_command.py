"""The command context-parallel: groups of every size in turn, what is left out and why, and agreement."""

import contextlib
import functools

import pytest
import torch
from process_cases import run_together
from sage_lab.__main__ import main
from sage_lab.experiments import context_parallel as command
from sage_lab.experiments.context_parallel import (
    ATTENTIONS,
    LEAST_DEVICES,
    Measured,
    Members,
    ParallelPlan,
    Pass,
    largest_length,
    why_left_out,
)
from sage_lab.records import read_record
from sage_lab.training.processes import Processes, processes


def measure(path):
    """Run the command in one of two processes, with SLA2 of the reference."""
    command.SLA2 = functools.partial(command.SLA2, backend="reference")
    command.ParallelSLA2 = functools.partial(command.ParallelSLA2, backend="reference")
    with processes("cpu") as group:
        command.processes = lambda device: contextlib.nullcontext(group)
        main(["context-parallel", "--device", "cpu", "--json", str(path)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    printed = run_together(folder, measure, folder / "record.json")
    return read_record(folder / "record.json"), printed


def test_every_attention_runs_on_one_device_and_on_two(measured):
    record, printed = measured
    found = [(row["n"], row["attention"], row["devices"]) for row in record.rows]
    expected = [
        (n, name, devices) for n in (256, 512) for name in ATTENTIONS for devices in (1, 2)
        if devices >= LEAST_DEVICES.get(name, 1)
    ]  # fmt: skip
    assert sorted(found) == sorted(expected)
    assert all(row["repetitions"] == 2 and 0 < row["ms_p20"] <= row["ms_p80"] for row in record.rows)
    assert record.provenance["devices"] == 2
    assert record.provenance["command"].startswith("torchrun --standalone --nproc-per-node 2 -m sage_lab context-par")
    assert "  not measured: SageBwd, ring on 1 device(s), it takes 2 devices or more" in printed


def test_every_pass_on_two_devices_sends_what_it_should_and_waits_for_it(measured):
    """By hand: eight tensors by Ulysses, half of each; in the ring K^ and V^, K^ and V, then dK and dV twice."""
    heads, head_dim, number = 2, 16, 4  # bytes of float32, which the reference has in place of INT8, too
    for row in measured[0].rows:
        if row["devices"] == 1:
            assert row["exchange_ms"] is row["sent_bytes"] is None
            continue
        assert 0 < row["exchange_ms"] < row["ms_p80"] + row["ms_median"]
        tensor = row["n"] // 2 * heads * head_dim * number
        if row["attention"] == "sagebwd_ring":
            scales_and_means = tensor // 16
            assert 8 * tensor <= row["sent_bytes"] <= 8 * tensor + scales_and_means
        else:
            assert row["sent_bytes"] == 4 * tensor


def test_the_shortest_sequences_agree_with_one_device(measured):
    for row in measured[0].rows:
        compared = row["n"] == 256 and row["devices"] == 2 and row["attention"] != "none"
        assert ("rel_l2_dK" in row) == compared
        if "rel_l2_dK" in row:
            assert max(row[f"rel_l2_{name}"] for name in command.TENSORS) < 5e-3
            assert row["same_bits"] == (max(row[f"rel_l2_{name}"] for name in command.TENSORS) == 0)


def test_inputs_are_parts_of_one_sequence():
    plan, world = ParallelPlan(heads=2, head_dim=4), Processes(0, 4)
    whole = command.inputs_of(Members(1, 0, None), 512, plan, world)
    for size in (2, 4):
        parts = [command.inputs_of(Members(size, rank, None), 512, plan, world) for rank in range(size)]
        for x, of_processes in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.cat(of_processes, 2).equal(x)
    assert not whole[0].equal(whole[1])


def row(attention, devices, n, ms=1000.0, peak=2**33, **more):
    return {"attention": attention, "devices": devices, "n": n, "ms_median": ms, "peak_bytes": peak} | more


MEMORY = 100 * 2**30


@pytest.mark.parametrize(
    ("attention", "size", "rows", "why"),
    [
        ("sagebwd", 4, (), "4 devices don't divide 2 heads"), ("sagebwd_ring", 4, (), None),
        ("sagebwd_both", 2, (), "it takes 4 devices or more"), ("sagebwd_both", 4, (), None),
        ("sagebwd_ring", 1, (), "it takes 2 devices or more"), ("sagebwd", 2, (), None),
        ("sagebwd", 1, [row("sagebwd", 1, 256, ms=6251)], "a pass would take more than 25 s"),
        ("sagebwd", 1, [row("sagebwd", 1, 256, ms=6249)], None),
        ("sagebwd", 1, [row("sagebwd", 2, 256)], "a shorter one was left out"),
        ("sagebwd", 1, [row("sagebwd", 1, 256, peak=46 * 2**30)], "it would need more memory than a device has"),
        ("sagebwd", 1, [row("sagebwd", 1, 256, peak=44 * 2**30)], None),
        ("sla2", 1, [row("sla2", 1, 128, peak=10 * 2**30), row("sla2", 1, 256, peak=31 * 2**30)],
         "it would need more memory than a device has"),  # 9 N + N^2 at 128, so 106 GiB at 512
        ("sla2", 1, [row("sla2", 1, 128, peak=10 * 2**30), row("sla2", 1, 256, peak=27 * 2**30)], None),  # 82 GiB
    ],
)  # fmt: skip
def test_what_is_left_out_and_why(attention, size, rows, why):
    one = Pass(attention, Members(size, 0, None))
    assert why_left_out(one, 512, ParallelPlan(heads=2), MEMORY, rows) == why


@pytest.mark.parametrize(
    ("attention", "peaks", "longest"),
    [
        ("sagebwd", (10, 20), 9),  # GiB at N = 1 and 2 parts
        ("sla2", (10, 23), 5),  # 8.5 N + 1.5 N^2 is 90 at 5.4 parts
        ("sagebwd", (40, 80), None), ("none", (1, 2), None), ("exact", (), None),
    ],
)  # fmt: skip
def test_the_longest_sequence_fills_the_memory_but_for_a_tenth(attention, peaks, longest):
    rows = [row(attention, 1, n * command.PART, peak=peak * 2**30) for n, peak in enumerate(peaks, start=1)]
    found = largest_length(Pass(attention, Members(1, 0, None)), MEMORY, rows)
    assert found == (longest and longest * command.PART)


def test_a_pass_that_takes_long_is_run_as_often_as_the_plan_affords(monkeypatch):
    """A first run, which compiles, and the timed ones; the first one counts if it is the only one."""
    plan, world, ran = ParallelPlan(repetitions=3, affordable=5), Processes(), []
    passes = [Pass(name, Members(1, 0, None)) for name in ("exact", "sagebwd", "sla2")]
    shorter = [row("exact", 1, 128, ms=2000), row("sagebwd", 1, 128, ms=625), row("sla2", 1, 128, ms=1)]

    def run(one, *_):
        ran.append(one.attention)
        return Measured(len(ran), 0, 0, 0), ()

    monkeypatch.setattr(command, "run_pass", run)
    rows = command.length_rows(passes, 256, plan, world, shorter)
    assert [ran.count(one.attention) for one in passes] == [1, 3, 4]  # 8 s, 2.5 s and 4 ms
    assert [row["repetitions"] for row in rows] == [1, 2, 3]
    assert rows[0]["ms_median"] == 1
    assert rows[1]["ms_median"] > 3
