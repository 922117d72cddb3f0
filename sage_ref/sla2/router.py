"""SLA2's learnable router: which blocks get softmax attention, and how that choice is trained (arXiv 2602.12675).

Blocks are scored by proj_q(Qbar) proj_k(Kbar)^T, with Qbar, Kbar the means of blocks of queries and of smoothed keys.
Hard Top-k keeps the largest k% of each row (`top_blocks`), and has no gradient. In training SoftTop-k replaces it:

SoftTop-k(x)_ij = sigmoid(x_ij / tau + lambda_i),  lambda_i such that row i sums to as many blocks as Top-k keeps.

The paper prints two arguments of SoftTop-k, both with tau = 0.1: the scores themselves (`EQUATIONS_16_17`), and in
Algorithm 2, line 8, P_c = softmax(c scores) (`PRINTED`). Hard Top-k chooses the same blocks by either, but SoftTop-k
doesn't give them the same weights. Among more than a hundred blocks P_c is tiny, so the mask of Algorithm 2 is nearly
flat. If a soft M weighs e^S, as `branches` reads softmax(S * M), a flat M cancels: the loss is near 0 whatever the hard
mask would choose, and alpha ends far too large for it. If M multiplies S it does not cancel, and stage 1 does not learn
either. Of the two printed forms only this one cheats. The scores don't shrink with the number of blocks, so the mask of
Eq. 16-17 is nearly hard, and its loss is nearly the error that the hard mask will have. Neither does log P_c shrink: it
is c scores up to a shift of each row that lambda absorbs. The default takes it, with tau = 1, and keeps the hard mask
in the forward pass, so that the loss is the hard mask's error at any temperature. On two captured layers of a video
model, with three seeds each, it ended 4% lower than Eq. 16-17 on a video that nothing was fitted to (train_router_cpu).
In a small video model, its loss was lower after both stages, in three seeds from one start (video_equations_h200).

With the identity for both projections this is SLA's heuristic router.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sage_ref.attention import softmax_scale
from sage_ref.checks import (
    check_choice,
    check_count,
    check_floating,
    check_reverse_mode,
    check_switches,
    check_temperature,
)
from sage_ref.derivatives import gradients_once
from sage_ref.shapes import called
from sage_ref.sla2.blocks import BlockSettings, router_means

SCORES = ("logits", "P_c", "log P_c")
# An unselected block's M in a straight-through mask: its gradient grows with 1/M where the mask misses a row's mass.
LEAST_WEIGHT = 1e-3
NARROW = 0.7  # from a bracket of this width on Newton's method is certain to converge
NEWTON_STEPS = 5


def top_blocks(scores: Tensor, count: int) -> Tensor:
    """Return bool, True for the `count` largest scores of each row; among equal scores the first block wins.

    scores [..., Tm, Tn]. count beyond Tn selects all. A NaN counts as larger than any number.
    """
    scores = scores + 0.0  # CUDA sorts -0 after 0
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)


class SoftTopK(torch.autograd.Function):
    """sigmoid(x / tau + lambda) with rows that sum to `count`, and its exact gradient.

    With w = s (1 - s), ds = (w dx - w (w . dx) / sum(w)) / tau: the second term is lambda's change, which preserves the
    row sum. The matrix is symmetric, so the gradient of x is the same formula with ds in place of dx.
    Returns s in the dtype of x and, without a gradient, in float64.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, count, temperature):
        logits = x.double() / temperature
        last_in, first_out = logits.topk(count + 1).values[..., -2:].split(1, -1)
        logits = logits - (last_in + first_out) / 2
        soft = torch.sigmoid(logits + row_shift(logits, count))
        return soft.to(x.dtype, copy=True), soft

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, ctx.temperature = inputs
        ctx.save_for_backward(output[1], x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad_soft, _):
        compute = partial(_soft_top_k_gradient, ctx.temperature)
        return *gradients_once("soft_top_k", compute, grad_soft, *ctx.saved_tensors), None, None


