"""SLA2 at long lengths and large scores: memory that grows with N, and a backward pass that fits the forward pass."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from sla2_oracles import drawn, drawn_qkv, gradients_of
from torch.testing import assert_close

from sage_ref.parallel import ParallelSLA2
from sage_ref.sla2 import SLA, SLA2, BlockSettings, block_mass, blocks, sparse_linear_attention
from sage_ref.sla2.api import reference_attention
from sage_ref.sla2.blocks import BACKWARDS
from sage_ref.tracing import relative_l2

SMALL = BlockSettings(16, 8)


def calls(q, k, v):
    """Every public way to SLA and SLA2, both passes; those for several processes need a group."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    kinds = {"SLA2": SLA2, "parallel": ParallelSLA2}
    modules = {name: kind(16, 1, sparsity=0.5, backend="reference") for name, kind in kinds.items()}
    soft = {f"{name}, stage 1": copy.deepcopy(module).stage(1) for name, module in modules.items()}
    printed = SLA2(16, 1, sparsity=0.5, backend="reference", backward="printed")
    function = partial(sparse_linear_attention, block_mask=mask, alpha=0.5, backend="reference")
    attentions = modules | soft | {"printed": printed, "SLA": SLA(16, 1, sparsity=0.5), "function": function}
    for name, attention in attentions.items():
        yield name, lambda attention=attention: attention(q, k, v).sum().backward()
    for name, module in modules.items():
        yield f"initialize_alpha, {name}", partial(module.initialize_alpha, q, k)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_no_public_call_makes_a_tensor_of_queries_by_keys(largest_tensor, monkeypatch):
    """As on 3,072 tokens with all the scores that may stand at a time: a quarter of one, a sixteenth of the other."""
    n = 768
    monkeypatch.setattr(blocks, "PART_SCORES", blocks.PART_SCORES // 16)
    q, k, v = (drawn(1, 1, n, 16, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    for name, call in calls(q, k, v):
        with largest_tensor() as largest:
            call()
        assert 0 < largest.numbers <= blocks.PART_SCORES < n * n / 2, name


@pytest.mark.parametrize("parts", [2, 100])
@pytest.mark.parametrize("kind", ["16 bit", *BACKWARDS, "weights"])
def test_parts_give_the_numbers_of_the_whole(monkeypatch, parts, kind):
    q, k, v = drawn_qkv(100, 90)
    do = drawn(1, 2, 100, 8, seed=3)
    alpha, weights = drawn(1, 2, 7, seed=4).sigmoid(), drawn(1, 2, 7, 12, seed=5).sigmoid()
    settings = replace(SMALL, quantize=True, backward=kind) if kind in BACKWARDS else SMALL

    def run(*x):
        chooser = x[4] if kind == "weights" else weights > 0.5
        return reference_attention(*x[:3], chooser, x[3], settings) + 0 * x[4].sum()

    tensors = q, k, v, alpha, weights
    expected = run(*tensors), *gradients_of(run, tensors, do), block_mass(q, k, settings)
    monkeypatch.setattr(blocks, "PART_SCORES", 2 * 100 * 90 // parts)
    found = run(*tensors), *gradients_of(run, tensors, do), block_mass(q, k, settings)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, atol=1e-12, rtol=1e-12)


def scores_up_to(size):
    """Q, K, V and dO of 128 tokens with scores of about `size`."""
    q, k, v = drawn_qkv(128, 128, head_dim=32)
    factor = (size / (q @ k.mT * 32**-0.5).abs().max()) ** 0.5
    return q * factor, k * factor, v, drawn(1, 2, 128, 32, seed=3)


def by_the_module(q, k, v, **options):
    return SLA2(32, 2, sparsity=0.75, backend="reference", **options).double()(q, k, v)


def by_the_function(q, k, v, **options):
    mask = torch.ones(1, 2, 1, 2, dtype=torch.bool)
    return sparse_linear_attention(q, k, v, mask, 0.9, backend="reference", **options)


@pytest.mark.parametrize("attention", [by_the_module, by_the_function])
def test_int8_trains_with_matched_gradients_unless_the_printed_ones_are_asked_for(attention):
    """At large scores the matched ones are nearer to the exact ones; without INT8 there is one kind."""
    *qkv, do = scores_up_to(300)

    def gradients(**options):
        return gradients_of(lambda *x: attention(*x, **options), qkv, do)

    exact, printed_exact = gradients(quantize=False), gradients(quantize=False, backward="printed")
    found, matched, printed = (
        gradients(quantize=True, **x) for x in ({}, {"backward": "matched"}, {"backward": "printed"})
    )
    assert all(torch.equal(x, y) for x, y in zip((*found, *exact), (*matched, *printed_exact), strict=True))
    for x, y, z in zip(found, printed, exact, strict=True):
        assert relative_l2(x, z) < 0.7 * relative_l2(y, z)
