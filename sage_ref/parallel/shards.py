"""What the ring and the parts of both its backends pass to one another."""

from typing import NamedTuple

from torch import Tensor


class RingOptions(NamedTuple):
    is_causal: bool
    scale: float  # c
    smooth_k: bool
    smooth_q: bool
    granularity: str


class Shards(NamedTuple):
    """What a pass works on: tensors that stay, and those that visit one process after the other."""

    here: tuple[Tensor, ...]
    visiting: tuple[Tensor, ...]
