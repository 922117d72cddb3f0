"""Repairs of dS: nothing changes where nothing is quantised, and each does what it is made for."""

import math

import pytest
import torch
from sage_lab.repairs import (
    REMEDIES,
    RepairedSettings,
    hadamard,
    largest_tiles,
    rotate_tokens,
    scales_in_a_record,
    weighted_mean,
    with_remedy,
    with_repairs,
)
from torch.testing import assert_close

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.quantization import fake_quantize
from sage_ref.sagebwd import MATMULS, SageBwdSettings, sagebwd_backward, sagebwd_forward, smooth
from sage_ref.sagebwd.api import reference_attention
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates

WIDE = {"output_dtype": torch.float64}
REPAIRS = {
    "matching delta": {"matching_delta": True},
    "wide O": WIDE,
    "rounded sum": {"rounded_sum": True},
    "V smoothed": {"smooth_v": True},
    "token scales": {"token_scales": True},
    "key mean": {"key_mean": True},
    "two terms": {"two_terms": 0.5},
    "rotated": {"rotate": True},
}
REPAIRS["all"] = {name: value for repair in REPAIRS.values() for name, value in repair.items()}
SMALL = {"block_q": 16, "block_kv": 8}


def passes(tensors, **changes):
    q, k, v, do = tensors
    settings = RepairedSettings(**SMALL | changes)
    forward = sagebwd_forward(q, k, v, settings)
    return forward, sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)


def errors(tensors, **changes):
    """Relative L2 of every intermediate against exact attention in float64."""
    settings = RepairedSettings(**SMALL | changes)
    exact, found = exact_intermediates(*tensors, settings), sagebwd_intermediates(*tensors, settings)
    return {name: relative_l2(found[name], exact[name]) for name in exact}


# Identities


@pytest.mark.parametrize("name", REPAIRS)
@pytest.mark.parametrize(
    ("is_causal", "smooth_k", "granularity"), [(False, True, "block"), (True, True, "row"), (True, False, "row")]
)
def test_without_quantisation_it_changes_nothing(inputs, name, is_causal, smooth_k, granularity):
    """O, L, dQ, dK, dV, delta, P, dP and dS are those of exact attention. 41 and 53: blocks are partial, too."""
    q, k, v, do = inputs(41, 53, 16)
    v = v + 3 * torch.randn(16, dtype=v.dtype, generator=torch.Generator().manual_seed(1))
    settings = {"smooth_k": smooth_k, "granularity": granularity, "is_causal": is_causal}
    forward, backward = passes((q, k, v, do), exact_matmuls=MATMULS, **settings, **REPAIRS[name])
    exact = attention_forward(q, k, v, is_causal=is_causal)
    expected = attention_backward(do, q, k, v, exact.output, exact.log_sum_exp, is_causal=is_causal)
    for ours, theirs in zip((*forward[:2], *backward), (*exact[:2], *expected), strict=True):
        assert_close(ours, theirs, atol=1e-10, rtol=0)


# In INT8, which results differ from those without the repair. O of 16 bit, which alone shows a wide O.
CHANGED = {
    "matching delta": "delta dS dQ dK",
    "wide O": "O delta dS dQ dK",
    "rounded sum": "O delta dS dQ dK",
    "V smoothed": "O delta dP dS dQ dK",
    "token scales": "dP dS dQ dK",
    "key mean": "dQ",
    "two terms": "dQ dK",
    "rotated": "dQ dK",
}


@pytest.mark.parametrize("name", CHANGED)
def test_in_int8_it_changes_what_it_says_and_nothing_else(inputs, name):
    tensors = inputs(40, 48, 16, dtype=torch.float16)
    tensors[2] += 2  # V has a mean
    found = {}
    for repair in ("none", name):
        settings = RepairedSettings(**SMALL, exact_matmuls=(), **REPAIRS.get(repair, {}))
        found[repair] = sagebwd_intermediates(*tensors, settings)
    before, after = found.values()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed == set(CHANGED[name].split())


