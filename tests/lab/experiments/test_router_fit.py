"""Stage 1 makes the hard mask better where the heuristic is wrong, and every number it is compared with is right."""

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import router_fit
from sage_lab.experiments.router_fit import FITTED, HELD_OUT, FitSettings, RouterSweep, fit_router, mask_rows, samples
from sage_lab.plan import FinishedParts
from sage_lab.records import Record, read_record
from sage_lab.training.capture import Capture, write_capture
from sage_lab.training.video_like import VideoLike, video_like
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing import assert_close

from sage_ref.sla2 import PRINTED, SLA, Relaxation, block_count, soft_sparse_linear_attention, soft_top_k, top_blocks
from sage_ref.sla2.router import LEAST_WEIGHT

# Outliers among the queries put their block's mean where the block has no mass: the heuristic is wrong on purpose.
DATA = VideoLike(grid=(4, 8, 8), cube=(1, 4, 4), heads=2, head_dim=16, outlier=120.0)
SETTINGS = FitSettings(sparsity=0.9, steps=80, query_blocks=8, learning_rate=5e-3)
FAST = replace(SETTINGS, steps=2)


def outlier_samples(count, seed=0):
    return samples(*video_like(DATA, count, seed=seed)[0].values(), SETTINGS.blocks)


@pytest.fixture(scope="module")
def fitted():
    return outlier_samples(3)


@pytest.fixture(scope="module")
def held_out():
    return outlier_samples(2, seed=1)


@pytest.fixture(scope="module")
def straight_through(fitted):
    return fit_router(fitted, SETTINGS)


@pytest.fixture(scope="module")
def printed(fitted):
    return fit_router(fitted, replace(SETTINGS, relaxation=PRINTED, steps=200, learning_rate=1e-2))


def by_method(rows, sample_set):
    return {row["method"]: row for row in rows if row["samples"] == sample_set}


def test_the_fit_beats_the_heuristic_where_that_is_wrong(fitted, held_out, straight_through):
    rows = mask_rows(fitted, held_out, SETTINGS) + router_fit.sla_rows(fitted, held_out, SETTINGS)
    rows += router_fit.trained_rows(fitted, held_out, straight_through, SETTINGS.relaxation)
    for sample_set in (FITTED, HELD_OUT):
        methods = by_method(rows, sample_set)
        row, heuristic = methods["SLA2"], methods["heuristic, alpha fitted"]
        assert row["error"] < 0.95 * heuristic["error"]
        assert row["error"] < methods["SLA, best step"]["error"]
        assert row["share_of_best_mass"] > heuristic["share_of_best_mass"] + 0.05
        assert row["error"] > methods["best mask, alpha fitted"]["error"]


def test_the_printed_stand_in_is_solved_by_a_flat_mask(fitted, printed):
    """Its loss falls to almost nothing while the mask that will be used gets worse."""
    before = router_fit.held_mass(fitted, router_fit.heuristic_mask(fitted, SETTINGS))["mass"]
    row = by_method(router_fit.trained_rows(fitted, fitted, printed, PRINTED), FITTED)["SLA2"]
    assert row["error_stage1"] < 0.3 * printed.trace[0]["loss"]
    assert row["flatness"] > row["flatness_at_start"]
    assert row["mass"] < before
    assert row["error"] > 3 * row["error_stage1"]


def test_no_mask_holds_more_than_the_best_one_and_mass_is_that_of_the_probabilities(fitted, held_out, straight_through):
    rows = mask_rows(fitted, held_out, SETTINGS) + router_fit.trained_rows(
        fitted, held_out, straight_through, Relaxation()
    )
    for row in rows:
        assert row["share_of_best_mass"] <= 1 + 1e-6
        assert (row["share_of_best_mass"] == pytest.approx(1, abs=1e-6)) == row["method"].startswith("best mask")
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 31):
        mask = top_blocks(torch.rand(fitted.mass.shape, generator=generator), count)
        assert router_fit.held_mass(fitted, mask)["share_of_best_mass"] < 1
    everything = torch.ones_like(mask)
    assert router_fit.held_mass(fitted, everything) == pytest.approx({"mass": 1.0, "share_of_best_mass": 1.0})
    mask = router_fit.heuristic_mask(fitted, SETTINGS)
    p = (fitted.query @ fitted.key.mT / 4).softmax(-1)
    seen = mask.repeat_interleave(16, -2).repeat_interleave(8, -1)
    assert router_fit.held_mass(fitted, mask)["mass"] == pytest.approx((p * seen).sum(-1).mean().item(), rel=1e-5)


