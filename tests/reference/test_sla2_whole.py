"""SLA2's attention for a given mask: Algorithms 2 and 3 against autograd, a dense oracle and INT8 written out."""

import math

import pytest
import torch
from sla2_oracles import assert_all_close, dense, drawn_weights, gradients_of, token_weights
from torch.testing import assert_close

from sage_ref.sla2 import (
    FEATURE_MAPS,
    BlockSettings,
    Sla2Backward,
    Sla2Forward,
    SparseLinearFunction,
    block_count,
    sla2_backward,
    sla2_forward,
    soft_sparse_linear_attention,
    tiled_backward,
    tiled_forward,
)
from sage_ref.sla2.blocks import BACKWARDS

# Nq, Nk, block_q, block_kv: one block, one token, ragged ends on either side, both or neither
SHAPES = [
    (1, 1, 16, 8), (16, 8, 16, 8), (1, 50, 16, 8), (50, 33, 16, 8), (48, 64, 16, 8), (21, 21, 5, 7), (6, 5, 1, 1),
]  # fmt: skip
SMALL = BlockSettings(16, 8)
INT8 = BlockSettings(16, 8, quantize=True)
PRINTED = BlockSettings(16, 8, quantize=True, backward="printed")  # the backward pass as the paper has it


def problem(inputs, n_q, n_k, block_q=16, block_kv=8, head_dim=8, **options):
    """Q, K, V, dO, a mask and alpha, both drawn. Of more than two rows, one is full and one empty."""
    q, k, v, do = inputs(n_q, n_k, head_dim, **options)
    blocks = block_count(n_q, block_q), block_count(n_k, block_kv)
    q[..., 0, 0] = 0  # where relu has a corner
    mask = drawn_weights(1, q.shape[1], *blocks) < 0.5
    if blocks[0] > 2:
        mask[..., 0, :], mask[..., 1, :] = True, False
    return q, k, v, do, mask, drawn_weights(1, q.shape[1], blocks[0], seed=1)


def tiled(tensors, do, settings):
    """`tiled_forward` and `tiled_backward` one head at a time, the results put together to [1, H, ...]."""
    results = []
    for h in range(do.shape[1]):
        operands = [x[0, h] for x in tensors]
        forward = tiled_forward(*operands, settings)
        results.append((*forward, *tiled_backward(do[0, h], *operands, forward, settings)))
    results = [torch.stack(parts)[None] for parts in zip(*results, strict=True)]
    return Sla2Forward(*results[:4]), Sla2Backward(*results[4:])


def whole(tensors, do, settings):
    forward = sla2_forward(*tensors, settings)
    return forward, sla2_backward(do, *tensors, forward.sparse_output, forward.log_sum_exp, settings)


# Algorithms 2 and 3 by hand, by tiles and at once, against autograd


@pytest.mark.parametrize(("kind", "scale"), [*zip(FEATURE_MAPS, (None, 0.6, None), strict=True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_equal_a_dense_oracle_and_autograd_through_the_soft_form(inputs, shape, scale, kind):
    """Every erratum shows here: scores masked as 0, dV assigned, one alpha for all rows."""
    q, k, v, do, mask, alpha = problem(inputs, *shape)
    settings = BlockSettings(*shape[2:], scale=scale, feature_map=kind)

    def soft(q, k, v, alpha):
        return soft_sparse_linear_attention(q, k, v, mask.double(), alpha, settings)

    gradients = gradients_of(soft, (q, k, v, alpha), do)
    forward, backward = whole((q, k, v, mask, alpha), do, settings)
    assert torch.equal(forward.output, soft(q, k, v, alpha))
    assert_all_close(forward[:3], dense(q, k, v, mask, alpha, settings), 1e-12)
    s = (q @ k.mT * (8**-0.5 if scale is None else scale)).masked_fill(~token_weights(mask, *shape), -math.inf)
    assert_close(forward.log_sum_exp, s.logsumexp(-1, keepdim=True), atol=1e-12, rtol=0)
    assert_all_close(backward, gradients, 1e-11)
    tiled_results = tiled((q, k, v, mask, alpha), do, settings)
    assert_all_close(tiled_results[0], forward, 1e-12)
    assert_all_close(tiled_results[1], gradients, 1e-11)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_and_whole_matrices_agree_in_int8_too(inputs, shape, backward):
    q, k, v, do, mask, alpha = problem(inputs, *shape)
    settings = BlockSettings(*shape[2:], quantize=True, backward=backward)
    forms = [form((q, k + 3, v, mask, alpha), do, settings) for form in (tiled, whole)]
    for results, atol in zip(zip(*forms, strict=True), (1e-12, 1e-11), strict=True):
        assert_all_close(*results, atol)


def test_whole_matrices_take_any_leading_dimensions(inputs):
    """One head alone, [N, D], and in front of it as many dimensions as one likes."""
    q, k, v, do, mask, alpha = problem(inputs, 33, 50)

    def results(index):
        forward, backward = whole([x[index] for x in (q, k, v, mask, alpha)], do[index], INT8)
        return *forward, *backward

    expected = results(...)
    assert_all_close(results((0, 1)), [x[0, 1] for x in expected], 1e-13)
    assert_all_close(results(None), [x[None] for x in expected], 1e-13)


# As one differentiable operation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", [SMALL, INT8, PRINTED])
def test_autograd_hands_back_what_the_functions_compute(inputs, dtype, settings):
    """Autocast doesn't reach inside."""
    q, k, v, do, mask, alpha = problem(inputs, 33, 40, dtype=dtype)
    alpha = alpha.float()
    leaves = [x.clone().requires_grad_() for x in (q, k, v, alpha)]
    with torch.autocast("cpu", torch.bfloat16):
        output, *_ = SparseLinearFunction.apply(*leaves[:3], mask, leaves[3], settings)
        gradients = torch.autograd.grad(output, leaves, do)
    forward, backward = whole((q, k, v, mask, alpha), do, settings)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in (*forward, *backward)} == {wide}
    for x, wide_x, like in zip((output, *gradients), (forward.output, *backward), (q, q, k, v, alpha), strict=True):
        assert x.dtype == like.dtype
        assert torch.equal(x, wide_x.to(like.dtype))
