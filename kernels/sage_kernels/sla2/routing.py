"""The choice of key blocks for each query block: router scores from block means, hard Top-k, and its lists.

Nothing here touches tokens: the block means come from the program that reads Q, K and V anyway (`prepare.py`).
The mean key of the sequence, which smoothing needs, is a mean of block means.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.quantize import SCALE_BLOCK
from sage_kernels.sla2.lists import (
    BlockLists,
    Choice,
    empty_complement,
    options,
    row_width,
    store_complement,
    store_list,
)
from sage_kernels.sla2.sums import padded_columns
from sage_ref.sla2.blocks import block_count

MASK_BLOCK_Q, MASK_BLOCK_KV = 128, 64  # queries and keys of one entry of the block mask
if SCALE_BLOCK % MASK_BLOCK_Q or SCALE_BLOCK % MASK_BLOCK_KV:  # kernels would read past the copies that `quantize` pads
    raise ValueError(
        f"SCALE_BLOCK: expected a multiple of SLA2's mask blocks {MASK_BLOCK_Q} x {MASK_BLOCK_KV}, got {SCALE_BLOCK}"
    )


@triton.jit(do_not_specialize=["n", "blocks"])
def sla2_sequence_mean_program(
    means_ptr, mean_ptr, n, blocks, D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Compute the mean of some features of one head."""
    d, head = tl.program_id(0) * 32 + tl.arange(0, 32), tl.program_id(1).to(tl.int64)
    total = tl.zeros([STEP, 32], tl.float32)
    for first in range(0, blocks, STEP):
        block = first + tl.arange(0, STEP)
        inside = (block[:, None] < blocks) & (d[None, :] < D)
        means = tl.load(means_ptr + (head * blocks + block[:, None]) * D + d[None, :], mask=inside, other=0.0)
        total += means * tl.minimum(n - block * BLOCK, BLOCK)[:, None].to(tl.float32)
    tl.store(mean_ptr + head * D + d, tl.sum(total, 0) / n, mask=d < D)


def sequence_mean(means: Tensor, n: int, block: int, start: Start = start_with_triton) -> Tensor:
    """Return the mean over all n tokens, [B, H, D], from block means [B, H, blocks, D]; the last may be partial."""
    batch, heads, blocks, head_dim = means.shape
    mean = means.new_empty(batch, heads, head_dim)
    grid, arguments = (block_count(head_dim, 32), batch * heads), (means, mean, n, blocks)
    start(sla2_sequence_mean_program, grid, arguments, {"D": head_dim, "BLOCK": block, "STEP": 64}, {})
    return mean


@triton.jit
def sla2_top_blocks_program(
    scores_ptr, mask_ptr, complement_ptr, entries_ptr, counts_ptr, columns, padded, count,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Select the `count` largest of one row of [Tm, Tn] scores; among equal ones those that come first."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    score = tl.load(scores_ptr + row * columns + column, mask=column < columns, other=0.0)
    # Unsigned integers in the order of the scores: NaN above infinity, -0 equal to 0.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, bits)
    rank = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    rank = tl.where(column < columns, rank, 0)
    # The largest threshold that at least `count` ranks reach, bit by bit. Unrolled, long rows compile for minutes.
    threshold = tl.zeros([], tl.uint32)
    for bit in range(32):
        raised = threshold | (tl.full([], 1, tl.uint32) << (31 - bit))
        threshold = tl.where(tl.sum((rank >= raised).to(tl.int32), 0) >= count, raised, threshold)
    above = rank > threshold
    equal = (rank == threshold) & (column < columns)
    still_wanted = count - tl.sum(above.to(tl.int32), 0)
    selected = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= still_wanted))
    tl.store(mask_ptr + row * columns + column, selected, mask=column < columns)
    store_complement(selected.to(tl.int32), column, row, columns, padded, complement_ptr)
    store_list(selected.to(tl.int32), column, row, count, entries_ptr, counts_ptr)


def top_blocks(scores: Tensor, count: int, start: Start = start_with_triton) -> Choice:
    """Select the `count` largest of each row of scores, ties as `sage_ref.sla2` breaks them.

    scores: float32 [B, H, Tm, Tn]; count <= Tn.
    """
    columns = scores.shape[-1]
    mask, complement = torch.empty_like(scores, dtype=torch.bool), empty_complement(scores)
    lists = BlockLists(
        scores.new_empty(*scores.shape[:3], count, dtype=torch.int32),
        scores.new_empty(scores.shape[:3], dtype=torch.int32),
    )
    arguments = scores, mask, complement, *lists, columns, padded_columns(columns), count
    grid, constants = (lists.counts.numel(),), {"WIDTH": row_width(columns)}
    start(sla2_top_blocks_program, grid, arguments, constants, options(columns))
    return Choice(mask, complement, lists)


def route(
    q_bar: Tensor,
    k_bar: Tensor,
    proj_q: Tensor,
    proj_k: Tensor,
    count: int,
    start: Start = start_with_triton,
) -> Choice:
    """Choose blocks as SLA2's router with hard Top-k. q_bar [B, H, Tm, D], k_bar [B, Hkv, Tn, D], proj [D, D].

    Smoothing K would change every score of a row alike, as would c.
    """
    (batch, heads, rows, head_dim), columns = q_bar.shape, k_bar.shape[2]
    q_bar, k_bar = F.linear(q_bar, proj_q.float()), F.linear(k_bar, proj_k.float())
    # The heads that share a key head are one matrix: [B Hkv, H / Hkv Tm, D] x [B Hkv, D, Tn].
    scores = torch.bmm(q_bar.view(batch * k_bar.shape[1], -1, head_dim), k_bar.flatten(0, 1).mT)
    return top_blocks(scores.view(batch, heads, rows, columns), count, start)