def row_shift(logits: Tensor, count: int) -> Tensor:
    """Return lambda [..., 1] such that rows of sigmoid(logits + lambda) sum to `count`, up to float64's last digits.

    logits [..., n], float64, zero in the middle between the last of the `count` largest and the first of the others.
    Then lambda is between -log(n - count) and log(count), whatever the temperature. Let k = count, and let the last of
    the largest be h above zero, the first of the others h below. At log(k) each of the k largest lacks at most
    1 / (1 + k e^h) of 1, and the next one alone is 1 / (1 + e^h / k), at least as much as they lack together: the row
    sums to k or more. At the lower end it sums to k or less, by the same argument. Bisection makes this bracket NARROW.
    Newton's method does the rest: a sigmoid's slope changes by a factor of at most e^d over a distance d, so an error
    e < NARROW / 2 becomes less than e^2 e^e / 2, and 4e-11 after four iterations.
    """
    n = logits.shape[-1]
    lowest, highest = -math.log(n - count), math.log(count)
    shift, half_width = torch.full_like(logits[..., :1], (lowest + highest) / 2), (highest - lowest) / 2
    while half_width > NARROW / 2:
        half_width /= 2
        excess = torch.sigmoid(logits + shift).sum(-1, keepdim=True) - count
        shift = shift - half_width * excess.sign()
    for _ in range(NEWTON_STEPS):
        soft = torch.sigmoid(logits + shift)
        slope = (soft * (1 - soft)).sum(-1, keepdim=True).clamp_min(torch.finfo(soft.dtype).tiny)
        step = (soft.sum(-1, keepdim=True) - count) / slope
        shift = shift - step.clamp(-half_width, half_width)  # where all are 0 or 1, the slope is too small to divide by
    return shift


