"""Room for the dS that levels 5 and 6 keep between their program of keys and their program of queries.

dS of all pairs of tokens takes 2 Nq Nk bytes per head. As many heads as fit WORKSPACE are worked off together, the next
ones in the same room.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sage_kernels.backward.program import BackwardInputs, Gradients
from sage_kernels.quantize import BLOCK_Q, padded_length

WORKSPACE = 4 << 30  # bytes of dS


class Kept(NamedTuple):
    """dS^T over its scale, and the scales: one per key and block of 128 queries."""

    ds: Tensor  # float16 [1, H, tiles, width of a tile]
    scale: Tensor  # float32 [1, H, Nq / 128 x Nk]


def heads_together(inputs: BackwardInputs) -> int:
    """How many heads of keys, of all samples, are worked off together; 0 if not even one fits."""
    (batch, heads, n_q, _), (_, kv_heads, n_k, _) = inputs.query.shape, inputs.key.shape
    most = WORKSPACE // (2 * padded_length(n_q) * padded_length(n_k) * heads // kv_heads)
    if most == 0:
        return 0
    rounds = -(-batch * kv_heads // most)
    return -(-batch * kv_heads // rounds)


def room(inputs: BackwardInputs, together: int, width: int) -> Kept:
    """Place for so many heads of keys and the heads of queries that share them, in tiles `width` queries wide."""
    (_, heads, n_q, _), (_, kv_heads, n_k, _) = inputs.query.shape, inputs.key.shape
    count, pairs = together * heads // kv_heads, padded_length(n_q) * padded_length(n_k)
    ds = inputs.query.new_empty(1, count, pairs // width, width, dtype=torch.float16)
    return Kept(ds, inputs.query.new_empty(1, count, pairs // BLOCK_Q, dtype=torch.float32))


def in_rounds(
    inputs: BackwardInputs, gradients: Gradients, together: int
) -> Iterator[tuple[BackwardInputs, Gradients]]:
    """Both cut to the heads of one round after the other, as one sample each."""
    # Of query and key only the shapes count, and these can be cut into heads without a copy.
    inputs = inputs._replace(query=gradients.query, key=gradients.key)
    batch, kv_heads = inputs.key.shape[:2]

    def cut(x, first, end):
        if isinstance(x, tuple):
            return type(x)(*(cut(y, first, end) for y in x))
        if x is None:
            return None
        groups = x.shape[1] // kv_heads
        return x.flatten(0, 1)[first * groups : end * groups].unsqueeze(0)

    for first in range(0, batch * kv_heads, together):
        end = min(first + together, batch * kv_heads)
        yield cut(inputs, first, end), cut(gradients, first, end)
