"""Notebook 11: SLA2's router, SoftTop-k and its gradient, a soft mask in the softmax, stage 1's loss."""

from functools import partial

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws


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


def value_and_gradient(function, hard, x):
    """Return the value of a stand-in for the hard mask, and the gradient of x, the soft mask."""
    x = x.requires_grad_()
    found = function(hard, 1 * x)
    direction = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        return found, torch.zeros_like(x)
    return found.detach(), torch.autograd.grad((found * direction).sum(), x)[0]


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


GAPS = {
    "router_logits": Gap(router_logits, lambda: [(*_draw(0, (2, 3, 4), (2, 6, 4), (4, 4), (4, 4)), 0.5)], (
        Mistake("q_bar @ w_q.mT", "q_bar @ w_q", "proj(x) = W x is for a column. For rows it is x W^T."),
        Mistake("k_bar @ w_k.mT", "k_bar @ w_k", "proj(x) = W x is for a column. For rows it is x W^T."),
        Mistake("(q_bar @ w_q.mT) @ (k_bar @ w_k.mT).mT", "(q_bar @ w_q) @ (k_bar @ w_k).mT",
                "proj(x) = W x is for a column. For rows it is x W^T."),
        Mistake("c * (q_bar @ w_q.mT) @ (k_bar @ w_k.mT).mT",
                "torch.softmax(c * (q_bar @ w_q.mT) @ (k_bar @ w_k.mT).mT, -1)",
                "These are probabilities. Logits come before the softmax."),
        Mistake("(q_bar @ w_q.mT) @ (k_bar @ w_k.mT).mT", "(w_q @ q_bar) @ (w_k @ k_bar).mT",
                "proj(x) = W x is for a column. Your means are rows: x W^T."),
        Mistake("(q_bar @ w_q.mT) @ (k_bar @ w_k.mT).mT", "(w_q @ q_bar.mT) @ (w_k @ k_bar.mT).mT",
                "These are columns now, [D, blocks]. Stay with rows: x W^T is [blocks, D]."),
    )),
    "find_shift": Gap(find_shift, _rows, (
        Mistake("low = torch.where(too_much, low, middle)\n        high = torch.where(too_much, middle, high)",
                "low = torch.where(too_much, middle, low)\n        high = torch.where(too_much, high, middle)",
                "If the row sums to too much, lambda must fall: the middle becomes the new upper end."),
        Mistake("sum(-1, keepdim=True)", "mean(-1, keepdim=True)", "The row must sum to `count`; you took its mean."),
        Mistake("torch.sigmoid(scaled + middle)", "torch.softmax(scaled + middle, -1)",
                "A softmax sums to 1 for every lambda. SoftTop-k has a sigmoid for each block."),
        Mistake("too_much, low, middle)", "too_much, middle, low)",
                "This runs to the upper end. Is the middle tried, and does `low` stay where it is too much?"),
        Mistake("torch.sigmoid(scaled + middle)", "torch.sigmoid(scaled)",
                "Which lambda do you try? It is the middle."),
        Mistake("scaled + middle", "middle", "The sum is over the blocks of a row: where are their scores?"),
    )),
    "soft_top_k_backward": Gap(soft_top_k_backward, _soft_masks, (
        Mistake("(grad_soft - shared)", "grad_soft", "That holds lambda fixed, but lambda moves with every score."),
        Mistake("grad_soft - shared", "grad_soft + shared", "d lambda has a minus: what one gains, the others lose."),
        Mistake("w * (grad_soft - shared) / tau", "w * grad_soft / tau - shared",
                "w multiplies d lambda, too: first subtract, then multiply."),
        Mistake("(w * grad_soft).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)", "grad_soft.mean(-1, keepdim=True)",
                "The mean is weighted, by w."),
        Mistake("(w * grad_soft).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)",
                "(soft * grad_soft).sum(-1, keepdim=True) / soft.sum(-1, keepdim=True)",
                "The weights of the mean are w = s (1 - s), not s."),
        Mistake("(w * grad_soft).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)", "(w * grad_soft).sum() / w.sum()",
                "Every row has its own lambda."),
        Mistake("w * (grad_soft - shared) / tau", "w * (grad_soft / tau - shared)",
                "d lambda, too, is divided by tau."),
        Mistake("(w * grad_soft).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)",
                "(w * grad_soft).sum(-1) / w.sum(-1)", "One number per row, [..., 1]: keepdim=True in both sums."),
        Mistake("soft * (1 - soft)", "soft", "The derivative of a sigmoid s is s (1 - s)."),
        Mistake("/ w.sum(-1, keepdim=True)", "/ w.shape[-1]", "The mean is weighted: divide by the sum of w."),
    )),
    "weighted_attention": Gap(weighted_attention, _weighted_scores, (
        Mistake("m * torch.exp(s - s.amax(-1, keepdim=True))", "torch.exp(s * m - (s * m).amax(-1, keepdim=True))",
                "That is softmax(S * M), the other reading: at M = 0 it leaves a key the weight e^0."),
        Mistake("s - s.amax(-1, keepdim=True)", "s",
                "Right on paper, but e^800 is infinite: subtract first, as in a softmax."),
        Mistake("s.amax(-1, keepdim=True)", "s.max()",
                "Each row subtracts its own largest score, or a row far below is 0 / 0."),
        Mistake("p = m * torch.exp(s - s.amax(-1, keepdim=True))", "p = torch.exp(m * (s - s.amax(-1, keepdim=True)))",
                "M weighs the exponential, so it stands in front of it."),
        Mistake("p / p.sum(-1, keepdim=True) @ v", "p @ v / p.sum()", "Each row is divided by its own sum."),
        Mistake("p / p.sum(-1, keepdim=True) @ v", "p @ v / m.sum(-1, keepdim=True)",
                "Divide by the sum of the weights p, which contain M and the exponentials."),
        Mistake("p = m * ", "p = m.exp() * ", "A weight M in front of e^S is log M added to S, not M."),
        Mistake("p / p.sum(-1, keepdim=True) @ v", "p @ v", "The weights of a row must sum to one."),
        Mistake("m * torch.exp(s - s.amax(-1, keepdim=True))\n    return p / p.sum(-1, keepdim=True) @ v",
                "m * torch.softmax(s, -1)\n    return p @ v",
                "Normalise after weighing, not before."),
        Mistake("p = m * ", "p = (m > 0.5) * ", "The mask is soft: its values are the weights."),
    )),
    "stage_1_loss": Gap(stage_1_loss, _branches, (
        Mistake("alpha * o_s + (1 - alpha) * o_l", "o_s + o_l", "The branches are mixed by alpha."),
        Mistake("alpha * o_s + (1 - alpha) * o_l", "(1 - alpha) * o_s + alpha * o_l", "alpha is the weight of O_s."),
        Mistake("(mixed - o).square().sum() / o.square().sum()", "(mixed - o).square().mean()",
                "The loss is relative to the squared length of O."),
        Mistake("/ o.square()", "/ mixed.square()", "The loss is relative to O, which the layer should give."),
        Mistake("(mixed - o).square().sum() / o.square().sum()",
                "((mixed - o).square().sum(-1) / o.square().sum(-1)).mean()",
                "Take one quotient of two sums over all entries, not one for each query."),
        Mistake("(mixed - o).square().sum() / o.square().sum()", "((mixed - o) / o).square().sum()",
                "Entries of O near 0 then count most. Divide one sum by the other."),
        Mistake("o.square().sum()", "o.sum().square()", "First square each entry of O, then sum."),
        Mistake("(mixed - o).square().sum() / o.square().sum()", "(mixed - o).abs().sum() / o.abs().sum()",
                "The lengths are squared: take squares, not absolute values."),
        Mistake(" / o.square().sum()", "", "The loss is relative to the squared length of O."),
    )),
    "straight_through": Gap(straight_through, _hard_and_soft, (
        Mistake("hard + (soft - soft.detach())", "soft", "The value must be the hard mask's."),
        Mistake("hard + (soft - soft.detach())", "hard", "The value is right, but no gradient arrives."),
        Mistake("(soft - soft.detach())", "(soft.detach() - soft)",
                "The value is right; the gradient has the wrong sign."),
        Mistake("hard + (soft - soft.detach())", "soft.detach()", "Hard and soft have changed places."),
        Mistake("hard + (soft - soft.detach())", "hard * soft / soft.detach()",
                "The gradient must go to soft unchanged, at unselected blocks, too."),
        Mistake("hard + (soft - soft.detach())", "(soft > 0.5).to(soft.dtype)",
                "The hard mask is given. And a comparison has no gradient."),
        Mistake("hard + (soft - soft.detach())", "hard * soft", "The value must be the hard mask's, 0 or 1."),
        Mistake(" - soft.detach()", "",
                "The value is hard + soft: take the soft value away again, without its gradient."),
    ), value_and_gradient),
}  # fmt: skip
