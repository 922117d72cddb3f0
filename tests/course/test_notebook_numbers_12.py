"""The numbers that notebook 12 claims, on the same inputs or the same records."""

import math
from statistics import mean

import matplotlib.pyplot as plt
import pytest
import torch
from torch.testing import assert_close

from sage_ref.course.figures import (
    dense_time,
    flex_time,
    list_lengths_figure,
    quantization_aware_figure,
    sla2_ladder_figure,
    sla2_parts,
    sla2_parts_figure,
    sla2_sparsity_figure,
    sla2_time,
)
from sage_ref.experiments.quantization_aware import WAYS, effect
from sage_ref.records import RECORDED, Record, read_record
from sage_ref.sla2 import (
    BlockSettings,
    block_count,
    heuristic_scores,
    linear_branch,
    per_query,
    selected_count,
    sla2_backward,
    sla2_forward,
    sparse_branch,
    top_blocks,
)
from sage_ref.tracing import relative_l2
from sage_ref.training.capture import read_capture

N, SPARSITY = 32760, 0.97


@pytest.fixture(autouse=True, scope="module")
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def bench():
    return read_record("bench_sla2_h200")


@pytest.fixture(scope="module")
def lengths(bench):
    return sorted({row["n_q"] for row in bench.select(op="sla2")})


@pytest.fixture(scope="module")
def tuned():
    return read_record("quantization_aware_cpu")


@pytest.fixture(scope="module")
def layer2():
    layer = read_capture(RECORDED / "capture_video.safetensors").layers[2]
    return [layer[name].double() for name in ("query", "key", "value")]


class TestBytes:
    def test_level_0_spends_its_time_on_the_sums(self, bench):
        rows, columns = block_count(N, 128), block_count(N, 64)
        h_and_z = 128 * 129 * 2
        as_printed = 12 * rows * (columns - selected_count(SPARSITY, columns)) * h_and_z
        assert as_printed == pytest.approx(50.4e9, rel=0.01)
        assert as_printed > 150 * 12 * (columns + rows) * h_and_z
        level0 = sla2_time(bench, N, SPARSITY, 0, scope="kernel")
        assert 0.5 < as_printed / 4.8e9 / level0 < 1.5
        assert level0 / 20 > 4 * 12 * N**2 * 128 * (1 - SPARSITY) / 989e9


class TestChoice:
    def test_a_threshold_selects_all_that_tie(self):
        scores = torch.zeros(1, 1, 1, 100)
        assert (scores >= scores.topk(3).values[..., -1:]).sum() == 100
        assert top_blocks(scores, 3).flatten().nonzero().flatten().tolist() == [0, 1, 2]

    def test_integers_in_the_order_of_floats(self):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        x = torch.cat((x, torch.tensor([-math.inf, math.inf, 0.0, -0.0, 1e-40, -1e-40])))
        bits = (x + 0.0).view(torch.int32).long()
        rank = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)
        assert torch.equal(rank.sort(stable=True).indices, (x + 0.0).sort(stable=True).indices)

    def test_inverse_lists_of_the_capture_are_uneven(self, layer2):
        scores = heuristic_scores(*(x[0, 1] for x in layer2[:2]), BlockSettings(16, 8))
        mask = top_blocks(scores, selected_count(SPARSITY, scores.shape[-1]))
        assert mask.sum(1).unique().tolist() == [4]
        assert mask.sum(0).double().mean() == 2
        assert mask.sum(0).max() > 10
        assert (mask.sum(0) == 0).double().mean() > 0.3


