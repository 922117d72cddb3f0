"""SLA: block masks and what scores them, both branches against their definitions, soft weights, the module."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from sage_ref import SLA
from sage_ref.sla2 import (
    FEATURE_MAPS,
    BlockSettings,
    block_count,
    block_mass,
    block_mean,
    divisor,
    feature_map,
    heuristic_scores,
    into_blocks,
    key_block_sums,
    linear_branch,
    selected_count,
    sparse_branch,
    spread_blocks,
    top_blocks,
    weighted_sums,
)

SHAPES = [(1, 1), (3, 3), (16, 1), (1, 16), (33, 50), (50, 33), (64, 64)]  # Nq, Nk
SMALL = BlockSettings(16, 8)


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn_mask(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def token_weights(block_weights, n_q, n_k, settings):
    """The block weight of every pair of tokens, entry by entry."""
    i = torch.arange(n_q) // settings.block_q
    j = torch.arange(n_k) // settings.block_kv
    return block_weights[..., i[:, None], j[None, :]]


def mask_for(q, k, settings, seed=0):
    shape = (*q.shape[:2], block_count(q.shape[2], settings.block_q), block_count(k.shape[2], settings.block_kv))
    return drawn_mask(*shape, seed=seed)


# Settings and blocks


@pytest.mark.parametrize("name", ["block_q", "block_kv"])
def test_settings_name_what_is_wrong(name):
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"^{name}: expected at least 1, got {value}$"):
            BlockSettings(**{name: value})
    for value, kind in ((64.0, "float"), ("64", "str"), (True, "bool"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"^{name}: expected an int, got {kind}$"):
            BlockSettings(**{name: value})
    assert getattr(BlockSettings(**{name: 1}), name) == 1


def test_settings_refuse_an_unknown_feature_map():
    with pytest.raises(ValueError, match=r"^feature_map: expected one of \('softmax', 'elu\+1', 'relu'\), got 'elu'$"):
        BlockSettings(feature_map="elu")


def test_the_papers_blocks_are_the_default():
    assert BlockSettings() == BlockSettings(128, 64, None, "softmax", False)


@given(n=st.integers(1, 40), block=st.integers(1, 15))
def test_blocks_cover_the_sequence_and_fill_up_with_zeros(n, block):
    x = drawn(2, n, 3)
    blocks = into_blocks(x, block)
    assert blocks.shape == (2, block_count(n, block), block, 3)
    assert torch.equal(blocks.flatten(1, 2)[:, :n], x)
    assert not blocks.flatten(1, 2)[:, n:].any()
    assert block_count(n, block) == len(range(0, n, block))


@given(n=st.integers(1, 40), block=st.integers(1, 15))
def test_means_are_over_real_tokens_only(n, block):
    x = drawn(2, n, 3) + 5
    expected = torch.stack([part.mean(-2) for part in x.split(block, -2)], -2)
    assert_close(block_mean(x, block), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_every_pair_of_tokens_gets_the_weight_of_its_block(n_q, n_k):
    weights = drawn(2, block_count(n_q, 16), block_count(n_k, 8))
    assert torch.equal(spread_blocks(weights, n_q, n_k, SMALL), token_weights(weights, n_q, n_k, SMALL))


# How many blocks, and which


@pytest.mark.parametrize(
    ("n", "key_blocks", "at_95", "at_96", "at_97"), [(32_760, 512, 26, 20, 15), (75_600, 1182, 59, 47, 35)]
)
def test_selected_count_at_the_papers_sizes(n, key_blocks, at_95, at_96, at_97):
    assert block_count(n, 64) == key_blocks
    assert [selected_count(sparsity, key_blocks) for sparsity in (0.95, 0.96, 0.97)] == [at_95, at_96, at_97]


def test_selected_count_rounds_half_to_even_and_selects_at_least_one():
    assert [selected_count(0.5, n) for n in range(1, 8)] == [1, 1, 2, 2, 2, 3, 4]
    assert [selected_count(0.75, n) for n in (5, 6, 7, 10, 14)] == [1, 2, 2, 2, 4]
    assert [selected_count(0.97, n) for n in (1, 16, 33, 51)] == [1, 1, 1, 2]
    assert [selected_count(0.0, n) for n in (1, 9)] == [1, 9]
    assert selected_count(1 - 1e-12, 10_000) == 1


@given(scores=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3), count=st.data())
def test_top_blocks_takes_the_largest_and_of_equals_the_first(scores, count):
    count = count.draw(st.integers(0, 7))
    selected = top_blocks(torch.tensor(scores, dtype=torch.float32), count)
    assert selected.dtype == torch.bool
    for row, chosen in zip(scores, selected.tolist(), strict=True):
        in_order = sorted(range(5), key=lambda j: (-row[j], j))
        assert {j for j in range(5) if chosen[j]} == set(in_order[:count])


def test_long_rows_of_equal_scores_select_the_first_blocks():
    """An unstable sort gets short rows right by luck."""
    selected = top_blocks(torch.zeros(3, 5000), 1234)
    assert selected[:, :1234].all()
    assert not selected[:, 1234:].any()


def test_a_nan_score_counts_as_the_largest():
    scores = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert top_blocks(scores, 1).tolist() == [False, True, False, False]
    assert top_blocks(scores, 3).tolist() == [True, True, True, False]


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_heuristic_scores_are_the_attention_of_block_means(n_q, n_k):
    q, k = drawn(1, 2, n_q, 8), drawn(1, 2, n_k, 8, seed=1)
    k_sm = k - k.mean(2, keepdim=True)
    q_bar = torch.stack([part.mean(-2) for part in q.split(16, -2)], -2)
    k_bar = torch.stack([part.mean(-2) for part in k_sm.split(8, -2)], -2)
    for scale in (None, 0.7):
        c = 8**-0.5 if scale is None else scale
        expected = torch.einsum("bhid,bhjd->bhij", q_bar, k_bar).mul(c).softmax(-1)
        assert_close(heuristic_scores(q, k, BlockSettings(16, 8, scale=scale)), expected, atol=1e-13, rtol=0)


def test_a_constant_added_to_all_keys_leaves_the_heuristic_scores_alone():
    """Also where rounding would notice: the offset is a thousand times the keys."""
    q, k = drawn(1, 2, 40, 8), drawn(1, 2, 50, 8, seed=1)
    assert_close(heuristic_scores(q, k + 1000, SMALL), heuristic_scores(q, k, SMALL), atol=1e-11, rtol=0)


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_block_mass_is_the_mean_mass_of_a_tile_and_its_rows_sum_to_one(n_q, n_k):
    q, k = drawn(2, n_q, 8), drawn(2, n_k, 8, seed=1)
    for scale in (None, 0.9):
        p = (q @ k.mT * (8**-0.5 if scale is None else scale)).softmax(-1)
        expected = torch.stack(
            [torch.stack([tile.sum(-1).mean(-1) for tile in rows.split(8, -1)], -1) for rows in p.split(16, -2)], -2
        )
        mass = block_mass(q, k, BlockSettings(16, 8, scale=scale))
        assert_close(mass, expected, atol=1e-13, rtol=0)
        assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]), atol=1e-13, rtol=0)


# The sparse branch: P proportional to M e^S


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
@pytest.mark.parametrize("scale", [None, 0.4])
def test_a_hard_mask_gives_sdpa_over_the_selected_keys(n_q, n_k, scale):
    q, k, v = drawn(1, 2, n_q, 8), drawn(1, 2, n_k, 8, seed=1), drawn(1, 2, n_k, 8, seed=2)
    settings = BlockSettings(16, 8, scale=scale)
    mask = mask_for(q, k, settings)
    output, log_sum_exp = sparse_branch(q, k, v, mask, settings)
    seen = token_weights(mask, n_q, n_k, settings)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    some = seen.any(-1, keepdim=True)
    assert_close(output, torch.where(some, expected, 0), atol=1e-13, rtol=0)
    s = (q @ k.mT * (8**-0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    assert_close(log_sum_exp, s.logsumexp(-1, keepdim=True), atol=1e-13, rtol=0)
    as_numbers = sparse_branch(q, k, v, mask.double(), settings)
    assert torch.equal(as_numbers[0], output)
    assert torch.equal(as_numbers[1], log_sum_exp)


def test_weights_between_mean_scores_plus_their_logarithm():
    q, k, v = drawn(1, 2, 33, 8), drawn(1, 2, 50, 8, seed=1), drawn(1, 2, 50, 8, seed=2)
    weights = torch.rand(1, 2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights[..., 2], weights[..., 4] = 0, 1e-30
    output, log_sum_exp = sparse_branch(q, k, v, weights, SMALL)
    s = q @ k.mT / 8**0.5 + token_weights(weights, 33, 50, SMALL).log()
    assert_close(output, s.softmax(-1) @ v, atol=1e-13, rtol=0)
    assert_close(log_sum_exp, s.logsumexp(-1, keepdim=True), atol=1e-13, rtol=0)


def test_gradients_of_the_sparse_branch_pass_gradcheck():
    """Weights of 1 and in between, and of 0, where a step to the negative side is as good as one to the other."""
    q, k, v = (x.requires_grad_() for x in (drawn(5, 3), drawn(7, 3, seed=1), drawn(7, 3, seed=2)))
    weights = torch.tensor([[0.2, 0, 1, 0.7], [1, 0.01, 0, 0], [0, 0, 0, 1]]).double().requires_grad_()
    settings = BlockSettings(2, 2)
    assert torch.autograd.gradcheck(lambda *x: sparse_branch(*x, settings), (q, k, v, weights))


@pytest.mark.parametrize("size", [1, 30, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_give_finite_gradients_and_right_ones_at_weight_zero(size, dtype):
    """dO . (V_j - O_s) e^(S_j - L), where that factor is a number of the dtype; scores from -size to size."""
    q = torch.ones(4, 1, dtype=dtype, requires_grad=True)
    k = (torch.linspace(-1, 1, 6, dtype=dtype)[:, None] * size).requires_grad_()
    v = drawn(6, 1, dtype=dtype).requires_grad_()
    weights = torch.tensor(
        [[1, 0, 1, 0, 0.5, 0], [0, 0, 0, 0, 0, 1], [1e-30, 0, 0, 0, 0, 0], [1e-30, 1, 0.1, 0, 0, 1e-36]], dtype=dtype
    )
    weights.requires_grad_()
    output, log_sum_exp = sparse_branch(q, k, v, weights, BlockSettings(1, 1, scale=1))
    gradients = torch.autograd.grad(output.sum(), (q, k, v, weights))
    for x in (output, log_sum_exp, *gradients):
        assert x.isfinite().all()
    with torch.no_grad():
        s = q @ k.mT
        assert_close(log_sum_exp, (s + weights.log()).logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-5)
        factor = (s - log_sum_exp).exp()
        expected = (v.mT - output) * factor
        tolerance = 8 * torch.finfo(dtype).eps * (100 + size) * factor * v.abs().max()  # |L| <= 70 + size
        representable = factor < torch.finfo(dtype).tiny ** -0.5
        assert ((gradients[3] - expected).abs() <= tolerance)[representable].all()
        bounded = gradients[3][~representable & (weights == 0)]
        assert (bounded.abs() > 1e15).all()
        assert torch.equal(bounded.sign(), (v.mT - output)[~representable & (weights == 0)].sign())
    assert representable.any()
    assert (len(bounded) > 0) == (size == 1000 or dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_query_without_a_key_gets_zeros_and_no_gradient(dtype):
    q, k, v = (drawn(n, 4, seed=n, dtype=dtype).requires_grad_() for n in (4, 6, 6))
    weights = torch.tensor([[0, 0, 0], [1, 0, 0.5]], dtype=dtype, requires_grad=True)
    output, log_sum_exp = sparse_branch(q, k, v, weights, BlockSettings(2, 2))
    assert not output[:2].any()
    assert (log_sum_exp[:2] == -math.inf).all()
    gradients = torch.autograd.grad(output.sum() + log_sum_exp[2:].sum(), (q, k, v, weights))
    assert not gradients[0][:2].any()
    assert not gradients[3][0].any()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    torch.autograd.grad(sparse_branch(q, k, v, weights, BlockSettings(2, 2))[1].sum(), q)[0].isfinite().all()


# The linear branch


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_feature_maps_are_what_they_are_called(kind):
    x = drawn(2, 5, 4) * 3
    x[0, 0] = 0
    expected = {
        "softmax": x.exp() / x.exp().sum(-1, keepdim=True),
        "elu+1": torch.where(x > 0, x + 1, x.exp()),
        "relu": x * (x > 0),
    }[kind]
    assert_close(feature_map(x, kind), expected, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_the_linear_branch_averages_values_by_common_features(n_q, n_k, kind):
    q, k, v = drawn(1, 2, n_q, 8), drawn(1, 2, n_k, 8, seed=1), drawn(1, 2, n_k, 8, seed=2)
    settings = BlockSettings(16, 8, feature_map=kind)
    mask = mask_for(q, k, settings)
    for weights in (mask, mask * torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)).double()):
        a = feature_map(q, kind) @ feature_map(k, kind).mT * token_weights(weights, n_q, n_k, settings)
        total = a.sum(-1, keepdim=True)
        expected = torch.where(total > 0, a @ v / total.where(total > 0, 1), 0)
        assert_close(linear_branch(q, k, v, weights, settings), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_gradients_of_the_linear_branch_pass_gradcheck(kind):
    q, k, v = (x.requires_grad_() for x in (drawn(5, 3), drawn(7, 3, seed=1), drawn(7, 3, seed=2)))
    weights = torch.tensor([[0.2, 0, 1, 0.7], [1, 0.01, 0, 0], [0.3, 0.3, 0, 1]]).double().requires_grad_()
    settings = BlockSettings(2, 2, feature_map=kind)
    assert torch.autograd.gradcheck(lambda *x: linear_branch(*x, settings), (q, k, v, weights))


def test_sums_over_key_blocks_are_those_of_their_definition():
    k_phi, v = drawn(2, 13, 3), drawn(2, 13, 3, seed=1)
    weights = drawn(2, 4, 4, seed=2)
    h, z = key_block_sums(k_phi, v, BlockSettings(5, 4))
    for j, tokens in enumerate((slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 13))):
        assert_close(h[:, j], torch.einsum("bnd,bne->bde", k_phi[:, tokens], v[:, tokens]))
        assert_close(z[:, j], k_phi[:, tokens].sum(1))
    h_i, z_i = weighted_sums(weights, h, z)
    assert_close(h_i, torch.einsum("bij,bjde->bide", weights, h))
    assert_close(z_i, torch.einsum("bij,bjd->bid", weights, z))


def test_without_a_common_feature_the_linear_branch_is_zero_and_so_are_its_gradients():
    q = torch.tensor([[1.0, -1], [-1, -1]]).requires_grad_()
    k = torch.tensor([[-1.0, 2], [-2, 3]]).requires_grad_()
    v = torch.ones(2, 2).requires_grad_()
    output = linear_branch(q, k, v, torch.ones(1, 1), BlockSettings(feature_map="relu"))
    assert not output.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), (q, k, v)))


@pytest.mark.parametrize("distance", [10, 30, 60, 70, 75, 80, 85, 88, 95, 104, 200])
def test_features_that_hardly_meet_do_not_overflow(distance):
    """phi_q and phi_k share e^-distance: either the average is right, or that share is as good as none and O_l is 0."""
    q = torch.tensor([[float(distance), 0]], requires_grad=True)
    k = torch.tensor([[0, float(distance)]] * 40, requires_grad=True)
    v = torch.full((40, 2), 3.0, requires_grad=True)
    output = linear_branch(q, k, v, torch.ones(1, 1), BlockSettings())
    assert_close(output, torch.full_like(output, 3 if distance < 76 else 0))
    for gradient in torch.autograd.grad(output.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_what_is_divided_by_next_to_nothing_is_zero():
    for dtype in (torch.float32, torch.float64):
        limits = torch.finfo(dtype)
        x = torch.tensor([0, 4, limits.tiny, 1.01, 0.99], dtype=dtype)
        x[3:] *= limits.tiny / limits.eps
        x.requires_grad_()
        quotient = 3 / divisor(x)
        assert torch.equal(quotient == 0, torch.tensor([True, False, True, False, True]))
        assert quotient[1] == 3 / 4
        (gradient,) = torch.autograd.grad(quotient[[0, 1, 2, 4]].sum(), x)
        assert gradient[[0, 1, 2, 4]].tolist() == [0, -3 / 16, 0, 0]
    assert divisor(torch.tensor(math.nan)).isnan()


# The module


def module(**options):
    return SLA(8, 2, **({"block_q": 16, "block_kv": 8, "sparsity": 0.6} | options))


def trained(model, seed=0):
    """model with a Proj that does something."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return model


