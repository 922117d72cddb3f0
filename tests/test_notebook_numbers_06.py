"""The numbers that notebook 06 claims, from the records and from the package's functions."""

import ast
import copy
import json
import math
from statistics import mean, stdev

import matplotlib.pyplot as plt
import pytest
import torch

from sage_ref import plotting
from sage_ref.plotting import PAPER_LOSSES, RUN_KINDS, Interval, noise_of
from sage_ref.quantization import fake_quantize
from sage_ref.recorded import RECORDED, REPOSITORY, Record, read_record
from sage_ref.tables import PAPER_TABLE2
from sage_ref.training.noise import VARIANTS

RUNS, LAYERS = read_record("pretrain_h200"), read_record("layers_h200")
PLAN = RUNS.provenance["plan"]
SMALL, LARGE = PLAN["tokens_per_step"]
NOISE_RECORDS = [name for name in ("noise_cpu", "noise_h200") if (RECORDED / f"{name}.json").exists()]
PAPER_GAP = {size: x["sagebwd"] / x["exact"] - 1 for size, x in PAPER_LOSSES.items()}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(params=NOISE_RECORDS)
def noise(request):
    return read_record(request.param)


def altered(record, **changes):
    """A copy of the record; changes: the rows, or values of the provenance."""
    rows = copy.deepcopy(changes.pop("rows", record.rows))
    return Record(record.provenance | changes, rows)


def run_like(kind, *, seed, loss, size=LARGE, qk_norm=True):
    """A run of the record with another seed and, all along, another loss."""
    row = copy.deepcopy(plotting.pretrain_runs(RUNS, kind, size, qk_norm)[0])
    return row | {"seed": seed, "final_val_loss": loss, "curve": [[tokens, loss] for tokens, _ in row["curve"]]}