def test_every_remedy_has_a_name_and_differs_from_the_others():
    plain = SageBwdSettings(is_causal=True)
    settings = [with_remedy(plain, name) for name in REMEDIES]
    assert settings[0] == with_repairs(plain)
    assert len(set(settings)) == len(REMEDIES)
    assert {x.is_causal for x in settings} == {True}
    with pytest.raises(ValueError, match="^remedy: expected one of"):
        with_remedy(plain, "hope")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_without_a_repair_the_bits_are_the_library_s(inputs, rounding):
    tensors = inputs(40, 48, 16, dtype=torch.float32)
    plain = SageBwdSettings(is_causal=True, exact_matmuls=(), ds_rounding=rounding, generator=torch.Generator())
    found = []
    for settings in (plain, with_repairs(plain)):
        plain.generator.manual_seed(0)
        found.append(sagebwd_intermediates(*tensors, settings))
    assert all(torch.equal(x, y) for x, y in zip(*(x.values() for x in found), strict=True))


def test_a_record_says_how_its_numbers_were_quantised():
    printed = {"block_q": 64, "block_kv": 32, "granularity": "block"}
    assert scales_in_a_record(SageBwdSettings.printed(block_kv=32)) == printed


# What each is made for


def with_offset(tensors, size):
    """V with an offset that all tokens share."""
    q, k, v, do = tensors
    offset = torch.randn(v.shape[-1], dtype=v.dtype, generator=torch.Generator().manual_seed(2))
    return q, k, v + size * offset, do


@pytest.mark.parametrize(("repair", "factor"), [({"matching_delta": True}, 3), ({"smooth_v": True}, 20)])
def test_an_offset_of_v_costs_less_with_a_delta_that_fits_or_without_the_offset(inputs, repair, factor):
    """A coarse scale's error has a part that all keys share, which delta takes, and one of each key's own."""
    offset = with_offset(inputs(128, 128, 16), 30)
    only_dp = tuple(matmul for matmul in MATMULS if matmul != "dP")
    before, after = (errors(offset, exact_matmuls=only_dp, **x)["dQ"] for x in ({}, repair))
    assert after < before / factor


def test_equal_values_come_out_as_they_are_where_the_sum_is_of_what_is_multiplied(inputs):
    """All values alike and on their grid: O is that value, unless P lost a part of its sum."""
    q, k, v, do = inputs(64, 64, 16)
    v[:] = 2.0
    settings = {rounded: RepairedSettings(**SMALL, rounded_sum=rounded) for rounded in (False, True)}
    off = {rounded: (sagebwd_forward(q, k, v, x).output - 2).abs().max().item() for rounded, x in settings.items()}
    assert off[True] < 1e-12 < 1e-3 < off[False]


def test_what_p_loses_goes_to_the_mean_of_v_where_it_is_smoothed_and_to_large_p_where_the_sum_is_rounded(inputs):
    """One key has a large P, the others are lost: all that they bring is the mean of V, or nothing."""
    q, k, v, do = (torch.zeros_like(x) for x in inputs(1, 1000, 4))
    k[..., 0, 0] = 1.0
    q[..., 0] = 2 * math.log(500)  # e^S is 500 once, 999 times 1: below half a step of 500 / 127
    v[..., 1:, :] = 1.0
    outputs = {
        name: sagebwd_forward(q, k, v, RepairedSettings(smooth_k=False, block_kv=1000, **REPAIRS.get(name, {}))).output
        for name in ("none", "rounded sum", "V smoothed")
    }
    means = {name: x.mean().item() for name, x in outputs.items()}
    exact = 999 / 1499
    assert means["none"] == means["rounded sum"] == 0
    assert means["V smoothed"] == pytest.approx(exact, rel=0.01)


def test_rows_of_ds_sum_to_zero_with_the_matching_delta(inputs):
    found = [passes(inputs(40, 48, 16), exact_matmuls=(), matching_delta=on)[1].grad_scores for on in (True, False)]
    matching, plain = (ds.sum(-1).abs().max().item() for ds in found)
    assert matching < 1e-12 < 1e-3 < plain


