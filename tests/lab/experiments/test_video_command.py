"""The video experiment: the plan, its measurements, the claims they decide, and commands that are stopped and go on."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.video import measures
from sage_lab.experiments.video.plan import AFTERWARDS, FULL, NOT_TUNED, PLANS, TRAINED, VideoRun
from sage_lab.experiments.video.plan import planned as planned_runs
from sage_lab.experiments.video.verdicts import CONTRADICTED, NOT_DECIDED, SUPPORTED, bootstrap, verdict_rows
from sage_lab.plan import Work
from sage_lab.records import read_record
from sage_lab.training.video_flow import flow_batch, started_model
from sage_lab.training.video_router import new_core
from video_cases import CONFIG, PLAN, QUICK, experiment, made_up_digits, opened_weights

from sage_ref.sla2 import EQUATIONS_16_17, SLA2, Relaxation

DIGITS = made_up_digits()


def work_in(folder, plan=QUICK, arms=TRAINED, **options):
    return Work(planned_runs(plan, arms), folder, experiment(plan).arguments, **options)


# The plan


@pytest.mark.parametrize("arm", TRAINED)
def test_each_arm_trains_as_its_name_says(tmp_path, arm):
    config, weights, row = experiment(QUICK).tune(VideoRun(arm, 0), work_in(tmp_path))
    assert (row["diverged"], row["steps"]) == (None, 0 if arm == NOT_TUNED else 1)
    before = opened_weights()
    assert any(not torch.equal(x, before[name]) for name, x in weights.items() if name in before) == bool(row["steps"])
    core = started_model(config, weights).blocks[0].attention.core
    assert isinstance(core, SLA2) == (config.attention == "sla2")
    if isinstance(core, SLA2):
        assert (core.settings.quantize, core.settings.backward) == (arm != "SLA2, 16 bit", "printed")
        is_identity = torch.equal(core.router.proj_q.weight, torch.eye(16))
        assert is_identity == (arm in ("router at its start", "no stage 1"))
        assert (core.alpha(1, 1) == 1).all() == (arm == "sparse only")
        assert ("stage1_error" in row) == (arm != "no stage 1")
        stage1 = new_core(config, QUICK.stage1(VideoRun(arm, 0)), 0)
        assert stage1.relaxation == (EQUATIONS_16_17 if arm == "SLA2, Eq. 16-17" else Relaxation())
    sparsity = {"90%": 0.9, "95%": 0.95, "85%": 0.85}
    assert config.sparsity == sparsity.get(arm[-3:], 0.75)  # 0.75 is this plan's 97%
    assert config.cube == ((1, 1, 1) if arm == "rows in order" else (2, 2, 2))


# Measurements


def test_losses_are_of_every_video_at_every_level_and_only_sparse_attention_has_errors():
    batch = video, _, noise = flow_batch(2, DIGITS, CONFIG, seed=(1,))
    found = measures.grid_losses(lambda x, t: x * t.view(-1, 1, 1, 1, 1), video, noise, torch.tensor([0.25, 0.75]))
    for column, t in enumerate((0.25, 0.75)):
        expected = (((1 - t) * video + t * noise) * t - (noise - video)).square().flatten(1).mean(1)
        assert torch.allclose(found[:, column], expected)
    with torch.no_grad():
        exact = measures.attention_errors(started_model(CONFIG, opened_weights()), *batch)
        sparse = measures.attention_errors(started_model(PLAN.config(CONFIG, "SLA2"), opened_weights()), *batch)
    assert len(sparse) == CONFIG.layers
    assert max(exact) < 1e-6 < 0.01 < min(sparse)


# Claims


def test_the_claims_of_the_record_are_those_of_its_rows():
    """By the bootstrap over paired seeds and videos; all three verdicts are among them."""
    record = read_record("video_h200")
    recorded, found = record.provenance["claims"], verdict_rows(record.rows)
    for one, other in zip(recorded, found, strict=True):
        for name in ("claim", "verdict", "seeds", "mean", "low", "high"):
            assert one[name] == pytest.approx(other[name])
    assert {row["verdict"] for row in found} == {SUPPORTED, CONTRADICTED, NOT_DECIDED}
    with pytest.raises(ValueError, match="^differences: expected .seeds, videos., none of size zero"):
        bootstrap(np.zeros((0, 3)))


def test_an_arm_that_diverged_loses():
    for who, verdict in (("sparse only", SUPPORTED), ("SLA2", CONTRADICTED)):
        rows = [{"arm": arm, "seed": 0, "loss_by_video": [1.0], "diverged": None} for arm in ("SLA2", "sparse only")]
        (found,) = verdict_rows([row | ({"diverged": "yes"} if row["arm"] == who else {}) for row in rows])
        assert found["verdict"] == f"{verdict}: {who} diverged"


# Runs


def test_an_arm_that_is_judged_as_another_has_a_row_of_its_own(tmp_path):
    plan, arms = replace(QUICK, seeds=(0, 1)), (FULL, "SLA2, 16 bit", NOT_TUNED)
    shared, work = experiment(plan), work_in(tmp_path, plan, arms)
    assert work.finish(lambda run, _: shared.measure(run, work)) == []
    by = {(row["arm"], row["seed"]): row for row in work.rows}
    assert list(by) == [(FULL, 0), ("SLA2, 16 bit", 0), (AFTERWARDS, 0), (FULL, 1), ("SLA2, 16 bit", 1),
                        (AFTERWARDS, 1), (NOT_TUNED, 0)]  # fmt: skip
    quantised, plain = by[AFTERWARDS, 0], by["SLA2, 16 bit", 0]
    assert (quantised["int8"], plain["int8"]) == (True, False)
    assert quantised["loss"] != plain["loss"]
    assert quantised["loss"] == pytest.approx(np.mean(quantised["loss_by_video"]), rel=1e-4)
    for row in work.rows:
        sizes = [len(row[name]) for name in ("loss_by_video", "attention_error")]
        assert sizes == [plan.videos, CONFIG.layers]
    json.dumps(work.rows, allow_nan=False)


def test_a_run_that_diverges_is_a_row(tmp_path):
    hot = replace(PLAN, learning_rate=1e4, steps=4)
    (row,) = experiment(hot).measure(VideoRun(FULL, 0), work_in(tmp_path, hot))
    assert row["diverged"]
    assert "loss" not in row


# Commands


def test_train_and_finetune(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PLANS, "cpu", QUICK)
    tiny = "--frames 4 --size 8 --patch 2 --cube 2 2 2 --layers 1 --width 16 --heads 1 --batch 2 --device cpu"
    main(f"video train {tiny} --steps 2 --reports 1 --weights start --json train.json".split())
    assert read_record(tmp_path / "train.json").rows[0]["steps"] == 2
    options = "--plan cpu --device cpu --folder work --json record.json"
    main(f"video finetune --start start.1.safetensors {options} --arms full SageBwd".split())
    record = read_record(tmp_path / "record.json")
    assert [row["arm"] for row in record.rows] == [FULL, FULL, "SageBwd"]
    assert record.provenance["start"]["steps"] == 2
    assert (record.provenance["unfinished"], record.provenance["plan"]["steps"]) == ([], 1)
    assert "| SageBwd | 1 |" in capsys.readouterr().out
