"""SLA2's router: SoftTop-k and its gradient, scores of blocks."""

import pytest
import torch
from sla2_oracles import drawn, drawn_qkv
from torch import nn
from torch.testing import assert_close

from sage_ref.sla2 import SLA2, BlockSettings, Router, block_mean, soft_top_k


def gradient_of(x, count, temperature, grad_soft):
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(soft_top_k(x, count, temperature), x, grad_soft)
    return gradient


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize(("key_blocks", "count"), [(2, 1), (9, 8), (256, 8), (4096, 123)])
def test_it_is_a_sigmoid_with_one_shift_per_row_whose_sum_is_exact_up_to_rounding(key_blocks, count, size):
    """Scores from a bell curve, from its cube, in two groups of which the count divides one, and in steps."""
    bell = drawn(20, key_blocks)
    groups = bell / size + (torch.arange(key_blocks) < (count + 1) // 2).double()
    x = torch.cat([bell, bell**3, groups, bell.round()]) * size
    soft = soft_top_k(x, count, 0.1)
    assert_close(soft.sum(-1), torch.full((80,), float(count)).double(), atol=2e-14 * key_blocks, rtol=0)
    shift = (soft.logit() - x / 0.1).gather(-1, (soft - 0.5).abs().argmin(-1, keepdim=True))  # where it is known best
    known = ((soft - 0.5).abs().amin(-1) < 0.49) & (x.abs().amax(-1) < 1e3)
    assert known.any() or size == 1e6
    assert_close(soft[known], torch.sigmoid(x / 0.1 + shift)[known], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("count", "temperature"), [(1, 0.05), (2, 0.1), (4, 2.0)])
def test_the_gradient_passes_gradcheck_and_keeps_the_rows_sum(count, temperature):
    """(w dx - w (w . dx) / sum(w)) / tau with w = s (1 - s)."""
    x, grad_soft = (drawn(3, 5) * 0.3).requires_grad_(), drawn(3, 5, seed=2)
    assert torch.autograd.gradcheck(lambda x: soft_top_k(x, count, temperature), x)
    gradient = gradient_of(x, count, temperature, grad_soft)
    assert_close(gradient.sum(-1), torch.zeros(3).double(), atol=1e-12, rtol=0)
    assert_close(gradient_of(x, count, temperature, torch.ones_like(x)), torch.zeros_like(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e6])
def test_extreme_scores_give_finite_gradients(dtype, size):
    """Also where every number of a row is 0 or 1, and w is zero throughout."""
    x = torch.linspace(-1, 1, 10, dtype=dtype).mul(size).expand(2, 10)
    soft = soft_top_k(x, 3)
    assert soft.dtype == dtype
    assert_close(soft.double().sum(-1), torch.full((2,), 3.0).double(), atol=1e-6, rtol=0)
    gradient = gradient_of(x, 3, 0.1, drawn(2, 10, dtype=dtype))
    assert gradient.isfinite().all()
    assert gradient.any() == (size <= 1)


# The router


def test_logits_are_the_scores_of_projected_means():
    q, k = drawn(2, 20, 4), drawn(2, 30, 4, seed=1)
    router = Router(4, BlockSettings(16, 8, scale=0.7))
    for parameter, seed in ((router.proj_q.weight, 2), (router.proj_k.weight, 3)):
        parameter.data = drawn(4, 4, seed=seed, dtype=torch.float32)
    q_bar = block_mean(q, 16) @ router.proj_q.weight.double().mT
    k_bar = block_mean(k - k.mean(-2, keepdim=True), 8) @ router.proj_k.weight.double().mT
    assert_close(router(q, k), torch.einsum("bid,bjd->bij", q_bar, k_bar) * 0.7, atol=1e-12, rtol=0)


class Adapted(nn.Module):
    """A layer with an adapter beside it, as LoRA's are."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Packed(nn.Module):
    """A layer that keeps its weight in INT8 and unpacks it when it is called, as quantised ones do."""

    def __init__(self, layer):
        super().__init__()
        packed = torch.randint(-127, 128, (8, 8), dtype=torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) / 64).mT


def replicated(layer):
    """As in a replica of DataParallel, which has weights, but no parameters."""
    layer.weight.normal_()
    layer.parameters, layer._former_parameters = list, layer._parameters
    return layer


@pytest.mark.parametrize(("change", "stage"), [(Adapted, 1), (Packed, 2), (replicated, 2)])
def test_the_router_multiplies_by_what_its_layers_compute_when_they_are_called(change, stage):
    q, k, v = drawn_qkv(40, 80)
    plain, expected, model = (SLA2(8, 2, sparsity=0.6, block_q=16, block_kv=8, backend="reference") for _ in "abc")
    with torch.no_grad():
        for name in ("proj_q", "proj_k"):
            layer = change(getattr(model.router, name))
            setattr(model.router, name, layer)
            dtype = q.dtype if change is Packed else torch.float32
            getattr(expected.router.to(dtype), name).weight.copy_(layer(torch.eye(8, dtype=dtype)).mT)
        outputs = [x.stage(stage)(q, k, v) for x in (model, expected, plain)]
        assert torch.equal(model.block_mask(q, k), expected.block_mask(q, k))
    assert_close(*outputs[:2], atol=1e-12, rtol=0)
    assert (outputs[0] - outputs[2]).abs().max() > 1e-4
