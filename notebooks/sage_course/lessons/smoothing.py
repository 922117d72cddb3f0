"""Notebook 03: K-smoothing, its log-sum-exp, its gradient, and rows of dS that add up to zero again."""

import torch

from sage_course.gaps import Gap, Mistake

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


GAPS = {
    "smooth_key": Gap(smooth_key, lambda: [(_draw(0, 6, HEAD_DIM),), (_draw(1, 2, 5, HEAD_DIM),)], (
        Mistake("k.mean(-2, keepdim=True)", "k.mean(-1, keepdim=True)",
                "That is the mean of each key's channels. The mean key is a mean over the tokens, dimension -2."),
        Mistake("k.mean(-2, keepdim=True)", "k.mean(0, keepdim=True)",
                "The first dimension may be the batch. Tokens are the last but one."),
        Mistake("k.mean(-2, keepdim=True)", "k.mean((-2, -1), keepdim=True)",
                "Each channel has its own mean: over the tokens alone."),
        Mistake("k - k_mean, k_mean", "k - k_mean", "Return two things: the mean is needed later."),
    ), right=(
        ("k.mean(-2, keepdim=True)", "k.sum(-2, keepdim=True) / k.shape[-2]"),
        ("k.mean(", "k.double().mean("),
    )),
    "log_sum_exp_of_keys": Gap(log_sum_exp_of_keys,
        lambda: [(_draw(2, 6), _draw(3, 6, HEAD_DIM), _draw(4, 1, HEAD_DIM), C)], (
        Mistake("l_smooth + c", "l_smooth - c", "The smoothed scores lost this number: add it back."),
        Mistake("l_smooth + c * (q * k_mean).sum(-1)", "l_smooth",
                "The scores of a row moved by one number, and L moves with them."),
        Mistake("(q * k_mean).sum(-1)", "(q @ k_mean.mT)", "That is [..., queries, 1]: drop the last dimension."),
        Mistake("l_smooth + c * (q * k_mean).sum(-1)", "torch.logaddexp(l_smooth, c * (q * k_mean).sum(-1))",
                "The sum gets no new term: every score of the row moves by the same number, and so does L."),
        Mistake("c * (q * k_mean).sum(-1)", "torch.log(c * (q * k_mean).sum(-1))",
                "Every score lost this number, and L is like a score: it moves by the number itself."),
        Mistake("l_smooth + c * (q * k_mean).sum(-1)", "l_smooth * torch.exp(c * (q * k_mean).sum(-1))",
                "The sum of exponentials gets a factor. L is its logarithm, and so it gets a term."),
        Mistake("(q * k_mean).sum(-1)", "q * k_mean", "Sum over the channels: q and the mean key give one number."),
    ), right=(
        ("c * (q * k_mean).sum(-1)", "(q @ k_mean.mT).squeeze(-1) * c"),
        ("c * (q * k_mean).sum(-1)", "c * torch.einsum('...qd,...kd->...q', q, k_mean)"),
    )),
    "grad_through_mean": Gap(grad_through_mean, lambda: [(_draw(5, 6, HEAD_DIM),), (_draw(6, 2, 5, HEAD_DIM),)], (
        Mistake(".mean(-2, keepdim=True)", ".sum(-2, keepdim=True) / dk_smooth.shape[-1]",
                "N is the number of tokens, the last dimension but one."),
        Mistake("dk_smooth - dk_smooth.mean(-2, keepdim=True)", "dk_smooth", "The way through the mean is missing."),
        Mistake("dk_smooth - dk", "-dk", "The direct way is missing: each row of K_sm also contains its own key."),
        Mistake("dk_smooth.mean(-2, keepdim=True)", "dk_smooth / dk_smooth.shape[-2]",
                "Through the mean, a key acts on the rows of all keys, not only on its own: sum over them."),
        Mistake("dk_smooth.mean(-2, keepdim=True)",
                "dk_smooth.mean(-2, keepdim=True) + dk_smooth / dk_smooth.shape[-2]",
                "You left a key's own row out of the mean. It belongs there as well."),
    ), right=(
        ("dk_smooth.mean(-2, keepdim=True)", "dk_smooth.sum(-2, keepdim=True) / dk_smooth.shape[-2]"),
        ("dk_smooth.mean(", "dk_smooth.double().mean("),
    )),
    "with_row_sums_zero": Gap(with_row_sums_zero, lambda: [(_draw(7, 4, 6),), (_draw(8, 2, 5, 7),)], (
        Mistake(".mean(-1, keepdim=True)", ".mean(-2, keepdim=True)",
                "That corrects the columns. A row is a query, so the mean runs over its keys."),
        Mistake(".mean(-1, keepdim=True)", ".sum(-1, keepdim=True)",
                "That takes the whole sum from each of N entries: each must give one N-th."),
        Mistake(".mean(-1, keepdim=True)", ".sum(-1, keepdim=True) / ds_hat.shape[-2]",
                "A row has as many entries as there are keys: the last dimension."),
        Mistake("ds_hat - ds_hat.mean(-1, keepdim=True)", "ds_hat / ds_hat.sum(-1, keepdim=True)",
                "That makes each row sum to 1. Subtract something, so that the sum is 0."),
        Mistake("ds_hat.mean(-1, keepdim=True)",
                "ds_hat * ds_hat.sum(-1, keepdim=True) / ds_hat.abs().sum(-1, keepdim=True)",
                "The share is the same for every entry of a row, whatever its size."),
    ), right=(
        ("ds_hat.mean(-1, keepdim=True)", "ds_hat.sum(-1, keepdim=True) / ds_hat.shape[-1]"),
        ("ds_hat.mean(", "ds_hat.double().mean("),
    )),
    "smooth_key_prefix": Gap(smooth_key_prefix, lambda: [(_draw(9, 6, HEAD_DIM), 2), (_draw(10, 2, 5, HEAD_DIM), 3)], (
        Mistake("k[..., :length, :].mean", "k.mean", "That mean sees all keys, also future ones."),
        Mistake("k[..., :length, :]", "k[:length]", "Tokens are the last dimension but one: `k[..., :length, :]`."),
        Mistake("k[..., :length, :]", "k[..., :length]", "Those are channels. Tokens come before them: `:length, :`."),
        Mistake("k - k[", "k[..., :length, :] - k[", "All keys are smoothed, not only the prefix."),
        Mistake(":length, :", "-length:, :", "These are the last keys, which are the future."),
        Mistake(":length, :", "length:, :",
                "That is the mean of all keys after the first `length`, which are the future."),
        Mistake("k - k[..., :length, :].mean(-2, keepdim=True)",
                "torch.cat([k[..., :length, :] - k[..., :length, :].mean(-2, keepdim=True), k[..., length:, :]], -2)",
                "All keys must lose the same vector, or a row of S no longer moves by one number."),
    ), right=(
        ("k[..., :length, :].mean(-2, keepdim=True)", "k[..., :length, :].sum(-2, keepdim=True) / length"),
        ("k[..., :length, :]", "k.narrow(-2, 0, length)"),
    )),
}  # fmt: skip
