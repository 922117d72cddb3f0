"""The prologue of attention: QK-norm, then rotary positions, applied to queries and keys in one step.

QK-norm:  y = x gamma / sqrt(mean(x^2) + eps)
rotation: z_i = y_i cos - y_(i + D/2) sin,  z_(i + D/2) = y_i sin + y_(i + D/2) cos   (angles of the token, i < D/2)

`sagebwd_attention(..., prologue=...)` takes both into its first step: the kernels normalise and rotate as they read Q
and K to quantise them. z is never rounded to 16 bit and never written to memory.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_ref.checks import check_device, check_floating, is_number, savable, shown
from sage_ref.shapes import working_dtype

LEAST_EPS = 1e-30  # far above the least number that float32 holds


class Prologue(NamedTuple):
    """QK-norm, if there are gains, and the rotation. Token n of queries and of keys takes row n of the angles' tables.

    Args:
        cos, sin: [tokens, D/2], for at least as many tokens as Q and K have; floating, without gradient.
        query_gain, key_gain: gamma [D] of QK-norm, floating, differentiable; None means no norm.
        eps: A positive number of QK-norm. Sums are in float32, for float64 in float64.
    """

    cos: Tensor
    sin: Tensor
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    eps: float = 1e-6

    def applied(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and rotate query [..., Nq, D] and key [..., Nk, D]; the results keep the working dtype."""
        return self._one(query, self.query_gain), self._one(key, self.key_gain)

    def _one(self, x: Tensor, gain: Tensor | None) -> Tensor:
        wide, tokens = working_dtype(x), x.shape[-2]
        x = x.to(wide)
        if gain is not None:
            x = F.rms_norm(x, x.shape[-1:], gain.to(wide), self.eps)
        return rotate(x, self.cos[:tokens].to(wide), self.sin[:tokens].to(wide))


def before_attention(query: Tensor, key: Tensor, prologue: Prologue, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Normalise and rotate query and key, and round them once, to the dtype that attention without a prologue gets."""
    return tuple(x.to(dtype) for x in prologue.applied(query, key))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features (x_i, x_(i + D/2)) of x [..., N, D] by its angle; cos, sin [N, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class RoundedGradient(torch.autograd.Function):
    """The identity apply(z, dtype) = z, whose gradient is rounded to dtype as if it were stored in memory in dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, dtype):
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx, grad_z):
        return grad_z.to(ctx.dtype).to(grad_z.dtype), None


def checked_prologue(prologue: Prologue, query: Tensor, key: Tensor) -> Prologue:
    """Check a prologue for query [B, H, Nq, D] and key [B, Hkv, Nk, D]; return it with tensors that can be saved."""
    if not isinstance(prologue, Prologue):
        raise TypeError(f"prologue: expected a sage_ref.Prologue or None, got {type(prologue).__name__}")
    tokens, head_dim = max(query.shape[2], key.shape[2]), query.shape[3]
    if head_dim % 2:
        raise ValueError(f"query: expected an even head size, whose halves a prologue rotates, got {head_dim}")
    for name, x in (("prologue.cos", prologue.cos), ("prologue.sin", prologue.sin)):
        check_floating(name, x)
        check_device(name, x, query)
        if x.dim() != 2 or x.shape[1] != head_dim // 2 or x.shape[0] < tokens:
            raise ValueError(
                f"{name}: expected shape (at least {tokens}, {head_dim // 2}), one angle per token and pair of "
                f"features, got {tuple(x.shape)}"
            )
        if x.requires_grad:
            raise ValueError(f"{name}: expected a tensor without a gradient, got one with requires_grad=True")
    gains = {"prologue.query_gain": prologue.query_gain, "prologue.key_gain": prologue.key_gain}
    if sum(x is None for x in gains.values()) == 1:
        missing = next(name for name, x in gains.items() if x is None)
        raise ValueError(f"{missing}: expected a gain, as the other of query and key has one, got None")
    for name, x in gains.items():
        if x is not None:
            check_floating(name, x)
            check_device(name, x, query)
            if x.shape != (head_dim,):
                raise ValueError(f"{name}: expected shape {(head_dim,)}, one gain per feature, got {tuple(x.shape)}")
    if not is_number(prologue.eps):
        raise TypeError(f"prologue.eps: expected a float, got {type(prologue.eps).__name__}")
    if not LEAST_EPS <= prologue.eps <= 1:
        raise ValueError(f"prologue.eps: expected a number from {LEAST_EPS:g} to 1, got {shown(prologue.eps)}")
    return Prologue(*savable(*prologue[:4]), prologue.eps)