def test_the_matching_delta_is_a_weighted_mean():
    p, dp = torch.tensor([[0.5, 0.3], [0.25, 0.75]]), torch.tensor([[1.0, 3.0], [4.0, 8.0]])
    assert_close(weighted_mean(p, p * dp), torch.tensor([[1.4 / 0.8], [7.0]]))


def test_a_nan_that_no_query_sees_stays_where_it_is(inputs):
    """Key 45 is beyond the last tile that the first 32 queries visit."""
    tensors = inputs(48, 48, 8)
    tensors[2][..., 45, :] = math.nan
    for name in ("matching delta", "two terms", "rotated"):
        _, backward = passes(tensors, is_causal=True, **REPAIRS[name])
        assert backward.grad_query[..., :32, :].isfinite().all()
        assert backward.grad_query[..., 47, :].isnan().all()


def test_a_wide_o_is_kept_for_delta_and_handed_out_rounded(inputs):
    q, k, v, do = inputs(64, 64, 16, dtype=torch.bfloat16)
    of_delta, outputs = {}, {}
    for wide in (False, True):
        settings = RepairedSettings(exact_matmuls=MATMULS, **(WIDE if wide else {}))
        found, exact = sagebwd_intermediates(q, k, v, do, settings), exact_intermediates(q, k, v, do, settings)
        of_delta[wide] = relative_l2(found["delta"], exact["delta"])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        outputs[wide] = reference_attention(*leaves, settings)
        (dq,) = torch.autograd.grad(outputs[wide], leaves[:1], do)
        assert torch.equal(dq, found["dQ"])
    assert outputs[True].dtype == torch.bfloat16
    assert torch.equal(outputs[False], outputs[True])
    assert of_delta[True] < 1e-5 < 1e-3 < of_delta[False]


def test_the_key_mean_s_part_is_the_row_sums_of_the_rounded_ds(inputs):
    """dQ = c dS^ (K^ + 1 mu_K^T), and nothing where K is not smoothed."""
    q, k, v, do = tensors = inputs(40, 48, 16)
    k += 2
    _, backward = passes(tensors, key_mean=True)
    ds_hat = fake_quantize(backward.grad_scores, (1, 8))
    k_hat = fake_quantize(smooth(q, k, SageBwdSettings()).k, (8, None))
    assert_close(backward.grad_query, ds_hat @ (k_hat + k.mean(-2, keepdim=True)) / 4, atol=1e-12, rtol=0)
    unsmoothed = [passes(tensors, smooth_k=False, key_mean=on)[1].grad_query for on in (False, True)]
    assert torch.equal(*unsmoothed)


@pytest.mark.parametrize("of_v", [False, True])
def test_token_scales_keep_a_small_token_beside_a_large_one(inputs, of_v):
    q, k, v, do = inputs(32, 32, 16)
    (v if of_v else do)[..., ::8, :] *= 1000
    small = torch.arange(32) % 8 != 0
    found = {}
    for on in (False, True):
        dp = passes((q, k, v, do), exact_matmuls=(), token_scales=on)[1].grad_probabilities
        of_small, exact = ((x.mT if of_v else x)[..., small, :] for x in (dp, do @ v.mT))
        found[on] = relative_l2(of_small, exact)
    assert found[True] < 0.02 < 0.3 < found[False]


@pytest.mark.parametrize("granularity", ["block", "row"])
def test_a_second_term_leaves_a_hundredth_of_the_error_of_rounding_ds(inputs, granularity):
    tensors = inputs(48, 48, 16)
    ds = passes(tensors)[1].grad_scores

    def error(share):
        settings = RepairedSettings(**SMALL, granularity=granularity, two_terms=share)
        return relative_l2(settings.operands("dQ", ds, tensors[1])[0], ds)

    once, half, twice = error(0.0), error(0.5), error(1.0)
    assert twice < once / 100
    assert twice < half < once / 1.4


