"""The plan of runs without batch noise: who runs, in which order, and a command that was killed."""

import json
import math
from dataclasses import asdict, replace

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import full_batch
from sage_lab.experiments.full_batch import CONTROLS, CURVE, TRUTH, FullBatchPlan, deviating, planned, screening
from sage_lab.records import read_record

PLAN = FullBatchPlan(learning_rates=(0.1,), seeds=(0, 1), halvings=2, remedies=("two terms", "seven"))


def row_of(loss, scatter=0.0):
    """A run whose exact loss is `loss` at its end, and `loss` + scatter at the report before."""
    curve = [[None] * len(CURVE) for _ in range(3)]
    for row, x in zip(curve, (9.0, scatter, 0.0), strict=True):
        row[CURVE.index("exact_loss")] = loss + x
    return {"final_loss": loss, "curve": curve}


def finished_with(gaps):
    """Rows of the screening, where each arm is behind the truth by `gaps` of (arm, qk_norm), else by nothing."""
    return {run: row_of(2.0 + gaps.get((run.arm, run.qk_norm), 0.0)) for run in screening(PLAN)}


# The plan


def test_the_record_is_that_of_the_plan_and_every_stage_follows_from_the_rows_before_it():
    """A run is known as soon as the stages before its own have ended, and never changes its place."""
    record, plan = read_record("full_batch_h200"), FullBatchPlan()
    assert record.provenance["plan"] == json.loads(json.dumps(asdict(plan)))
    assert record.provenance["curve"] == list(CURVE)
    finished = {full_batch.FullBatchRun.of_row(row): row for row in record.rows}
    runs, known = list(finished), [planned(plan, {})]
    assert known[0] == screening(plan)
    while len(known[-1]) < len(runs):
        assert known[-1] == runs[: len(known[-1])]
        almost = {run: finished[run] for run in known[-1][:-1]}
        assert planned(plan, almost) == known[-1]
        known.append(planned(plan, {run: finished[run] for run in known[-1]}))
    assert known[-1] == runs
    stages = [{run.arm for run in after[len(before) :]} for before, after in zip(known, known[1:], strict=False)]
    assert [sum(": " in arm for arm in arms) for arms in stages] == [0, len(plan.remedies), 0, 0]
    assert stages[2] == set(plan.unsmoothed)
    assert {run.batch_tokens for run in runs} == {2**18, 2**17, 2**16, 2**15}
    assert all(row["tokens_at_bias"] == full_batch.tokens_at_bias(row["curve"]) for row in record.rows)


def test_a_plan_has_whole_sequences_after_every_halving():
    with pytest.raises(ValueError, match="^tokens: expected whole sequences of 1024 after 2 halvings, got 5120"):
        replace(PLAN, tokens=5 * 1024)


def test_a_gap_counts_beyond_twice_the_controls_largest_of_the_second_half():
    finished = finished_with({("bf16", False): 0.001, ("bf16", True): 0.001, ("per tile", False): 0.015})
    assert deviating(PLAN, finished) == [PLAN.run("per tile", False, 0.1, 0)]
    finished[PLAN.run("bf16", False, 0.1, 0)] = row_of(2.001, scatter=0.01)
    assert deviating(PLAN, finished) == []
    assert planned(PLAN, finished) == screening(PLAN) + full_batch.not_smoothed(PLAN, {})


def test_remedies_are_tried_on_the_scales_that_need_them():
    for worst, base in (("per row", "per row"), ("kernels", "per row"), ("per tile", "per tile")):
        found = full_batch.remedy_runs(PLAN, finished_with({(worst, True): 0.1}))
        assert [run.arm for run in found] == [f"{base}: two terms", f"{base}: seven"]
    assert full_batch.furthest_behind(PLAN, finished_with({("per row", True): -0.1})) is None


def test_who_diverges_is_infinitely_behind_unless_the_truth_diverges():
    finished = finished_with({})
    broken = PLAN.run("per tile", False, 0.1, 0)
    finished[broken] = row_of(2.0) | {"final_loss": None}
    assert full_batch.gap(finished, broken) == math.inf
    assert deviating(PLAN, finished) == [broken]
    finished[broken.replace(arm=TRUTH)] = finished[broken]
    assert math.isnan(full_batch.gap(finished, broken))
    assert deviating(PLAN, finished) == []


# The command

TINY = replace(
    full_batch.CPU_PLAN, tokens=2**9, context=32, layers=1, width=16, steps=2, reports=2, learning_rates=(0.01,),
    seeds=(0,), arms=(TRUTH, *CONTROLS, "per tile"), remedies=("two terms",), unsmoothed=(), halvings=1, margin=0.0,
    validation_sequences=4,
)  # fmt: skip
COMMAND = ["full-batch", "--corpus", "text.txt", "--device", "cpu", "--folder", "runs", "--json", "out.json"]


def test_a_command_that_is_out_of_time_goes_on_to_the_whole_record(text, monkeypatch, capsys):
    monkeypatch.setitem(full_batch.PLANS, "cpu", TINY)
    main([*COMMAND, "--minutes", "1e-9"])
    assert "known runs are unfinished" in capsys.readouterr().out
    assert not (text / "out.json").exists()
    main(COMMAND)
    record = read_record(text / "out.json")
    assert [row["arm"] for row in record.rows[:4]] == list(TINY.arms)
    assert len(record.rows) >= 2 * len(TINY.arms)
    assert list((text / "runs").glob("*.pt")) == []
    assert set(record.rows[0]) - {"compiled", "ds_rounding"} <= set(read_record("full_batch_h200").rows[0])
    assert record.provenance["unfinished"] == []
    assert record.provenance["plan"]["tokens"] == 512
    row = record.select(arm="per tile", qk_norm=False, seed=0, batch_tokens=512)[0]
    assert (row["granularity"], row["smoothing"], row["remedy"], row["diverged"]) == ("block", "k", "none", None)
    assert row["final_loss"] == row["curve"][-1][CURVE.index("exact_loss")]
