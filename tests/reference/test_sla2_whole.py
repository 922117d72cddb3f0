"""SLA2's attention for a given mask: Algorithms 2 and 3 against autograd, a dense oracle and INT8 written out."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from sage_ref import sparse_linear_attention
from sage_ref.sla2 import (
    FEATURE_MAPS,
    BlockSettings,
    Sla2Backward,
    Sla2Forward,
    SparseLinearFunction,
    block_count,
    selected_count,
    sla2_backward,
    sla2_forward,
    soft_sparse_linear_attention,
    tiled_backward,
    tiled_forward,
)
from sage_ref.sla2.whole import feature_map_backward
from sage_ref.tracing import relative_l2

# Nq, Nk, block_q, block_kv: one block, one token, ragged ends on either side, both or neither
SHAPES = [
    (1, 1, 16, 8), (3, 3, 16, 8), (16, 8, 16, 8), (1, 50, 16, 8), (50, 1, 16, 8), (33, 50, 16, 8), (50, 33, 16, 8),
    (48, 64, 16, 8), (21, 21, 5, 7), (6, 5, 1, 1),
]  # fmt: skip
SELECTED = ["all", "one", "50%", "97%", "all but one"]


def drawn_mask(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def problem(inputs, n_q, n_k, block_q, block_kv, head_dim=8, **options):
    """Q, K, V, dO, a mask and alpha, both drawn. Of more than two rows, one is full and one empty."""
    q, k, v, do = inputs(n_q, n_k, head_dim, **options)
    blocks = block_count(n_q, block_q), block_count(n_k, block_kv)
    mask = drawn_mask(1, q.shape[1], *blocks)
    if blocks[0] > 2:
        mask[..., 0, :], mask[..., 1, :] = True, False
    alpha = torch.rand(1, q.shape[1], blocks[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return q, k, v, do, mask, alpha


def block_masks(kind, heads, n_q, n_k, block_q, block_kv):
    """[1, H, Tm, Tn], equally many blocks in every row, drawn."""
    shape = 1, heads, block_count(n_q, block_q), block_count(n_k, block_kv)
    key_blocks = shape[-1]
    count = {
        "all": key_blocks,
        "one": 1,
        "50%": selected_count(0.5, key_blocks),
        "97%": selected_count(0.97, key_blocks),
        "all but one": key_blocks - 1,
        "none": 0,
    }[kind]
    order = torch.rand(shape, generator=torch.Generator().manual_seed(2)).argsort(-1)
    return order < count


def seen_tokens(mask, n_q, n_k, block_q, block_kv):
    """bool [..., Nq, Nk]."""
    return mask[..., (torch.arange(n_q) // block_q)[:, None], torch.arange(n_k) // block_kv]


def features(x, kind):
    return {"softmax": x.softmax(-1), "elu+1": F.elu(x) + 1, "relu": x.clamp(min=0)}[kind]


def averaged(weights, values):
    """weights V / rowsum(weights), and 0 for a row without any."""
    total = weights.sum(-1, keepdim=True)
    return weights @ values / torch.where(total == 0, 1, total)


def dense(q, k, v, mask, alpha, settings):
    """(O, O_s, O_l) from full [Nq, Nk] matrices: softmax over selected keys, averages by common features of others."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    seen = seen_tokens(mask, q.shape[-2], k.shape[-2], settings.block_q, settings.block_kv)
    c = q.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    s = (q @ k.mT * c).masked_fill(~seen, -math.inf)
    o_s = averaged((s - s.amax(-1, keepdim=True).clamp(min=-1e9)).exp(), v)
    o_l = averaged(features(q, settings.feature_map) @ features(k, settings.feature_map).mT * ~seen, v)
    share = alpha.repeat_interleave(settings.block_q, -1)[..., : q.shape[-2], None]
    return share * o_s + (1 - share) * o_l, o_s, o_l


def per_head(form, tensors, settings):
    """`form` of one head at a time, the results put together to [1, H, ...]."""
    heads = [form(*(x[0, h] for x in tensors), settings) for h in range(tensors[0].shape[1])]
    return type(heads[0])(*(torch.stack(parts)[None] for parts in zip(*heads, strict=True)))


def tiled_backward_per_head(do, q, k, v, mask, alpha, forward, settings):
    heads = [
        tiled_backward(
            *(x[0, h] for x in (do, q, k, v, mask, alpha)), Sla2Forward(*(x[0, h] for x in forward)), settings
        )
        for h in range(q.shape[1])
    ]
    return Sla2Backward(*(torch.stack(parts)[None] for parts in zip(*heads, strict=True)))