def test_fitted_alpha_cannot_be_improved(fitted):
    mask = router_fit.heuristic_mask(fitted, SETTINGS)
    o_s, o_l = router_fit.branches(fitted, mask, SETTINGS.blocks)
    alpha = router_fit.fitted_alpha(fitted, o_s, o_l)
    assert alpha.shape == (2,)
    least = router_fit.mixed_row(fitted, mask, alpha, SETTINGS.blocks)["error"]
    for head in range(2):
        for change in (-0.02, 0.02):
            other = alpha.clone()
            other[head] += change
            assert router_fit.mixed_row(fitted, mask, other, SETTINGS.blocks)["error"] > least


def test_alphas_of_the_baselines_come_from_the_fitted_samples(fitted, held_out):
    rows = mask_rows(fitted, held_out, SETTINGS)
    on_fitted, on_held_out = (by_method(rows, sample_set) for sample_set in (FITTED, HELD_OUT))
    assert len(on_fitted) == 2 * 3
    for method, row in on_fitted.items():
        assert on_held_out[method]["alpha"] == pytest.approx(row["alpha"])
        if method.endswith("alpha from data"):
            assert row["alpha"] == pytest.approx(row["mass"], rel=1e-5)
        if method.endswith("sparse only"):
            assert row["alpha"] == 1


def test_sla_starts_as_sparse_attention_and_learns(fitted, held_out):
    sla = SLA(16, 2, sparsity=SETTINGS.sparsity, block_q=16, block_kv=8)
    alone = router_fit.squared_error(sla(*fitted[:3]), fitted).item()
    sparse = by_method(mask_rows(fitted, held_out, SETTINGS), FITTED)["heuristic, sparse only"]
    assert sparse["error"] == pytest.approx(alone, rel=1e-5)
    rows = router_fit.sla_rows(fitted, held_out, SETTINGS)
    for sample_set in (FITTED, HELD_OUT):
        methods = by_method(rows, sample_set)
        assert methods["SLA, best step"]["error"] <= methods["SLA"]["error"]
    # Told when to stop it is at least the sparse attention it starts as; at its last step it fits too closely.
    sparse = by_method(mask_rows(fitted, held_out, SETTINGS), HELD_OUT)["heuristic, sparse only"]["error"]
    assert by_method(rows, HELD_OUT)["SLA, best step"]["error"] <= sparse * (1 + 1e-5)
    assert by_method(rows, HELD_OUT)["SLA"]["error"] > sparse
    assert by_method(rows, FITTED)["SLA"]["error"] < alone
    assert by_method(router_fit.sla_rows(fitted, held_out, FAST), FITTED)["SLA"]["error"] < alone


def test_the_trained_row_is_that_of_the_module_with_alpha_fitted_and_compared(fitted, held_out, straight_through):
    model = straight_through.model
    assert model.current_stage == 2
    row = by_method(router_fit.trained_rows(fitted, held_out, straight_through, Relaxation()), HELD_OUT)["SLA2"]
    with torch.no_grad():
        output = model(*held_out[:3])
    assert row["error"] == pytest.approx(router_fit.squared_error(output, held_out).item(), rel=1e-5)
    mask = model.block_mask(fitted.query, fitted.key)
    alpha = router_fit.fitted_alpha(fitted, *router_fit.branches(fitted, mask, SETTINGS.blocks))
    expected = router_fit.mixed_row(held_out, model.block_mask(held_out.query, held_out.key), alpha, SETTINGS.blocks)
    assert row["error_fitted_alpha"] == pytest.approx(expected["error"], rel=1e-6)
    assert row["alpha_minus_mass"] == pytest.approx(row["alpha"] - row["mass"], abs=1e-6)


def test_the_printed_loss_is_that_of_the_module_in_stage_1(fitted):
    model = fit_router(fitted, replace(FAST, alpha_per_block=True)).model
    for sample, rows in (([0, 1, 2], torch.arange(16)), ([1], torch.tensor([5, 2]))):
        with torch.no_grad():
            loss, soft = router_fit.stage1_loss(model, fitted, PRINTED, sample, rows)
            model.relaxation = PRINTED
            everything = model.soft_block_mask(fitted.query[sample], fitted.key[sample])
            alpha = model.alpha(len(sample), 16)
            tensors = (x[sample] for x in fitted[:3])
            output = soft_sparse_linear_attention(*tensors, everything, alpha, model.settings)
        assert_close(soft, everything[:, :, rows])
        wanted = fitted.output[sample].unflatten(2, (16, 16))[:, :, rows]
        error = output.unflatten(2, (16, 16))[:, :, rows] - wanted
        assert_close(loss, error.square().sum() / wanted.square().sum())