class TestRecord:
    """What the prose says of the recorded times: orderings and ranges, not values."""

    def test_ladder(self, bench):
        as_printed, lists, fused, int8 = (sla2_time(bench, N, SPARSITY, level, scope="kernel") for level in range(4))
        assert as_printed > 5 * lists
        assert int8 < min(lists, fused)
        assert as_printed < dense_time(bench, N, "sdpa_flash")

    def test_int8_gains_for_the_kernel_less_for_the_op_and_nothing_at_8192(self, bench, lengths):
        gain = {
            (n, scope): sla2_time(bench, n, SPARSITY, 2, scope=scope) / sla2_time(bench, n, SPARSITY, 3, scope=scope)
            for n in lengths
            for scope in ("kernel", "op")
        }
        assert all(gain[n, "kernel"] > max(1.1, gain[n, "op"]) for n in lengths)
        assert gain[8192, "op"] < 1 < gain[N, "op"]

    def test_only_the_short_op_takes_longer_than_its_steps(self, bench):
        ratio = {n: sla2_time(bench, n, SPARSITY, 3) / sum(sla2_parts(bench, n, SPARSITY).values()) for n in (8192, N)}
        assert ratio[8192] > 1.2
        assert ratio[N] < 1.1

    def test_steps_leave_out_exactly_what_was_measured_beside_them(self, bench, lengths):
        for n in lengths:
            parts = bench.select(scope="part", n_q=n, sparsity=SPARSITY)
            steps = sla2_parts(bench, n, SPARSITY)
            (beside,) = [row["part"] for row in parts if row["part"] not in steps]
            assert beside.endswith("alone")

    def test_the_product_for_h_takes_a_growing_share(self, bench):
        share = [
            {part: time / sla2_time(bench, n, SPARSITY, 3) for part, time in sla2_parts(bench, n, SPARSITY).items()}
            for n in (N, 75600)
        ]
        grows = max(share[0], key=lambda part: share[1][part] / share[0][part])
        assert grows.startswith("H ")
        assert share[1][grows] > 1.5 * share[0][grows]
        operations = 40 * block_count(75600, 128) * block_count(75600, 64) / (12 * 256 * 512)
        times = (sla2_parts(bench, n, SPARSITY)[grows] for n in (75600, N))
        assert next(times) / next(times) > operations

    def test_peers(self, bench):
        def against(n, peer):
            return dense_time(bench, n, peer) / sla2_time(bench, n, SPARSITY, 3)

        assert against(N, "sdpa_flash") > 15
        assert against(N, "sdpa_flash") > 2 * against(8192, "sdpa_flash")
        assert 0.5 < against(8192, "sdpa_cudnn") < 2
        assert 1 < against(N, "sdpa_cudnn") < 0.8 * against(N, "sdpa_flash")
        assert all(flex_time(bench, n, SPARSITY) < sla2_time(bench, n, SPARSITY, 3) for n in (8192, N))
        assert flex_time(bench, 75600, 0.85) > sla2_time(bench, 75600, 0.85, 3)


class TestBackward:
    def test_assigning_dv_loses_the_sparse_share(self):
        generator = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn(1, 2, 200, 32, generator=generator, dtype=torch.float64) for _ in range(4))
        mask = top_blocks(torch.rand(1, 2, 2, 4, generator=generator), 2)
        alpha, settings = torch.rand(1, 2, 2, generator=generator).double(), BlockSettings()
        forward = sla2_forward(q, k, v, mask, alpha, settings)
        saved = forward.sparse_output, forward.log_sum_exp
        true = sla2_backward(do, q, k, v, mask, alpha, *saved, settings).grad_value
        leaf, share = v.requires_grad_(), per_query(alpha, 200, settings)
        branches = (
            share * sparse_branch(q, k, leaf, mask, settings)[0],
            (1 - share) * linear_branch(q, k, leaf, ~mask, settings),
        )
        of_sparse, of_linear = (torch.autograd.grad(branch, leaf, do)[0] for branch in branches)
        assert_close(of_sparse + of_linear, true)
        assert relative_l2(of_linear, true) > 0.5

    def test_an_outlier_in_v_makes_dq_of_algorithm_3_wrong_and_not_dv(self, layer2):
        inputs, settings = [x[:1, :2] for x in layer2], BlockSettings()
        mask = top_blocks(heuristic_scores(*inputs[:2], settings), 2)
        alpha = torch.full(mask.shape[:3], 0.5, dtype=torch.float64)
        do = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        error = {}
        for outlier in (1.0, 300.0):
            size = torch.ones(inputs[2].shape[-1], dtype=torch.float64)
            size[0] = outlier
            tensors = do / size, *inputs[:2], inputs[2] * size
            both = [sla2_forward(*tensors[1:], mask, alpha, BlockSettings(quantize=x)) for x in (False, True)]
            own, left = (sla2_backward(*tensors, mask, alpha, x.sparse_output, x.log_sum_exp, settings) for x in both)
            error[outlier] = [relative_l2(left[i], own[i]) for i in range(3)]
        assert error[1.0][0] < 0.05
        assert error[300.0][0] > 1
        assert error[300.0][1] > 0.2
        assert error[300.0][2] == pytest.approx(error[1.0][2], rel=0.01)