def gradients_of(function, tensors, do):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves, do)


def assert_all_close(ours, expected, atol):
    for x, y in zip(ours, expected, strict=True):
        assert_close(x, y, atol=atol, rtol=0)


# Algorithms 2 and 3 by hand, by tiles and at once, against autograd


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("scale", [None, 0.6])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_equal_autograd_through_the_soft_form(inputs, shape, scale, kind):
    q, k, v, do, mask, alpha = problem(inputs, *shape)
    settings = BlockSettings(*shape[2:], scale=scale, feature_map=kind)

    def soft(q, k, v, alpha):
        return soft_sparse_linear_attention(q, k, v, mask.double(), alpha, settings)

    output, gradients = soft(q, k, v, alpha), gradients_of(soft, (q, k, v, alpha), do)
    whole = sla2_forward(q, k, v, mask, alpha, settings)
    tiled = per_head(tiled_forward, (q, k, v, mask, alpha), settings)
    assert_all_close(tiled, whole, 1e-12)
    assert torch.equal(whole.output, output)
    by_hand = sla2_backward(do, q, k, v, mask, alpha, whole.sparse_output, whole.log_sum_exp, settings)
    assert_all_close(by_hand, gradients, 1e-11)
    assert_all_close(tiled_backward_per_head(do, q, k, v, mask, alpha, tiled, settings), gradients, 1e-11)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_and_whole_matrices_agree_in_int8_too(inputs, shape, kind):
    q, k, v, do, mask, alpha = problem(inputs, *shape)
    settings = BlockSettings(*shape[2:], feature_map=kind, quantize=True)
    k = k + 3
    whole = sla2_forward(q, k, v, mask, alpha, settings)
    tiled = per_head(tiled_forward, (q, k, v, mask, alpha), settings)
    assert_all_close(tiled, whole, 1e-12)
    by_hand = sla2_backward(do, q, k, v, mask, alpha, whole.sparse_output, whole.log_sum_exp, settings)
    assert_all_close(tiled_backward_per_head(do, q, k, v, mask, alpha, tiled, settings), by_hand, 1e-11)


@pytest.mark.parametrize("quantize", [False, True])
def test_whole_matrices_take_any_leading_dimensions(inputs, quantize):
    """One head alone, [N, D], and in front of it as many dimensions as one likes."""
    tensors = problem(inputs, 33, 50, 16, 8)
    settings = BlockSettings(16, 8, quantize=quantize)

    def whole(q, k, v, do, mask, alpha):
        forward = sla2_forward(q, k, v, mask, alpha, settings)
        saved = forward.sparse_output, forward.log_sum_exp
        return *forward, *sla2_backward(do, q, k, v, mask, alpha, *saved, settings)

    expected = whole(*tensors)
    assert_all_close(whole(*(x[0, 1] for x in tensors)), [x[0, 1] for x in expected], 1e-13)
    assert_all_close(whole(*(x[None] for x in tensors)), [x[None] for x in expected], 1e-13)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_weights_in_between_pass_gradcheck_in_every_tensor(inputs, kind):
    q, k, v, _ = inputs(5, 7, 3, heads=1)
    weights = torch.tensor([[0.2, 0, 1, 0.7], [1, 0.01, 0, 0.5], [0.9, 0.1, 0, 1]]).double()
    alpha = torch.tensor([[[0.3, 0.9, 0.5]]]).double()
    settings = BlockSettings(2, 2, feature_map=kind)
    leaves = [x.requires_grad_() for x in (q, k, v, weights, alpha)]
    assert torch.autograd.gradcheck(lambda *x: soft_sparse_linear_attention(*x, settings), leaves)