def test_a_flat_mask_cancels_in_the_softmax_only_where_it_weighs_e_to_the_s(fitted):
    flat, alpha = torch.full(fitted.mass.shape, 3 / 32), torch.ones(fitted.mass.shape[:-1])
    errors = {
        reading: router_fit.squared_error(attention(*fitted[:3], flat, alpha, SETTINGS.blocks), fitted).item()
        for reading, attention in router_fit.READINGS.items()
    }
    assert errors[router_fit.WEIGHTED] < 1e-10
    assert errors[router_fit.MULTIPLIED] > 0.1
    s = fitted.query @ fitted.key.mT / 4
    expected = (s * 3 / 32).softmax(-1) @ fitted.value
    found = router_fit.printed_soft_attention(*fitted[:3], flat, alpha, SETTINGS.blocks)
    assert_close(found, expected)
    linear = router_fit.linear_branch(*fitted[:3], 1 - flat, SETTINGS.blocks)
    assert_close(router_fit.printed_soft_attention(*fitted[:3], flat, 0 * alpha, SETTINGS.blocks), linear)


def test_the_fit_and_its_row_follow_the_reading(fitted):
    settings = replace(FAST, relaxation=PRINTED, reading=router_fit.MULTIPLIED)
    found, weighted = (fit_router(fitted, x) for x in (settings, replace(settings, reading=router_fit.WEIGHTED)))
    assert found.trace[0]["loss"] > 2 * weighted.trace[0]["loss"]
    (row, _) = router_fit.fit_rows(fitted, fitted, settings)
    assert (row["relaxation"], row["reading"]) == (PRINTED.name, "softmax(S * M)")
    everything = [0, 1, 2], torch.arange(16)
    with torch.no_grad():
        loss, _ = router_fit.stage1_loss(found.model, fitted, PRINTED, *everything, router_fit.MULTIPLIED)
    assert row["error_stage1"] == pytest.approx(loss.item(), rel=1e-5)


def test_straight_through_takes_values_from_top_k_and_gradients_from_soft_top_k():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 12, generator=generator, requires_grad=True)
    direction = torch.randn(2, 3, 12, generator=generator)
    for scores, temperature in (("log P_c", 1.0), ("P_c", 0.1)):
        relaxation = Relaxation(scores, temperature)
        weights, soft = relaxation.block_weights(relaxation.scores_of(logits), 4)
        expected = top_blocks(logits, 4).float().clamp_min(LEAST_WEIGHT)
        assert torch.equal(weights, expected)
        p_c = logits.softmax(-1)
        by_hand = soft_top_k(p_c if scores == "P_c" else p_c.log(), 4, temperature)
        assert_close(soft, by_hand)
        (grad,) = torch.autograd.grad((weights * direction).sum(), logits)
        (expected_grad,) = torch.autograd.grad((by_hand * direction).sum(), logits)
        assert_close(grad, expected_grad)
        assert grad.abs().max() > 1e-3
        weights, soft = replace(relaxation, straight_through=False).block_weights(relaxation.scores_of(logits), 4)
        assert torch.equal(weights, soft)
        assert_close(soft, by_hand)


def test_flatness_and_correlation_at_their_ends():
    assert router_fit.flatness(torch.full((2, 3, 8), 0.25)) == pytest.approx(1)
    assert router_fit.flatness(top_blocks(torch.rand(2, 3, 8), 2).float()) == pytest.approx(0, abs=1e-6)
    x = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    assert router_fit.correlation(x, -3 * x) == pytest.approx(-1, abs=1e-5)
    assert router_fit.correlation(x, torch.ones_like(x)) is None


@pytest.mark.parametrize("alpha_per_block", [False, True])
def test_alpha_starts_at_the_mass_and_moves(fitted, alpha_per_block):
    settings = replace(FAST, alpha_per_block=alpha_per_block, alpha_learning_rate=1e-9)
    model = fit_router(fitted, settings).model
    assert model.alpha_logit.shape == (2, 16 if alpha_per_block else 1)
    held = (fitted.mass * router_fit.heuristic_mask(fitted, settings)).sum(-1).mean(0)
    assert_close(model.alpha(1, 16)[0], held if alpha_per_block else held.mean(-1, keepdim=True).expand(-1, 16))
    moved = fit_router(fitted, replace(settings, alpha_learning_rate=0.05)).model.alpha(1, 16)
    assert (moved - model.alpha(1, 16)).abs().mean() > 1e-3


