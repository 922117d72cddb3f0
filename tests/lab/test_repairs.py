"""Repairs of dS: without quantisation they change nothing; in INT8 each pass is what its equations give by hand."""

import math

import pytest
import torch
from sage_lab import repairs
from sage_lab.repairs import REMEDIES, RepairedSettings, with_remedy, with_repairs
from torch.testing import assert_close

from sage_ref.attention import causal_mask
from sage_ref.quantization import fake_quantize
from sage_ref.sagebwd import SageBwdSettings, sagebwd_backward, sagebwd_forward

WIDE = {"output_dtype": torch.float64}
REPAIRS = {
    "none": {},
    "matching delta": {"matching_delta": True},
    "V smoothed": {"smooth_v": True},
    "token scales": {"token_scales": True},
    "two terms": {"two_terms": True},
}
REPAIRS["all"] = WIDE | {name: value for repair in REPAIRS.values() for name, value in repair.items()}
SMALL = {"block_q": 16, "block_kv": 8}


def passes(tensors, **changes):
    q, k, v, do = tensors
    settings = RepairedSettings(**SMALL | changes)
    forward = sagebwd_forward(q, k, v, settings)
    return forward, sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)


def with_means(inputs, *shape):
    """Inputs whose K and V have means, which all tokens share."""
    q, k, v, do = inputs(*shape)
    k_mean, v_mean = torch.randn(2, shape[-1], dtype=v.dtype, generator=torch.Generator().manual_seed(1))
    return q, k + k_mean, v + 3 * v_mean, do


def by_hand(q, k, v, do, is_causal, granularity, output_dtype=None, **repairs):
    """Return O, dQ, dK, dV, delta, P, dP and dS with all seven matmuls in INT8, by the equations of the repairs."""

    def on(name):
        return repairs.get(name, 0)

    def of_ds(ds, x, tile):
        """Multiply dS by K for dQ, or its transpose by Q for dK."""
        shape = (1, tile[1]) if granularity == "row" else tile
        first = fake_quantize(ds, shape)
        second = fake_quantize(ds - first, shape) if on("two_terms") else 0.0
        return (first + second) @ fake_quantize(x, (tile[1], None)) / 4

    k_mean, v_mean = k.mean(-2, keepdim=True), v.mean(-2, keepdim=True) * on("smooth_v")
    k, v = k - k_mean, v - v_mean
    s = fake_quantize(q, (16, None)) @ fake_quantize(k, (8, None)).mT / 4
    if is_causal:
        s = s.masked_fill(~causal_mask(*s.shape[-2:], s.device), -math.inf)
    p = (s - s.amax(-1, keepdim=True)).exp()
    p_hat = fake_quantize(p, (1, 8))
    o = p_hat @ fake_quantize(v, (8, None)) / p.sum(-1, keepdim=True)
    p = p / p.sum(-1, keepdim=True)
    dv = fake_quantize(p, (16, 1) if granularity == "row" else (16, 8)).mT @ fake_quantize(do, (16, None))
    rows_of_do, rows_of_v = (1, 1) if on("token_scales") else (16, 8)
    dp = fake_quantize(do, (rows_of_do, None)) @ fake_quantize(v, (rows_of_v, None)).mT
    weighted = (p * dp).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)
    delta = weighted if on("matching_delta") else (do * o).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dq, dk = of_ds(ds, k, (16, 8)), of_ds(ds.mT, q, (8, 16))
    shift = do @ v_mean.mT
    return o + v_mean, dq, dk, dv, delta + shift, p, dp + shift, ds


@pytest.mark.parametrize("name", REPAIRS)
@pytest.mark.parametrize(("is_causal", "granularity"), [(False, "row"), (True, "block")])
def test_in_int8_it_is_its_equations(inputs, name, is_causal, granularity):
    tensors, options = with_means(inputs, 41, 53, 16), {"is_causal": is_causal, "granularity": granularity}
    forward, backward = passes(tensors, exact_matmuls=(), **options, **REPAIRS[name])
    expected = by_hand(*tensors, **options, **REPAIRS[name])
    for found, wanted in zip((forward.output, *backward), expected, strict=True):
        assert_close(found, wanted, atol=1e-11, rtol=0)


def test_the_matching_delta_is_a_mean_weighted_by_rows_that_do_not_sum_to_one():
    p, dp = torch.tensor([[0.5, 0.3], [0.25, 0.75]]), torch.tensor([[1.0, 3.0], [4.0, 8.0]])
    assert_close(repairs.weighted_mean(p, p * dp), torch.tensor([[1.4 / 0.8], [7.0]]))


def test_every_remedy_has_a_name_and_differs_from_the_others():
    plain = SageBwdSettings(is_causal=True)
    settings = [with_remedy(plain, name) for name in REMEDIES]
    assert settings[0] == with_repairs(plain)
    assert len(set(settings)) == len(REMEDIES)
    assert {x.is_causal for x in settings} == {True}
    with pytest.raises(ValueError, match="^remedy: expected one of"):
        with_remedy(plain, "hope")
    printed = {"block_q": 64, "block_kv": 32, "granularity": "block"}
    assert repairs.scales_in_a_record(SageBwdSettings.printed(block_kv=32)) == printed


def test_a_nan_that_no_query_sees_stays_where_it_is(inputs):
    """Key 45 is beyond the last tile that the first 32 queries visit."""
    tensors = inputs(48, 48, 8)
    tensors[2][..., 45, :] = math.nan
    for name in ("matching delta", "two terms"):
        _, backward = passes(tensors, is_causal=True, **REPAIRS[name])
        assert backward.grad_query[..., :32, :].isfinite().all()
        assert backward.grad_query[..., 47, :].isnan().all()