def test_the_soft_form_mixes_weighted_branches(inputs):
    """Weights M e^S in the softmax, 1 - M in the linear branch."""
    q, k, v, _ = inputs(20, 30, 8)
    weights = torch.rand(1, 2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha = torch.tensor([[[0.2, 0.7]]], dtype=torch.float64).expand(1, 2, 2)
    w = seen_tokens(weights, 20, 30, 16, 8)
    o_s = averaged((q @ k.mT / 8**0.5).exp() * w, v)
    o_l = averaged(q.softmax(-1) @ k.softmax(-1).mT * (1 - w), v)
    share = alpha.repeat_interleave(16, -1)[..., :20, None]
    output = soft_sparse_linear_attention(q, k, v, weights, alpha, BlockSettings(16, 8))
    assert_close(output, share * o_s + (1 - share) * o_l, atol=1e-13, rtol=0)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_feature_map_backward_is_autograds(kind):
    generator = torch.Generator().manual_seed(0)
    x, grad_phi = (torch.randn(2, 9, 5, dtype=torch.float64, generator=generator) * 2 for _ in range(2))
    x[0, 0] = 0
    (expected,) = gradients_of(lambda x: features(x, kind), (x,), grad_phi)
    if kind == "relu":
        expected = expected * (x != 0)  # clamp lets the gradient of 0 through, relu does not
    assert_close(feature_map_backward(x, features(x, kind), grad_phi, kind), expected, atol=1e-13, rtol=0)


# A dense oracle


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("selected", SELECTED)
@pytest.mark.parametrize(("n_q", "n_k"), [(113, 203), (256, 408), (203, 399), (799, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_relative_l2_against_the_dense_oracle(inputs, n_q, n_k, selected, heads, dtype):
    """Output and all gradients. 97 % of 51 blocks: 2 are selected."""
    *qkv, do = inputs(n_q, n_k, 16, heads=heads[0], kv_heads=heads[1], dtype=dtype)
    settings = BlockSettings(16, 8)
    mask = block_masks(selected, heads[0], n_q, n_k, 16, 8)
    alpha = torch.rand(1, *mask.shape[1:3], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if dtype != torch.float64:
        alpha = alpha.float()
    errors = errors_against_dense(qkv, do, mask, alpha, settings)
    bound = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.5e-3}[dtype]
    assert max(errors.values()) < bound


def errors_against_dense(qkv, do, mask, alpha, settings):
    """Relative L2 of O, dQ, dK, dV and dalpha; the oracle in float64 from the same numbers."""

    def ours(q, k, v, alpha):
        options = {"block_q": settings.block_q, "block_kv": settings.block_kv, "backend": "reference"}
        return sparse_linear_attention(q, k, v, mask, alpha, **options)

    exact = [x.double() for x in (*qkv, alpha)]
    names = ("O", "dQ", "dK", "dV", "dalpha")
    found = (ours(*qkv, alpha), *gradients_of(ours, (*qkv, alpha), do))
    expected = (
        dense(*exact[:3], mask, exact[3], settings)[0],
        *gradients_of(lambda q, k, v, a: dense(q, k, v, mask, a, settings)[0], exact, do.double()),
    )
    assert [x.dtype for x in found] == [x.dtype for x in (qkv[0], *qkv, alpha)]
    return {name: relative_l2(x, y) for name, x, y in zip(names, found, expected, strict=True)}


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, 0.6])
def test_each_branch_equals_its_dense_oracle(inputs, shape, scale, kind):
    q, k, v, _, mask, alpha = problem(inputs, *shape)
    settings = BlockSettings(*shape[2:], scale=scale, feature_map=kind)
    output, o_s, o_l = dense(q, k, v, mask, alpha, settings)
    forward = sla2_forward(q, k, v, mask, alpha, settings)
    assert_all_close((forward.output, forward.sparse_output, forward.linear_output), (output, o_s, o_l), 1e-12)
    seen = seen_tokens(mask, *shape)
    s = (q @ k.mT * (8**-0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    assert_close(forward.log_sum_exp, s.logsumexp(-1, keepdim=True), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (50, 33), (33, 50)])
def test_all_blocks_at_alpha_one_are_full_attention(inputs, n_q, n_k):
    *qkv, do = inputs(n_q, n_k, 8, heads=4, kv_heads=2)
    options = {"block_q": 16, "block_kv": 8, "backend": "reference"}
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for f, expected in (
        (
            lambda q, k, v: sparse_linear_attention(q, k, v, mask, 1.0, **options),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ),
        (
            lambda q, k, v: sparse_linear_attention(q, k, v, ~mask, 0.0, **options),
            lambda q, k, v: linear_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v))),
        ),
    ):
        assert_close(f(*qkv), expected(*qkv), atol=1e-13, rtol=0)
        assert_all_close(gradients_of(f, qkv, do), gradients_of(expected, qkv, do), 1e-12)


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-1).mT @ v) / (q.softmax(-1) @ k.softmax(-1).sum(-2)[..., None])


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=4)), ids=str)
def test_no_mask_gives_a_nan(inputs, mask, quantize):
    """Every mask of 2 x 2 blocks, backward too, at alpha 0, in between and 1."""
    q, k, v, do = inputs(20, 13, 8, dtype=torch.float32)
    mask = torch.tensor(mask).view(2, 2)
    for share in (0.0, 0.3, 1.0):
        alpha = torch.tensor([[[share] * 2] * 2])

        def ours(q, k, v, alpha):
            options = {"quantize": quantize, "block_q": 16, "block_kv": 8, "backend": "reference"}
            return sparse_linear_attention(q, k, v, mask, alpha, **options)

        output, gradients = ours(q, k, v, alpha), gradients_of(ours, (q, k, v, alpha), do)
        assert all(x.isfinite().all() for x in (output, *gradients))
        forward = sla2_forward(q, k, v, mask.expand(1, 2, 2, 2), alpha, BlockSettings(16, 8, quantize=quantize))
        for i, rows in enumerate((slice(0, 16), slice(16, 20))):
            assert forward.sparse_output[:, :, rows].any() == mask[i].any()
            assert forward.linear_output[:, :, rows].any() == (not mask[i].all())
            assert (forward.log_sum_exp[:, :, rows] == -math.inf).all() == (not mask[i].any())


