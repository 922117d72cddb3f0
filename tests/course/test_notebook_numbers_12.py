"""Notebooks 12 and 12b: their figures, and what their records must hold."""

import math
from statistics import mean

import matplotlib.pyplot as plt
import pytest
import torch
from sage_course.figures import (
    dense_time,
    list_lengths_figure,
    quantization_aware_figure,
    sla2_ladder_figure,
    sla2_paired_figure,
    sla2_parts,
    sla2_parts_figure,
    sla2_time,
)
from sage_lab.experiments.quantization_aware import WAYS
from sage_lab.records import Record, read_record
from torch.testing import assert_close

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


class TestRecord:
    def test_steps_leave_out_exactly_what_was_measured_beside_them(self, bench, lengths):
        for n in lengths:
            parts = bench.select(scope="part", n_q=n, sparsity=SPARSITY)
            steps = sla2_parts(bench, n, SPARSITY)
            (beside,) = [row["part"] for row in parts if row["part"] not in steps]
            assert beside.endswith("alone")


class TestQuantizationAware:
    def test_record_is_complete(self, tuned):
        seeds = {row["seed"] for row in tuned.rows}
        assert len(seeds) >= 5
        places = {(row["layer"], row["value_outlier"], row["way"]) for row in tuned.rows}
        assert len(tuned.rows) == len(places) * len(seeds) == 2 * 4 * len(WAYS) * len(seeds)

    def test_outliers_change_nothing_but_the_grid(self, tuned):
        for row in tuned.select(way="afterwards"):
            (plain,) = tuned.select(way="afterwards", layer=row["layer"], seed=row["seed"], value_outlier=1.0)
            assert row["fitted_16bit"] == pytest.approx(plain["fitted_16bit"], abs=1e-4)
            assert row["other_16bit"] == pytest.approx(plain["other_16bit"], abs=1e-4)


class TestFigures:
    def test_ladder(self, bench):
        figure = sla2_ladder_figure(bench, (8192, N), SPARSITY, title="Title", here=bench)
        for ax, n in zip(figure.axes, (8192, N), strict=True):
            times = [sla2_time(bench, n, SPARSITY, level, scope="kernel") for level in range(4)]
            assert_close([bar.get_height() for bar in ax.containers[0]], times)
            assert_close(list(ax.lines[0].get_ydata()), times)
            assert [text.get_text() for text in ax.texts] == [f"{time:.2f}" for time in times]
            peers = [dense_time(bench, n, peer) for peer in ("sdpa_flash", "sdpa_cudnn")]
            assert [line.get_ydata()[0] for line in ax.lines[1:]] == peers
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
            parts, top = sla2_parts(bench, n, SPARSITY), ax.containers[-1][i]
            assert top.get_y() + top.get_height() == pytest.approx(100)
            assert ax.containers[0][i].get_height() == pytest.approx(100 * [*parts.values()][0] / sum(parts.values()))

    def test_paired(self):
        paired = read_record("paired_sla2_h200")
        figure = sla2_paired_figure(paired, title="Title")
        for ax, direction in zip(figure.axes, ("fwd", "fwd+bwd"), strict=True):
            lines = {line.get_label(): line for line in ax.lines}
            for provider, name in (("sdpa_cudnn", "cuDNN"), ("fa4", "FlashAttention-4")):
                for mask in ("random", "skewed"):
                    line, where = lines[f"{name}, {mask} mask"], {"mask": mask, "direction": direction}
                    for n, ratio in zip(*line.get_data(), strict=True):
                        ours = paired.select(provider="sage_kernels", n_q=n, **where)
                        (theirs,) = paired.select(provider=provider, n_q=n, **where)
                        assert ratio == theirs["ms_median"] / min(row["ms_median"] for row in ours)
                    assert list(line.get_xdata()) == sorted({row["n_q"] for row in paired.rows})

    def test_list_lengths(self):
        mask = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
        blocks, right = list_lengths_figure(mask, title="Title").axes
        assert torch.equal(torch.tensor(blocks.images[0].get_array().data), mask)
        assert [list(line.get_ydata()) for line in right.lines] == [[2, 2], [2, 1, 1, 0]]
        assert [list(line.get_xdata()) for line in right.lines] == [[0, 50], [0, 25, 50, 75]]

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