def test_the_options_are_those_of_the_paper_by_default():
    model = SLA(8, 2)
    assert (model.sparsity, model.skipped, model.settings) == (0.9, 0, BlockSettings())


@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_at_first_sla_is_sparse_attention(n_q, n_k):
    q, k, v = drawn(1, 2, n_q, 8), drawn(1, 2, n_k, 8, seed=1), drawn(1, 2, n_k, 8, seed=2)
    selected = top_blocks(heuristic_scores(q, k, SMALL), selected_count(0.6, block_count(n_k, 8)))
    seen = token_weights(selected, n_q, n_k, SMALL)
    assert seen.any(-1).all()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert_close(module()(q, k, v), expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("skipped", [0, 0.3])
def test_sla_is_the_sparse_branch_plus_the_projected_linear_branch(kind, skipped):
    q, k, v = drawn(1, 2, 40, 8), drawn(1, 2, 80, 8, seed=1), drawn(1, 2, 80, 8, seed=2)
    model = trained(module(skipped=skipped, feature_map=kind))
    scores = heuristic_scores(q, k, SMALL)
    rank = (scores[..., None, :] > scores[..., :, None]).sum(-1)  # how many blocks of the row have larger scores
    selected, linear = rank < 4, (rank >= 4) & (rank < (7 if skipped else 10))
    o_s = F.scaled_dot_product_attention(q, k, v, attn_mask=token_weights(selected, 40, 80, SMALL))
    a = feature_map(q, kind) @ feature_map(k, kind).mT * token_weights(linear, 40, 80, SMALL)
    o_l = a @ v / a.sum(-1, keepdim=True)
    weight, bias = model.proj.weight.double(), model.proj.bias.double()
    assert_close(model(q, k, v), o_s + o_l @ weight.mT + bias, atol=1e-12, rtol=0)


def test_the_skipped_share_is_seen_by_neither_branch():
    """Values of blocks that nobody sees change nothing; those of the others do."""
    q, k, v = drawn(1, 2, 16, 8), drawn(1, 2, 80, 8, seed=1), drawn(1, 2, 80, 8, seed=2)
    model = trained(module(skipped=0.3))
    selected, linear = model.block_masks(q, k)
    assert selected.sum(-1).unique().tolist() == [4]
    assert linear.sum(-1).unique().tolist() == [3]
    assert not (selected & linear).any()
    before = model(q, k, v)
    for head in range(2):
        for j in range(10):
            changed = v.clone()
            changed[:, head, j * 8 : (j + 1) * 8] += 1
            seen = bool((selected | linear)[0, head, 0, j])
            assert torch.equal(model(q, k, changed), before) != seen


@pytest.mark.parametrize("n_k", [1, 5, 12, 20, 28, 40, 100])
@pytest.mark.parametrize(("sparsity", "skipped"), [(0, 0), (0.5, 0.5), (0.9, 0.9), (0.99, 0.2), (0.99, 0.99)])
def test_any_shares_and_lengths_work(n_k, sparsity, skipped):
    q, k, v = drawn(1, 2, 20, 8), drawn(1, 2, n_k, 8, seed=1), drawn(1, 2, n_k, 8, seed=2)
    model = trained(module(sparsity=sparsity, skipped=skipped))
    blocks = block_count(n_k, 8)
    selected, linear = model.block_masks(q, k)
    assert (selected.sum(-1) == selected_count(sparsity, blocks)).all()
    assert not (selected & linear).any()
    assert ((selected | linear).sum(-1) == max(selected.sum(-1).max(), blocks - round(skipped * blocks))).all()
    assert model(q, k, v).isfinite().all()


def test_everything_trains_and_gradients_flow_through_both_branches():
    q, k, v = (x.requires_grad_() for x in (drawn(1, 2, 20, 8), drawn(1, 2, 40, 8, seed=1), drawn(1, 2, 40, 8, seed=2)))
    model = trained(module()).double()
    leaves = (q, k, v, *model.parameters())
    assert len(leaves) == 5
    assert all(gradient.any() for gradient in torch.autograd.grad(model(q, k, v).square().sum(), leaves))
    fresh = module().double()
    assert all(gradient.any() for gradient in torch.autograd.grad(fresh(q, k, v).sum(), list(fresh.parameters())))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gqa_is_sla_with_the_heads_repeated(kv_heads):
    q, k, v = drawn(2, 4, 20, 8), drawn(2, kv_heads, 40, 8, seed=1), drawn(2, kv_heads, 40, 8, seed=2)
    model = trained(SLA(8, 4, block_q=16, block_kv=8, sparsity=0.6))
    shared = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
    assert torch.equal(model(q, k, v), model(q, *shared))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sla_computes_wide_and_returns_the_dtype_of_query(dtype):
    q, k, v = (drawn(1, 2, n, 8, seed=n).to(dtype) for n in (20, 40, 40))
    model = trained(module())
    output = model(q, k, v)
    assert output.dtype == dtype
    wide = model(*(x.double() for x in (q, k, v)))
    assert_close(output.double(), wide, atol=1e-5, rtol=4 * torch.finfo(dtype).eps)


def test_autocast_casts_the_inputs_and_nothing_inside():
    """Queries and keys in float32 beside values in bfloat16, as behind a norm."""
    q, k, v = (drawn(1, 2, n, 8, seed=n, dtype=torch.float32) for n in (20, 40, 40))
    model = trained(module())
    expected = model(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(q, k, v.bfloat16()), expected)


def test_state_dict_and_deepcopy_keep_what_was_learned():
    q, k, v = (drawn(1, 2, n, 8, seed=n) for n in (20, 40, 40))
    model = trained(module())
    restored = module()
    restored.load_state_dict(model.state_dict())
    for twin in (restored, copy.deepcopy(model)):
        assert torch.equal(twin(q, k, v), model(q, k, v))


def test_a_compiled_module_is_one_graph_with_the_same_numbers():
    torch._dynamo.reset()
    q, k, v = (drawn(1, 2, n, 8, seed=n).requires_grad_() for n in (20, 40, 40))
    model = trained(module())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(q, k, v), model(q, k, v), atol=1e-13, rtol=0)
    for x, y in zip(*(torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, model)), strict=True):
        assert_close(x, y, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim: expected at least 1, got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads: expected an int, got float"),
        ({"block_q": 0}, ValueError, "block_q: expected at least 1, got 0"),
        ({"block_kv": -1}, ValueError, "block_kv: expected at least 1, got -1"),
        ({"sparsity": 1}, ValueError, "sparsity: expected a share of the key blocks in [0, 1), got 1"),
        ({"sparsity": -0.1}, ValueError, "sparsity: expected a share of the key blocks in [0, 1), got -0.1"),
        ({"sparsity": math.nan}, ValueError, "sparsity: expected a share of the key blocks in [0, 1), got nan"),
        ({"sparsity": "0.9"}, TypeError, "sparsity: expected a float, got str"),
        ({"sparsity": True}, TypeError, "sparsity: expected a float, got bool"),
        ({"skipped": 1.5}, ValueError, "skipped: expected a share of the key blocks in [0, 1), got 1.5"),
        ({"skipped": 0.95}, ValueError, "skipped: expected at most sparsity, 0.9, got 0.95"),
        ({"feature_map": "exp"}, ValueError, f"feature_map: expected one of {FEATURE_MAPS}, got 'exp'"),
    ],
)
def test_the_module_names_what_is_wrong(options, kind, message):
    with pytest.raises(kind) as error:
        SLA(**({"head_dim": 8, "num_heads": 2} | options))
    assert str(error.value) == message


def test_the_module_takes_the_heads_it_was_made_for():
    x = torch.ones(1, 2, 4, 8)
    for bad, message in (
        ((torch.ones(1, 3, 4, 8), x[:, :1], x[:, :1]), "query: expected 2 heads, as the module has, got 3"),
        ((x[..., :4],) * 3, "query: expected head size 8, as the module has, got 4"),
        (
            (x, x.repeat(1, 2, 1, 1), x.repeat(1, 2, 1, 1)),
            "key: expected a number of heads that divides query's 2, got 4",
        ),
        ((x, x, x[:, :, :3]), "value: expected the shape of key, (1, 2, 4, 8), got (1, 2, 3, 8)"),
        ((x[0], x, x), "query: expected 4 dimensions (B, H, N, D), got shape (2, 4, 8)"),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below)
            module()(*bad)
        assert str(error.value) == message
