"""Q-smoothing and the missing branch of dK."""

import math

import torch
from torch import Tensor


def tiles(length: int, block: int) -> list[slice]:
    """[0, block), [block, 2 block), ... up to length; the last may be partial. (Given.)"""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def fake_quantize(x: Tensor) -> Tensor:
    """psi as floats: s round(X / s) with one scale s = max|X| / 127 for all of x. (Given: exercise 01.)"""
    scale = x.abs().amax() / 127
    return scale * torch.round(x / scale) if scale > 0 else x


def smooth_query(query: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Q_sm = Q - mu_Q and mu_Q, the mean of each block of `block` queries; the last block may be partial.

    query float32 [N, D] -> q_smooth [N, D], q_mean [ceil(N / block), D]: one row per block.

    >>> q_smooth, q_mean = smooth_query(torch.tensor([[1.0], [3.0], [10.0]]), block=2)
    >>> q_smooth.tolist(), q_mean.tolist()
    ([[-1.0], [1.0], [0.0]], [[2.0], [10.0]])
    """
    ### SOLUTION: compute the mean of each block and subtract it
    q_mean = torch.stack([query[rows].mean(0) for rows in tiles(query.shape[0], block)])
    return query - q_mean.repeat_interleave(block, 0)[: query.shape[0]], q_mean


def scores(query: Tensor, key: Tensor, block: int) -> Tensor:
    """S = c Q K^T from smoothed queries, tile by tile, float32 [Nq, Nk]. c = 1/sqrt(D).

    query float32 [Nq, D], key float32 [Nk, D].
    S_ij = c psi(Q_sm,i) psi(K_j)^T + c 1 (mu_Q,i K_j^T): the first product in INT8 with one scale per block, the
    second in float32 from the keys as they are. Query and key blocks have the same size.

    >>> query, key = torch.tensor([[4.0], [6.0]]), torch.tensor([[1.0], [-1.0]])
    >>> scores(query, key, block=2).tolist()  # mu_Q = 5, Q_sm = -1, 1
    [[4.0, -4.0], [6.0, -6.0]]
    """
    c = 1 / math.sqrt(query.shape[-1])
    s = torch.empty(query.shape[0], key.shape[0])
    q_smooth, q_mean = smooth_query(query, block)
    for i, rows in enumerate(tiles(query.shape[0], block)):
        for columns in tiles(key.shape[0], block):
            ### SOLUTION: fill this tile of S: the INT8 product and the mean's product
            k_j = key[columns]  # [Bkv, D]
            s[rows, columns] = c * (fake_quantize(q_smooth[rows]) @ fake_quantize(k_j).mT + q_mean[i] @ k_j.mT)
    return s


def grad_key(grad_scores: Tensor, query: Tensor, block: int) -> Tensor:
    """dK = c dS^T Q when the scores were computed from smoothed queries: both branches, float32 [Nk, D].

    grad_scores float32 [Nq, Nk], query float32 [Nq, D] (not smoothed yet).
    For key block j, summed over the query blocks i:
        c psi(dS_ij)^T psi(Q_sm,i)      the first branch, in INT8: one scale per tile of dS, one per block of Q
        c (dS_ij^T 1) mu_Q,i^T          the second: column sums of dS as it is, times the mean of *its* query block

    >>> ds, query = torch.tensor([[1.0, -1.0], [1.0, -1.0]]), torch.tensor([[4.0], [6.0]])
    >>> grad_key(ds, query, block=2).tolist()  # first branch: 0; second: 2 * 5 and -2 * 5
    [[10.0], [-10.0]]
    """
    c = 1 / math.sqrt(query.shape[-1])
    dk = torch.zeros(grad_scores.shape[1], query.shape[1])
    q_smooth, q_mean = smooth_query(query, block)
    for i, rows in enumerate(tiles(query.shape[0], block)):
        for columns in tiles(grad_scores.shape[1], block):
            ds_ij = grad_scores[rows, columns]  # [Bq, Bkv]
            ### SOLUTION: add both branches of this tile
            dk[columns] += c * fake_quantize(ds_ij).mT @ fake_quantize(q_smooth[rows])
            dk[columns] += c * torch.outer(ds_ij.sum(0), q_mean[i])
    return dk
