"""Notebook 03: K-smoothing, its log-sum-exp, its gradient, and rows of dS that add up to zero again."""

import torch

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes

HEAD_DIM = 8
C = HEAD_DIM**-0.5


def smooth_key(k):
    k_mean = k.mean(-2, keepdim=True)
    return k - k_mean, k_mean


def log_sum_exp_of_keys(l_smooth, q, k_mean, c):
    return l_smooth + c * (q * k_mean).sum(-1)


def grad_through_mean(dk_smooth):
    return dk_smooth - dk_smooth.mean(-2, keepdim=True)


def with_row_sums_zero(ds_hat):
    return ds_hat - ds_hat.mean(-1, keepdim=True)


def smooth_key_prefix(k, length):
    return k - k[..., :length, :].mean(-2, keepdim=True)


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 1


GAPS = with_mistakes(
    __file__,
    {
        "smooth_key": Gap(smooth_key, lambda: [(_draw(0, 6, HEAD_DIM),), (_draw(1, 2, 5, HEAD_DIM),)]),
        "log_sum_exp_of_keys": Gap(
            log_sum_exp_of_keys, lambda: [(_draw(2, 6), _draw(3, 6, HEAD_DIM), _draw(4, 1, HEAD_DIM), C)]
        ),
        "grad_through_mean": Gap(grad_through_mean, lambda: [(_draw(5, 6, HEAD_DIM),), (_draw(6, 2, 5, HEAD_DIM),)]),
        "with_row_sums_zero": Gap(with_row_sums_zero, lambda: [(_draw(7, 4, 6),), (_draw(8, 2, 5, 7),)]),
        "smooth_key_prefix": Gap(
            smooth_key_prefix, lambda: [(_draw(9, 6, HEAD_DIM), 2), (_draw(10, 2, 5, HEAD_DIM), 3)]
        ),
    },
)
