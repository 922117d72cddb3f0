"""What notebooks 06 and 06b claim, from the records and from the package's functions."""

import copy
import math
from statistics import mean, stdev

import matplotlib.pyplot as plt
import pytest
import torch
from sage_course import figures as plotting
from sage_course.results import claims
from sage_course.results.pretraining import (
    PAPER_LOSSES,
    RUN_KINDS,
    Interval,
    bias_to_gradient,
    bias_to_noise,
    final_losses,
    last_errors,
    loss_summary,
    mean_interval,
    noise_checkpoints,
    noise_of,
    paired_differences,
    pretrain_runs,
    relative_gaps,
    score_groups,
    t_quantile,
)
from sage_lab.experiments.gradient_noise import VARIANTS
from sage_lab.experiments.table2 import PAPER_TABLE2
from sage_lab.records import Record, read_record

RUNS, LAYERS = read_record("pretrain_h200"), read_record("layers_h200")
PLAN = RUNS.provenance["plan"]
SMALL, LARGE = PLAN["tokens_per_step"]
H200_NOISE = read_record("noise_h200")
SIZES = {"ours": LARGE, "the paper's": 2**21}
PAPER_GAP = {size: x["sagebwd"] / x["exact"] - 1 for size, x in PAPER_LOSSES.items()}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(params=["noise_cpu", "noise_h200"])
def noise(request):
    return read_record(request.param)


def altered(record, **changes):
    """A copy of the record; changes: the rows, or values of the provenance."""
    rows = copy.deepcopy(changes.pop("rows", record.rows))
    return Record(record.provenance | changes, rows)


def run_like(kind, *, seed, loss, size=LARGE, qk_norm=True):
    """A run of the record with another seed and, all along, another loss."""
    row = copy.deepcopy(pretrain_runs(RUNS, kind, size, qk_norm)[0])
    return row | {"seed": seed, "final_val_loss": loss, "curve": [[tokens, loss] for tokens, _ in row["curve"]]}


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
            losses = final_losses(pretrain_runs(RUNS, kind, size))
            assert mean(losses[seed] for seed in (0, 1, 2)) == pytest.approx(loss, abs=5e-5)

    def test_seeds_differ_by_more_than_attentions_at_both_sizes(self):
        scatter = {}
        for size in (SMALL, LARGE):
            losses = final_losses(pretrain_runs(RUNS, "exact", size))
            gaps = paired_differences(RUNS, "SageBwd, K smoothed", size)
            assert len(gaps) >= 3
            scatter[size] = max(losses.values()) - min(losses.values())
            assert abs(mean(gaps.values())) < scatter[size]
        assert scatter[SMALL] < scatter[LARGE]

    def test_the_small_step_would_show_the_papers_gap(self):
        found = mean_interval(relative_gaps(RUNS, SMALL))
        assert found.half < PAPER_GAP[2**21]
        assert found.mean + found.half < PAPER_GAP[2**21]

    def test_eight_seeds_at_the_large_step_exclude_the_papers_gap_but_resolve_no_smaller_one(self):
        gaps = relative_gaps(RUNS, LARGE)
        assert len(gaps) == len(PLAN["seeds_at_large"]) == 8
        everything = mean_interval(gaps)
        far_off = max(gaps, key=lambda gap: abs(gap - everything.mean))
        others = mean_interval([gap for gap in gaps if gap != far_off])
        for found in (everything, others):
            assert found.mean - found.half < 0 < found.mean + found.half < PAPER_GAP[2**21]
        assert everything.half > PAPER_GAP[2**21]

    def test_larger_steps_end_at_a_higher_loss(self):
        for kind in RUN_KINDS:
            for qk_norm in (True, False):
                losses = [final_losses(pretrain_runs(RUNS, kind, size, qk_norm)) for size in (SMALL, LARGE)]
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
        for degrees in range(1, 20):
            quantile = t_quantile(degrees)
            x = torch.linspace(-quantile, quantile, 200_001, dtype=torch.float64)
            density = (1 + x.square() / degrees) ** (-(degrees + 1) / 2)
            log_norm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
            assert math.exp(log_norm) * torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-4)

    def test_interval_of_a_mean(self):
        values = [0.01, -0.02, 0.04]
        found = mean_interval(values)
        assert found.mean == pytest.approx(0.01)
        assert found.error == pytest.approx(stdev(values) / math.sqrt(3))
        assert (found.half, found.count) == (pytest.approx(4.302653 * found.error), 3)

    @pytest.mark.parametrize("count", [0, 1])
    def test_interval_needs_two_values(self, count):
        with pytest.raises(ValueError, match=f"values: expected at least 2 of them, got {count}"):
            mean_interval([1.0] * count)

    def test_differences_are_paired_by_seed_and_skip_what_is_missing(self):
        more = [
            run_like("exact", seed=13, loss=1.0),
            run_like("SageBwd, K smoothed", seed=13, loss=1.25),
            run_like("SageBwd, K smoothed", seed=14, loss=1.25),
            run_like("exact", seed=15, loss=1.0),
            run_like("SageBwd, K smoothed", seed=15, loss=None) | {"diverged": "the loss is not finite"},
        ]
        found = paired_differences(altered(RUNS, rows=RUNS.rows + more), "SageBwd, K smoothed", LARGE)
        before = paired_differences(RUNS, "SageBwd, K smoothed", LARGE)
        assert found.keys() - before.keys() == {13}
        assert found[13] == pytest.approx(0.25)

    def test_runs_are_those_at_the_chosen_rate(self):
        for kind, (attention, smoothing, granularity) in RUN_KINDS.items():
            for row in pretrain_runs(RUNS, kind, LARGE).values():
                assert (row["attention"], row["smoothing"], row["granularity"]) == (attention, smoothing, granularity)
                assert row["learning_rate"] == RUNS.provenance["learning_rate"][str(LARGE)]
                assert row["qk_norm"]
        assert set(pretrain_runs(RUNS, "exact", LARGE)) >= set(PLAN["seeds"])

    def test_relative_gap_is_a_share_of_exacts_mean_loss(self):
        exact = mean(final_losses(pretrain_runs(RUNS, "exact", SMALL)).values())
        gaps = paired_differences(RUNS, "SageBwd, K smoothed", SMALL)
        assert relative_gaps(RUNS, SMALL) == pytest.approx([gap / exact for gap in gaps.values()])

    def test_summary_of_seeds(self):
        runs = {
            seed: run_like("exact", seed=seed, loss=loss) | {"diverged": None if loss else "not finite"}
            for seed, loss in enumerate((1.0, 2.0, 1.5, None))
        }
        assert loss_summary(runs) == "1.5000 (1.0000 to 2.0000, 3 seeds, 1 diverged)"
        assert loss_summary({0: runs[0], 1: runs[1]}) == "1.5000 (1.0000 to 2.0000, 2 seeds)"
        assert loss_summary({0: runs[0]}) == "1.0000 (1 seed)"
        assert loss_summary({3: runs[3]}) == "1 diverged"
        assert loss_summary({}) == "not run"


