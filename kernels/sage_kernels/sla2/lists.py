"""Lists in place of the block mask: the selected key blocks of each query block, and the reverse for dK and dV."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.sla2.sums import padded_columns, sums_dtype


class BlockLists(NamedTuple):
    """The selected blocks of each row of a block mask, in ascending order."""

    entries: Tensor  # int32 [B, H, rows, width], undefined after the row's count
    counts: Tensor  # int32 [B, H, rows]


class Choice(NamedTuple):
    """Which key blocks each query block selects, in the forms that programs and matrix products read."""

    block_mask: Tensor  # bool [B, H, Tm, Tn]
    complement: Tensor  # [B, H, Tm, Tn padded], 1 where the mask is False, 0 elsewhere; in the type of the sums
    lists: BlockLists  # by query block


@triton.jit
def store_list(selected, column, list_number, width, entries_ptr, counts_ptr):
    """Store the columns whose `selected` is 1 and not 0, in ascending order, as list number list_number."""
    position = tl.cumsum(selected, 0) - 1
    tl.store(entries_ptr + list_number * width + position, column, mask=selected != 0)
    tl.store(counts_ptr + list_number, tl.sum(selected, 0))


@triton.jit
def store_complement(selected, column, row, columns, padded, complement_ptr):
    """Store row `row` of the complement: 1 where `selected` is 0, and 0 from `columns` on."""
    unselected = ((selected == 0) & (column < columns)).to(tl.float32)
    pointers = complement_ptr + row * padded + column
    tl.store(pointers, unselected.to(complement_ptr.dtype.element_ty), mask=column < padded)


@triton.jit
def list_range(entries_ptr, count_ptr, n_k, MASK_BLOCK_KV: tl.constexpr):
    """Return (full, count): entries [0, full) need no mask; [full, count) is the partial last block, if listed."""
    count = tl.load(count_ptr)
    last = tl.load(entries_ptr + count - 1, mask=count > 0, other=0)
    return tl.where((count > 0) & ((last + 1) * MASK_BLOCK_KV > n_k), count - 1, count), count


@triton.jit
def sla2_list_program(
    mask_ptr, stride_row, stride_column, columns, entries_ptr, counts_ptr, complement_ptr, padded, WIDTH: tl.constexpr
):
    """List one row of a mask, or one column as if it were a row. complement_ptr None: the list alone."""
    row, head, column = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    rows = tl.num_programs(0)
    pointers = mask_ptr + head * rows * columns + row * stride_row + column * stride_column
    selected = tl.load(pointers, mask=column < columns, other=0).to(tl.int32)
    store_list(selected, column, head * rows + row, columns, entries_ptr, counts_ptr)
    if complement_ptr is not None:
        store_complement(selected, column, head * rows + row, columns, padded, complement_ptr)


def block_lists(
    block_mask: Tensor, start: Start = start_with_triton, *, by_key: bool = False, complement: Tensor | None = None
) -> BlockLists:
    """List the selected key blocks of every query block; by_key: the query blocks that selected each key block.

    block_mask: bool [B, H, Tm, Tn], contiguous. complement: where `Choice.complement` goes, not with by_key.
    """
    batch, heads, rows, columns = block_mask.shape
    strides = columns, 1
    if by_key:
        rows, columns, strides = columns, rows, strides[::-1]
    entries = block_mask.new_empty(batch, heads, rows, columns, dtype=torch.int32)
    counts = block_mask.new_empty(batch, heads, rows, dtype=torch.int32)
    padded = padded_columns(columns)
    arguments = block_mask, *strides, columns, entries, counts, complement, padded
    start(sla2_list_program, (rows, batch * heads), arguments, {"WIDTH": row_width(columns)}, options(columns))
    return BlockLists(entries, counts)


def given(block_mask: Tensor, start: Start = start_with_triton) -> Choice:
    """Return the choice that a block mask, bool [B, H, Tm, Tn] and contiguous, stands for."""
    complement = empty_complement(block_mask)
    return Choice(block_mask, complement, block_lists(block_mask, start, complement=complement))


def empty_complement(x: Tensor) -> Tensor:
    """Allocate the complement of a mask or scores x [B, H, Tm, Tn]."""
    return x.new_empty(*x.shape[:3], padded_columns(x.shape[3]), dtype=sums_dtype(x))


def row_width(columns: int) -> int:
    """Return the power of two that holds a row of a mask, and of its complement."""
    return 1 << (padded_columns(columns) - 1).bit_length()


def options(columns: int) -> dict:
    """Return what Triton's compiler is told of a program that holds one row of a mask."""
    return {"num_warps": max(1, min(16, row_width(columns) // 512))}
