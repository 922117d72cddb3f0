"""The small QAT experiment: each way of training computes its own gradients, and nothing else differs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments import quantization_aware
from sage_lab.experiments.quantization_aware import WAYS, MappedSLA2, TuningRun, TuningSettings, errors, fine_tune
from sage_lab.records import read_record
from torch.testing import assert_close

from sage_ref.attention import attention_forward
from sage_ref.sla2 import BlockSettings, sla2_backward, sla2_forward
from sage_ref.tracing import relative_l2

SETTINGS = TuningSettings(sparsity=0.75, block_q=32, block_kv=16, steps=4)
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
def test_the_layer_starts_as_sla2_and_its_gradients_are_those_of_its_way(layer, tensors, way):
    """Algorithm 3 from the O_s and L of the INT8 forward pass; the other ways from those without quantisation."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    output = layer(*leaves, way)
    assert_close(output, plain(layer, tensors, quantize=way != "afterwards")[1].output)
    assert relative_l2(layer(*tensors, "algorithm 3"), layer(*tensors, "afterwards")) > 1e-3
    grad_output = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(output, leaves, grad_output)
    block_mask, forward = plain(layer, tensors, quantize=way == "algorithm 3")
    blocks, alpha = BlockSettings(SETTINGS.block_q, SETTINGS.block_kv), layer.sla2.alpha(1, N // SETTINGS.block_q)
    saved = forward.sparse_output, forward.log_sum_exp
    expected = sla2_backward(grad_output, *tensors, block_mask, alpha, *saved, blocks)
    for x, y in zip(found, expected, strict=False):
        assert_close(x, y)


def test_maps_are_applied_per_head_and_errors_are_relative_to_full_attention(layer, tensors):
    maps = torch.randn(layer.maps.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        layer.maps.copy_(maps)
        _, inner = plain(layer, [x @ w for x, w in zip(tensors, maps, strict=False)], quantize=False)
        assert_close(layer(*tensors, "afterwards"), inner.output @ maps[3])
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


def test_the_command_makes_the_row_of_the_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = TuningRun(4, 300.0, "algorithm 3", 3)
    monkeypatch.setattr(quantization_aware, "RUNS", [run])
    main(["quantization-aware", "--json", "qat.json"])
    records = read_record(Path("qat.json")), read_record("quantization_aware_cpu")
    (row,), (recorded,) = (record.select(**vars(run)) for record in records)
    assert row.keys() == recorded.keys()
    errors_of = {name: x for name, x in recorded.items() if name not in vars(run)}
    assert {name: row[name] for name in errors_of} == pytest.approx(errors_of, abs=0.01)
    assert not list(tmp_path.glob("**/*.partial"))