def test_tokens_of_a_partial_block_count_and_padding_does_not(inputs):
    """The last keys alone in their block: cut off they change O, doubled they are no padding."""
    q, k, v, _ = inputs(16, 17, 8)
    for selected in (True, False):
        mask = torch.full((1, 1, 1, 3), selected)
        output = sparse_linear_attention(q, k, v, mask, 0.5, block_q=16, block_kv=8, backend="reference")
        expected = dense(q, k, v, mask.expand(1, 2, 1, 3), torch.full((1, 2, 1), 0.5).double(), BlockSettings(16, 8))[0]
        assert_close(output, expected, atol=1e-13, rtol=0)
        assert not torch.equal(output, dense(q, k[:, :, :16], v[:, :, :16], mask[..., :2].expand(1, 2, 1, 2),
                                             torch.full((1, 2, 1), 0.5).double(), BlockSettings(16, 8))[0])  # fmt: skip


# INT8: what is rounded, by how much, and what the backward pass makes of it


def on_grid(x, rows):
    """psi of every `rows` rows of the last two axes."""
    return torch.cat([grid(part) for part in x.split(rows, -2)], -2)


def grid(x):
    step = x.abs().amax((-2, -1), keepdim=True) / 127
    return torch.where(step == 0, 0, (x / torch.where(step == 0, 1, step)).round() * step)


def test_int8_rounds_the_operands_of_the_paper_and_nothing_else(inputs):
    """Q per block, K per block after smoothing, V per block, P per query and key block; L and O_l stay as they are."""
    q, k, v, _, mask, alpha = problem(inputs, 45, 60, 16, 8)
    k = k + 2
    seen = seen_tokens(mask, 45, 60, 16, 8)
    mean = k.mean(-2, keepdim=True)
    s = (on_grid(q, 16) @ on_grid(k - mean, 8).mT * 0.3).masked_fill(~seen, -math.inf)
    some = seen.any(-1, keepdim=True)
    p = torch.where(some, (s - s.amax(-1, keepdim=True)).exp(), 0)
    p_hat = torch.cat([torch.stack([grid(row[..., None, :]).squeeze(-2) for row in tile.unbind(-2)], -2)
                       for tile in p.split(8, -1)], -1)  # fmt: skip
    o_s = p_hat @ on_grid(v, 8) / torch.where(some, p.sum(-1, keepdim=True), 1)
    settings = BlockSettings(16, 8, scale=0.3, quantize=True)
    forward = sla2_forward(q, k, v, mask, alpha, settings)
    assert_close(forward.sparse_output, o_s, atol=1e-12, rtol=0)
    assert_close(forward.log_sum_exp, s.logsumexp(-1, keepdim=True) + q @ mean.mT * 0.3, atol=1e-12, rtol=0)
    exact = sla2_forward(q, k, v, mask, alpha, BlockSettings(16, 8, scale=0.3))
    assert torch.equal(forward.linear_output, exact.linear_output)
    share = alpha.repeat_interleave(16, -1)[..., :45, None]
    assert_close(forward.output, share * o_s + (1 - share) * exact.linear_output, atol=1e-12, rtol=0)