class TestClaims:
    @pytest.mark.parametrize(
        ("middle", "half", "verdict"),
        [
            (2.0, 1.0, "supported"),
            (0.5, 1.0, "contradicted at our size"),
            (0.5, 3.0, "cannot be decided"),
            (-3.0, 1.0, "contradicted at our size"),
        ],
    )
    def test_a_verdict_follows_its_rule(self, middle, half, verdict):
        assert claims.decide(Interval(middle, half / 4, half, 3), 2.1) == verdict

    def verdicts(self, runs=RUNS, layers=LAYERS):
        return [claim.verdict for claim in claims.claims(runs, layers)]

    def test_each_has_a_line_in_the_papers_order(self):
        found = claims.claims(RUNS, LAYERS)
        assert [claim.paper.partition(" ")[0] for claim in found] == ["(i)", "(ii)", "(iii)", "(iii)", "(iv)"]
        assert "by 2.1%" in found[2].paper  # 2.640 / 2.586
        for claim, size in ((found[0], SMALL), (found[2], LARGE)):
            gap = mean_interval(relative_gaps(RUNS, size))
            low, high = 100 * (gap.mean - gap.half), 100 * (gap.mean + gap.half)
            shown = f"loss {100 * gap.mean:+.1f}% (95% interval {low:+.1f}% to {high:+.1f}%, {gap.count} seeds)"
            assert claim.ours == shown

    def test_a_gap_at_the_small_step_is_noticed(self):
        assert self.verdicts()[0] == "supported"
        rows = [
            row | {"final_val_loss": 1.05 * row["final_val_loss"]}
            if (row["attention"], row["tokens_per_step"]) == ("sagebwd", SMALL)
            else row
            for row in RUNS.rows
        ]
        assert self.verdicts(altered(RUNS, rows=rows))[0] == "cannot be decided"

    def test_scatter_at_the_small_step_is_noticed(self):
        rows = list(RUNS.rows)
        for seed, gap in ((3, 0.07), (4, -0.07)):
            rows.append(run_like("exact", seed=seed, loss=0.66, size=SMALL))
            rows.append(run_like("SageBwd, K smoothed", seed=seed, loss=0.66 + gap, size=SMALL))
        record = altered(RUNS, rows=rows)
        assert mean(relative_gaps(record, SMALL)) < PAPER_GAP[2**21]
        assert self.verdicts(record)[0] == "cannot be decided"

    def test_a_gap_at_the_large_step_is_decided_by_the_rule_where_that_step_is_the_papers(self, monkeypatch):
        rows = [row for row in RUNS.rows if row["tokens_per_step"] == SMALL]
        for gap, verdict in ((1.03, "supported"), (1.0, "contradicted at our size")):
            runs = list(rows)
            for seed in (0, 1, 2, 3):
                exact = 0.8 + 0.001 * seed
                runs.append(run_like("exact", seed=seed, loss=exact))
                runs.append(run_like("SageBwd, K smoothed", seed=seed, loss=gap * exact))
            runs += [row for row in RUNS.rows if row["tokens_per_step"] == LARGE and row["smoothing"] in ("none", "qk")]
            runs += RUNS.select(tokens_per_step=LARGE, smoothing="k", qk_norm=False)
            assert self.verdicts(altered(RUNS, rows=runs))[2] == "not tested at our size"
            with monkeypatch.context() as patched:
                patched.setattr(claims, "PAPER_LOSSES", {LARGE: None})
                assert self.verdicts(altered(RUNS, rows=runs))[2] == verdict

    @pytest.mark.parametrize(
        ("changes", "verdict"),
        [
            ({}, "supported in part"),
            ({"O": 1e-3}, "supported"),
            ({"P": 1.0, "O": 1.0}, "contradicted at our size"),
            ({"dK": 2.0, "dQ": 1e-3, "O": 1e-3}, "supported"),
            ({"P": 1.0}, "contradicted at our size"),
        ],
    )
    def test_where_errors_grow(self, changes, verdict):
        rows = [row | {"rel_l2": changes.get(row["tensor"], row["rel_l2"])} for row in LAYERS.rows]
        assert self.verdicts(layers=altered(LAYERS, rows=rows))[1] == verdict

    def test_layers_are_counted(self):
        traced = [
            errors
            for size in (SMALL, LARGE)
            for norm in (True, False)
            for errors in last_errors(LAYERS, size, norm).values()
        ]
        p, o = (sum(errors["dS"] > errors[name] for errors in traced) for name in "PO")
        assert claims.claims(RUNS, LAYERS)[1].ours == (
            f"of {len(traced)} traced layers, dS arrives with more error than P in {p}, than O in {o}; "
            f"dQ or dK, which are made of it, are worst in {len(traced)}"
        )

    def test_a_run_without_qk_norm_that_diverges_counts(self):
        assert self.verdicts()[3] == "not seen at our size"
        for qk_norm, size, verdict in (
            (False, LARGE, "supported"),
            (True, LARGE, "not seen at our size"),
            (False, SMALL, "not seen at our size"),
        ):
            lost = run_like("SageBwd, K smoothed", seed=9, loss=None, qk_norm=qk_norm, size=size)
            record = altered(RUNS, rows=[*RUNS.rows, lost | {"diverged": "not finite"}])
            assert self.verdicts(record)[3] == verdict

    def test_smoothing_has_one_seed_and_so_no_verdict(self):
        claim = claims.claims(RUNS, LAYERS)[4]
        assert claim.verdict == "cannot be decided"
        for kind, name in (("SageBwd, nothing smoothed", "nothing"), ("SageBwd, Q and K smoothed", "Q and K")):
            changes = []
            for size in (SMALL, LARGE):
                for norm in (True, False):
                    runs = pretrain_runs(RUNS, kind, size, norm)
                    assert len(runs) <= 1
                    smoothed = final_losses(pretrain_runs(RUNS, "SageBwd, K smoothed", size, norm))
                    changes += [row["final_val_loss"] - smoothed[seed] for seed, row in runs.items()]
            assert f"{name} {min(changes):+.3f} to {max(changes):+.3f}" in claim.ours
        exact = final_losses(pretrain_runs(RUNS, "exact", LARGE)).values()
        assert f"span {max(exact) - min(exact):.3f}" in claim.ours


