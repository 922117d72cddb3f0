"""Gradients written by hand that have no derivative of their own, under autograd, torch.func and torch.vmap."""

from collections.abc import Callable

import torch
from torch import Tensor


class GradientsOnce(torch.autograd.Function):
    """compute(*tensors), a tuple of gradients that raises an error when it is differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(compute, of, *tensors):
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.of = inputs[1]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.of}: expected to be differentiated once, got a second derivative of it")


def gradients_once(of: str, compute: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return compute(*tensors), the gradients of the public function `of`.

    A second derivative, by create_graph=True or by torch.func, raises RuntimeError when it is taken: it would silently
    lack terms. Compiled code has no second derivatives in any case.
    """
    # A backward pass that will not be differentiated runs without gradients. Compiled code has no such graph, and can't
    # trace one function inside another.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return compute(*tensors)
    return GradientsOnce.apply(compute, of, *tensors)