def test_dq_and_dk_take_second_terms_of_the_same_tiles(inputs):
    q, k, v, do = tensors = inputs(48, 40, 16)
    _, backward = passes(tensors, two_terms=0.3)
    ds, k = backward.grad_scores, smooth(q, k, SageBwdSettings()).k
    chosen = largest_tiles(ds, (16, 8), 0.3)

    def in_two_terms(shape):
        first = fake_quantize(ds, shape)
        return first + fake_quantize(ds - first, shape) * chosen

    ds_hat, by_key = in_two_terms((1, 8)), in_two_terms((16, 1))
    assert_close(backward.grad_query, ds_hat @ fake_quantize(k, (8, None)) / 4, atol=1e-12, rtol=0)
    assert_close(backward.grad_key, by_key.mT @ fake_quantize(q, (16, None)) / 4, atol=1e-12, rtol=0)


def test_a_nan_takes_no_other_tile_s_second_term():
    ds = torch.arange(1.0, 65.0).reshape(8, 8)
    ds[0, 0] = math.nan
    chosen = largest_tiles(ds, (4, 4), 1 / 3)
    assert chosen[4:, 4:].all()
    assert chosen.sum() == 16


def test_the_tiles_with_the_largest_entries_get_the_second_term():
    ds = torch.ones(2, 5, 6)
    ds[0, 4, 5], ds[0, 0, 0] = -9, 4  # tiles (2, 2) and (0, 0) of 2 x 2, the former partial
    ds[1, :, :4] = 0  # three tiles are left, of which one is a third
    ds[1, 3, 4] = 2
    chosen = largest_tiles(ds, (2, 2), 2 / 9)
    expected = torch.zeros(2, 5, 6, dtype=torch.bool)
    expected[0, 4:, 4:] = expected[0, :2, :2] = expected[1, 2:4, 4:] = True
    assert torch.equal(chosen, expected)
    assert torch.equal(largest_tiles(ds, (2, 2), 1), ds != 0)
    assert not largest_tiles(torch.zeros(4, 4), (2, 2), 0.5).any()


def test_a_rotation_is_its_own_inverse_and_spreads_one_token_over_its_block():
    h = hadamard(8, torch.ones(1, dtype=torch.float64))
    assert_close(h @ h, torch.eye(8, dtype=torch.float64))
    assert_close(h, h.mT)
    x = torch.zeros(1, 20, 3, dtype=torch.float64)
    x[0, 9] = torch.tensor([1.0, -2.0, 4.0])
    x[0, 18] = 5.0
    turned = rotate_tokens(x, 8)
    assert_close(turned[0, 8:16].abs(), x[0, 9].abs().expand(8, 3) / math.sqrt(8))
    assert (turned[0, :8] == 0).all()
    assert torch.equal(turned[0, 16:], x[0, 16:])  # a partial block
    assert_close(rotate_tokens(turned, 8), x)


def test_rotation_helps_where_one_key_s_row_hides_the_others(inputs):
    """K has one outlier per block, dS none: rotated, K's small tokens keep their digits."""
    q, k, v, do = inputs(64, 64, 16)
    k[..., ::8, :] *= 20
    q *= 0.01  # P stays even, dS as well
    exact_matmuls = tuple(matmul for matmul in MATMULS if matmul != "dQ")
    found = [errors((q, k, v, do), smooth_k=False, exact_matmuls=exact_matmuls, rotate=rotate)["dQ"]
             for rotate in (False, True)]  # fmt: skip
    assert found[1] < 0.9 * found[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"two_terms": 1.5}, ValueError, "two_terms: expected a share"),
        ({"two_terms": True}, ValueError, "two_terms: expected a share"),
        ({"key_mean": 1}, TypeError, "key_mean: expected a bool"),
        ({"rotate": True, "block_q": 48}, ValueError, "block_q: expected a power of two"),
        ({"block_q": 0}, ValueError, "block_q: expected at least 1"),
    ],
)
def test_what_is_no_repair_is_named(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        RepairedSettings(**options)