class TestRunFigures:
    def test_curves_are_the_records(self):
        figure = plotting.pretrain_curves_figure(RUNS, title="")
        upper, lower = figure.axes[0], figure.axes[2]
        for line, kind in zip(upper.lines, plotting.MAIN_KINDS, strict=True):
            runs = pretrain_runs(RUNS, kind, SMALL).values()
            assert line.get_ydata()[-1] == pytest.approx(mean(row["final_val_loss"] for row in runs))
            assert line.get_xdata()[0] >= PLAN["warmup"] * PLAN["tokens"] / 1e6
        last = [line.get_ydata()[-1] for line in lower.lines[:-1]]
        gaps = list(paired_differences(RUNS, "SageBwd, K smoothed", SMALL).values())
        assert last == pytest.approx([*gaps, mean(gaps)])
        bands = [path for band in upper.collections for path in band.get_paths()]
        exact = final_losses(pretrain_runs(RUNS, "exact", SMALL)).values()
        at_the_end = bands[0].vertices[bands[0].vertices[:, 0] > PLAN["tokens"] / 1e6 - 1e-6, 1]
        assert (min(at_the_end), max(at_the_end)) == pytest.approx((min(exact), max(exact)))

    def test_curves_take_more_seeds_and_a_diverged_run(self):
        more = [run_like(kind, seed=seed, loss=0.8) for kind in plotting.MAIN_KINDS for seed in (10, 11, 12, 13)]
        more.append(run_like("exact", seed=14, loss=None) | {"diverged": "the loss is not finite", "curve": [[0, 5.2]]})
        record = altered(RUNS, rows=RUNS.rows + more)
        figure = plotting.pretrain_curves_figure(record, title="")
        count = len(paired_differences(RUNS, "SageBwd, K smoothed", LARGE)) + 4
        assert f"of {count} seeds" in figure.axes[1].lines[0].get_label()
        assert len(figure.axes[3].lines) == count + 2  # their mean, and zero
        assert len(plotting.gap_figure(record, title="").axes[0].lines[0].get_ydata()) == 3

    def test_every_run_has_its_dot_and_missing_ones_are_named(self):
        figure = plotting.final_losses_figure(RUNS, title="")
        kinds = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        for ax, size in zip(figure.axes, (SMALL, LARGE), strict=True):
            texts = {round(text.get_position()[1]): text.get_text() for text in ax.texts}
            dots = [line for line in ax.lines if line.get_marker() in "oD"]
            for y, name in enumerate(kinds):
                kind, _, without = name.partition(", no QK-norm")
                losses = final_losses(pretrain_runs(RUNS, name.removesuffix(", no QK-norm"), size,
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
            assert list(line.get_ydata()) == pytest.approx([100 * gap for gap in relative_gaps(RUNS, size)])
        paper = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "D"]
        assert paper == pytest.approx([100 * gap for gap in PAPER_GAP.values()])
        for bars, size in zip(ax.containers, (SMALL, LARGE), strict=True):
            found = mean_interval([100 * gap for gap in relative_gaps(RUNS, size)])
            ends = bars.lines[2][0].get_segments()[0][:, 1]
            assert sorted(ends) == pytest.approx([found.mean - found.half, found.mean + found.half])


class TestNoise:
    def test_columns_agree_with_each_other(self, noise):
        for rows in noise_checkpoints(noise).values():
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
        for rows in noise_checkpoints(noise).values():
            whole = {variant: noise_of(rows, "whole", variant)["bias_square"] for variant in VARIANTS}
            assert whole["bf16"] < whole["per row, nearest"] < whole["per block, nearest"]
            scores = {
                variant: sum(noise_of(rows, group, variant)["bias_square"] for group in score_groups(rows))
                for variant in VARIANTS
            }
            assert scores["per block, stochastic"] < 0.5 * scores["per block, nearest"]
            assert scores["per row, nearest"] < 0.5 * scores["per block, nearest"]
            for group in score_groups(rows):
                row = noise_of(rows, group, "per block, nearest")
                assert row["bias_square"] > 3 * row["bias_square_error"]

    def test_bias_crosses_the_noise_between_the_papers_two_steps(self):
        small, large = (claims.bias_ratios(H200_NOISE, "per block, nearest", size) for size in PAPER_LOSSES)
        assert max(small) < 0.5
        assert [ratio > 1 for ratio in large] == [True, False, True, True]
        ours = claims.bias_ratios(H200_NOISE, "per row, nearest", LARGE)
        assert 0.01 < min(ours) < max(ours) < 0.1
        shown = claims.hypothesis(RUNS, H200_NOISE)
        assert f"in the worst layer of {len(small)} checkpoints" in shown
        for size, ratios in zip((LARGE, *PAPER_LOSSES), (ours, small, large), strict=True):
            assert f"{size:,} tokens per step {min(ratios):.2f} to {max(ratios):.2f}" in shown

    def test_bias_ratio_is_that_of_the_worst_layer(self, noise):
        for rows, ratio in zip(
            noise_checkpoints(noise).values(), claims.bias_ratios(noise, "per block, nearest", LARGE), strict=True
        ):
            found = [noise_of(rows, group, "per block, nearest") for group in score_groups(rows)]
            assert ratio == pytest.approx(max(math.sqrt(LARGE / row["tokens_at_bias"]) for row in found))
        without = altered(noise, rows=[row | {"tokens_at_bias": None} for row in noise.rows])
        assert set(claims.bias_ratios(without, "bf16", LARGE)) == {0.0}
        partly = [
            row | ({"tokens_at_bias": None} if row["group"] == "layer 0, query and key" else {}) for row in noise.rows
        ]
        assert min(claims.bias_ratios(altered(noise, rows=partly), "bf16", LARGE)) > 0

    def test_bias_of_our_kernels_was_below_the_noise_of_our_steps(self, noise):
        for rows in noise_checkpoints(noise).values():
            for group in score_groups(rows):
                assert bias_to_noise(noise_of(rows, group, "per row, nearest"), LARGE) < 0.5

    def test_checkpoints_hold_all_rows_once(self, noise):
        checkpoints = noise_checkpoints(noise)
        assert sum(map(len, checkpoints.values())) == len(noise.rows)
        assert all(len({(row["step"], row["qk_norm"]) for row in rows}) == 1 for rows in checkpoints.values())

    def test_seeds_are_different_checkpoints(self, noise):
        again = [row | {"seed": 99} for row in noise.rows]
        both = noise_checkpoints(altered(noise, rows=noise.rows + again))
        assert len(both) == 2 * len(noise_checkpoints(noise))

    def test_bias_to_gradient(self, noise):
        row = noise.rows[0] | {"gradient_square": 4.0, "bias_square": 0.01}
        assert bias_to_gradient(row) == pytest.approx(0.05)
        assert bias_to_gradient(row | {"bias_square": -0.01}) == 0
        assert math.isnan(bias_to_gradient(row | {"gradient_square": -1.0}))

    def test_bias_to_noise_is_one_at_the_crossing(self, noise):
        row = noise_of(next(iter(noise_checkpoints(noise).values())), "whole", "per block, nearest")
        assert bias_to_noise(row, row["tokens_at_bias"]) == pytest.approx(1)
        assert bias_to_noise(row, 4 * row["tokens_at_bias"]) == pytest.approx(2)
        assert math.isnan(bias_to_noise(row | {"tokens_at_bias": None}, 100))

    def test_one_row_is_found_or_an_error(self, noise):
        with pytest.raises(ValueError, match="not enough values"):
            noise_of(noise.rows, "layer 99", "bf16")

    def test_lines_of_the_noise_figure_cross_at_the_crosses(self, noise):
        rows = next(iter(noise_checkpoints(noise).values()))
        row_of = {variant: noise_of(rows, "whole", variant) for variant in plotting.VARIANT_STYLES}
        (ax,) = plotting.noise_figure(row_of, SIZES, title="", caption="").axes
        (line,) = [line for line in ax.lines if line.get_label() == "noise"]
        x, y = line.get_data()
        slope = math.log(y[-1] / y[0]) / math.log(x[-1] / x[0])
        assert slope == pytest.approx(-0.5)
        crosses = [line for line in ax.lines if line.get_marker() == "x"]
        assert [cross.get_xdata()[0] for cross in crosses] == [row["tokens_at_bias"] for row in row_of.values()]
        for cross in crosses:
            assert cross.get_ydata()[0] == pytest.approx(y[0] * math.sqrt(x[0] / cross.get_xdata()[0]))
        assert {text.get_text(): text.get_position()[0] for text in ax.texts} == SIZES

    def test_tokens_at_bias_figure_marks_every_variant_of_every_checkpoint(self, noise):
        checkpoints = noise_checkpoints(noise)
        (ax,) = plotting.tokens_at_bias_figure(checkpoints, SIZES, title="", caption="").axes
        marks = [line for line in ax.lines if line.get_marker() != "None"]
        assert [mark.get_label() for mark in marks] == list(checkpoints)
        for mark, rows in zip(marks, checkpoints.values(), strict=True):
            stars = [noise_of(rows, "whole", variant)["tokens_at_bias"] for variant in plotting.VARIANT_STYLES]
            assert list(mark.get_xdata()) == stars
            assert list(mark.get_ydata()) == list(range(len(stars)))
        assert [label.get_text() for label in ax.get_yticklabels()] == list(plotting.VARIANT_STYLES)
        assert {text.get_text(): text.get_position()[0] for text in ax.texts} == SIZES

    def test_figures_take_a_bias_that_was_not_found(self, noise):
        rows = copy.deepcopy(next(iter(noise_checkpoints(noise).values())))
        row = noise_of(rows, "whole", "bf16")
        row |= {"bias_square": -1e-9, "tokens_at_bias": None}
        (mark,) = [
            line
            for line in plotting.tokens_at_bias_figure({"a": rows}, {}, title="", caption="").axes[0].lines
            if line.get_label() == "a"
        ]
        names = list(plotting.VARIANT_STYLES)
        assert [names[y] for y in mark.get_ydata()] == [name for name in names if name != "bf16"]
        (ax,) = plotting.noise_figure({"bf16": row}, {}, title="", caption="").axes
        assert not [line for line in ax.lines if line.get_marker() == "x"]

    @pytest.mark.parametrize("tokens", [64, 1024, 16_384])
    def test_drawn_gradients_scatter_as_the_tokens_say(self, tokens):
        (ax,) = plotting.gradients_figure((tokens,), title="").axes
        dots = {line.get_color(): torch.tensor(line.get_xydata()) for line in ax.lines if line.get_marker() == "."}
        means = {line.get_color(): torch.tensor(line.get_xydata())[0] for line in ax.lines if line.get_marker() == "P"}
        assert means.keys() == dots.keys()
        bias = (means[plotting.RED] - means[plotting.BLUE]).square().sum()
        for color, mean_of in means.items():
            noise = (dots[color] - mean_of).square().sum(-1).mean()
            assert noise / bias == pytest.approx(1024 / tokens, rel=0.2)


class TestLayers:
    def test_last_errors_are_those_of_the_last_step(self):
        found = last_errors(LAYERS, LARGE, True)
        (row,) = LAYERS.select(
            tokens_per_step=LARGE, qk_norm=True, step=PLAN["tokens"] // LARGE, layer=0, tensor="dQ", seed=0
        )
        assert found["layer 0"]["dQ"] == row["rel_l2"]

    def test_heat_map_writes_the_errors(self):
        figure = plotting.layer_errors_figure(altered(LAYERS, rows=LAYERS.rows[::-1]), LARGE, title="")
        found = last_errors(LAYERS, LARGE, qk_norm=True)
        written = [text.get_text() for text in figure.axes[0].texts]
        expected = [found[f"layer {layer}"][name] for layer in reversed(range(4)) for name in PAPER_TABLE2]
        assert written == [f"{error:.3f}" if error > 1e-9 else "" for error in expected]

    def test_training_figure_ends_at_the_last_errors(self):
        (ax,) = plotting.layer_training_figure(LAYERS, LARGE, ("dQ", "dS"), title="").axes
        found = last_errors(LAYERS, LARGE, qk_norm=True).values()
        for line, band, tensor in zip(ax.lines, ax.collections, ("dQ", "dS"), strict=True):
            errors = [of_layer[tensor] for of_layer in found]
            assert line.get_label() == tensor
            assert line.get_xdata()[-1] == pytest.approx(PLAN["tokens"] / 1e6)
            assert line.get_ydata()[-1] == pytest.approx(mean(errors))
            corners = band.get_paths()[0].vertices
            at_the_end = corners[corners[:, 0] == corners[:, 0].max(), 1]
            assert (min(at_the_end), max(at_the_end)) == (min(errors), max(errors))
