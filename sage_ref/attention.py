"""Exact attention: the seven matmuls and the gradient of the scores, written out by hand.

Forward:   S = c Q K^T           P = softmax(S)           O = P V
Backward:  S again               dV = P^T dO              dP = dO V^T
           delta = rowsum(dO * O)      dS = P * (dP - delta 1^T)
           dQ = c dS K           dK = c dS^T Q

c = 1/sqrt(D). Everything else in this package is this file with some of the seven matmuls in INT8.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionForward(NamedTuple):
    """output [..., Nq, D], log_sum_exp [..., Nq] (natural log), scores [..., Nq, Nk] (masked: -inf)."""

    output: Tensor
    log_sum_exp: Tensor
    scores: Tensor


class AttentionBackward(NamedTuple):
    """The three gradients, then the intermediates in the order they are computed."""

    grad_query: Tensor  # dQ     [..., Nq, D]
    grad_key: Tensor  # dK       [..., Nk, D]
    grad_value: Tensor  # dV     [..., Nk, D]
    delta: Tensor  # delta       [..., Nq, 1]
    probabilities: Tensor  # P   [..., Nq, Nk]
    grad_probabilities: Tensor  # dP
    grad_scores: Tensor  # dS


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """Return c of S = c Q K^T: `scale` if given, else 1/sqrt(head_dim)."""
    return 1 / math.sqrt(head_dim) if scale is None else float(scale)


def causal_mask(n_q: int, n_k: int, device: torch.device) -> Tensor:
    """Return bool [Nq, Nk], True where query i may see key j: j <= i (top-left convention, as in SDPA)."""
    return torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril()


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> AttentionForward:
    """Compute O = softmax(c Q K^T) V in the dtype of the inputs.

    query [..., Nq, D], key [..., Nk, D], value [..., Nk, Dv], one floating dtype.
    """
    q, k, v = query, key, value
    s = q @ k.mT * softmax_scale(scale, q.shape[-1])
    if is_causal:
        s = s.masked_fill(~causal_mask(*s.shape[-2:], s.device), -math.inf)
    log_sum_exp = s.logsumexp(-1)
    p = torch.exp(s - log_sum_exp[..., None])
    return AttentionForward(p @ v, log_sum_exp, s)


def attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> AttentionBackward:
    """Compute the gradients of `attention_forward` from dO and the forward's output and log_sum_exp.

    The softmax's Jacobian needs no [Nq, Nq] matrix: since rowsum(P * dP) = rowsum(dO * O) = delta,
    dS = P * (dP - delta 1^T). Every row of dS therefore sums to zero.
    """
    q, k, v, do = query, key, value, grad_output
    c = softmax_scale(scale, q.shape[-1])
    s = q @ k.mT * c
    p = torch.exp(s - log_sum_exp[..., None])
    if is_causal:
        p = p.masked_fill(~causal_mask(*s.shape[-2:], s.device), 0)
    dv = p.mT @ do
    dp = do @ v.mT
    delta = (do * output).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dq = ds @ k * c
    dk = ds.mT @ q * c
    return AttentionBackward(dq, dk, dv, delta, p, dp, ds)
