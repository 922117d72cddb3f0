"""Long lists in pieces: a key block that every query selects would keep its program busy when all others are done.

A list of more than `longest` query blocks is split into equal pieces of at most that many, each with a program of its
own; what these leave of dK and dV, in float32, is added up in the order of the pieces. So results don't depend on who
is done first.

The host doesn't know how long the lists are, but must make room for the pieces: one place per KEY_BLOCKS_PER_PLACE key
blocks of a head. A program chooses `longest` on the device so that the places suffice. A list that is split is longer,
so it has fewer than 2 length / longest pieces, and all lists have fewer than 2 sum(lengths) / longest. So longest = 2
sum(lengths) / places is enough: 2 KEY_BLOCKS_PER_PLACE, eight, times the mean length.

Shorter pieces would need more places, of 64 x 2 x Dp numbers each: with four key blocks per place they take a quarter
of dK and dV in float32.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start, start_with_triton
from sage_ref.sla2.blocks import block_count

KEY_BLOCKS_PER_PLACE = 4
LEAST_ENTRIES = 8  # no list of so few is split: to write, read and add up pieces moves as much memory as one or two
WARPS = 4


class Pieces(NamedTuple):
    """Where the pieces of the long lists of a key head are, block by block, piece by piece."""

    first: Tensor  # int32 [B, Hkv, Tn + 1]: place of a key block's first piece; without pieces, the next block's
    blocks: Tensor  # int32 [B, Hkv, places]: the key block whose piece is there, or -1


@triton.jit(do_not_specialize=["columns", "places", "least"])
def sla2_pieces_program(counts_ptr, first_ptr, blocks_ptr, group_size, columns, places, least, WIDTH: tl.constexpr):
    """Split the lists of one key head. counts: of the lists by key of the `group_size` query heads that share it."""
    kv_head, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    length = tl.zeros([WIDTH], tl.int32)
    for g in range(group_size):
        length += tl.load(counts_ptr + (kv_head * group_size + g) * columns + column, mask=column < columns, other=0)
    longest = tl.maximum(least, tl.cdiv(2 * tl.sum(length, 0), places))
    pieces = tl.where(length > longest, tl.cdiv(length, longest), 0)
    first = tl.cumsum(pieces, 0) - pieces
    tl.store(first_ptr + kv_head * (columns + 1) + column, first, mask=column <= columns)
    blocks_ptr += kv_head * places
    tl.store(blocks_ptr + column, -1, mask=(column >= tl.sum(pieces, 0)) & (column < places))
    for piece in range(tl.max(pieces, 0)):
        tl.store(blocks_ptr + first + piece, column, mask=piece < pieces)


def pieces_of(counts: Tensor, kv_heads: int, start: Start = start_with_triton) -> Pieces:
    """Return how the lists by key are split. counts: int32 [B, H, Tn], their lengths."""
    batch, heads, columns = counts.shape
    places = block_count(columns, KEY_BLOCKS_PER_PLACE)
    first, blocks = counts.new_empty(batch, kv_heads, columns + 1), counts.new_empty(batch, kv_heads, places)
    arguments = counts, first, blocks, heads // kv_heads, columns, places, LEAST_ENTRIES
    width = 1 << columns.bit_length()
    start(sla2_pieces_program, (batch * kv_heads,), arguments, {"WIDTH": width}, {"num_warps": WARPS})
    return Pieces(first, blocks)
