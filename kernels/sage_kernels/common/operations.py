"""Registration of a function that launches kernels as a PyTorch operation: torch.ops.sage_kernels.NAME.

Whoever traces a call sees one node and asks `fake` for shapes: torch.compile, an exporter, a mode that watches what
PyTorch's dispatcher does. A plain call doesn't take that way, for it costs the CPU more than a launch. Autograd is not
the operation's affair: a torch.autograd.Function around it costs a call less than `torch.library.custom_op`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_ref.checks import PLAIN_TENSORS

LIBRARY = torch.library.Library("sage_kernels", "DEF")


def register(name: str, function: Callable, fake: Callable) -> Callable:
    """Register a function of tensors and numbers, with type hints, that returns new tensors; return what calls it.

    Tensors that somebody else made are among the first five arguments. fake: the same without values.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{name}", fake, lib=LIBRARY)
    operation = getattr(torch.ops.sage_kernels, name).default

    def call(*arguments) -> Any:
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        return operation(*arguments) if traced or not all(map(is_plain, arguments[:5])) else function(*arguments)

    return call


def is_plain(x: object) -> bool:
    """Return whether x is no tensor, or one whose memory holds its numbers."""
    if not isinstance(x, Tensor):
        return True
    is_batched = torch._C._functorch.is_legacy_batchedtensor(x)
    return type(x) in PLAIN_TENSORS and not is_batched and not x.is_neg() and not x._is_zerotensor()
