"""The numbers that notebook 03 claims, on the same inputs, and the record that notebook 05 reads."""

import math
from functools import cache

import matplotlib.pyplot as plt
import pytest
import torch
from torch.testing import assert_close

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.course.figures import sigma_figure, table1_choices_figure
from sage_ref.experiments.table1 import TENSORS, closest_setting, deviation
from sage_ref.experiments.table2 import CAPTURES, most_error_prone, table2_rows
from sage_ref.quantization import fake_quantize
from sage_ref.records import RECORDED, read_record
from sage_ref.sagebwd import MATMULS, SageBwdSettings, sagebwd_backward, sagebwd_forward
from sage_ref.smoothing import QKNorm, query_mean_grad_key, smooth_key, smooth_query
from sage_ref.tracing import exact_intermediates, relative_l2, rms, sagebwd_intermediates, trace
from sage_ref.training.capture import read_capture

C = 1 / 8  # 1 / sqrt(64)


def gaussian(*, seed=0, count=4, n=512, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 1, n, 64, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.fixture(scope="module")
def inputs():
    """Notebook 03's example: Gaussian, and an offset in four channels."""
    q, k_plain, v, do = gaussian()
    offset = torch.zeros(64, dtype=torch.float64)
    offset[[5, 20, 41, 50]] = torch.tensor([10.0, -8.0, 6.0, -12.0], dtype=torch.float64)
    return q, k_plain, v, do, offset


def errors(q, k, v, do, **settings):
    traced = trace(q, k, v, do, SageBwdSettings.printed(**settings))
    return {name: traced[name].rel_l2 for name in TENSORS}


class TestSmoothing:
    def test_offset_costs_and_smoothing_removes_it(self, inputs):
        q, k_plain, v, do, offset = inputs
        plain = errors(q, k_plain, v, do, smooth_k=False)
        naive = errors(q, k_plain + offset, v, do, smooth_k=False)
        smoothed = errors(q, k_plain + offset, v, do)
        assert naive["O"] > 1.5 * plain["O"]
        assert naive["dQ"] > 2 * plain["dQ"]
        assert smoothed == pytest.approx(plain, rel=0.02)

    def test_adding_the_row_sums_back_makes_dq_worse(self, inputs):
        q, k_plain, v, do, offset = inputs
        k, settings = k_plain + offset, SageBwdSettings.printed()
        forward = sagebwd_forward(q, k, v, settings)
        backward = sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)
        ds_hat = fake_quantize(backward.grad_scores, settings.per_query)
        k_smooth, mean = smooth_key(k)
        row_sum = ds_hat.sum(-1, keepdim=True)
        exact = exact_intermediates(q, k, v, do, settings)["dQ"]
        corrected = backward.grad_query + C * row_sum * mean
        assert relative_l2(corrected, exact) > 2 * relative_l2(backward.grad_query, exact)
        assert_close(ds_hat @ k_smooth, (ds_hat - row_sum / 512) @ k, rtol=1e-9, atol=1e-10)

    def test_future_key_moves_the_past_through_the_mean_only(self, inputs):
        q, k_plain, v, _, offset = inputs
        direction = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        exact = attention_forward(q, k_plain + offset, v, is_causal=True).output[..., :448, :]

        def earlier_rows(change, mean_of):
            k = k_plain + offset
            k[..., -1, :] += change * direction
            k = k - k[..., mean_of, :].mean(-2, keepdim=True)
            return sagebwd_forward(q, k, v, SageBwdSettings.printed(is_causal=True, smooth_k=False)).output[
                ..., :448, :
            ]

        everything, prefix = slice(None), slice(0, 64)
        before = earlier_rows(0, everything)
        assert 0.1 < rms(earlier_rows(1, everything) - before) / rms(before - exact) < 1
        assert rms(earlier_rows(1e4, everything) - exact) > 5 * rms(before - exact)
        assert torch.equal(earlier_rows(1e4, prefix), earlier_rows(0, prefix))
        assert rms(earlier_rows(0, prefix) - exact) == pytest.approx(rms(before - exact), rel=0.1)

    def test_query_smoothing_needs_bias_and_second_branch(self, inputs):
        q, k, v, do, offset = inputs
        q = q + offset.roll(7)
        q_smooth, q_mean = smooth_query(q, 64)
        exact = attention_forward(q, k, v)
        backward = attention_backward(do, q, k, v, exact.output, exact.log_sum_exp)
        one_branch = C * backward.grad_scores.mT @ q_smooth
        assert relative_l2(attention_forward(q_smooth, k, v).output, exact.output) > 0.5
        assert relative_l2(one_branch, backward.grad_key) > 0.5
        assert_close(one_branch + query_mean_grad_key(backward.grad_scores, q_mean, C), backward.grad_key)

    def test_query_smoothing_helps_queries_with_an_offset_only(self, inputs):
        q, k, v, do, offset = inputs
        k = k + offset
        assert errors(q, k, v, do, smooth_q=True) == pytest.approx(errors(q, k, v, do), rel=0.03)
        q = q + offset.roll(7)
        assert errors(q, k, v, do, smooth_q=True)["dK"] < 0.5 * errors(q, k, v, do)["dK"]

    def test_score_error_grows_with_sigma_squared(self, inputs):
        q, k, v, *_ = inputs

        def score_error(sigma):
            smoothed = smooth_key(sigma * k)[0]
            scores = sagebwd_forward(sigma * q, smoothed, v, SageBwdSettings.printed()).scores
            return (scores - sigma * q @ smoothed.mT * C).std().item()

        assert score_error(10) == pytest.approx(100 * score_error(1), rel=1e-6)

    def test_qk_norm_bounds_logits_and_error(self, inputs):
        q, k, v, do, _ = inputs
        q_norm, k_norm = QKNorm(64).double().requires_grad_(False)(10 * q, 10 * k)
        assert (q_norm @ k_norm.mT * C).abs().max() <= 8
        assert errors(q_norm, k_norm, v, do)["dQ"] < 0.05
        assert errors(10 * q, 10 * k, v, do)["dQ"] > 0.6