def test_a_fit_is_a_function_of_its_seed(fitted):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (fit_router(fitted, replace(FAST, seed=seed)).model for seed in (0, 0, 1))
    assert not torch.equal(first.router.proj_q.weight, other.router.proj_q.weight)
    for name, x in first.state_dict().items():
        assert torch.equal(x, again.state_dict()[name])
    # Linear layers draw weights before they become identities; what comes out does not depend on it.
    torch.set_rng_state(before)
    assert torch.equal(fit_router(fitted, FAST).model.router.proj_q.weight, first.router.proj_q.weight)


def test_learning_rates_follow_a_cosine_to_zero(fitted):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda x, *_: rates.append([group["lr"] for group in x.param_groups]))
    try:
        fit_router(fitted, replace(FAST, steps=4))
    finally:
        hook.remove()
    expected = torch.tensor([[1.0], [0.8536], [0.5], [0.1464]]).expand(4, 2)
    assert_close(torch.tensor(rates) / torch.tensor(rates[0]), expected, atol=1e-4, rtol=0)
    assert rates[0] == [FAST.learning_rate, FAST.alpha_learning_rate]


def test_a_length_with_a_partial_block_is_fitted_on_its_whole_blocks():
    tensors = [x[:, :, :250] for x in video_like(DATA, 2)[0].values()]
    data = samples(*tensors, SETTINGS.blocks)
    found = fit_router(data, replace(FAST, alpha_per_block=True))
    row = by_method(router_fit.trained_rows(data, data, found, Relaxation()), FITTED)["SLA2"]
    with torch.no_grad():
        assert row["error"] == pytest.approx(router_fit.squared_error(found.model(*tensors), data).item(), rel=1e-5)
    assert found.model.alpha_logit.shape[1] == block_count(250, 16) == 16
    held = (data.mass * router_fit.heuristic_mask(data, FAST)).sum(-1).mean(0)
    moved = (found.model.alpha(1, 16)[0] - held).abs()
    assert moved[:, :-1].max() > 1e-2
    assert moved[:, -1].max() < 1e-5


def test_impossible_settings_are_refused(fitted):
    larger, broken = replace(SETTINGS, block_q=512), fitted._replace(output=fitted.output * torch.nan)
    one = video_like(DATA, 1)[0]
    for error, message, call in (
        (ValueError, r"scores: expected one of \('P_c', 'log P_c'\), got 'logits'", lambda: Relaxation("logits")),
        (ValueError, "temperature: expected a positive number, got 0", lambda: Relaxation(temperature=0)),
        (ValueError, "^steps: expected at least 2, got 1", lambda: replace(SETTINGS, steps=1)),
        (ValueError, r"reading: expected one of \('M e\^S', .*, got 'S M'", lambda: replace(SETTINGS, reading="S M")),
        (ValueError, "query: expected at least block_q=512 tokens, got 256", lambda: fit_router(fitted, larger)),
        (ValueError, "capture: expected 2 samples or more, .*, got 1", lambda: router_fit.split_samples(one)),
        (RuntimeError, "left weights that are not finite", lambda: fit_router(broken, FAST)),
    ):
        with pytest.raises(error, match=message):
            call()


def test_the_last_sample_is_held_out():
    tensors, _ = video_like(DATA, 3)
    fit, held = router_fit.split_samples(tensors)
    for x, first, last in zip(tensors.values(), fit, held, strict=True):
        assert torch.equal(torch.cat((first, last)), x)
        assert len(last) == 1


SWEEP = RouterSweep(FAST, sparsities=(0.9, 0.95), relaxations=(PRINTED, Relaxation()), seeds=(0, 1))
LAYERS = {2: video_like(DATA, 2)[0], 7: video_like(DATA, 2, seed=1)[0]}