def from_the_notebook(name):
    """A function that notebook 06 defines."""
    cells = json.loads((REPOSITORY / "notebooks" / "06_tokens_per_step.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = [node for source in sources for node in ast.parse(source).body if getattr(node, "name", "") == name]
    names = {"math": math, "mean": mean, "plotting": plotting, "runs": RUNS}
    exec(compile(ast.Module(found, []), name, "exec"), names)
    return names[name]


def test_rounding_to_nearest_has_a_floor_where_noise_has_none():
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(256, generator=generator))
    wanted, count = size * math.exp(0.5), 2**18
    sums = {name: torch.zeros(256, dtype=torch.float64) for name in ("not rounded", "nearest", "stochastic")}
    for _ in range(count // 8192):
        x = size * torch.exp(torch.randn(8192, 256, generator=generator))
        sums["not rounded"] += x.sum(0)
        sums["nearest"] += fake_quantize(x, (1, None)).sum(0)
        sums["stochastic"] += fake_quantize(x, (1, None), "stochastic", generator).sum(0)
    error = {name: ((total / count - wanted).norm() / wanted.norm()).item() for name, total in sums.items()}
    assert error["nearest"] > 1.5 * error["not rounded"]
    assert error["stochastic"] == pytest.approx(error["not rounded"], rel=0.1)


class TestRuns:
    def test_labels_agree_with_what_the_runs_did(self):
        for row in RUNS.rows:
            assert row["steps"] * row["tokens_per_step"] == row["tokens"] == row["curve"][-1][0] == PLAN["tokens"]
            assert row["final_val_loss"] == row["curve"][-1][1]
            is_exact = row["attention"] == "exact"
            assert is_exact == (row["smoothing"] is None) == (row["backend"] is None)
            # Before the first step: exact runs of a seed agree, SageBwd differs from them by its rounding alone.
            of_seed = RUNS.select(attention="exact", seed=row["seed"], qk_norm=row["qk_norm"])
            away = abs(row["curve"][0][1] - of_seed[0]["curve"][0][1])
            assert away < 1e-6 if is_exact else 1e-5 < away < 2e-3
        starts = {(row["seed"], row["qk_norm"]): round(row["curve"][0][1], 4) for row in RUNS.select(attention="exact")}
        assert len(set(starts.values())) == len(starts)

    def test_learning_rate_was_chosen_on_exact_attention(self):
        for size in (SMALL, LARGE):
            tried = RUNS.select(attention="exact", qk_norm=True, tokens_per_step=size, seed=PLAN["seeds"][0])
            assert {row["learning_rate"] for row in tried} == set(PLAN["learning_rates"])
            best = min(tried, key=lambda row: row["final_val_loss"])["learning_rate"]
            assert RUNS.provenance["learning_rate"][str(size)] == best
            for row in RUNS.select(attention="sagebwd", tokens_per_step=size):
                assert row["learning_rate"] == best

    def test_means_of_the_first_three_seeds(self):
        expected = {
            (SMALL, "exact"): 0.6617, (SMALL, "SageBwd, K smoothed"): 0.6633, (LARGE, "exact"): 0.7855,
            (LARGE, "SageBwd, K smoothed"): 0.7884,
        }  # fmt: skip
        for (size, kind), loss in expected.items():
            losses = plotting.final_losses(plotting.pretrain_runs(RUNS, kind, size))
            assert mean(losses[seed] for seed in (0, 1, 2)) == pytest.approx(loss, abs=5e-5)

    def test_seeds_differ_by_more_than_attentions_at_both_sizes(self):
        scatter = {}
        for size in (SMALL, LARGE):
            losses = plotting.final_losses(plotting.pretrain_runs(RUNS, "exact", size))
            gaps = plotting.paired_differences(RUNS, "SageBwd, K smoothed", size)
            assert len(gaps) >= 3
            scatter[size] = max(losses.values()) - min(losses.values())
            assert abs(mean(gaps.values())) < scatter[size]
        assert scatter[SMALL] < scatter[LARGE]

    def test_the_small_step_would_show_the_papers_gap(self):
        found = plotting.mean_interval(plotting.relative_gaps(RUNS, SMALL))
        assert found.half < PAPER_GAP[2**21]
        assert found.mean + found.half < PAPER_GAP[2**21]

    def test_larger_steps_end_at_a_higher_loss(self):
        for kind in RUN_KINDS:
            for qk_norm in (True, False):
                losses = [
                    plotting.final_losses(plotting.pretrain_runs(RUNS, kind, size, qk_norm)) for size in (SMALL, LARGE)
                ]
                if all(losses):
                    assert max(losses[0].values()) < min(losses[1].values())

    def test_nothing_diverged_without_qk_norm(self):
        without = RUNS.select(qk_norm=False)
        assert {row["attention"] for row in without} == {"exact", "sagebwd"}
        assert {row["tokens_per_step"] for row in without} == {SMALL, LARGE}
        assert not any(row["diverged"] for row in RUNS.rows)


class TestStatistics:
    def test_the_papers_losses_are_quoted_as_printed(self):
        assert PAPER_LOSSES == {262144: {"exact": 2.563, "sagebwd": 2.561}, 2097152: {"exact": 2.586, "sagebwd": 2.64}}

    def test_quantiles_are_students(self):
        for degrees, quantile in enumerate(plotting.T_QUANTILES, start=1):
            x = torch.linspace(-quantile, quantile, 200_001, dtype=torch.float64)
            density = (1 + x.square() / degrees) ** (-(degrees + 1) / 2)
            log_norm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
            assert math.exp(log_norm) * torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-4)

    def test_interval_of_a_mean(self):
        values = [0.01, -0.02, 0.04]
        found = plotting.mean_interval(values)
        assert found.mean == pytest.approx(0.01)
        assert found.error == pytest.approx(stdev(values) / math.sqrt(3))
        assert (found.half, found.count) == (pytest.approx(4.303 * found.error), 3)

    @pytest.mark.parametrize("count", [0, 1, 21])
    def test_interval_needs_two_values_and_a_quantile(self, count):
        with pytest.raises(ValueError, match=f"values: expected 2 to 20 of them, got {count}"):
            plotting.mean_interval([1.0] * count)

    def test_differences_are_paired_by_seed_and_skip_what_is_missing(self):
        more = [
            run_like("exact", seed=3, loss=1.0),
            run_like("SageBwd, K smoothed", seed=3, loss=1.25),
            run_like("SageBwd, K smoothed", seed=4, loss=1.25),
            run_like("exact", seed=5, loss=1.0),
            run_like("SageBwd, K smoothed", seed=5, loss=None) | {"diverged": "the loss is not finite"},
        ]
        found = plotting.paired_differences(altered(RUNS, rows=RUNS.rows + more), "SageBwd, K smoothed", LARGE)
        before = plotting.paired_differences(RUNS, "SageBwd, K smoothed", LARGE)
        assert found.keys() - before.keys() == {3}
        assert found[3] == pytest.approx(0.25)

    def test_runs_are_those_at_the_chosen_rate(self):
        for kind, (attention, smoothing, granularity) in RUN_KINDS.items():
            for row in plotting.pretrain_runs(RUNS, kind, LARGE).values():
                assert (row["attention"], row["smoothing"], row["granularity"]) == (attention, smoothing, granularity)
                assert row["learning_rate"] == RUNS.provenance["learning_rate"][str(LARGE)]
                assert row["qk_norm"]
        assert set(plotting.pretrain_runs(RUNS, "exact", LARGE)) >= set(PLAN["seeds"])

    def test_relative_gap_is_a_share_of_exacts_mean_loss(self):
        exact = mean(plotting.final_losses(plotting.pretrain_runs(RUNS, "exact", SMALL)).values())
        gaps = plotting.paired_differences(RUNS, "SageBwd, K smoothed", SMALL)
        assert plotting.relative_gaps(RUNS, SMALL) == pytest.approx([gap / exact for gap in gaps.values()])

    @pytest.mark.parametrize(
        ("middle", "half", "verdict"),
        [
            (2.0, 1.0, "supported"),
            (0.5, 1.0, "contradicted at our size"),
            (0.5, 3.0, "cannot be decided"),
            (-3.0, 1.0, "contradicted at our size"),
        ],
    )
    def test_the_notebooks_verdict_follows_its_rule(self, middle, half, verdict):
        assert from_the_notebook("decide")(Interval(middle, half / 4, half, 3), 2.1) == verdict

    def test_seeds_needed_for_a_gap(self):
        needed = from_the_notebook("seeds_needed")
        found = plotting.mean_interval([0.0, 1.0, 2.0])  # deviation 1
        count = needed(found, 1.0)
        assert plotting.T_QUANTILES[count - 2] / math.sqrt(count) < 1.0
        assert plotting.T_QUANTILES[count - 3] / math.sqrt(count - 1) > 1.0
        assert needed(found, 0.01) == "more than 20"

    def test_a_cell_without_runs_is_not_run(self):
        summary = from_the_notebook("summary")
        assert summary("SageBwd, one scale per tile", SMALL, True) == "not run"
        assert "seed" in summary("exact", LARGE, True)


class TestRunFigures:
    def test_curves_are_the_records(self):
        figure = plotting.pretrain_curves_figure(RUNS, title="")
        upper, lower = figure.axes[0], figure.axes[2]
        for line, kind in zip(upper.lines, plotting.MAIN_KINDS, strict=True):
            runs = plotting.pretrain_runs(RUNS, kind, SMALL).values()
            assert line.get_ydata()[-1] == pytest.approx(mean(row["final_val_loss"] for row in runs))
            assert line.get_xdata()[0] >= PLAN["warmup"] * PLAN["tokens"] / 1e6
        last = [line.get_ydata()[-1] for line in lower.lines[:-1]]
        assert last == pytest.approx(list(plotting.paired_differences(RUNS, "SageBwd, K smoothed", SMALL).values()))
        bands = [path for band in upper.collections for path in band.get_paths()]
        exact = plotting.final_losses(plotting.pretrain_runs(RUNS, "exact", SMALL)).values()
        at_the_end = bands[0].vertices[bands[0].vertices[:, 0] > PLAN["tokens"] / 1e6 - 1e-6, 1]
        assert (min(at_the_end), max(at_the_end)) == pytest.approx((min(exact), max(exact)))

    def test_curves_take_more_seeds_and_a_diverged_run(self):
        more = [run_like(kind, seed=seed, loss=0.8) for kind in plotting.MAIN_KINDS for seed in (3, 4, 5, 6)]
        more.append(run_like("exact", seed=7, loss=None) | {"diverged": "the loss is not finite", "curve": [[0, 5.2]]})
        record = altered(RUNS, rows=RUNS.rows + more)
        figure = plotting.pretrain_curves_figure(record, title="")
        assert "of 7 seeds" in figure.axes[1].lines[0].get_label()
        assert len(figure.axes[3].lines) == 7 + 1
        assert len(plotting.gap_figure(record, title="").axes[0].lines[0].get_ydata()) == 3

    def test_every_run_has_its_dot_and_missing_ones_are_named(self):
        figure = plotting.final_losses_figure(RUNS, title="")
        kinds = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        for ax, size in zip(figure.axes, (SMALL, LARGE), strict=True):
            texts = {round(text.get_position()[1]): text.get_text() for text in ax.texts}
            dots = [line for line in ax.lines if line.get_marker() in "oD"]
            for y, name in enumerate(kinds):
                kind, _, without = name.partition(", no QK-norm")
                losses = plotting.final_losses(plotting.pretrain_runs(RUNS, name.removesuffix(", no QK-norm"), size,
                                                                      not name.endswith(", no QK-norm")))  # fmt: skip
                assert list(dots[y].get_xdata()) == list(losses.values()), (kind, without)
                assert texts[y] == ("" if losses else "not run")
        assert "not run" in [text.get_text() for text in figure.axes[0].texts]

    def test_a_diverged_run_is_named(self):
        lost = run_like("SageBwd, K smoothed", seed=9, loss=None, qk_norm=False) | {"diverged": "not finite"}
        figure = plotting.final_losses_figure(altered(RUNS, rows=[*RUNS.rows, lost]), title="")
        assert "1 diverged" in [text.get_text() for text in figure.axes[1].texts]

    def test_gap_figure_shows_ours_and_the_papers(self):
        (ax,) = plotting.gap_figure(RUNS, title="").axes
        dots = [line for line in ax.lines if line.get_marker() == "o"]
        for line, size in zip(dots, (SMALL, LARGE), strict=True):
            assert list(line.get_ydata()) == pytest.approx([100 * gap for gap in plotting.relative_gaps(RUNS, size)])
        paper = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "D"]
        assert paper == pytest.approx([100 * gap for gap in PAPER_GAP.values()])
        for bars, size in zip(ax.containers, (SMALL, LARGE), strict=True):
            found = plotting.mean_interval([100 * gap for gap in plotting.relative_gaps(RUNS, size)])
            ends = bars.lines[2][0].get_segments()[0][:, 1]
            assert sorted(ends) == pytest.approx([found.mean - found.half, found.mean + found.half])


