"""The backward pass, one tile at a time."""

import math

import torch
from torch import Tensor


def tiles(length: int, block: int) -> list[slice]:
    """[0, block), [block, 2 block), ... up to length; the last may be partial. (Given.)"""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """psi(X) with one scale for all of x: int8 values and a float32 scale, 0-dimensional. (Given: exercise 01.)"""
    x = x.float()
    scale = x.abs().amax() / 127
    return torch.round(x / torch.where(scale > 0, scale, 1)).to(torch.int8), scale


def scaled_matmul(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """MM(A^, B^) s_A s_B of two results of `quantize`: float32 [M, N]. (Given: exercise 02.)"""
    (a_values, a_scale), (b_values, b_scale) = a, b
    return (a_values.int() @ b_values.int()) * a_scale * b_scale


def transposed(a: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The transpose of a result of `quantize`. (Given.)"""
    values, scale = a
    return values.mT, scale


def recompute_probabilities(q_i: Tensor, k_j: Tensor, l_i: Tensor) -> Tensor:
    """P_ij = exp(S_ij - L_i), float32 [Bq, Bkv], where S_ij = c MM(Q^_i, K^_j) s_Q s_K as in the forward pass.

    q_i float16 [Bq, D], k_j float16 [Bkv, D], l_i float32 [Bq, 1]: the forward's log-sum-exp. c = 1/sqrt(D).

    >>> q_i, k_j = torch.zeros(1, 1, dtype=torch.float16), torch.ones(2, 1, dtype=torch.float16)
    >>> recompute_probabilities(q_i, k_j, torch.tensor([[math.log(4)]])).tolist()  # four keys, two of them elsewhere
    [[0.25, 0.25]]
    """
    ### SOLUTION: compute the INT8 scores, then P from L
    s_ij = scaled_matmul(quantize(q_i), transposed(quantize(k_j))) / math.sqrt(q_i.shape[-1])
    return torch.exp(s_ij - l_i)


def backward_tile(
    q_i: Tensor, k_j: Tensor, v_j: Tensor, do_i: Tensor, l_i: Tensor, delta_i: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What tile (i, j) adds to dQ_i, dK_j and dV_j.

    q_i, do_i float16 [Bq, D], k_j, v_j float16 [Bkv, D], l_i, delta_i float32 [Bq, 1]
    -> dq float32 [Bq, D], dk float32 [Bkv, D], dv float32 [Bkv, D].

    dV_j += MM(P^^T, dO^) s_P s_dO
    dP = dO V^T from the float16 inputs as they are, summed in float32; dS = P * (dP - delta), P not rounded
    dQ_i += c MM(dS^, K^) s_dS s_K
    dK_j += c MM(dS^^T, Q^) s_dS s_Q
    Every psi has one scale per block.

    >>> one = torch.ones(1, 1, dtype=torch.float16)
    >>> l_i, delta_i = torch.full((1, 1), 1 + math.log(2)), torch.full((1, 1), 1.0)  # P = 1/2, dP = 4, dS = 3/2
    >>> [round(x.item(), 4) for x in backward_tile(one, one, 2 * one, 2 * one, l_i, delta_i)]
    [1.5, 1.5, 1.0]
    """
    c = 1 / math.sqrt(q_i.shape[-1])
    p_ij = recompute_probabilities(q_i, k_j, l_i)  # [Bq, Bkv]
    ### SOLUTION: compute dV, dP and dS, then dQ and dK
    dv = scaled_matmul(transposed(quantize(p_ij)), quantize(do_i))
    dp_ij = do_i.float() @ v_j.float().mT
    ds_hat = quantize(p_ij * (dp_ij - delta_i))
    dq = scaled_matmul(ds_hat, quantize(k_j)) * c
    dk = scaled_matmul(transposed(ds_hat), quantize(q_i)) * c
    return dq, dk, dv


def backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor, block_q: int,
    block_kv: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV float32, for keys that are smoothed already (log_sum_exp belongs to their scores).

    grad_output, query, output float16 [Nq, D], key, value float16 [Nk, D], log_sum_exp float32 [Nq].
    The last tile of queries and of keys may be partial.

    One key and value 1, one query 0, dO = 2: O = 1, L = 0, P = 1, dP = delta = 2, so dS = 0 and only dV is left.

    >>> one = torch.ones(1, 1, dtype=torch.float16)
    >>> [x.item() for x in backward(2 * one, 0 * one, one, one, one, torch.zeros(1), block_q=64, block_kv=64)]
    [0.0, 0.0, 2.0]
    """
    delta = (grad_output.float() * output.float()).sum(-1, keepdim=True)  # [Nq, 1]
    ### SOLUTION: go over all tiles and add up their shares
    dq, dk, dv = (torch.zeros(x.shape) for x in (query, key, value))
    for columns in tiles(key.shape[0], block_kv):
        for rows in tiles(query.shape[0], block_q):
            dq_i, dk_j, dv_j = backward_tile(
                query[rows], key[columns], value[columns], grad_output[rows], log_sum_exp[rows, None], delta[rows]
            )
            dq[rows] += dq_i
            dk[columns] += dk_j
            dv[columns] += dv_j
    return dq, dk, dv
