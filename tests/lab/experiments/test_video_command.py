"""The video experiment: the plan, what is measured, which claims it decides, and commands that were stopped."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.video import command, measures, runs
from sage_lab.experiments.video import plan as plan_module
from sage_lab.experiments.video.measures import (
    Answers,
    attention_errors,
    found_objects,
    grid_losses,
    known_objects,
    psnr,
    ssim,
    truth_row,
)
from sage_lab.experiments.video.pictures import write_film, write_strip
from sage_lab.experiments.video.plan import (
    AFTERWARDS,
    ARMS,
    DECISIVE,
    FULL,
    NOT_TUNED,
    PLANS,
    SINGLE,
    Run,
    VideoPlan,
    plan_table,
    planned,
    run_seconds,
    step_seconds,
)
from sage_lab.experiments.video.runs import VideoRuns, all_rows, median_step_ms, tune
from sage_lab.experiments.video.speed import CONTENDERS, FlexCore
from sage_lab.experiments.video.verdicts import (
    CLAIMS,
    CONTRADICTED,
    NOT_DECIDED,
    SUPPORTED,
    bootstrap,
    verdict_rows,
    verdict_table,
)
from sage_lab.models.video_dit import VideoDiT
from sage_lab.records import read_record
from sage_lab.training.video_clips import write_clips
from sage_lab.training.video_flow import FlowTraining, flow_batch, started_model, write_weights
from sage_lab.training.video_router import RouterTraining
from sage_lab.training.video_scenes import draw_scenes, render
from video_cases import CONFIG, PLAN, made_up_digits, opened_weights, start_in

from sage_ref.sla2 import SLA2

DIGITS = made_up_digits()

# The plan


def test_decisive_arms_come_first_with_every_seed_and_each_arm_is_run_or_judged_as_one_that_is():
    order = planned(VideoPlan())
    assert order[: len(DECISIVE)] == [Run(arm, 0) for arm in DECISIVE]
    assert order[0] == Run(FULL, 0)
    assert [run for run in order if run.arm in SINGLE] == [Run(arm, 0) for arm in SINGLE] == order[3 * len(DECISIVE) :]
    assert {run.arm for run in order} | {name for name, arm in ARMS.items() if arm.judged_as} == ARMS.keys()
    assert all(ARMS[arm.judged_as].judged_as is None for arm in ARMS.values() if arm.judged_as)
    names = [run.name for run in order]
    assert len(set(names)) == len(names)
    assert all(name.replace("_", "").isalnum() for name in names)


def test_every_claim_is_about_arms_and_the_first_five_about_decisive_ones():
    for number, claim in enumerate(CLAIMS):
        assert {claim.better, claim.worse} <= ARMS.keys()
        if number < 5:
            assert {claim.better, claim.worse} <= {*DECISIVE, AFTERWARDS}


def test_the_model_is_as_large_as_the_issue_wants_and_its_blocks_are_cubes():
    config = command.MODEL
    assert (config.tokens, config.head_dim, config.patch) == (16_384, 128, 4)
    with torch.device("meta"):
        parameters = sum(x.numel() for x in VideoDiT(config).parameters() if x.requires_grad)
    assert 16e6 < parameters < 20e6
    small = replace(config, size=32, layers=1, width=32, heads=1)  # the same cubes
    for positions in VideoDiT(small).patches.positions.split(PLANS["gpu"].block_kv):
        assert (positions.amax(0) - positions.amin(0) + 1).tolist() == [4, 4, 4]


def test_what_a_run_should_cost_follows_the_arithmetic():
    plan, model = VideoPlan(), command.MODEL
    cost = {arm: step_seconds(plan.config(model, arm), plan.batch_size) for arm in ARMS}
    assert cost["SLA2"] < cost["SLA2 at 95%"] < cost["SLA2 at 90%"] < cost["SLA2 at 85%"] < cost[FULL]
    # Twice the frames: four times the attention, which is most of it.
    longer = step_seconds(replace(model, frames=32), 8) / step_seconds(model, 8)
    assert 3 < longer < 4
    assert run_seconds(plan, model, NOT_TUNED) < run_seconds(plan, model, "SLA2") < run_seconds(plan, model, FULL)
    total = sum(run_seconds(plan, model, run.arm) for run in planned(plan))
    assert f"| {total / 60:.1f} |" in plan_table(plan, model).splitlines()[-1]
    assert total < 32 * 60  # beside 13 minutes of pre-training


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_trains_and_is_what_it_is_called(tmp_path, arm):
    if ARMS[arm].judged_as:
        assert PLAN.config(CONFIG, arm) == replace(PLAN.config(CONFIG, ARMS[arm].judged_as), quantize=True)
        return
    quick = replace(PLAN, steps=1, stage1_steps=1, reports=1)
    config, weights, row = tune(quick, Run(arm, 0), start_in(tmp_path))
    assert row["diverged"] is None
    assert row["steps"] == (0 if arm == NOT_TUNED else 1)
    before = opened_weights()
    moved = any(not torch.equal(x, before[name]) for name, x in weights.items() if name in before)
    assert moved == (arm != NOT_TUNED)
    model = started_model(config, weights)
    core = model.blocks[0].attention.core
    if arm.startswith("SLA2") or config.attention == "sla2":
        assert isinstance(core, SLA2)
        assert core.settings.quantize == (arm != "SLA2, 16 bit")
        is_identity = torch.equal(core.router.proj_q.weight, torch.eye(16))
        assert is_identity == (arm in ("router at its start", "no stage 1"))
        assert (core.alpha(1, 1) == 1).all() == (arm == "sparse only")
        assert ("stage1_error" in row) == (arm != "no stage 1")
    sparsity = {"90": 0.9, "95": 0.95, "85": 0.85, "97": 0.75}  # 0.75 is this plan's 97%
    expected = sparsity.get(arm[-3:-1], 0.75)
    assert arm == "SLA at 97%" or config.sparsity == expected
    assert config.cube == ((1, 1, 1) if arm == "rows in order" else (2, 2, 2))


def test_int8_arms_and_16_bit_ones_share_a_stage_1(tmp_path, monkeypatch):
    """It runs once, its checkpoint stays until the last of them is done, and a 16-bit arm alone fits its own."""
    assert Run("SLA2, 16 bit", 1).stage1 == Run("SLA2", 1).stage1 == Run("SLA2", 1)
    same = {arm: Run(arm, 0).stage1.arm for arm in ARMS if ARMS[arm].stage1}
    assert {arm for arm, of in same.items() if arm != of} == {"SLA2, 16 bit", AFTERWARDS}
    monkeypatch.setattr(plan_module, "DECISIVE", ("SLA2", "SLA2, 16 bit"))
    monkeypatch.setattr(plan_module, "SINGLE", ())
    quick = replace(PLAN, steps=1, stage1_steps=2, reports=1, seeds=(0,))
    steps, original = [], RouterTraining.advance
    monkeypatch.setattr(RouterTraining, "advance", lambda self: steps.append(self.step) or original(self))
    runs, checkpoints = VideoRuns(quick, start_in(tmp_path), None), []
    runs.work(planned(quick), lambda: checkpoints.append([path.name for path in tmp_path.glob("*.pt")]))
    assert steps == [0, 1]
    assert checkpoints == [["SLA2_seed0_stage1.pt"], []]
    alone = tune(quick, Run("SLA2, 16 bit", 0), start_in(tmp_path / "alone"))
    assert steps == [0, 1, 0, 1]
    assert alone.row["stage1_error"] == all_rows(runs)[0]["stage1_error"] == all_rows(runs)[1]["stage1_error"]


# What is measured


def test_psnr_and_ssim_are_their_equations():
    video = torch.rand(2, 3, 2, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert psnr(video, video).tolist() == [100, 100]
    assert torch.allclose(psnr(video, video + 0.2), torch.tensor(20.0))  # an error of a tenth of the range
    assert torch.allclose(ssim(video, video), torch.ones(2))
    assert ssim(video, video.flip(-1)).max() < 0.3
    grey, darker = torch.zeros(1, 3, 1, 16, 16), torch.full((1, 3, 1, 16, 16), -0.5)  # 0.5 and 0.25 of [0, 1]
    assert ssim(grey, darker).item() == pytest.approx((2 * 0.125 + 1e-4) / (0.25 + 0.0625 + 1e-4), rel=1e-3)


def test_the_grid_is_the_loss_of_every_video_at_every_level():
    video, _, noise = flow_batch(2, DIGITS, CONFIG, seed=(1,))
    levels = torch.tensor([0.25, 0.75])
    found = grid_losses(lambda x, t: x * t.view(-1, 1, 1, 1, 1), video, noise, levels)
    for column, t in enumerate((0.25, 0.75)):
        expected = (((1 - t) * video + t * noise) * t - (noise - video)).square().flatten(1).mean(1)
        assert torch.allclose(found[:, column], expected)


def test_attention_errors_are_none_for_exact_attention_and_some_for_sparse():
    weights, batch = opened_weights(), flow_batch(1, DIGITS, CONFIG, seed=(1,))
    with torch.no_grad():
        exact = attention_errors(started_model(CONFIG, weights), *batch)
        sparse = attention_errors(started_model(PLAN.config(CONFIG, "SLA2"), weights), *batch)
    assert max(exact) < 1e-6
    assert min(sparse) > 0.01
    assert len(sparse) == CONFIG.layers


@pytest.fixture(scope="module")
def known():
    scenes = draw_scenes(2, len(DIGITS), 96, seed=(4,), device="cpu")
    return scenes, *known_objects(scenes, DIGITS, 4, 96)


def test_objects_that_are_there_are_kept_and_others_are_not(known):
    scenes, video, objects = known
    assert truth_row(video, objects)["kept"] == 1
    assert truth_row(video, objects)["velocity_error"] == 0
    assert objects.is_seen[:, :3].any()
    for k in range(3):
        is_there = scenes.is_there.clone()
        is_there[:, k] = False
        share, _ = found_objects(render(scenes._replace(is_there=is_there), DIGITS, 4, 96)[0], objects)
        assert share[:, k][objects.is_seen[:, k]].max() < 0.4
        others = [j for j in range(3) if j != k]
        assert share[:, others][objects.is_seen[:, others]].min() > 0.4
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    assert truth_row(video + 0.1 * noise, objects)["kept"] == 1
    assert truth_row(noise, objects)["kept"] == 0


def test_a_wrong_velocity_is_measured_in_pixels_per_frame(known):
    _, video, objects = known
    faster = torch.stack([video[:, :, t].roll(t, -1) for t in range(4)], 2)
    still = truth_row(video.roll(2, -1), objects)
    assert still["velocity_error"] < 0.2 < 0.8 < truth_row(faster, objects)["velocity_error"] < 1.2


def test_films_and_strips_are_small_pictures(tmp_path):
    from PIL import Image

    video, _ = render(draw_scenes(1, len(DIGITS), 64, seed=(4,), device="cpu"), DIGITS, 8, 64)
    write_film(tmp_path / "film.gif", video[0])
    write_strip(tmp_path / "strip.png", video[0])
    with Image.open(tmp_path / "film.gif") as film, Image.open(tmp_path / "strip.png") as strip:
        assert (film.n_frames, film.size) == (8, (64, 64))
        assert strip.size == (6 * 64, 64)
        shown = torch.from_numpy(np.array(strip.convert("RGB"))[:, :64]).permute(2, 0, 1) / 127.5 - 1
    assert (shown - video[0, :, 0]).abs().mean() < 0.05
    assert (tmp_path / "film.gif").stat().st_size < 40_000


# Which claims are decided


def rows_of(**losses):
    """A row for each arm and seed; losses: arm -> [seeds][videos]."""
    return [
        {"arm": arm.replace("_", " "), "seed": seed, "loss_by_video": list(of_videos), "diverged": None}
        for arm, of_seeds in losses.items()
        for seed, of_videos in enumerate(of_seeds)
    ]


def test_the_bootstrap_is_its_definition():
    difference = np.array([[1.0, 3.0]])
    found = bootstrap(difference)
    assert found == bootstrap(difference)
    assert (found.mean, found.low, found.high, found.seeds) == (2, 1, 3, 1)
    rng = np.random.default_rng(1)
    found = bootstrap(rng.normal(0.5, 1.0, (1, 400)))
    assert found.high - found.low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    # Where seeds differ and videos don't, the interval is that of the seeds.
    found = bootstrap(np.array([[-1.0] * 50, [1.0] * 50, [0.6] * 50]))
    assert (found.low, found.high) == (-1, 1)
    for shape in ((0, 3), (3, 0), (3,)):
        with pytest.raises(ValueError, match="^differences: expected .seeds, videos., none of size zero"):
            bootstrap(np.zeros(shape))


def test_verdicts_follow_the_interval():
    rng = np.random.default_rng(0)
    videos = rng.normal(1, 0.3, (3, 40))  # the same in all arms: pairing takes it away
    rows = rows_of(SLA2=videos, full=videos - 0.01, sparse_only=videos + rng.normal(0.01, 0.005, (3, 40)),
                   no_stage_1=videos + rng.normal(0, 0.01, (3, 40)),
                   router_at_its_start=videos - rng.normal(0.01, 0.005, (3, 40)))  # fmt: skip
    found = {row["claim"]: row for row in verdict_rows(rows)}
    assert found["alpha matters"]["verdict"] == SUPPORTED
    assert found["stage 1 matters"]["verdict"] == NOT_DECIDED
    assert found["a learned router beats the heuristic"]["verdict"] == CONTRADICTED
    assert found["full attention beats SLA2 at 97%"]["mean"] == pytest.approx(0.01)
    assert "QAT helps" not in found  # no such arm among the rows
    assert "| alpha matters | +" in verdict_table(list(found.values()))


def test_where_more_is_better_the_sign_turns_and_what_is_missing_is_left_out():
    rows = [row | {"psnr_by_video": [30 - x for x in row["loss_by_video"]]} for row in
            rows_of(SLA2=[[1.0, 2.0]], sparse_only=[[1.5, 2.5]], full=[[0.5, 1.0]])]  # fmt: skip
    rows[-1]["psnr_by_video"] = None  # of what others are compared with
    found = verdict_rows(rows, ("loss_by_video", "psnr_by_video"))
    assert [(row["claim"], row["on"], row["mean"]) for row in found] == [
        ("alpha matters", "loss_by_video", 0.5),
        ("full attention beats SLA2 at 97%", "loss_by_video", 0.75),
        ("alpha matters", "psnr_by_video", 0.5),
    ]


def test_the_time_of_a_step_is_the_median_without_the_first_and_without_what_a_resumed_run_repeats(tmp_path):
    seconds = [10.0 + 0.1 * n for n in range(20)] + [11.5 + 0.3 * n for n in range(3)]  # a kill set it back
    rows = [{"step": 0, "validation_loss": 1.0}, *({"step": n, "seconds": x} for n, x in enumerate(seconds))]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert median_step_ms(tmp_path / "run.jsonl") == 100
    (tmp_path / "run.jsonl").write_text("")
    assert median_step_ms(tmp_path / "run.jsonl") is None


def test_seeds_are_paired_and_a_divergence_decides():
    rows = rows_of(SLA2=[[1.0, 2.0], [5.0, 6.0]], sparse_only=[[1.5, 2.5]])
    (found,) = verdict_rows(rows)
    assert (found["seeds"], found["mean"], found["verdict"]) == (1, 0.5, SUPPORTED)
    for who, verdict in (("sparse only", SUPPORTED), ("SLA2", CONTRADICTED)):
        diverged = [row | ({"diverged": "yes", "loss_by_video": None} if row["arm"] == who else {}) for row in rows]
        (found,) = verdict_rows(diverged)
        assert found["verdict"] == f"{verdict}: {who} diverged"
        assert "diverged" in verdict_table([found])


# Runs


@pytest.fixture
def few_arms(monkeypatch):
    monkeypatch.setattr(plan_module, "DECISIVE", (FULL, "SLA2, 16 bit"))
    monkeypatch.setattr(plan_module, "SINGLE", ("sparse only",))
    return replace(PLAN, steps=1, stage1_steps=1, reports=1, seeds=(0, 1))


def test_the_plan_is_worked_off_in_its_order_and_what_is_finished_is_not_done_again(tmp_path, few_arms, monkeypatch):
    times = iter([False] * 7 + [True] * 100)
    stopped = VideoRuns(few_arms, start_in(tmp_path, lambda: next(times)), None)
    left = stopped.work(planned(few_arms), lambda: None)
    assert 0 < len(stopped.finished) < 5
    assert left == planned(few_arms)[len(stopped.finished) :]
    assert all_rows(stopped)[0]["arm"] == FULL
    trained = []
    original = FlowTraining.advance
    monkeypatch.setattr(FlowTraining, "advance", lambda self: trained.append(self.config.attention) or original(self))
    whole = VideoRuns(few_arms, start_in(tmp_path), None)
    assert whole.work(planned(few_arms), lambda: None) == []
    assert len(trained) == 5 - len(stopped.finished)
    rows = all_rows(whole)
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (FULL, 0), ("SLA2, 16 bit", 0), (AFTERWARDS, 0), (FULL, 1), ("SLA2, 16 bit", 1), (AFTERWARDS, 1),
        ("sparse only", 0),
    ]  # fmt: skip
    assert [row["compared_with"] for row in rows] == [
        None, *["full, seed 0"] * 3, *["full, seed 1"] * 2, "full, seed 0",
    ]  # fmt: skip
    by = {(row["arm"], row["seed"]): row for row in rows}
    assert by[AFTERWARDS, 0]["int8"]
    assert not by["SLA2, 16 bit", 0]["int8"]
    assert by[AFTERWARDS, 0]["loss"] != by["SLA2, 16 bit", 0]["loss"]
    for row in rows:
        assert len(row["loss_by_video"]) == few_arms.videos
        assert len(row["loss_by_t"]) == few_arms.levels
        assert len(row["attention_error"]) == CONFIG.layers
    json.dumps(rows, allow_nan=False)
    drawn = {path.stem for path in (tmp_path / "pictures").glob("*.gif")}
    assert drawn == {"full_seed0", "sparse_only_seed0"}
    assert not list(tmp_path.glob("*.pt"))
    # The samples of the full model are asked for as long as a run is left that is compared with them.
    trained.clear()
    whole.samples_path(1).unlink()
    again = VideoRuns(few_arms, start_in(tmp_path), None)
    assert again.work(planned(few_arms), lambda: None) == []
    assert trained == []
    del again.parts.parts[Run("SLA2, 16 bit", 1).name]
    assert not again.is_finished(Run(FULL, 1))
    assert again.is_finished(Run(FULL, 0))
    assert again.work(planned(few_arms), lambda: None) == []
    assert trained == ["exact", "sla2"]


def test_a_run_that_diverges_is_a_row(tmp_path, monkeypatch):
    hot = replace(PLAN, learning_rate=1e4, steps=4)
    found = VideoRuns(hot, start_in(tmp_path), None)
    found.work([Run(FULL, 0)], lambda: None)
    (row,) = all_rows(found)
    assert row["diverged"]
    assert "loss" not in row


def test_what_the_router_selected_is_written_bit_by_bit(tmp_path):
    from safetensors.torch import load_file

    model = started_model(PLAN.config(CONFIG, "SLA2"), opened_weights())
    asked = measures.questions(PLAN, CONFIG, DIGITS, None)
    runs.write_selected(tmp_path / "selected.safetensors", model, asked, False)
    found = load_file(tmp_path / "selected.safetensors")
    assert found["video"].shape == (3, 2, 8, 8)  # the first frame of each cube
    bits = np.unpackbits(found["selected"].numpy(), axis=-1)
    assert bits.shape == (2, 1, 4, 8)  # layers, heads, blocks of queries and of keys
    assert (bits.sum(-1) == 2).all()  # a quarter of 8


# Commands

TINY = (
    "--frames 4 --size 8 --patch 2 --cube 2 2 2 --layers 1 --width 16 --heads 1 --device cpu --no-autocast --no-compile"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "digit_images", made_up_digits)
    return tmp_path


def test_train_finetune_sample_and_evaluate(here, capsys):
    main(f"video train {TINY} --steps 2 --batch 2 --reports 1 --weights start --json train.json".split())
    assert read_record(here / "train.json").rows[0]["steps"] == 2
    main(f"video train {TINY} --steps 1 --batch 2 --start start.1.safetensors --checkpoint b.pt --weights b".split())
    assert "1 steps" in capsys.readouterr().out
    choice = "--start start.1.safetensors --plan cpu --device cpu --steps 1 --stage1-steps 1"
    main(f"video finetune {choice} --arm full --weights tuned --folder arm".split())
    clips = torch.zeros(2, 3, 4, 8, 8)
    write_clips(here / "clips.npz", clips)
    judged = "--plan cpu --device cpu --videos 2 --samples 1 --sampling-steps 1 --clips clips.npz"
    main(f"video evaluate --start tuned.1.safetensors {judged} --json evaluated.json".split())
    record = read_record(here / "evaluated.json")
    assert record.rows[0]["arm"] == "full"
    assert len(record.rows[0]["clip_loss_by_video"]) == 2
    assert record.provenance["start"]["before"]["steps"] == 2
    options = "--start tuned.1.safetensors --count 2 --sampling-steps 1 --device cpu --out films"
    main(["video", "sample", *options.split()])
    assert {path.name for path in (here / "films").iterdir()} == {"film0.gif", "film0.png", "film1.gif", "film1.png"}


def test_the_whole_plan_by_its_command(here, few_arms, capsys, monkeypatch):
    monkeypatch.setattr(command, "PLANS", {"cpu": replace(few_arms, seeds=(0,)), "gpu": PLANS["gpu"]})
    row = {"loss": 1.0, "loss_by_video": [1.0, 2.0]}
    judged = Answers(row, torch.zeros(1, 3, 4, 8, 8), torch.zeros(1, 3, 4, 8, 8))
    monkeypatch.setattr(runs, "answers", lambda *_: judged)
    (start,) = write_weights(here / "start", opened_weights(), CONFIG, {"steps": 9})
    main(f"video finetune --start {start.name} --plan cpu --all --device cpu --folder f --json record.json".split())
    record = read_record(here / "record.json")
    assert [row["arm"] for row in record.rows] == [FULL, "SLA2, 16 bit", AFTERWARDS, "sparse only"]
    assert record.provenance["unfinished"] == []
    assert record.provenance["start"] == {"steps": 9}
    assert record.provenance["plan"]["steps"] == 1
    assert "| sparse only |" in capsys.readouterr().out


def test_plan_shows_what_would_be_cut_first(capsys):
    main(["video", "plan", "--plan", "gpu"])
    printed = capsys.readouterr().out
    assert "With less time the last ones are cut first: SageBwd" in printed
    assert "| 1 | full | 0 |" in printed


def test_speed_takes_turns_and_says_what_is_missing(here, capsys, monkeypatch):
    small = replace(CONFIG, attention="exact")
    monkeypatch.setattr(command, "MODEL", replace(small, block_q=16, block_kv=8))
    taken, original = [], FlowTraining.advance
    monkeypatch.setattr(FlowTraining, "advance", lambda self: taken.append(self.config.attention) or original(self))
    monkeypatch.setattr(command, "CONTENDERS", {name: CONTENDERS[name] for name in ("sla2", "exact", "cudnn")})
    options = "--frames 4 8 --size 8 --layers 1 --width 16 --heads 1 --videos 2 --warmup 1 --repetitions 2"
    main(f"video speed {options} --sampling-steps 1 --device cpu --json speed.json".split())
    assert taken == 2 * ["sla2", "exact", "sla2", "exact", "exact", "sla2"]
    record = read_record(here / "speed.json")
    assert [(row["what"], row["tokens"], row["videos"]) for row in record.select(provider="sla2")] == [
        ("step", 64, 2), ("sampling", 64, 1), ("step", 128, 1), ("sampling", 128, 1),
    ]  # fmt: skip
    assert all(row["protocol"] == "paired" and row["ms_median"] > 0 for row in record.rows)
    assert record.provenance["not_timed"] == {"cudnn": "it needs a CUDA device"}
    assert "| step | 64 | SLA2 |" in capsys.readouterr().out
    assert not list(here.glob("speed.*.partial"))


def test_speed_that_was_stopped_goes_on_with_the_length_it_was_at(here, monkeypatch):
    monkeypatch.setattr(command, "MODEL", replace(CONFIG, attention="exact", block_q=16, block_kv=8))
    measured, original = [], command.length_rows

    def stopped_once(plan, config, *rest):
        measured.append(config.frames)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return [*original(plan, config, *rest), {"provider": "flex", "what": "graph", "tokens": 1, "missing": "why"}]

    monkeypatch.setattr(command, "length_rows", stopped_once)
    options = "--attentions sla2 exact --frames 4 8 --size 8 --layers 1 --width 16 --heads 1 --videos 2"
    call = f"video speed {options} --warmup 1 --repetitions 2 --sampling-steps 1 --device cpu --json speed.json".split()
    with pytest.raises(SystemExit):
        main(call)
    assert {row["frames"] for row in read_record(here / "speed.json").rows} == {4}
    main(call)
    assert measured == [4, 8, 8]
    record = read_record(here / "speed.json")
    assert [row["frames"] for row in record.rows] == 4 * [4] + 4 * [8]
    assert record.provenance["not_timed"] == {"flex, graph, 1 tokens": "why"}


def test_flex_attention_is_given_as_many_keys_in_blocks_that_are_drawn_once():
    """PyTorch's own function looks at single blocks where it is compiled, on a GPU."""
    config = replace(CONFIG, frames=8, size=32, sparsity=0.75)  # 2048 tokens, 16 blocks of 128
    core, again = (FlexCore(config, torch.device("cpu")) for _ in range(2))
    selected = core.mask.to_dense()[0, 0]
    assert selected.shape == (16, 16)
    assert (selected.sum(1) == 4).all()
    assert len(selected.unique(dim=0)) > 8
    assert torch.equal(again.mask.to_dense()[0, 0], selected)
    given = {}
    core.attention = lambda *qkv, **options: given.update(options) or qkv[2]
    core(*3 * [torch.zeros(1, 1, 2048, 16)])
    assert given == {"block_mask": core.mask}
