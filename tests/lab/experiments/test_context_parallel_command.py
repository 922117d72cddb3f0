"""The command context-parallel: groups of every size in turn, what is left out and why, and agreement."""

import contextlib
import functools

import pytest
import torch
from process_cases import run_together
from sage_lab.__main__ import main
from sage_lab.experiments import context_parallel as command
from sage_lab.experiments.context_parallel import ATTENTIONS, Members, ParallelPlan, Pass, why_left_out
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
        if (name, devices) != ("sagebwd_ring", 1)
    ]  # fmt: skip
    assert sorted(found) == sorted(expected)
    assert all(row["repetitions"] == 2 and 0 < row["ms_p20"] <= row["ms_p80"] for row in record.rows)
    assert set(record.rows[0]) == set(read_record("context_parallel_h200").rows[0])
    assert record.provenance["devices"] == 2
    assert record.provenance["command"].startswith("torchrun --standalone --nproc-per-node 2 -m sage_lab context-par")
    assert "  not measured: SageBwd, ring on 1 device(s), one device needs no ring" in printed


def test_the_shortest_sequences_agree_with_one_device(measured):
    for row in measured[0].rows:
        assert ("rel_l2_dK" in row) == (row["n"] == 256 and row["devices"] == 2)
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
        ("sagebwd_ring", 1, (), "one device needs no ring"), ("sagebwd", 2, (), None),
        ("sagebwd", 1, [row("sagebwd", 1, 256, ms=6251)], "a pass would take more than 25 s"),
        ("sagebwd", 1, [row("sagebwd", 1, 256, ms=6249)], None),
        ("sagebwd", 1, [row("sagebwd", 2, 256)], "a shorter one was left out"),
        ("sagebwd", 1, [row("sagebwd", 1, 256, peak=46 * 2**30)], "it would need more memory than a device has"),
        ("sagebwd", 1, [row("sagebwd", 1, 256, peak=44 * 2**30)], None),
        ("sla2", 1, [row("sla2", 1, 256, peak=23 * 2**30)], "it would need more memory than a device has"),
        ("sla2", 1, [row("sla2", 1, 256, peak=22 * 2**30)], None),
    ],
)  # fmt: skip
def test_what_is_left_out_and_why(attention, size, rows, why):
    one = Pass(attention, Members(size, 0, None))
    assert why_left_out(one, 512, ParallelPlan(heads=2), MEMORY, rows) == why