def test_a_killed_sweep_goes_on_where_it_was_and_its_rows_say_what_they_are(tmp_path, monkeypatch):
    whole = list(router_fit.router_sweep(SWEEP, LAYERS, FinishedParts(tmp_path / "whole", None)))
    assert len(whole) == router_fit.sweep_length(SWEEP, LAYERS) == 2 * 2 * 5
    fits, parts = [], FinishedParts(tmp_path / "sweep", None)
    monkeypatch.setattr(router_fit, "fit_router", lambda *arguments: fits.append(0) or fit_router(*arguments))
    killed = router_fit.router_sweep(SWEEP, LAYERS, parts)
    first = [next(killed) for _ in range(7)]
    killed.close()
    assert len(fits) == 5  # the other two lists are baselines
    assert list(router_fit.router_sweep(SWEEP, LAYERS, parts)) == whole
    assert len(fits) == 16
    assert whole[:7] == first
    record = Record({}, [row for found in whole for row in found])
    places = {(layer, *place) for layer in (2, 7) for place in ((0.9, 3), (0.95, 2))}
    assert {(row["layer"], row["sparsity"], row["blocks"]) for row in record.rows} == places
    trained = record.select(method="SLA2", layer=2, sparsity=0.9)
    expected = itertools.product(("soft, P_c / 0.1", "straight-through, log P_c / 1"), (0, 1), (FITTED, HELD_OUT))
    assert {(row["relaxation"], row["seed"], row["samples"]) for row in trained} == set(expected)


def test_the_table_shows_means_over_layers_and_seeds():
    def both(method, *errors, **more):
        more |= {"sparsity": 0.97, "method": method, "share_of_best_mass": 0.5}
        return [more | {"samples": s, "error": x} for s, x in zip((FITTED, HELD_OUT), errors, strict=True)]

    rows = both("SLA", 0.1, 0.3) + both("SLA", 0.2, 0.4)
    for seed, error in enumerate((0.2, 0.6)):
        rows += both("SLA2", 0.1, error, relaxation="soft", seed=seed, error_fitted_alpha=error / 2)
    lines = router_fit.result_table(Record({}, rows)).splitlines()
    assert lines[2] == "| 97% | SLA | 0.1500 | 0.3500 |  |  | 0.500 |"
    assert lines[3] == "| 97% | SLA2 (soft) | 0.1000 | 0.4000 | 0.2000 to 0.6000 | 0.2000 | 0.500 |"
    rows += both("SLA2", 0.1, 0.7, relaxation="soft", reading="S M", seed=0, error_fitted_alpha=0.3)
    lines = router_fit.result_table(Record({}, rows)).splitlines()
    assert lines[3:] == [
        "| 97% | SLA2 (soft) | 0.1000 | 0.4000 | 0.2000 to 0.6000 | 0.2000 | 0.500 |",
        "| 97% | SLA2 (soft; S M) | 0.1000 | 0.7000 |  | 0.3000 | 0.500 |",
    ]


def test_the_command_fits_prints_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_capture(tmp_path / "c.safetensors", Capture({"made": "up"}, LAYERS))
    options = "--capture c.safetensors --k 10 5 --seeds 1 --steps 2 --device cpu --json out.json"
    main(["train-router", *options.split()])
    printed = capsys.readouterr()
    record = read_record(tmp_path / "out.json")
    assert printed.out.count("| 90% |") == printed.out.count("| 95% |") == 10
    assert "12/12" in printed.err
    assert {file.name for file in tmp_path.iterdir()} == {"c.safetensors", "out.json"}
    assert record.provenance["command"] == f"python -m sage_lab train-router {options}"
    assert record.provenance["data"]["capture"] == "c.safetensors"
    assert re.fullmatch("[0-9a-f]{64}", record.provenance["data"]["sha256"])
    assert record.provenance["seeds"] == [0]
    assert record.provenance["settings"]["steps"] == 2
    for name in ("torch", "cpu", "commit", "date", "threads", "device"):
        assert record.provenance[name], name
    assert {row["layer"] for row in record.rows} == {2, 7}


def test_the_command_takes_made_up_data_and_tries_every_stand_in_and_reading(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(router_fit, "STUDY", (PRINTED,))
    monkeypatch.setattr(router_fit, "VideoLike", partial(VideoLike, grid=DATA.grid, cube=DATA.cube))
    options = "--outlier 120 --k 3 --seeds 2 --steps 2 --study --readings --device cpu --json"
    main(["train-router", *options.split(), "out.json"])
    record = read_record(tmp_path / "out.json")
    assert record.provenance["data"]["structured"]["outlier"] == 120
    assert record.provenance["seeds"] == [0, 1]
    assert {row.get("relaxation") for row in record.rows} == {None, PRINTED.name}
    assert {row.get("reading") for row in record.rows} == {None, *router_fit.READINGS}
    assert "soft, P_c / 0.1" in capsys.readouterr().out
    main(["train-router", *options.split(), "again.json"])
    assert read_record(tmp_path / "again.json").rows == record.rows
