"""The small QAT experiment: what each way of training computes, and that nothing else differs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from sage_lab.experiments import quantization_aware
from sage_lab.experiments.quantization_aware import WAYS, MappedSLA2, Study, TuningSettings, effect, errors, fine_tune
from sage_lab.records import Record
from torch.testing import assert_close

from sage_ref.attention import attention_forward
from sage_ref.sla2 import BlockSettings, sla2_backward, sla2_forward
from sage_ref.tracing import relative_l2

SETTINGS = TuningSettings(sparsity=0.75, block_q=32, block_kv=16, steps=4)
OUTLIER = replace(SETTINGS, value_outlier=300.0)
HEADS, N, HEAD_DIM = 2, 128, 16


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, N, HEAD_DIM, generator=generator) for _ in range(3)]


@pytest.fixture
def layer(tensors):
    layer = MappedSLA2(HEAD_DIM, HEADS, SETTINGS)
    layer.sla2.initialize_alpha(*tensors[:2])
    return layer


def plain(layer, tensors, *, quantize):
    block_mask = layer.sla2.block_mask(*tensors[:2])
    blocks = BlockSettings(SETTINGS.block_q, SETTINGS.block_kv, quantize=quantize)
    return block_mask, sla2_forward(*tensors, block_mask, layer.sla2.alpha(1, N // SETTINGS.block_q), blocks)


@pytest.mark.parametrize("way", WAYS)
def test_the_layer_starts_as_sla2_and_all_but_one_way_see_int8(layer, tensors, way):
    _, expected = plain(layer, tensors, quantize=way != "afterwards")
    assert_close(layer(*tensors, way), expected.output)
    assert relative_l2(layer(*tensors, "algorithm 3"), layer(*tensors, "afterwards")) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_gradients(layer, tensors, way):
    """Algorithm 3 from the O_s and L of the INT8 forward pass; the other ways from those without quantisation."""
    grad_output = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = torch.autograd.grad(layer(*leaves, way), leaves, grad_output)
    block_mask, forward = plain(layer, tensors, quantize=way == "algorithm 3")
    blocks = BlockSettings(SETTINGS.block_q, SETTINGS.block_kv)
    alpha = layer.sla2.alpha(1, N // SETTINGS.block_q)
    saved = forward.sparse_output, forward.log_sum_exp
    expected = sla2_backward(grad_output, *tensors, block_mask, alpha, *saved, blocks)
    for x, y in zip(found, expected, strict=False):
        assert_close(x, y)


def test_maps_are_applied_per_head(layer, tensors):
    maps = torch.randn(layer.maps.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        layer.maps.copy_(maps)
        _, inner = plain(layer, [x @ w for x, w in zip(tensors, maps, strict=False)], quantize=False)
        assert_close(layer(*tensors, "afterwards"), inner.output @ maps[3])


def test_the_outlier_changes_nothing_without_quantisation_and_much_with_it(tensors):
    tuned = fine_tune(*tensors, "afterwards", SETTINGS, seed=0)
    with_outlier = fine_tune(*tensors, "afterwards", OUTLIER, seed=0)
    assert_close(with_outlier.maps, tuned.maps, rtol=1e-3, atol=1e-4)
    (plain_error, int8_error), (plain_outlier, int8_outlier) = (errors(x, *tensors) for x in (tuned, with_outlier))
    assert plain_outlier == pytest.approx(plain_error, abs=1e-4)
    assert int8_error < 1.02 * plain_error
    assert int8_outlier > 1.2 * plain_outlier


def test_errors_are_relative_to_full_attention(layer, tensors):
    exact = attention_forward(*tensors).output
    expected = [relative_l2(layer(*tensors, way), exact) for way in ("afterwards", "algorithm 3")]
    assert errors(layer, *tensors) == pytest.approx(expected)
    assert expected[0] != expected[1]


@pytest.mark.parametrize("way", WAYS)
def test_training_reduces_the_error_and_its_seed_decides_the_batches(layer, tensors, way):
    settings = replace(SETTINGS, steps=40, learning_rate=5e-3)
    assert errors(fine_tune(*tensors, way, settings, 0), *tensors)[1] < 0.9 * errors(layer, *tensors)[1]
    first, again, other = (fine_tune(*tensors, way, SETTINGS, seed) for seed in (0, 0, 1))
    assert torch.equal(first.maps, again.maps)
    assert not torch.equal(first.maps, other.maps)
    assert not torch.equal(first.sla2.alpha_logit, layer.sla2.alpha_logit)
    assert all(torch.equal(weight, torch.eye(HEAD_DIM)) for weight in first.sla2.router.parameters())


def test_alpha_starts_at_the_mass_of_the_selected_blocks_and_learning_rates_fall(layer, tensors):
    """Adam moves an entry by at most the rate: of two steps of a cosine to zero, the second has half of the first's."""
    tuned = fine_tune(*tensors, "afterwards", replace(SETTINGS, alpha_learning_rate=0.0, steps=2), seed=0)
    assert torch.equal(tuned.sla2.alpha_logit, layer.sla2.alpha_logit)
    moved = (tuned.maps - torch.eye(HEAD_DIM)).abs().max().item() / SETTINGS.learning_rate
    assert 1.4 < moved < 1.51


def test_impossible_settings_are_refused(tensors):
    for name in ("steps", "query_blocks", "value_outlier"):
        with pytest.raises(ValueError, match=name):
            TuningSettings(**{name: 0})
    with pytest.raises(ValueError, match="way: expected one of .*, got 'before'"):
        fine_tune(*tensors, "before", SETTINGS, seed=0)


def test_study_trains_on_the_first_video_and_judges_on_both(monkeypatch):
    monkeypatch.setattr(quantization_aware, "TuningSettings", partial(TuningSettings, steps=3))
    generator = torch.Generator().manual_seed(0)
    capture = {name: torch.randn(2, 4, 256, 16, generator=generator).bfloat16() for name in ("query", "key", "value")}
    rows = list(
        quantization_aware.study_rows(
            Study(layers=(2,), heads=1, value_outliers=(1.0, 300.0), seeds=(3,)), {2: capture}
        )
    )
    assert [(row["value_outlier"], row["way"]) for row in rows] == [(x, way) for x in (1.0, 300.0) for way in WAYS]
    fitted, other = ([x[i : i + 1, :1].float() for x in capture.values()] for i in (0, 1))
    tuned = fine_tune(*fitted, "algorithm 3", TuningSettings(steps=3, value_outlier=300.0), 3)
    row = next(row for row in rows if row["way"] == "algorithm 3" and row["value_outlier"] == 300.0)
    assert (row["seed"], row["layer"]) == (3, 2)
    assert (row["fitted_16bit"], row["fitted_int8"]) == pytest.approx(errors(tuned, *fitted), abs=1e-5)
    assert (row["other_16bit"], row["other_int8"]) == pytest.approx(errors(tuned, *other), abs=1e-5)


def test_effect_pairs_seeds():
    values = {"afterwards": {0: 1.0, 1: 2.0, 2: 3.0}, "algorithm 3": {2: 2.5, 1: 1.0, 0: 1.0}}
    rows = [{"way": way, "seed": seed, "x": x, "layer": 2} for way, of in values.items() for seed, x in of.items()]
    record = Record({}, [*rows, {"way": "afterwards", "seed": 0, "x": 9.0, "layer": 4}])
    assert effect(record, "x", "algorithm 3", layer=2) == pytest.approx((-0.5, 0.5))
