"""Q-smoothing takes the means of blocks."""

from torch.testing import assert_close

from sage_ref.smoothing import smooth_query

same = {"atol": 1e-12, "rtol": 0}


def test_each_block_of_smoothed_queries_has_mean_zero(inputs):
    q, *_ = inputs(11, 9, 4)
    smoothed, mean = smooth_query(q, 4)
    for block in (slice(0, 4), slice(4, 8), slice(8, 11)):
        assert_close(mean[..., block, :], q[..., block, :].mean(-2, keepdim=True).expand_as(q[..., block, :]), **same)
    assert_close(smoothed + mean, q, **same)