class TestQuantizationAware:
    def test_record_is_complete(self, tuned):
        seeds = {row["seed"] for row in tuned.rows}
        assert len(seeds) >= 5
        places = {(row["layer"], row["value_outlier"], row["way"]) for row in tuned.rows}
        assert len(tuned.rows) == len(places) * len(seeds) == 2 * 4 * len(WAYS) * len(seeds)

    @pytest.mark.parametrize("layer", [2, 4])
    @pytest.mark.parametrize("video", ["fitted", "other"])
    def test_as_captured_nothing_needs_repair(self, tuned, layer, video):
        for row in tuned.select(layer=layer, value_outlier=1.0):
            assert row[f"{video}_int8"] == pytest.approx(row[f"{video}_16bit"], rel=2e-3)
        for way in WAYS[1:]:
            assert abs(effect(tuned, f"{video}_int8", way, layer=layer, value_outlier=1.0)[0]) < 5e-4

    @pytest.mark.parametrize("layer", [2, 4])
    def test_a_moderate_outlier_makes_algorithm_3_worse_than_straight_through(self, tuned, layer):
        printed, straight = (effect(tuned, "fitted_int8", way, layer=layer, value_outlier=100.0)[0] for way in WAYS[1:])
        assert straight < 0 < printed

    @pytest.mark.parametrize("layer", [2, 4])
    @pytest.mark.parametrize("video", ["fitted", "other"])
    def test_an_extreme_outlier_makes_qat_worth_while(self, tuned, layer, video):
        rows = tuned.select(layer=layer, value_outlier=300.0, way="afterwards")
        damage = mean(row[f"{video}_int8"] - row[f"{video}_16bit"] for row in rows)
        for way in WAYS[1:]:
            gain, spread = effect(tuned, f"{video}_int8", way, layer=layer, value_outlier=300.0)
            assert -damage / 2 < gain < -spread

    def test_outliers_change_nothing_but_the_grid(self, tuned):
        for row in tuned.select(way="afterwards"):
            (plain,) = tuned.select(way="afterwards", layer=row["layer"], seed=row["seed"], value_outlier=1.0)
            assert row["fitted_16bit"] == pytest.approx(plain["fitted_16bit"], abs=1e-4)
            assert row["other_16bit"] == pytest.approx(plain["other_16bit"], abs=1e-4)