class TestTable1:
    def test_closest_setting_reproduces_the_paper(self):
        record = read_record("table1_sweep")
        best = closest_setting(record)
        assert best["granularity"] == "row"
        for row in record.select(**best):
            assert deviation(row) < (0.35 if row["sigma"] == 1 else 0.20)

    def test_only_sigma_1_tells_granularities_apart(self):
        record = read_record("table1_sweep")
        for row in record.rows:
            if row["sigma"] >= 3:
                assert 0.8 < row["rel_l2"] / row["paper_rel_l2"] < 1.25
        for row in record.select(sigma=1, granularity="block", block_q=64, block_kv=64):
            assert row["tensor"] == "O" or row["rel_l2"] > 2 * row["paper_rel_l2"]

    def test_choices_figure_averages_the_record(self):
        record = read_record("table1_sweep")
        figure = table1_choices_figure(record)
        line = next(line for line in figure.axes[3].lines if line.get_label() == "row")
        logs = [math.log(r["rel_l2"] / r["paper_rel_l2"]) for r in record.select(granularity="row", sigma=1)]
        assert line.get_ydata()[0] == pytest.approx(math.exp(sum(logs) / len(logs)))
        plt.close(figure)

    def test_sigma_figure_shows_growing_errors(self):
        figure = sigma_figure((1, 5))
        shown = [float(ax.get_title().rpartition("dQ ")[2]) for ax in figure.axes]
        assert shown[0] < 0.1 < shown[1]
        plt.close(figure)


CAPTURED = {
    (norm, layer): tensors
    for norm, name in CAPTURES.items()
    for layer, tensors in read_capture(RECORDED / f"{name}.safetensors").layers.items()
}
TABLE2 = read_record("table2_captures")
PLACE = "QK-norm", most_error_prone(TABLE2.select(qk_norm=True))[0]["layer"]
every_place = pytest.mark.parametrize("place", CAPTURED)


def captured(place):
    return [CAPTURED[place][name].double() for name in ("query", "key", "value", "grad_output")]


@cache
def exact_of(place):
    return exact_intermediates(*captured(place), SageBwdSettings.printed(is_causal=True))


@cache
def sagebwd_of(place, exact_matmuls=("dP",), **choice):
    settings = SageBwdSettings.printed(is_causal=True, exact_matmuls=exact_matmuls, **choice)
    return sagebwd_intermediates(*captured(place), settings)


def captured_error(name, place=PLACE, **choice):
    return relative_l2(sagebwd_of(place, **choice)[name], exact_of(place)[name])


def only(*matmuls):
    return tuple(matmul for matmul in MATMULS if matmul not in matmuls)


def by_norm(values):
    """(with QK-norm, without) of a dict by place, layers in order."""
    return tuple([value for (norm, _), value in values.items() if norm == of] for of in CAPTURES)


class TestCaptured:
    """Sections 6 and 8."""

    def test_keys_share_more_without_qk_norm(self):
        shared = {
            place: (k.mean(-2).norm(dim=-1) / k.square().sum(-1).mean(-1).sqrt()).mean().item()
            for place, (_, k, *_) in ((place, captured(place)) for place in CAPTURED)
        }
        for with_norm, without in zip(*by_norm(shared), strict=True):
            assert with_norm < 0.45 < 0.53 < without < 0.8

    @pytest.mark.parametrize(("norm", "low", "high"), [("QK-norm", 0.74, 0.95), ("no QK-norm", 0.56, 0.76)])
    def test_key_smoothing_gains_most_without_qk_norm(self, norm, low, high):
        places = [place for place in CAPTURED if place[0] == norm]
        left = [captured_error("dQ", place) / captured_error("dQ", place, smooth_k=False) for place in places]
        assert low < min(left) < max(left) < high

    @every_place
    def test_query_smoothing_takes_a_tenth_to_a_third_off_dk_and_little_moves_dq(self, place):
        low, high = (0.79, 0.86) if place[0] == "QK-norm" else (0.64, 0.92)
        assert low < captured_error("dK", place, smooth_q=True) / captured_error("dK", place) < high
        assert captured_error("dQ", place, smooth_q=True) == pytest.approx(captured_error("dQ", place), rel=0.05)

    def test_logits_are_smaller_with_qk_norm_in_two_layers_but_gains_have_grown(self):
        largest = {}
        for place in CAPTURED:
            q, k, *_ = captured(place)
            largest[place] = (q @ k.mT / math.sqrt(q.shape[-1])).tril().abs().max().item()
        with_norm, without = by_norm(largest)
        assert [x < y for x, y in zip(with_norm, without, strict=True)] == [True, False, True]
        assert [x > math.sqrt(128) for x in with_norm] == [False, True, True]


@every_place
def test_table2_is_that_of_the_captures(place):
    norm, layer = place
    rows = table2_rows({layer: CAPTURED[place]}, SageBwdSettings.printed(is_causal=True))
    for row, recorded in zip(rows, TABLE2.select(qk_norm=norm == "QK-norm", layer=layer), strict=True):
        assert recorded["tensor"] == row["tensor"]
        for name in ("cosine", "rel_l2", "rms"):
            assert recorded[name] == pytest.approx(row[name], rel=0.02, abs=1e-6)
