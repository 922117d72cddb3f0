"""Values that the ring and the parts of its two backends exchange."""

from typing import NamedTuple

from torch import Tensor


class RingOptions(NamedTuple):
    is_causal: bool
    scale: float  # c
    smooth_k: bool
    smooth_q: bool
    granularity: str


class Shards(NamedTuple):
    """The tensors of a pass: some stay, others visit one process after the other."""

    here: tuple[Tensor, ...]
    visiting: tuple[Tensor, ...]