class TestFigures:
    def test_ladder(self, bench):
        figure = sla2_ladder_figure(bench, (8192, N), SPARSITY, title="Title", here=bench)
        for ax, n in zip(figure.axes, (8192, N), strict=True):
            for bars, dots, scope in zip(ax.containers, ax.lines[:2], ("kernel", "op"), strict=True):
                times = [sla2_time(bench, n, SPARSITY, level, scope=scope) for level in range(4)]
                assert_close([bar.get_height() for bar in bars], times)
                assert_close(list(dots.get_ydata()), times)
            peers = [dense_time(bench, n, peer) for peer in ("sdpa_flash", "sdpa_cudnn")]
            assert [line.get_ydata()[0] for line in ax.lines[2:]] == peers
            assert peers[0] > peers[1]

    def test_ladder_has_a_gap_where_nothing_was_measured(self, bench):
        rows = [row for row in bench.rows if row["level"] != 0 or row["direction"] == "bwd"]
        figure = sla2_ladder_figure(Record(bench.provenance, rows), (N,), SPARSITY, title="Title")
        heights = [bar.get_height() for bar in figure.axes[0].containers[0]]
        assert math.isnan(heights[0])
        assert not any(map(math.isnan, heights[1:]))

    def test_parts(self, bench, lengths):
        figure = sla2_parts_figure(bench, lengths, SPARSITY, title="Title")
        ax = figure.axes[0]
        assert [bars.get_label() for bars in ax.containers] == list(sla2_parts(bench, N, SPARSITY))
        for i, n in enumerate(lengths):
            top = ax.containers[-1][i]
            share = 100 * sum(sla2_parts(bench, n, SPARSITY).values()) / sla2_time(bench, n, SPARSITY, 3)
            assert top.get_y() + top.get_height() == pytest.approx(share)

    @pytest.mark.parametrize("direction", ["fwd", "fwd+bwd"])
    def test_sparsity(self, bench, lengths, direction):
        figure = sla2_sparsity_figure(bench, lengths, direction, title="Title", here=bench)
        for ax, n in zip(figure.axes, lengths, strict=True):
            sparsities = sorted({row["sparsity"] for row in bench.select(op="sla2", n_q=n)})
            flash = dense_time(bench, n, "sdpa_flash", direction)
            lines = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
            for name, level in (("SLA2, INT8", 3), ("SLA2, 16 bit", 2), ("SLA2, INT8, NVIDIA H200", 3)):
                times = [sla2_time(bench, n, s, level, scope="autograd", direction=direction) for s in sparsities]
                assert_close(lines[name], [flash / time for time in times])
            flex = [flash / flex_time(bench, n, s, direction) for s in sparsities]
            assert_close(lines["FlexAttention, mask given"], flex)
            assert_close(lines["1 / (1 - sparsity)"], [1 / (1 - s) for s in sparsities])
            assert lines["cuDNN"][0] == pytest.approx(flash / dense_time(bench, n, "sdpa_cudnn", direction))

    def test_flex_time_prefers_the_same_blocks(self, bench):
        rows = bench.select(provider="flex", n_q=N, sparsity=SPARSITY, direction="fwd")
        (same,) = [row["ms_median"] for row in rows if row["part"] is None]
        reordered = Record(bench.provenance, bench.rows[::-1])
        assert flex_time(bench, N, SPARSITY) == flex_time(reordered, N, SPARSITY) == same
        (wide,) = bench.select(provider="flex", n_q=N, sparsity=SPARSITY, direction="bwd")
        assert flex_time(bench, N, SPARSITY, "bwd") == wide["ms_median"]

    def test_list_lengths(self):
        mask = torch.tensor([[1, 0, 1], [1, 0, 0]], dtype=torch.bool)
        figure = list_lengths_figure(mask, title="Title")
        _, right, below, _ = figure.axes
        assert [bar.get_width() for bar in right.patches] == [2, 1]
        assert [bar.get_height() for bar in below.patches] == [2, 0, 1]

    def test_quantization_aware(self, tuned):
        figure = quantization_aware_figure(tuned, title="Title")
        assert [ax.get_title() for ax in figure.axes[:2]] == ["layer 2, fitted video", "layer 2, other video"]
        ax = figure.axes[3]
        outliers = sorted({row["value_outlier"] for row in tuned.rows})
        for bars, way in zip(ax.containers, WAYS, strict=True):
            assert bars.get_label() == way
            found = [[row["other_int8"] for row in tuned.select(layer=4, way=way, value_outlier=x)] for x in outliers]
            assert_close(list(bars.lines[0].get_ydata()), [mean(values) for values in found])
        exact = mean(row["other_16bit"] for row in tuned.select(layer=4, way="afterwards"))
        assert ax.lines[0].get_ydata()[0] == exact
