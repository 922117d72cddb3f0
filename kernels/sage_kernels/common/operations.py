"""Registration of a function that launches kernels as a PyTorch operation: torch.ops.sage_kernels.NAME.

The dispatcher calls it on every device. torch.compile sees one node and asks `fake` for shapes. Autograd is not the
operation's affair: a torch.autograd.Function around it costs a call less than `torch.library.custom_op`.
"""

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("sage_kernels", "DEF")


def register(name: str, function: Callable, fake: Callable) -> None:
    """Register a function of tensors and numbers, with type hints, that returns new tensors.

    fake: the same without values.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{name}", fake, lib=LIBRARY)
