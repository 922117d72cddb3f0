"""Smoothing of Q, K and V and QK-norm, which make them easier to quantise.

Queries and keys carry offsets that all tokens share. An offset widens a block's scale and so costs precision,
yet the softmax ignores most of it.

K-smoothing, K_sm = K - 1 mu_K^T with mu_K the mean over tokens, is exact: it subtracts q_i . mu_K from every
score of row i, which the softmax cancels. dQ = c dS K_sm as well, since rows of dS sum to zero.
Q-smoothing, Q_sm = Q - 1 mu_Q^T with mu_Q the mean of one query block, is not free: mu_Q K^T differs from key
to key, so it is added back to the scores, and dK gains a second branch (see `query_mean_grad_key`).
V-smoothing is not the paper's: see `smooth_value`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_ref.checks import check_count, check_device_of_module, check_floating
from sage_ref.shapes import block_that_fits, in_blocks


def smooth_key(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return K_sm = K - mu_K and mu_K: key [..., Nk, D] -> ([..., Nk, D], [..., 1, D]).

    The mean runs over the whole sequence. In causal attention that includes future keys: nothing leaks in exact
    arithmetic, a trace the size of the rounding error does in INT8.
    """
    mean = key.mean(-2, keepdim=True)
    return key - mean, mean


def key_mean_scores(query: Tensor, key_mean: Tensor, scale: float) -> Tensor:
    """Return c Q mu_K^T [..., Nq, 1], which K-smoothing subtracts from every score of a row.

    Adding it to the log-sum-exp of the smoothed scores gives the log-sum-exp of the scores themselves.
    """
    return query @ key_mean.mT * scale


def smooth_value(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return V_sm = V - mu_V and mu_V: value [..., Nk, D] -> ([..., Nk, D], [..., 1, D]).

    Rows of P sum to one, so P V = P V_sm + 1 mu_V^T. And dP = dO V^T = dO V_sm^T + (dO mu_V) 1^T: a row of dP and its
    delta change by the same amount. The mean includes future tokens, too, as in `smooth_key`.
    """
    mean = value.mean(-2, keepdim=True)
    return value - mean, mean


def smooth_query(query: Tensor, block_q: int) -> tuple[Tensor, Tensor]:
    """Return Q_sm = Q - mu_Q and mu_Q, the mean of each block of block_q queries; the last block may be partial.

    query [..., Nq, D] -> ([..., Nq, D], [..., Nq, D]): the mean stands in every row of its block.
    """
    tokens = query.shape[-2]
    block = block_that_fits(block_q, tokens)
    sums, sizes = (in_blocks(x, -2, block).sum(-1) for x in (query, torch.ones_like(query)))
    mean = (sums / sizes).index_select(-2, torch.arange(tokens, device=query.device) // block)
    return query - mean, mean


def query_mean_grad_key(grad_scores: Tensor, query_mean: Tensor, scale: float) -> Tensor:
    """Return the second term of dK = c dS^T Q_sm + c dS^T (1 mu_Q^T), the branch that goes through mu_Q.

    grad_scores [..., Nq, Nk], query_mean [..., Nq, D] as `smooth_query` returns it -> [..., Nk, D].
    """
    return grad_scores.mT @ query_mean * scale


class QKNorm(nn.Module):
    """QK-norm: every query and every key becomes x * gamma / sqrt(mean(x^2) + 1e-6), with learned gains gamma.

    With gamma = 1, |q_i . k_j| <= D: no outlier can widen a block's scale, which keeps INT8 training stable at large
    batch sizes.

    forward(query [..., Nq, D], key [..., Nk, D]) returns the same two shapes and dtypes: float16, bfloat16, float32 or
    float64, with entries of any finite size, since squares don't overflow. A NaN or an infinity makes its token NaN.
    Wrap, shard or offload it as a whole: it reads the gains of its two layers, and never calls these.

    Args:
        head_dim: D.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it.
    """

    def __init__(self, head_dim: int):
        super().__init__()
        check_count("head_dim", head_dim)
        self.query_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.key_norm = nn.RMSNorm(head_dim, eps=1e-6)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return _normalise("query", query, self.query_norm), _normalise("key", key, self.key_norm)


def _normalise(name: str, x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Compute norm(x) in the wider of the dtypes of x and of the gain, and return it in that of x."""
    check_floating(name, x)
    check_device_of_module(name, x, norm.weight)
    if x.shape[-1:] != norm.normalized_shape:
        raise ValueError(f"{name}: expected head size {norm.normalized_shape[0]}, got shape {tuple(x.shape)}")
    wide = torch.promote_types(torch.promote_types(x.dtype, norm.weight.dtype), torch.float32)
    # Squares of larger numbers would overflow. The size of a token cancels, and eps is negligible next to such squares.
    largest = torch.finfo(wide).max ** 0.25
    size = x.detach().to(wide).abs().amax(-1, keepdim=True)
    safe = x.to(wide) * (largest / size.clamp_min(largest))
    return F.rms_norm(safe, norm.normalized_shape, norm.weight.to(wide), norm.eps).to(x.dtype)