class TestNoise:
    def test_columns_agree_with_each_other(self, noise):
        for rows in plotting.noise_checkpoints(noise).values():
            assert {row["variant"] for row in rows} == set(VARIANTS)
            for row in rows:
                assert row["noise_scale"] == pytest.approx(row["noise_trace"] / row["gradient_square"])
                if row["bias_square"] > 0:
                    assert row["tokens_at_bias"] == pytest.approx(row["noise_trace"] / row["bias_square"])
                    assert row["tokens_at_bias_low"] < row["tokens_at_bias"]
                of_group = noise_of(rows, row["group"], "bf16")
                assert (row["noise_trace"], row["gradient_square"]) == (
                    of_group["noise_trace"], of_group["gradient_square"]
                )  # fmt: skip
            parts = [row for row in rows if "," in row["group"] or row["group"] == "embedding and norm"]
            for variant in VARIANTS:
                whole = noise_of(rows, "whole", variant)
                for column in ("bias_square", "noise_trace", "variance_trace"):
                    total = sum(row[column] for row in parts if row["variant"] == variant)
                    assert whole[column] == pytest.approx(total)

    def test_bias_is_found_and_ordered_as_the_notebook_says(self, noise):
        for rows in plotting.noise_checkpoints(noise).values():
            whole = {variant: noise_of(rows, "whole", variant)["bias_square"] for variant in VARIANTS}
            assert whole["bf16"] < whole["per row, nearest"] < whole["per block, nearest"]
            scores = {
                variant: sum(noise_of(rows, group, variant)["bias_square"] for group in plotting.score_groups(rows))
                for variant in VARIANTS
            }
            assert scores["per block, stochastic"] < 0.5 * scores["per block, nearest"]
            assert scores["per row, nearest"] < 0.5 * scores["per block, nearest"]
            for group in plotting.score_groups(rows):
                row = noise_of(rows, group, "per block, nearest")
                assert row["bias_square"] > 3 * row["bias_square_error"]

    def test_stochastic_rounding_adds_variance_where_it_removes_bias(self, noise):
        rows = list(plotting.noise_checkpoints(noise).values())[-1]
        for variance, compare in (("variance_trace", float.__gt__), ("bias_square", float.__lt__)):
            stochastic, nearest = (
                sum(noise_of(rows, group, f"per block, {name}")[variance] for group in plotting.score_groups(rows))
                for name in ("stochastic", "nearest")
            )
            assert compare(stochastic, nearest)

    def test_bias_of_our_kernels_was_below_the_noise_of_our_steps(self, noise):
        for rows in plotting.noise_checkpoints(noise).values():
            for group in plotting.score_groups(rows):
                assert plotting.bias_to_noise(noise_of(rows, group, "per row, nearest"), LARGE) < 0.5

    def test_checkpoints_hold_all_rows_once(self, noise):
        checkpoints = plotting.noise_checkpoints(noise)
        assert sum(map(len, checkpoints.values())) == len(noise.rows)
        assert all(len({(row["step"], row["qk_norm"]) for row in rows}) == 1 for rows in checkpoints.values())

    def test_seeds_are_different_checkpoints(self, noise):
        again = [row | {"seed": 99} for row in noise.rows]
        both = plotting.noise_checkpoints(altered(noise, rows=noise.rows + again))
        assert len(both) == 2 * len(plotting.noise_checkpoints(noise))

    def test_bias_to_gradient(self, noise):
        row = noise.rows[0] | {"gradient_square": 4.0, "bias_square": 0.01}
        assert plotting.bias_to_gradient(row) == pytest.approx(0.05)
        assert plotting.bias_to_gradient(row | {"bias_square": -0.01}) == 0
        assert math.isnan(plotting.bias_to_gradient(row | {"gradient_square": -1.0}))

    def test_bias_to_noise_is_one_at_the_crossing(self, noise):
        row = noise_of(next(iter(plotting.noise_checkpoints(noise).values())), "whole", "per block, nearest")
        assert plotting.bias_to_noise(row, row["tokens_at_bias"]) == pytest.approx(1)
        assert plotting.bias_to_noise(row, 4 * row["tokens_at_bias"]) == pytest.approx(2)
        assert math.isnan(plotting.bias_to_noise(row | {"tokens_at_bias": None}, 100))

    def test_one_row_is_found_or_an_error(self, noise):
        with pytest.raises(ValueError, match="not enough values"):
            noise_of(noise.rows, "layer 99", "bf16")

    def test_lines_of_the_noise_figure_cross_at_the_crosses(self, noise):
        rows = next(iter(plotting.noise_checkpoints(noise).values()))
        figure = plotting.noise_figure(rows, ["whole"], title="", caption="")
        (ax,) = figure.axes
        (line,) = [line for line in ax.lines if line.get_label() == "noise"]
        x, y = line.get_data()
        slope = math.log(y[-1] / y[0]) / math.log(x[-1] / x[0])
        assert slope == pytest.approx(-0.5)
        crosses = [line for line in ax.lines if line.get_marker() == "x"]
        assert len(crosses) == len(plotting.VARIANT_STYLES)
        for cross in crosses:
            star, bias = cross.get_xdata()[0], cross.get_ydata()[0]
            assert bias == pytest.approx(y[0] * math.sqrt(x[0] / star))
        row = noise_of(rows, "whole", "bf16")
        (gradient,) = [line for line in ax.lines if line.get_label() == "the gradient itself"]
        scale = row["noise_scale"]  # where the noise is as long as the gradient
        assert gradient.get_ydata()[0] == pytest.approx(y[0] * math.sqrt(x[0] / scale))

    def test_tokens_at_bias_figure_marks_every_variant(self, noise):
        rows = next(iter(plotting.noise_checkpoints(noise).values()))
        figure = plotting.tokens_at_bias_figure(rows, ["whole"], (SMALL, LARGE), title="", caption="")
        marks = {line.get_label(): line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() != "None"}
        stars = {variant: noise_of(rows, "whole", variant)["tokens_at_bias"] for variant in plotting.VARIANT_STYLES}
        assert marks == pytest.approx(stars)
        lines = [line.get_xdata()[0] for line in figure.axes[0].lines[-4:]]
        assert lines == [SMALL, LARGE, *PAPER_LOSSES]

    def test_figures_take_a_bias_that_was_not_found(self, noise):
        rows = copy.deepcopy(next(iter(plotting.noise_checkpoints(noise).values())))
        row = noise_of(rows, "whole", "bf16")
        row |= {"bias_square": -1e-9, "tokens_at_bias": None, "tokens_at_bias_low": 5e8, "gradient_square": -1e-9}
        figure = plotting.tokens_at_bias_figure(rows, ["whole"], (SMALL, LARGE), title="", caption="")
        (arrow,) = [line for line in figure.axes[0].lines if line.get_marker() == ">"]
        assert arrow.get_xdata()[0] == 5e8
        crosses = [
            line
            for line in plotting.noise_figure(rows, ["whole"], title="", caption="").axes[0].lines
            if line.get_marker() == "x"
        ]
        assert len(crosses) == len(plotting.VARIANT_STYLES) - 1
        plotting.balance_figure(rows, ["whole"], (SMALL,), title="")

    def test_balance_grows_with_the_root_of_the_tokens(self, noise):
        rows = next(iter(plotting.noise_checkpoints(noise).values()))
        groups = plotting.score_groups(rows)
        figure = plotting.balance_figure(rows, groups, (SMALL, 4 * SMALL), title="")
        first, second = ([bar.get_height() for bar in ax.patches] for ax in figure.axes)
        assert len(first) == len(groups) * len(plotting.VARIANT_STYLES)
        assert second == pytest.approx([2 * height for height in first])
        expected = [
            plotting.bias_to_noise(noise_of(rows, g, v), SMALL) for v in plotting.VARIANT_STYLES for g in groups
        ]
        assert first == pytest.approx(expected)


