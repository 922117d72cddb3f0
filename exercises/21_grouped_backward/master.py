"""The backward pass by hand, with shared keys."""

import torch
from torch import Tensor


def attention_backward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ [H, N, D], dK and dV [Hkv, N, D] of causal attention, without autograd.

    query, output, grad_output float32 [H, N, D]; key, value float32 [Hkv, N, D]; log_sum_exp float32 [H, N, 1], over
    the keys that a query sees. Query i sees the keys 0 to i. Query head h uses key head h // (H / Hkv). c = 1/sqrt(D).

    >>> one = torch.ones(2, 1, 1)  # two query heads share a key head; one token, so P is 1
    >>> attention_backward(one, one[:1], one[:1], one, one, 3 * one)
    (tensor([[[0.]],
    <BLANKLINE>
            [[0.]]]), tensor([[[0.]]]), tensor([[[6.]]]))
    """
    group, n, c = query.shape[0] // key.shape[0], query.shape[1], query.shape[2] ** -0.5
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    ### SOLUTION: P again, from L; then delta, dS and the three products; a key head adds up what its query heads give
    k, v = (x.repeat_interleave(group, 0) for x in (key, value))
    p = torch.exp(c * query @ k.mT - log_sum_exp).masked_fill(~visible, 0)
    delta = (grad_output * output).sum(-1, keepdim=True)
    ds = p * (grad_output @ v.mT - delta)
    dk, dv = c * ds.mT @ query, p.mT @ grad_output
    return c * ds @ k, dk.unflatten(0, (-1, group)).sum(1), dv.unflatten(0, (-1, group)).sum(1)


def bytes_kept(heads: int, kv_heads: int, n: int, head_dim: int) -> int:
    """How many bytes that backward pass needs from the forward pass: Q, K, V and O in 16 bit, L in float32.

    >>> bytes_kept(heads=2, kv_heads=1, n=1, head_dim=4)
    56
    """
    ### SOLUTION: two bytes a number, four for each L
    return 2 * (2 * heads + 2 * kv_heads) * n * head_dim + 4 * heads * n
