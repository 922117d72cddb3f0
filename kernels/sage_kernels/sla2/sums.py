"""The linear branch's sums H_i and Z_i of all query blocks, and their gradients' way back, as matrix products.

h_j and z_j of a key block (`prepare.py`) are side by side in one row of W = Dp (Dp + 1) numbers. H_i = sum_j (1 - M_ij)
h_j for all query blocks is then one matrix product, complement mask times rows, which reads each h_j once where adding
them up block by block would read it Tm times.

Fast matrix products want rows that start every 16 bytes. So the complement has zeros after its last column, up to a
multiple of COLUMNS, and there are as many rows of zeros after the last h_j: 0 times what memory held may be NaN.
"""

import torch
from torch import Tensor

from sage_ref.sla2.blocks import block_count

SUMS_DTYPE = torch.bfloat16  # on a GPU: it has the range for sums over a whole sequence
COLUMNS = 8  # numbers of SUMS_DTYPE in 16 bytes


def sums_dtype(x: Tensor) -> torch.dtype:
    """Return the type of h_j, z_j, H_i, Z_i and the complement. Triton's interpreter multiplies bfloat16 wrongly."""
    return torch.float32 if x.is_cpu else SUMS_DTYPE


def padded_columns(key_blocks: int) -> int:
    """Return the columns of the complement, and rows h_j, for this many key blocks."""
    return block_count(key_blocks, COLUMNS) * COLUMNS


def unselected_sums(complement: Tensor, sums: Tensor) -> Tensor:
    """Return H_i and Z_i: sums of the rows of the unselected key blocks.

    complement [B, H, Tm, Tn padded] x sums [B, Hkv, Tn padded, W] -> [B, H, Tm, W].
    """
    batch, heads, query_blocks, columns = complement.shape
    complement = complement.view(batch * sums.shape[1], -1, columns)
    return torch.bmm(complement, sums.flatten(0, 1)).view(batch, heads, query_blocks, -1)


def unselected_sums_by_key(complement: Tensor, sums: Tensor, kv_heads: int) -> Tensor:
    """Return the transposed product, for gradients.

    [B, H, Tm, Tn padded] x [B, H, Tm, W] -> [B, Hkv, Tn padded, W]. Tm needs no padding: in neither matrix are the
    query blocks the axis whose numbers are side by side.
    """
    batch, _, _, columns = complement.shape
    complement = complement.view(batch * kv_heads, -1, columns)
    sums = sums.view(batch * kv_heads, -1, sums.shape[-1])
    return torch.bmm(complement.mT, sums).view(batch, kv_heads, columns, -1)