@pytest.mark.parametrize("selected", ["all", "one", "50%"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_error_is_that_of_int8(inputs, selected, dtype):
    """Neither less (something wasn't quantised) nor more: rounding V alone leaves s / sqrt(12), s = max / 127."""
    q, k, v, _ = inputs(256, 256, 64, dtype=dtype)
    mask = block_masks(selected, 2, 256, 256, 128, 64)
    step = v.double().unflatten(-2, (-1, 64)).abs().amax((-2, -1)).mean() / 127 / v.double().std()
    expected = step.item() / math.sqrt(12)
    exact, rounded = (
        sparse_linear_attention(q, k, v, mask, 1.0, quantize=quantize, backend="reference")
        for quantize in (False, True)
    )
    assert expected < relative_l2(rounded, exact) < 3 * expected


def test_an_offset_of_the_keys_costs_nothing_and_stays_in_log_sum_exp(inputs):
    q, k, v, _ = inputs(256, 256, 64)
    mask = block_masks("50%", 2, 256, 256, 128, 64)
    alpha = torch.ones(1, 2, 2, dtype=torch.float64)
    shifted = k + torch.linspace(-20, 20, 64, dtype=torch.float64)
    errors = []
    for keys in (k, shifted):
        exact, rounded = (
            sla2_forward(q, keys, v, mask, alpha, BlockSettings(quantize=quantize)) for quantize in (False, True)
        )
        errors.append(relative_l2(rounded.sparse_output, exact.sparse_output))
        assert_close(rounded.log_sum_exp, exact.log_sum_exp, atol=0.05, rtol=0)
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)
    assert (exact.log_sum_exp - sla2_forward(q, k, v, mask, alpha, BlockSettings()).log_sum_exp).abs().max() > 1


def test_the_backward_pass_takes_unrounded_inputs_with_the_forwards_output_and_log_sum_exp(inputs):
    """Algorithm 3's formula: P = e^(S - L), dS = P * (dP - rowsum(dO * O_s)), for any O_s and L it is given.

    Written as the gradient of rowsum(dO * P V) - delta rowsum(P) with delta and L held, plus that of the linear branch.
    """
    q, k, v, do, mask, alpha = problem(inputs, 45, 60, 16, 8)
    settings = BlockSettings(16, 8, quantize=True)
    forward = sla2_forward(q, k, v, mask, alpha, settings)
    seen = seen_tokens(mask, 45, 60, 16, 8)
    share = alpha.repeat_interleave(16, -1)[..., :45, None]
    do_s = share * do
    delta = (do_s * forward.sparse_output).sum(-1, keepdim=True)

    def surrogate(q, k, v):
        p = torch.where(seen, (q @ k.mT / 8**0.5 - forward.log_sum_exp.clamp(min=-1e9)).where(seen, 0).exp(), 0)
        o_l = averaged(q.softmax(-1) @ k.softmax(-1).mT * ~seen, v)
        return (do_s * (p @ v)).sum() - (delta * p).sum() + ((1 - share) * do * o_l).sum()

    expected = gradients_of(surrogate, (q, k, v), torch.tensor(1.0, dtype=torch.float64))
    saved = forward.sparse_output, forward.log_sum_exp
    backward = sla2_backward(do, q, k, v, mask, alpha, *saved, settings)
    assert_all_close(backward[:3], expected, 1e-12)
    rows = (do * (forward.sparse_output - forward.linear_output)).sum(-1)
    expected_alpha = torch.stack([part.sum(-1) for part in rows.split(16, -1)], -1)
    assert_close(backward.grad_alpha, expected_alpha, atol=1e-12, rtol=0)
    # With the exact O_s and L it is the unquantised backward pass, and not otherwise.
    exact_settings = BlockSettings(16, 8)
    exact = sla2_forward(q, k, v, mask, alpha, exact_settings)
    exact_backward = sla2_backward(do, q, k, v, mask, alpha, exact.sparse_output, exact.log_sum_exp, exact_settings)
    with_exact = sla2_backward(do, q, k, v, mask, alpha, exact.sparse_output, exact.log_sum_exp, settings)
    for name, ours, same, other in zip(Sla2Backward._fields, with_exact, exact_backward, backward, strict=True):
        assert torch.equal(ours, same), name
        assert 1e-4 < relative_l2(other, same) < 0.1, name


@pytest.mark.parametrize("selected", ["one", "50%", "all"])
def test_gradients_after_an_int8_forward_pass_are_close_to_exact_ones(inputs, selected):
    *qkv, do = inputs(256, 256, 64)
    mask = block_masks(selected, 2, 256, 256, 128, 64)
    alpha = torch.full((1, 2, 2), 0.8, dtype=torch.float64)
    exact, rounded = (
        gradients_of(
            lambda q, k, v, a, quantize=quantize: sparse_linear_attention(
                q, k, v, mask, a, quantize=quantize, backend="reference"
            ),
            (*qkv, alpha),
            do,
        )
        for quantize in (False, True)
    )
    for x, y in zip(rounded, exact, strict=True):
        assert 1e-4 < relative_l2(x, y) < 0.05


# As one differentiable operation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("quantize", [False, True])
def test_autograd_hands_back_what_the_functions_compute(inputs, dtype, quantize):
    q, k, v, do, mask, alpha = problem(inputs, 33, 40, 16, 8, dtype=dtype)
    alpha = alpha.float()
    settings = BlockSettings(16, 8, quantize=quantize)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, alpha)]
    output = SparseLinearFunction.apply(*leaves[:3], mask, leaves[3], settings)
    gradients = torch.autograd.grad(output, leaves, do)
    forward = sla2_forward(q, k, v, mask, alpha, settings)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in forward} == {wide}
    backward = sla2_backward(do, q, k, v, mask, alpha, forward.sparse_output, forward.log_sum_exp, settings)
    assert {x.dtype for x in backward} == {wide}
    for x, wide_x, like in zip((output, *gradients), (forward.output, *backward), (q, q, k, v, alpha), strict=True):
        assert x.dtype == like.dtype
        assert torch.equal(x, wide_x.to(like.dtype))


