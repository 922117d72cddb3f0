"""The matched P of a backward tile."""

import torch
from torch import Tensor


def matched_tile(
    q_hat: Tensor, s_q: Tensor, k_hat: Tensor, s_k: Tensor, query: Tensor, key_mean: Tensor, log_sum_exp: Tensor
) -> Tensor:
    """P_ij = exp(S_ij - L_i) of one tile, float32 [Bq, Bkv], from the integers that the forward pass multiplied.

    q_hat, k_hat int8 [Bq, D], [Bkv, D] and their scales s_q, s_k, float32 []: Q ~ s_q Q^, and K - mean(K) ~ s_k K^.
    query float32 [Bq, D], unquantised. key_mean float32 [1, D], mean(K). c = 1/sqrt(D).
    log_sum_exp float32 [Bq, 1]: the forward pass added c Q mean(K), with the unquantised Q, to that of its scores.

    >>> q_hat, k_hat = torch.tensor([[100]], dtype=torch.int8), torch.tensor([[50], [-50]], dtype=torch.int8)
    >>> s_q, s_k, query, key_mean = torch.tensor(0.01), torch.tensor(0.02), torch.ones(1, 1), torch.full((1, 1), 2.0)
    >>> log_sum_exp = torch.tensor([[3.0, 1.0]]).logsumexp(-1, keepdim=True)  # S is 1 and -1; 2 was added to each
    >>> matched_tile(q_hat, s_q, k_hat, s_k, query, key_mean, log_sum_exp)
    tensor([[0.8808, 0.1192]])
    """
    ### SOLUTION: exp of INT8's scores minus an L that fits them
    c = query.shape[-1] ** -0.5
    s_ij = (q_hat.int() @ k_hat.int().mT).float() * (s_q * s_k * c)
    l_i = log_sum_exp - c * query @ key_mean.mT
    return torch.exp(s_ij - l_i)


def row_sums(
    q_hat: Tensor,
    s_q: Tensor,
    k_hat: Tensor,
    s_k: Tensor,
    query: Tensor,
    key_mean: Tensor,
    log_sum_exp: Tensor,
    block: int,
) -> Tensor:
    """The row sums of P over all keys, float32 [Bq, 1], tile by tile: what a training run should log.

    They are 1 if L belongs to the scores, whatever was rounded. k_hat int8 [Nk, D] is cut into tiles of `block` keys,
    of which the last may have fewer; s_k float32 has one scale for each. Everything else as in `matched_tile`.

    >>> q_hat, k_hat = torch.ones(1, 1, dtype=torch.int8), torch.zeros(3, 1, dtype=torch.int8)  # every score is 0
    >>> one = torch.ones(1, 1)
    >>> row_sums(q_hat, torch.tensor(1.0), k_hat, torch.ones(2), one, 0 * one, 0 * one, block=2)  # with a wrong L, 0
    tensor([[3.]])
    """
    total = torch.zeros_like(log_sum_exp)
    for j, start in enumerate(range(0, len(k_hat), block)):
        ### SOLUTION: add the sums of this tile's rows
        tile = matched_tile(q_hat, s_q, k_hat[start : start + block], s_k[j], query, key_mean, log_sum_exp)
        total += tile.sum(-1, keepdim=True)
    return total
