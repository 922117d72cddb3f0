"""SoftTop-k and its gradient."""

import torch
from torch import Tensor


class SoftTopK(torch.autograd.Function):
    """soft_top_k as an operation with a gradient of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, count: int, temperature: float) -> Tensor:
        """s [..., n] of x [..., n], in the dtype of x, computed in it. Each row sums to `count`."""
        ### SOLUTION: bisect lambda row by row, keep what the backward pass needs in ctx
        logits = x / temperature
        # With lambda at the lower end every term is at most count / n, at the upper end at least.
        share = torch.tensor(count / x.shape[-1], dtype=x.dtype).logit()
        lower, upper = share - logits.amax(-1, keepdim=True), share - logits.amin(-1, keepdim=True)
        for _ in range(80):
            middle = (lower + upper) / 2
            too_much = torch.sigmoid(logits + middle).sum(-1, keepdim=True) > count
            lower, upper = torch.where(too_much, lower, middle), torch.where(too_much, middle, upper)
        soft = torch.sigmoid(logits + (lower + upper) / 2)
        ctx.save_for_backward(soft)
        ctx.temperature = temperature
        return soft

    @staticmethod
    def backward(ctx, grad_soft: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x, [..., n], from that of s; None for count and temperature.

        A row whose s are all exactly 0 or 1 has gradient 0.
        """
        ### SOLUTION: derive the gradient from the constraint, sum(s) = count, and compute it
        (soft,) = ctx.saved_tensors
        w = soft * (1 - soft)
        total = w.sum(-1, keepdim=True)
        shared = (w * grad_soft).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
        return w * (grad_soft - shared) / ctx.temperature, None, None


def soft_top_k(x: Tensor, count: int, temperature: float) -> Tensor:
    """sigmoid(x / temperature + lambda) with rows (last axis) that sum to `count`, 0 < count < n. Differentiable.

    >>> soft_top_k(torch.tensor([[0.1, -0.1], [5.0, 5.0]]), 1, 0.1)  # sigmoid(1), sigmoid(-1)
    tensor([[0.7311, 0.2689],
            [0.5000, 0.5000]])
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> torch.autograd.grad(soft_top_k(x, 1, 0.5), x, torch.tensor([[1.0, 0.0]]))[0]  # of s_0 alone
    tensor([[ 0.2500, -0.2500]])
    """
    return SoftTopK.apply(x, count, temperature)