def _soft_top_k_gradient(temperature, grad_soft, soft, x):
    """Return dx. x is an argument so that autograd knows that a second derivative would depend on it."""
    w = soft * (1 - soft)
    shared = (w * grad_soft).sum(-1, keepdim=True) / w.sum(-1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    return (((w * grad_soft - w * shared) / temperature).to(grad_soft.dtype),)


def soft_top_k(x: Tensor, count: int, temperature: float = 0.1) -> Tensor:
    """Compute SoftTop-k of x [..., Tn] along the last axis: numbers in (0, 1); each row sums to `count` within 1e-6.

    x is floating and finite. A `count` of Tn or more gives all ones. Differentiable once, in reverse mode.

    Raises:
        TypeError, ValueError: An argument does not fit: count >= 1, temperature in [1e-6, 3.4e38].
    """
    check_floating("x", x)
    check_reverse_mode(x=x)
    check_count("count", count)
    check_temperature(temperature)
    if x.dim() == 0:
        raise ValueError(f"x: expected at least 1 dimension, got shape {tuple(x.shape)}")
    return soft_top_k_of_checked(x, count, temperature)


def soft_top_k_of_checked(x: Tensor, count: int, temperature: float) -> Tensor:
    """Compute `soft_top_k` of arguments that fit."""
    if count >= x.shape[-1]:
        return torch.ones_like(x)
    soft, _ = SoftTopK.apply(x, count, temperature)
    return soft


@dataclass(frozen=True)
class Relaxation:
    """The stand-in for the hard mask while the router is fitted: SoftTop-k at a temperature.

    Args:
        scores: The argument of SoftTop-k: "logits", the product of Eq. 16 without softmax and without c; "P_c", with
            both, as in Algorithm 2; or "log P_c". All put blocks in the same order.
        temperature: In [1e-6, 3.4e38].
        straight_through: SoftTop-k gives the gradient alone; the forward pass takes the hard mask, with 0 raised to
            LEAST_WEIGHT, which bounds the gradient.

    Raises:
        TypeError, ValueError: A field does not fit; the message names it.
    """

    scores: str = "log P_c"
    temperature: float = 1.0
    straight_through: bool = True

    def __post_init__(self):
        check_choice("scores", self.scores, SCORES)
        check_temperature(self.temperature)
        check_switches(straight_through=self.straight_through)

    @property
    def name(self) -> str:
        return f"{'straight-through' if self.straight_through else 'soft'}, {self.scores} / {self.temperature:g}"

    def scores_of(self, logits: Tensor, scale: float) -> Tensor:
        """Return the argument of SoftTop-k from the router's logits [..., Tm, Tn], in which c is `scale`."""
        if self.scores == "logits":
            return logits / scale
        return logits.softmax(-1) if self.scores == "P_c" else logits.log_softmax(-1)

    def block_weights(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return M for the two branches and SoftTop-k, [..., Tm, Tn] each; rows of SoftTop-k sum to `count`."""
        soft = soft_top_k_of_checked(scores, count, self.temperature)
        if not self.straight_through:
            return soft, soft
        hard = top_blocks(scores.detach(), count).to(soft.dtype).clamp_min(LEAST_WEIGHT)
        return hard + (soft - soft.detach()), soft


EQUATIONS_16_17 = Relaxation("logits", 0.1, straight_through=False)
PRINTED = Relaxation("P_c", 0.1, straight_through=False)  # Algorithm 2, line 8


class IdentityAtFirst(nn.Linear):
    """A layer that starts as the identity, also where a model is made on "meta" and its layers are reset later."""

    def reset_parameters(self) -> None:
        super().reset_parameters()  # draws as many random numbers as any other layer
        nn.init.eye_(self.weight)


class Router(nn.Module):
    """Scores of key blocks for each query block. One pair proj_q, proj_k [D, D] for all heads starts at the identity.

    forward(query [..., Nq, D], key [..., Nk, D]) -> logits c proj_q(Qbar) proj_k(Kbar)^T, [..., Tm, Tn]. Their softmax
    is P_c; it puts the blocks of a row in the same order.
    """

    def __init__(self, head_dim: int, settings: BlockSettings):
        super().__init__()
        self.settings = settings
        self.proj_q = IdentityAtFirst(head_dim, head_dim, bias=False)
        self.proj_k = IdentityAtFirst(head_dim, head_dim, bias=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return router_logits(query, key, *self.matrices(query), self.settings)

    def matrices(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices [D, D] that proj_q and proj_k multiply by, on the device of query.

        They are what the layers make of the identity.
        """
        identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            return called(self.proj_q, identity).mT, called(self.proj_k, identity).mT

    def soft_choice(self, query: Tensor, key: Tensor, count: int, relaxation: Relaxation) -> tuple[Tensor, Tensor]:
        """Return a relaxation's M for the two branches, and SoftTop-k; differentiable in both projections."""
        check_reverse_mode(**dict(self.named_parameters()))  # SoftTop-k's gradient is written by hand
        c = softmax_scale(self.settings.scale, query.shape[-1])
        with torch.autocast(query.device.type, enabled=False):
            scores = relaxation.scores_of(self(query, key), c)
            return relaxation.block_weights(scores, count)


def router_logits(query: Tensor, key: Tensor, proj_q: Tensor, proj_k: Tensor, settings: BlockSettings) -> Tensor:
    """Compute c proj_q(Qbar) proj_k(Kbar)^T: query [..., Nq, D], key [..., Nk, D], proj [D, D] -> [..., Tm, Tn]."""
    q_bar, k_bar = router_means(query, key, settings)
    q_bar, k_bar = q_bar @ proj_q.to(query.dtype).mT, k_bar @ proj_k.to(key.dtype).mT
    return q_bar @ k_bar.mT * softmax_scale(settings.scale, query.shape[-1])


class Routing(NamedTuple):
    """The router's hard choice, as both backends take it. It has no gradient."""

    proj_q: Tensor  # [D, D]
    proj_k: Tensor  # [D, D]
    count: int  # key blocks that each query block selects

    def block_mask(self, query: Tensor, key: Tensor, settings: BlockSettings) -> Tensor:
        """Return bool [..., Tm, Tn], `count` blocks in every row: query [..., Nq, D], key [..., Nk, D]."""
        logits = router_logits(query, key, self.proj_q, self.proj_k, settings).detach()
        return top_blocks(logits, self.count)
