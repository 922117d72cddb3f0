"""Notebook 11: SLA2's router, SoftTop-k and its gradient, a soft mask in the softmax, stage 1's loss."""

from functools import partial

import torch

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes


def router_logits(q_bar, k_bar, w_q, w_k, c):
    return c * (q_bar @ w_q.mT) @ (k_bar @ w_k.mT).mT


def find_shift(scaled, count):
    low, high = -20 - scaled.amax(-1, keepdim=True), 20 - scaled.amin(-1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        too_much = torch.sigmoid(scaled + middle).sum(-1, keepdim=True) > count
        low = torch.where(too_much, low, middle)
        high = torch.where(too_much, middle, high)
    return middle


def soft_top_k_backward(soft, grad_soft, tau):
    w = soft * (1 - soft)
    shared = (w * grad_soft).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)
    return w * (grad_soft - shared) / tau


def weighted_attention(s, m, v):
    p = m * torch.exp(s - s.amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True) @ v


def stage_1_loss(o_s, o_l, alpha, o):
    mixed = alpha * o_s + (1 - alpha) * o_l
    return (mixed - o).square().sum() / o.square().sum()


def straight_through(hard, soft):
    return hard + (soft - soft.detach())


def with_gradients(*places):
    """Return run(function, *inputs) -> the function's value, and the gradients of the inputs at these places."""

    def run(function, *inputs):
        leaves = [inputs[i].requires_grad_() for i in places]
        found = function(*(1 * x if i in places else x for i, x in enumerate(inputs)))
        if not isinstance(found, torch.Tensor) or not found.requires_grad:
            return found, *map(torch.zeros_like, leaves)
        direction = torch.linspace(1, 2, found.numel(), dtype=found.dtype).view(found.shape)
        gradients = torch.autograd.grad((found * direction).sum(), leaves, allow_unused=True, materialize_grads=True)
        return found.detach(), *gradients

    return run


_draw = partial(draws, dtype=torch.float64)


def _rows() -> list[tuple]:
    (x,) = _draw(1, (3, 8))
    return [(x, 2), (30 * x, 3), (x + 50, 1), (x, 0.5)]


def _soft_masks() -> list[tuple]:
    x, grad_soft = _draw(2, (3, 8), (3, 8))
    return [(torch.sigmoid(2 * x), grad_soft, 0.1), (torch.sigmoid(x), grad_soft, 1.0)]


def _weighted_scores() -> list[tuple]:
    s, m, v = _draw(3, (3, 8), (3, 8), (8, 4))
    hard = (m > 0).double()
    hard[:, 0] = 1
    far_apart = torch.tensor([[800.0], [0.0], [-800.0]], dtype=s.dtype)  # e^800 is infinite, e^-800 is zero
    return [(2 * s, torch.sigmoid(m), v), (2 * s + 5, hard, v), (2 * s + far_apart, torch.sigmoid(m), v)]


def _branches() -> list[tuple]:
    o_s, o_l, alpha, o = _draw(4, (2, 8, 4), (2, 8, 4), (2, 1, 1), (2, 8, 4))
    return [(o_s, o_l, torch.sigmoid(alpha), o)]


def _hard_and_soft() -> list[tuple]:
    hard, x = _draw(5, (3, 8), (3, 8))
    return [((hard > 0).double(), torch.sigmoid(x))]


GAPS = with_mistakes(
    __file__,
    {
        "router_logits": Gap(router_logits, lambda: [(*_draw(0, (2, 3, 4), (2, 6, 4), (4, 4), (4, 4)), 0.3)]),
        "find_shift": Gap(find_shift, _rows),
        "soft_top_k_backward": Gap(soft_top_k_backward, _soft_masks),
        "weighted_attention": Gap(weighted_attention, _weighted_scores),
        "stage_1_loss": Gap(stage_1_loss, _branches, run=with_gradients(0, 1, 2)),
        "straight_through": Gap(straight_through, _hard_and_soft, run=with_gradients(1)),
    },
)