def test_autocast_does_not_reach_inside(inputs):
    q, k, v, do, mask, alpha = problem(inputs, 33, 40, 16, 8, dtype=torch.float32)
    settings = BlockSettings(16, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = SparseLinearFunction.apply(*leaves, mask, alpha, settings)
    expected = torch.autograd.grad(output, leaves, do)
    with torch.autocast("cpu", torch.bfloat16):
        inside = SparseLinearFunction.apply(*leaves, mask, alpha, settings)
        gradients = torch.autograd.grad(inside, leaves, do)
    assert torch.equal(inside, output)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


def test_gradients_only_where_asked(inputs):
    q, k, v, do, mask, alpha = problem(inputs, 20, 20, 16, 8)
    alpha.requires_grad_()
    SparseLinearFunction.apply(q, k, v, mask, alpha, BlockSettings(16, 8)).backward(do)
    assert alpha.grad.any()
    assert q.grad is None


def test_a_second_derivative_is_refused(inputs):
    q, k, v, _, mask, alpha = problem(inputs, 6, 6, 16, 8)
    q.requires_grad_()
    output = SparseLinearFunction.apply(q, k, v, mask, alpha, BlockSettings(16, 8))
    for loss in (output.sum(), output.square().sum()):
        with pytest.raises(
            RuntimeError, match="^create_graph: expected False, as SLA2's gradients have no derivative; got"
        ):
            torch.autograd.grad(loss, q, create_graph=True)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("distance", [30, 70, 80, 95, 200])
def test_features_that_hardly_meet_do_not_overflow(distance, quantize):
    """phi_q and phi_k share e^-distance, in float32: nothing overflows forward or backward, by tiles or at once."""
    q = torch.tensor([[float(distance), 0]]).expand(1, 1, 3, 2)
    k = torch.tensor([[0, float(distance)]]).expand(1, 1, 16, 2)
    v, do = torch.full((1, 1, 16, 2), 3.0), torch.ones(1, 1, 3, 2)
    mask, alpha = torch.tensor([[[[True, False]]]]), torch.tensor([[[0.5]]])
    settings = BlockSettings(16, 8, quantize=quantize)
    whole = sla2_forward(q, k, v, mask, alpha, settings)
    tiled = per_head(tiled_forward, (q, k, v, mask, alpha), settings)
    assert_close(whole.linear_output, torch.full_like(v[:, :, :3], 3 if distance < 74 else 0))
    assert_all_close(tiled, whole, 1e-5)
    for gradients in (
        sla2_backward(do, q, k, v, mask, alpha, whole.sparse_output, whole.log_sum_exp, settings),
        tiled_backward_per_head(do, q, k, v, mask, alpha, tiled, settings),
    ):
        assert all(x.isfinite().all() for x in gradients)
