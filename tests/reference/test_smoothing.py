"""Q-smoothing takes the means of blocks; QK-norm is its equation."""

import torch
from torch.testing import assert_close

from sage_ref import QKNorm
from sage_ref.smoothing import smooth_query

same = {"atol": 1e-12, "rtol": 0}


def test_each_block_of_smoothed_queries_has_mean_zero(inputs):
    q, *_ = inputs(11, 9, 4)
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
