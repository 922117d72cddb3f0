"""The plan of runs without batch noise: who runs, in which order, and a command that was killed."""

import math
from dataclasses import replace

import pytest
from sage_lab.__main__ import main
from sage_lab.experiments import full_batch
from sage_lab.experiments.full_batch import (
    ARMS,
    CONTROLS,
    CPU_PLAN,
    CURVE,
    SCREENED,
    TRUTH,
    FullBatchPlan,
    deviating,
    gap,
    planned,
    screening,
    tokens_at_bias,
)
from sage_lab.models.llama import Llama
from sage_lab.records import read_record
from sage_lab.repairs import UNBIASED
from sage_lab.training.full_batch import FullBatchTraining

PLAN = FullBatchPlan(learning_rates=(0.1,), seeds=(0, 1), halvings=2, remedies=("two terms", "seven"))


def row_of(loss, scatter=0.0, **changes):
    """A run whose exact loss is `loss` at its end, and `loss` + scatter at the report before."""
    curve = [
        [step, None, loss + x, loss, 1.0, 0.01, 0.02, 0.5, 1e-6, 2.0] for step, x in ((0, 9.0), (1, scatter), (2, 0.0))
    ]
    row = {"final_loss": loss, "curve": curve, "tokens_at_bias": 2e6, "seconds": 4.0, "steps": 2}
    return row | changes


def finished_with(runs, gaps):
    """Rows of `runs`, of which each arm is behind the truth by `gaps` of (arm, qk_norm), else by nothing."""
    return {run: row_of(2.0 + gaps.get((run.arm, run.qk_norm), 0.0)) for run in runs}


# The plan


def test_the_model_cannot_memorise_the_corpus():
    config = PLAN.config(screening(PLAN)[0], 256)
    assert sum(x.numel() for x in Llama(config).parameters()) < 200_000 < 2**18 == FullBatchPlan().tokens
    with pytest.raises(ValueError, match="^tokens: expected whole sequences of 1024 after 2 halvings, got 5120"):
        replace(PLAN, tokens=5 * 1024)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_is_the_model_and_the_training_it_is_described_as(name):
    run = PLAN.run(name, True, 0.1, 1)
    config, settings = PLAN.config(run, 256), PLAN.settings(run, compile=False)
    assert (config.attention == "exact") == (name in (TRUTH, *CONTROLS))
    assert (config.qk_norm, config.fused_prologue) == (True, False)
    assert config.smooth_k == ("not smoothed" not in name)
    is_kernel = name.startswith("kernels")
    assert config.backend == ("triton" if is_kernel else "reference")
    assert settings.attention_in_bfloat16 == (is_kernel or name == "bf16")
    assert (settings.random_error > 0) == (name == "random error")
    assert (settings.batch_size, settings.micro_batch_size, settings.sequences, settings.seed) == (256, 32, 256, 1)
    small = PLAN.settings(run.replace(batch_tokens=2**14), compile=False)
    assert (small.batch_size, small.micro_batch_size, small.sequences) == (16, 16, 256)
    if config.attention == "sagebwd":
        scales = ("block", 64, 64) if name.startswith("per tile") else ("row", 128, 128)
        assert (config.granularity, config.block_q, config.block_kv) == scales
        _, _, remedy = name.partition(": ")
        assert config.remedy == (UNBIASED if name == "kernels, unbiased" else remedy or "none")


def test_the_screening_is_every_arm_without_and_with_norm_and_nothing_follows_before_it_ends():
    runs = planned(PLAN, {})
    assert runs == screening(PLAN)
    assert [(run.arm, run.qk_norm) for run in runs] == [(arm, norm) for norm in (False, True) for arm in SCREENED]
    assert planned(PLAN, finished_with(runs[:-1], {})) == runs


