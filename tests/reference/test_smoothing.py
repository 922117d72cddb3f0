"""K-smoothing and Q-smoothing change no result; QK-norm is its equation."""

import pytest
import torch
from torch.testing import assert_close

from sage_ref import QKNorm
from sage_ref.sagebwd import MATMULS, SageBwdSettings, sagebwd_backward, sagebwd_forward
from sage_ref.smoothing import smooth_key, smooth_query

same = {"atol": 1e-12, "rtol": 0}


def results(q, k, v, do, **settings):
    """O, L, dQ, dK, dV."""
    settings = SageBwdSettings(block_q=16, block_kv=8, **settings)
    forward = sagebwd_forward(q, k, v, settings)
    backward = sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)
    return forward.output, forward.log_sum_exp, *backward[:3]


@pytest.mark.parametrize("scale", [None, 0.9])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("smooth_k", "smooth_q"), [(True, False), (False, True), (True, True)])
def test_smoothing_is_exact_when_the_matmuls_are(inputs, smooth_k, smooth_q, is_causal, scale):
    q, k, v, do = inputs(41, 30, 8)
    q, k = q + torch.linspace(-3, 3, 8), k + torch.linspace(4, -4, 8)  # an offset that all tokens share
    options = {"is_causal": is_causal, "scale": scale, "exact_matmuls": MATMULS}
    plain = results(q, k, v, do, smooth_k=False, **options)
    for smoothed, expected in zip(
        results(q, k, v, do, smooth_k=smooth_k, smooth_q=smooth_q, **options), plain, strict=True
    ):
        assert_close(smoothed, expected, **same)


def test_smoothed_keys_have_mean_zero_and_so_has_each_block_of_smoothed_queries(inputs):
    q, k, *_ = inputs(11, 9, 4)
    smoothed, mean = smooth_key(k)
    assert_close(mean, k.mean(-2, keepdim=True), **same)
    assert_close(smoothed + mean, k, **same)
    smoothed, mean = smooth_query(q, 4)
    for block in (slice(0, 4), slice(4, 8), slice(8, 11)):
        assert_close(mean[..., block, :], q[..., block, :].mean(-2, keepdim=True).expand_as(q[..., block, :]), **same)
    assert_close(smoothed + mean, q, **same)


def test_qk_norm_is_its_equation_with_a_gain_for_each(inputs):
    q, k, *_ = inputs(5, 7, 16)
    norm = QKNorm(16).double()
    with torch.no_grad():
        norm.query_norm.weight.copy_(torch.linspace(0.5, 2, 16))
        norm.key_norm.weight.copy_(torch.linspace(-1, 1, 16))
    for x, gain, result in zip((q, k), norm.parameters(), norm(q, k), strict=True):
        assert_close(result, x * gain / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6), **same)
    assert torch.autograd.gradcheck(norm, (q[:, :, :2].requires_grad_(), k[:, :, :2].requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_qk_norm_keeps_the_dtype_and_learns_in_its_own(inputs, dtype, autocast):
    q, k, *_ = inputs(5, 7, 16, dtype=dtype)
    norm = QKNorm(16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        q_normal, k_normal = norm(q, k)
    assert (q_normal.dtype, k_normal.dtype) == (dtype, dtype)
    exact = (q.double() / (q.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)
    assert_close(q_normal, exact)
    (q_normal.sum() + k_normal.sum()).backward()
    assert {p.grad.dtype for p in norm.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["query", "key"])
def test_qk_norm_names_the_tensor_of_the_wrong_head_size(name):
    tensors = {"query": torch.ones(3, 8), "key": torch.ones(3, 8)} | {name: torch.ones(3, 9)}
    with pytest.raises(ValueError, match=rf"{name}: expected head size 8, got shape \(3, 9\)"):
        QKNorm(8)(**tensors)
