"""Online softmax with P in INT8."""

import math

import torch
from torch import Tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """psi(X) with one scale for all of x: int8 values and a float32 scale, 0-dimensional. (Given: exercise 01.)"""
    scale = x.abs().amax() / 127
    return torch.round(x / torch.where(scale > 0, scale, 1)).to(torch.int8), scale


def integer_matmul(a: Tensor, b: Tensor) -> Tensor:
    """int8 [M, K] x int8 [K, N] -> int32 [M, N], exactly. (Given: exercise 02.)"""
    return a.int() @ b.int()


def probabilities(s_ij: Tensor, m_new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P~ = exp(S - m_new) of one tile as INT8, one scale per row, and its row sums before rounding.

    s_ij float32 [Bq, Bkv], m_new float32 [Bq, 1], finite, at least the row's maximum
    -> values int8 [Bq, Bkv], scale float32 [Bq, 1], row_sum float32 [Bq, 1].

    scale = exp(rowmax(S) - m_new) / 127, so that the largest entry of every row becomes 127.
    A row of s_ij may be -inf throughout (no key of this tile is visible), or so far below m_new that its scale
    underflows: its values are 0 then, not NaN.

    >>> s_ij = torch.tensor([[0.0, math.log(0.2)]])
    >>> values, scale, row_sum = probabilities(s_ij, torch.tensor([[math.log(2.0)]]))  # P~ = 0.5, 0.1
    >>> values.tolist(), round(127 * scale.item(), 4), round(row_sum.item(), 4)
    ([[127, 25]], 0.5, 0.6)
    """
    ### SOLUTION: compute P~, its row sums, the scale of each row, and the integers
    p = torch.exp(s_ij - m_new)
    scale = torch.exp(s_ij.amax(-1, keepdim=True) - m_new) / 127
    divisor = torch.where(scale < torch.finfo(scale.dtype).tiny, 1, scale)
    return torch.round(p / divisor).to(torch.int8), scale, p.sum(-1, keepdim=True)


def online_step(
    m: Tensor, l: Tensor, o: Tensor, s_ij: Tensor, v_values: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, O) after one more tile of keys. O is not divided by l yet.

    m, l float32 [Bq, 1], o float32 [Bq, D], s_ij float32 [Bq, Bkv], v_values int8 [Bkv, D], v_scale float32 [].

    m_new = max(m, rowmax(S)); l and O are brought from the old maximum to the new one by exp(m - m_new), then the
    tile's share is added: row_sum to l, the integer product of P and V with its two scales to O.

    >>> state = torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), 4.0)  # one key with score 0 and value 4
    >>> m, l, o = online_step(*state, torch.full((1, 1), math.log(2)), *quantize(torch.full((1, 1), 8.0)))
    >>> [round(x.item(), 4) for x in (m, l, o)]  # log(2), 1/2 + 1, 4/2 + 8
    [0.6931, 1.5, 10.0]
    """
    ### SOLUTION: move l and O to the new maximum and add this tile's share
    m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
    p_values, p_scale, row_sum = probabilities(s_ij, m_new)
    rescale = torch.exp(m - m_new)
    return m_new, rescale * l + row_sum, rescale * o + integer_matmul(p_values, v_values) * p_scale * v_scale


def online_softmax(scores: Tensor, value: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """O = softmax(S) V and L = log-sum-exp of each row of S, tile by tile over `block` keys.

    scores float32 [Nq, Nk] (-inf where masked; every row has a finite score in the first tile), value float32 [Nk, D]
    -> output float32 [Nq, D], L float32 [Nq]. V is quantised per block of keys, P as above.

    >>> output, log_sum_exp = online_softmax(torch.tensor([[-300.0, -300.0]]), torch.tensor([[1.0], [5.0]]), block=1)
    >>> round(output.item(), 4), round(log_sum_exp.item(), 4)  # (1 + 5) / 2 and -300 + log(2)
    (3.0, -299.3069)
    """
    ### SOLUTION: start the state, take a step for each block of keys, and normalise
    m = torch.full((scores.shape[0], 1), -math.inf)
    l = torch.zeros(scores.shape[0], 1)
    o = torch.zeros(scores.shape[0], value.shape[1])
    for start in range(0, scores.shape[1], block):
        keys = slice(start, start + block)
        m, l, o = online_step(m, l, o, scores[:, keys], *quantize(value[keys]))
    return o / l, (m + torch.log(l)).squeeze(-1)