def test_where_no_gap_exceeds_the_controls_only_smoothing_is_left():
    runs = screening(PLAN)
    gaps = {("random error", False): -0.01, ("random error", True): 0.02, ("per tile", False): 0.019}
    after = planned(PLAN, finished_with(runs, gaps))
    assert after == runs + full_batch.not_smoothed(PLAN, {})
    assert planned(PLAN, finished_with(after, gaps)) == after


def test_a_control_counts_with_its_largest_gap_of_the_second_half():
    runs = screening(PLAN)
    gaps = {("bf16", False): 0.001, ("bf16", True): 0.001, ("per tile", False): 0.015}
    finished = finished_with(runs, gaps)
    assert deviating(PLAN, finished) == [PLAN.run("per tile", False, 0.1, 0)]
    finished[PLAN.run("bf16", False, 0.1, 0)] = row_of(2.001, scatter=0.01)
    assert deviating(PLAN, finished) == []


def test_stages_follow_one_another_where_arms_deviate():
    """Better than exact attention deviates, too, but needs no remedy."""
    runs = screening(PLAN)
    gaps = {(control, norm): 0.001 for control in CONTROLS for norm in (False, True)}
    gaps |= {("per row", True): 0.01, ("per tile", False): 0.02, ("kernels", False): -0.05}
    finished = finished_with(runs, gaps)
    order = [(run.arm, run.qk_norm) for run in deviating(PLAN, finished)]
    assert order == [("kernels", False), ("per tile", False), ("per row", True)]
    second = planned(PLAN, finished)[len(runs) :]
    assert {run.seed for run in second} == {1}
    compared = (TRUTH, *CONTROLS)
    assert [(run.arm, run.qk_norm) for run in second] == [
        *((arm, False) for arm in (*compared, "kernels", "per tile")),
        *((arm, True) for arm in (*compared, "per row")),
    ]
    finished |= finished_with(second, gaps)
    third = planned(PLAN, finished)[len(finished) :]
    worst = PLAN.run("per tile", False, 0.1, 0)
    assert third == [worst.replace(arm=f"per tile: {remedy}") for remedy in PLAN.remedies]
    finished |= finished_with(third, gaps)
    unsmoothed = planned(PLAN, finished)[len(finished) :]
    assert [(run.arm, run.qk_norm) for run in unsmoothed] == [
        (f"{scale}, K not smoothed", norm) for norm in (False, True) for scale in ("per tile", "kernels")
    ]
    finished |= finished_with(unsmoothed, gaps)
    fourth = planned(PLAN, finished)[len(finished) :]
    arms = (*compared, "per tile")
    assert fourth == [worst.replace(arm=arm, batch_tokens=size) for size in (2**17, 2**16) for arm in arms]
    finished |= finished_with(fourth, gaps)
    assert planned(PLAN, finished) == list(finished)


@pytest.mark.parametrize(("worst", "base"), [("per row", "per row"), ("kernels", "per row"), ("per tile", "per tile")])
def test_remedies_are_tried_on_the_scales_that_need_them(worst, base):
    finished = finished_with(screening(PLAN), {(worst, True): 0.1})
    assert [run.arm for run in full_batch.remedy_runs(PLAN, finished)] == [f"{base}: two terms", f"{base}: seven"]
    assert full_batch.furthest_behind(PLAN, finished_with(screening(PLAN), {(worst, True): -0.1})) is None


def test_who_diverges_is_infinitely_behind_unless_the_truth_diverges():
    runs = screening(PLAN)
    finished = finished_with(runs, {})
    broken = PLAN.run("per tile", False, 0.1, 0)
    finished[broken] = row_of(2.0) | {"final_loss": None}
    assert gap(finished, broken) == math.inf
    assert deviating(PLAN, finished) == [broken]
    finished[broken.replace(arm=TRUTH)] = finished[broken]
    assert math.isnan(gap(finished, broken))
    assert deviating(PLAN, finished) == []


