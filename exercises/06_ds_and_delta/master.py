"""dS and the delta trick."""

import math

import torch
from torch import Tensor


def delta(grad_output: Tensor, output: Tensor) -> Tensor:
    """delta = rowsum(dO * O), in float32: products and sums.

    grad_output, output float16 [N, D] -> float32 [N, 1].

    >>> x = torch.full((1, 2), 1e-4, dtype=torch.float16)  # 1e-4 squared is below the smallest float16
    >>> f"{delta(x, x).item():.1e}"
    '2.0e-08'
    """
    ### SOLUTION: multiply and sum in float32
    return (grad_output.float() * output.float()).sum(-1, keepdim=True)


def matching_delta(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, log_sum_exp: Tensor, block: int
) -> Tensor:
    """The same number the long way: rowsum(P * dP), over tiles of `block` keys, float32 [N, 1].

    query, key, value, grad_output float16 [N, D], log_sum_exp float32 [N].
    P_ij = exp(S_ij - L_i) with S = c Q K^T, dP = dO V^T, all from the float16 inputs, in float32. c = 1/sqrt(D).

    With exact attention it equals `delta`. If O or L carries a rounding error the two differ: this one belongs to the
    P and dP of the backward pass, so that rows of dS sum to 0. Its price is this loop, before the real one.

    >>> q, k, v = (torch.tensor(x, dtype=torch.float16) for x in ([[0.0]], [[1.0], [1.0]], [[2.0], [4.0]]))
    >>> matching_delta(q, k, v, torch.ones_like(q), torch.tensor([math.log(2)]), block=1).item()  # (2 + 4) / 2
    3.0
    """
    c = 1 / math.sqrt(query.shape[-1])
    total = torch.zeros(query.shape[0], 1)
    for start in range(0, key.shape[0], block):
        k_j, v_j = key[start : start + block], value[start : start + block]  # [Bkv, D]
        ### SOLUTION: add this tile's share of rowsum(P * dP)
        p = torch.exp(query.float() @ k_j.float().mT * c - log_sum_exp[:, None])  # [N, Bkv]
        dp = grad_output.float() @ v_j.float().mT
        total += (p * dp).sum(-1, keepdim=True)
    return total


def grad_scores_tile(p_ij: Tensor, v_j: Tensor, do_i: Tensor, delta_i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One tile of dS = P * (dP - delta), and psi of it: INT8 values and one scale.

    p_ij float32 [Bq, Bkv], v_j, do_i float16 [Bkv, D], [Bq, D], delta_i float32 [Bq, 1]
    -> ds float32 [Bq, Bkv], values int8 [Bq, Bkv], scale float32 [].

    "dP in 16 bit" means that the *inputs* of the product, dO and V, are 16 bit and not INT8. The sums over D and the
    difference dP - delta are float32, and so is the scale: dS can be as small as 1e-7. A tile of zeros has scale 0.

    >>> p, v = torch.full((1, 2), 0.5), torch.tensor([[2.0], [4.0]], dtype=torch.float16)
    >>> ds, values, scale = grad_scores_tile(p, v, torch.ones(1, 1, dtype=torch.float16), torch.tensor([[3.0]]))
    >>> ds.tolist(), values.tolist(), round(127 * scale.item(), 4)
    ([[-0.5, 0.5]], [[-127, 127]], 0.5)
    """
    ### SOLUTION: compute dP, dS and psi(dS)
    dp = do_i.float() @ v_j.float().mT
    ds = p_ij * (dp - delta_i)
    scale = ds.abs().amax() / 127
    return ds, torch.round(ds / torch.where(scale > 0, scale, 1)).to(torch.int8), scale
