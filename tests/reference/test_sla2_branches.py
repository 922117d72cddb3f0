"""Block masks and what scores them; both branches against their definitions, at soft weights and at extremes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sla2_oracles import LENGTHS, drawn, drawn_qkv
from torch.testing import assert_close

from sage_ref.sla2 import (
    FEATURE_MAPS,
    BlockSettings,
    block_count,
    block_mass,
    divisor,
    heuristic_scores,
    linear_branch,
    selected_count,
    sparse_branch,
    top_blocks,
)

SMALL = BlockSettings(16, 8)


def test_selected_count_rounds_half_to_even_and_selects_at_least_one():
    for n, key_blocks, counts in ((32_760, 512, [26, 20, 15]), (75_600, 1182, [59, 47, 35])):  # the paper's sizes
        assert block_count(n, 64) == key_blocks
        assert [selected_count(sparsity, key_blocks) for sparsity in (0.95, 0.96, 0.97)] == counts
    assert [selected_count(0.5, n) for n in range(1, 8)] == [1, 1, 2, 2, 2, 3, 4]
    assert [selected_count(0.75, n) for n in (5, 6, 7, 10, 14)] == [1, 2, 2, 2, 4]
    assert [selected_count(0.0, n) for n in (1, 9)] == [1, 9]
    assert selected_count(1 - 1e-12, 10_000) == 1


@given(scores=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3), count=st.data())
def test_top_blocks_takes_the_largest_and_of_equals_the_first(scores, count):
    count = count.draw(st.integers(0, 7))
    selected = top_blocks(torch.tensor(scores, dtype=torch.float32), count)
    assert selected.dtype == torch.bool
    for row, found in zip(scores, selected.tolist(), strict=True):
        in_order = sorted(range(5), key=lambda j: (-row[j], j))
        assert {j for j in range(5) if found[j]} == set(in_order[:count])


def test_top_blocks_of_long_rows_of_equal_scores_and_of_nan():
    """An unstable sort gets short rows right by luck. A NaN counts as the largest."""
    assert torch.equal(top_blocks(torch.zeros(3, 5000), 1234), (torch.arange(5000) < 1234).expand(3, -1))
    scores = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert top_blocks(scores, 1).tolist() == [False, True, False, False]
    assert top_blocks(scores, 3).tolist() == [True, True, True, False]


@pytest.mark.parametrize(("n_q", "n_k"), LENGTHS)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_block_scores_are_the_attention_of_means_and_the_mean_mass_of_a_tile(n_q, n_k, scale):
    """Heuristic scores: softmax of block means with smoothed keys. Mass: its rows sum to one."""
    (q, k, _), settings = drawn_qkv(n_q, n_k), BlockSettings(16, 8, scale=scale)
    c = 8**-0.5 if scale is None else scale
    q_bar = torch.stack([part.mean(-2) for part in q.split(16, -2)], -2)
    k_bar = torch.stack([part.mean(-2) for part in (k - k.mean(2, keepdim=True)).split(8, -2)], -2)
    expected = torch.einsum("bhid,bhjd->bhij", q_bar, k_bar).mul(c).softmax(-1)
    assert_close(heuristic_scores(q, k, settings), expected, atol=1e-13, rtol=0)
    rows = (q @ k.mT * c).softmax(-1).split(16, -2)
    expected = [torch.stack([tile.sum(-1).mean(-1) for tile in row.split(8, -1)], -1) for row in rows]
    mass = block_mass(q, k, settings)
    assert_close(mass, torch.stack(expected, -2), atol=1e-13, rtol=0)
    assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("branch", "kind"), [(sparse_branch, "softmax"), *((linear_branch, kind) for kind in FEATURE_MAPS)]
)
def test_gradients_of_both_branches_pass_gradcheck(branch, kind):
    """Weights of 1 and in between, and of 0, where a step to the negative side is as good as one to the other."""
    last = [0, 0, 0, 1] if branch is sparse_branch else [0.3, 0.3, 0, 1]
    weights = torch.tensor([[0.2, 0, 1, 0.7], [1, 0.01, 0, 0], last]).double()
    leaves = [x.requires_grad_() for x in (drawn(5, 3), drawn(7, 3, seed=1), drawn(7, 3, seed=2), weights)]
    assert torch.autograd.gradcheck(lambda *x: branch(*x, BlockSettings(2, 2, feature_map=kind)), leaves)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_give_finite_gradients_and_right_ones_at_weight_zero(size, dtype):
    """dO . (V_j - O_s) e^(S_j - L), where that factor is a number of the dtype; scores from -size to size."""
    q = torch.ones(4, 1, dtype=dtype, requires_grad=True)
    k = (torch.linspace(-1, 1, 6, dtype=dtype)[:, None] * size).requires_grad_()
    v = drawn(6, 1, dtype=dtype).requires_grad_()
    rows = [1, 0, 1, 0, 0.5, 0], [0, 0, 0, 0, 0, 1], [1e-30, 0, 0, 0, 0, 0], [1e-30, 1, 0.1, 0, 0, 1e-36]
    weights = torch.tensor(rows, dtype=dtype, requires_grad=True)
    output, log_sum_exp = sparse_branch(q, k, v, weights, BlockSettings(1, 1, scale=1))
    gradients = torch.autograd.grad(output.sum(), (q, k, v, weights))
    for x in (output, log_sum_exp, *gradients):
        assert x.isfinite().all()
    with torch.no_grad():
        s = q @ k.mT
        assert_close(log_sum_exp, (s + weights.log()).logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-5)
        factor, difference = (s - log_sum_exp).exp(), v.mT - output
        tolerance = 8 * torch.finfo(dtype).eps * (100 + size) * factor * v.abs().max()  # |L| <= 70 + size
        representable = factor < torch.finfo(dtype).tiny ** -0.5
        assert ((gradients[3] - difference * factor).abs() <= tolerance)[representable].all()
    assert representable.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_divided_by_next_to_nothing_is_zero(dtype):
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