def test_tokens_at_bias_are_the_median_of_the_second_half():
    def curve(*pairs):
        return [[0] * (len(CURVE) - 2) + list(pair) for pair in pairs]

    assert tokens_at_bias(curve((1.0, 8.0), (1.0, 8.0), (2.0, 6.0), (1.0, 5.0))) == 4.0
    assert tokens_at_bias(curve((0.0, 8.0), (0.0, 8.0))) is None
    assert tokens_at_bias(curve((1.0, None), (1.0, None))) is None


# The command

TINY = replace(
    CPU_PLAN, tokens=2**9, context=32, layers=1, width=16, steps=2, reports=2, learning_rates=(0.01,), seeds=(0,),
    arms=(TRUTH, *CONTROLS, "per tile"), remedies=("two terms",), unsmoothed=(), halvings=1, margin=0.0,
    validation_sequences=4,
)  # fmt: skip
COMMAND = ["full-batch", "--corpus", "text.txt", "--device", "cpu", "--folder", "runs", "--json", "out.json"]


@pytest.fixture
def tiny(text, monkeypatch):
    monkeypatch.setitem(full_batch.PLANS, "cpu", TINY)
    monkeypatch.setattr("sage_lab.records._commit", lambda: "0" * 40)
    return text


def rows_without_times(path):
    return [{name: x for name, x in row.items() if name != "seconds"} for row in read_record(path).rows]


def test_a_killed_command_goes_on_and_writes_the_same_record(tiny, monkeypatch, capsys):
    main([*COMMAND, "--json", "whole.json", "--folder", "other"])
    whole = rows_without_times(tiny / "whole.json")
    assert [row["arm"] for row in whole[:4]] == list(TINY.arms)
    assert len(whole) >= 2 * len(TINY.arms)
    shown = capsys.readouterr().out
    assert "| per_tile_qk_normFalse_learning_rate0.01_seed0_batch_tokens512 |" in shown
    assert "left" not in shown
    advance, calls = FullBatchTraining.advance, []

    def killed(training):
        calls.append(training.step)
        if len(calls) == 2 * 3 + 2:  # the second step of the fourth run
            raise KeyboardInterrupt
        return advance(training)

    monkeypatch.setattr(FullBatchTraining, "advance", killed)
    with pytest.raises(SystemExit):
        main(COMMAND)
    assert rows_without_times(tiny / "out.json") == whole[:3]
    assert read_record(tiny / "out.json").provenance["unfinished"]
    assert [path.suffix for path in (tiny / "runs").glob("*.pt")] == [".pt"]
    main(COMMAND)
    assert calls[8] == 1  # of two
    assert rows_without_times(tiny / "out.json") == whole
    assert list((tiny / "runs").glob("*.pt")) == []
    record = read_record(tiny / "out.json")
    assert record.provenance["unfinished"] == []
    assert record.provenance["curve"] == list(CURVE)
    assert record.provenance["plan"]["tokens"] == 512
    row = record.select(arm="per tile", qk_norm=False, seed=0, batch_tokens=512)[0]
    assert (row["granularity"], row["smoothing"], row["remedy"], row["diverged"]) == ("block", "k", "none", None)
    assert row["final_loss"] == row["curve"][-1][CURVE.index("exact_loss")]
    here = row["tokens_at_bias"] * 512 / (row["tokens_at_bias"] + 512)
    assert row["tokens_at_bias_here"] == pytest.approx(here)


def test_minutes_are_kept_and_the_same_command_goes_on(tiny, capsys):
    main([*COMMAND, "--minutes", "1e-9"])
    first = "exact_qk_normFalse_learning_rate0.01_seed0_batch_tokens512"
    assert f"runs are known to be left, first {first}: the same command goes on" in capsys.readouterr().out
    assert not (tiny / "out.json").exists()
    main([*COMMAND, "--minutes", "10"])
    assert read_record(tiny / "out.json").provenance["unfinished"] == []