class TestLayers:
    def errors(self):
        return {
            (size, norm): plotting.last_errors(LAYERS, size, norm) for size in (SMALL, LARGE) for norm in (True, False)
        }

    def test_dq_is_the_most_error_prone_in_every_layer(self):
        for found in self.errors().values():
            assert len(found) == PLAN["layers"]
            for errors in found.values():
                assert set(errors) == set(PAPER_TABLE2)
                assert max(errors, key=errors.get) == "dQ"
                assert errors["P"] < errors["dS"] < errors["dQ"] / 2

    def test_in_the_papers_layer_most_of_the_damage_reaches_ds(self):
        error = {name: rel_l2 for name, (_, rel_l2) in PAPER_TABLE2.items()}
        assert error["dS"] > 0.6 * error["dQ"]

    def test_qk_norm_lowers_what_ds_inherits_and_hardly_the_error_of_dq(self):
        def mean_error(tensor, norm):
            return mean(errors[tensor] for (_, n), x in self.errors().items() if n == norm for errors in x.values())

        assert mean_error("dS", True) < 0.7 * mean_error("dS", False)
        assert mean_error("dQ", True) == pytest.approx(mean_error("dQ", False), rel=0.1)

    def test_ds_stays_below_its_bound_and_sizes_fall_from_p_to_ds(self):
        for row in LAYERS.select(tensor="dS"):
            assert row["rms"] < row["rms_bound"]
        for row in LAYERS.select(tensor="P"):
            same = {name: row[name] for name in ("qk_norm", "tokens_per_step", "seed", "step", "layer")}
            (dp,), (ds,) = LAYERS.select(tensor="dP", **same), LAYERS.select(tensor="dS", **same)
            assert row["rms"] > dp["rms"] > ds["rms"]

    def test_last_errors_are_those_of_the_last_step(self):
        found = plotting.last_errors(LAYERS, LARGE, True)
        (row,) = LAYERS.select(
            tokens_per_step=LARGE, qk_norm=True, step=PLAN["tokens"] // LARGE, layer=0, tensor="dQ", seed=0
        )
        assert found["layer 0"]["dQ"] == row["rel_l2"]

    def test_heat_map_writes_the_errors(self):
        figure = plotting.layer_errors_figure(altered(LAYERS, rows=LAYERS.rows[::-1]), LARGE, title="")
        for ax, norm in zip(figure.axes[:2], (True, False), strict=True):
            found = plotting.last_errors(LAYERS, LARGE, norm)
            written = [text.get_text() for text in ax.texts]
            expected = [found[f"layer {layer}"][name] for layer in reversed(range(4)) for name in PAPER_TABLE2]
            assert written == [f"{error:.3f}" if error > 1e-9 else "" for error in expected]
        assert figure.axes[0].get_xticklabels()[3].get_text() == "dS\n(0.20)"

    def test_training_figure_ends_at_the_last_errors(self):
        figure = plotting.layer_training_figure(LAYERS, LARGE, title="")
        for ax, norm in zip(figure.axes[:2], (True, False), strict=True):
            found = plotting.last_errors(LAYERS, LARGE, norm)
            for line in ax.lines:
                tensor, layer = line.get_label().split(", ")
                assert line.get_ydata()[-1] == found[layer][tensor]
                assert line.get_xdata()[-1] == pytest.approx(PLAN["tokens"] / 1e6)
        ends = {
            row["rms"] for row in LAYERS.select(tokens_per_step=LARGE, step=PLAN["tokens"] // LARGE)
            if row["tensor"] in ("P", "dP", "dS")
        }  # fmt: skip
        assert {line.get_ydata()[-1] for line in figure.axes[2].lines} == ends
