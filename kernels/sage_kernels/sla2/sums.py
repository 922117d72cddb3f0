"""The linear branch's sums: h_j = phi(K_j)^T V_j and z_j = phi(K_j)^T 1 of every key block, then H_i and Z_i.

The pass over K and V that makes them leaves the block means of K and, for INT8 levels, V^ as well.
h_j and z_j of a block lie side by side in one row of D (D + 1) numbers. H_i = sum_j (1 - M_ij) h_j for all query blocks
is then one matrix product, complement mask times rows, which reads each h_j once where adding them up block by block
would read it Tm times.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import last_axis_contiguous
from sage_kernels.common.quantize import Quantized, padded_head_dim, padded_length, psi
from sage_kernels.common.signature import FLOATS, HAT, PADDED_SIZE, POINTERS, SIZE, Signature, strided
from sage_kernels.common.tiles import Operand, group_columns, load_tokens, softmax_features
from sage_kernels.sla2.routing import MASK_BLOCK_KV

SUMS_DTYPE = torch.bfloat16  # on a GPU: it has the range for sums over a whole sequence
WARPS = 8


@triton.jit
def column_sums(x, ROWS: tl.constexpr):
    """Sum of the rows of a 16-bit tile, in float32, by a matrix product with ones: no data crosses warps."""
    return tl.max(tl.dot(tl.full([16, ROWS], 1.0, x.dtype), x), 0)


class KeyBlocks(NamedTuple):
    """What one read of K and V yields."""

    sums: Tensor  # [B, Hkv, Tn, Dp (Dp + 1)]: h_j row by row, then z_j
    k_bar: Tensor  # float32 [B, Hkv, Tn, D]: block means of K
    v_hat: Quantized | None  # transposed, in the order of tiles.group_columns


@triton.jit(do_not_specialize=["n"])
def key_block_program(
    k_ptr, k_stride_b, k_stride_h, k_stride_n, v_ptr, v_stride_b, v_stride_h, v_stride_n,
    sums_ptr, k_bar_ptr, vt_hat_ptr, v_scale_ptr, heads, n, n_padded,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one block of keys and values of one head. vt_hat_ptr None: V is not quantised."""
    j, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = head * tl.num_programs(0) + j
    batch, h = head // heads, head % heads
    key, d = j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    # [Bkv, D]
    k_j = load_tokens(Operand(k_ptr + batch * k_stride_b + h * k_stride_h, k_stride_n), key, n, D, DP, True)
    v_j = load_tokens(Operand(v_ptr + batch * v_stride_b + h * v_stride_h, v_stride_n), key, n, D, DP, True)
    dtype = sums_ptr.dtype.element_ty
    k_phi_j = tl.where(key[:, None] < n, softmax_features(k_j.to(tl.float32), D, DP), 0.0).to(dtype)
    if vt_hat_ptr is not None:
        v_hat_j, s_v = psi(v_j.to(tl.float32))
        vt_hat_j = group_columns(tl.trans(v_hat_j), DP, BLOCK)
        tl.store(vt_hat_ptr + head * DP * n_padded + d[:, None] * n_padded + key[None, :], vt_hat_j)
        tl.store(v_scale_ptr + head * (n_padded // BLOCK) + j, s_v)
    k_bar_j = column_sums(k_j, BLOCK) / tl.minimum(n - j * BLOCK, BLOCK)
    tl.store(k_bar_ptr + block * D + d, k_bar_j, mask=d < D)
    sums_ptr += block * DP * (DP + 1)
    tl.store(sums_ptr + DP * DP + d, column_sums(k_phi_j, BLOCK).to(dtype))
    h_j = tl.dot(tl.trans(k_phi_j), v_j.to(dtype))
    tl.store(sums_ptr + d[:, None] * DP + d[None, :], h_j.to(dtype))


def sums_dtype(x: Tensor) -> torch.dtype:
    """That of h_j, z_j, H_i and Z_i. Triton's interpreter, on the CPU, multiplies bfloat16 wrongly."""
    return SUMS_DTYPE if x.is_cuda else torch.float32


def signature(*, int8: bool, dtype: torch.dtype = torch.bfloat16) -> Signature:
    """Triton's types of the parameters of `key_block_program`."""
    copy = {"vt_hat_ptr": HAT if int8 else None, "v_scale_ptr": FLOATS if int8 else None}
    sums = {"sums_ptr": POINTERS[SUMS_DTYPE], "k_bar_ptr": FLOATS}
    sizes = {"heads": SIZE, "n": SIZE, "n_padded": PADDED_SIZE}
    return strided("k", POINTERS[dtype]) | strided("v", POINTERS[dtype]) | sums | copy | sizes


def constants(head_dim: int) -> dict:
    """The constants of `key_block_program`."""
    return {"D": head_dim, "DP": padded_head_dim(head_dim), "BLOCK": MASK_BLOCK_KV}


def key_blocks(key: Tensor, value: Tensor, start: Start = start_with_triton, *, int8: bool) -> KeyBlocks:
    """One read of key and value [B, Hkv, Nk, D]; int8: V^ too."""
    batch, heads, n, head_dim = key.shape
    blocks, dp, n_padded = triton.cdiv(n, MASK_BLOCK_KV), padded_head_dim(head_dim), padded_length(n)
    key, value = last_axis_contiguous(key), last_axis_contiguous(value)
    sums = key.new_empty(batch, heads, blocks, dp * (dp + 1), dtype=sums_dtype(key))
    k_bar = key.new_empty(batch, heads, blocks, head_dim, dtype=torch.float32)
    vt_hat = key.new_empty(batch, heads, dp, n_padded, dtype=torch.int8) if int8 else None
    v_scale = key.new_empty(batch, heads, n_padded // MASK_BLOCK_KV, dtype=torch.float32) if int8 else None
    arguments = (
        key, *key.stride()[:3], value, *value.stride()[:3], sums, k_bar, vt_hat, v_scale, heads, n, n_padded,
    )  # fmt: skip
    start(
        "key_blocks", key_block_program, (blocks, batch * heads), arguments, constants(head_dim), {"num_warps": WARPS}
    )
    return KeyBlocks(sums, k_bar, Quantized(None, vt_hat, v_scale) if int8 else None)


def unselected_sums(block_mask: Tensor, sums: Tensor) -> Tensor:
    """H_i and Z_i: sums of the rows of the unselected key blocks. [B, H, Tm, Tn] x [B, Hkv, Tn, W] -> [B, H, Tm, W]."""
    batch, heads, query_blocks, key_blocks = block_mask.shape
    complement = (~block_mask).to(sums.dtype).view(batch * sums.shape[1], -1, key_blocks)
    return torch.bmm(complement, sums.flatten(0, 1)).view(batch, heads, query_blocks, -1)


def unselected_sums_by_key(block_mask: Tensor, sums: Tensor, kv_heads: int) -> Tensor:
    """The transposed product, for gradients: [B, H, Tm, Tn] x [B, H, Tm, W] -> [B, Hkv, Tn, W]."""
    batch, _, _, key_blocks = block_mask.shape
    complement = (~block_mask).to(sums.dtype).view(batch * kv_heads, -1, key_blocks)
    sums = sums.view(batch * kv_heads, -1, sums.shape[-1])
    return torch.bmm(complement.mT, sums).view(batch, kv_heads, key_blocks, -1)
