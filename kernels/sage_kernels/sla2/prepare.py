"""One read of Q, K and V, in one launch: h_j and z_j of every key block, block means, Q^ and V^.

h_j = phi(K_j)^T V_j and z_j = phi(K_j)^T 1 are what the linear branch adds up (`sums.py`), the block means what the
router compares. K^ takes a second read of K: it is smoothed, and the mean key is a mean of these block means.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.candidates import Launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import last_axis_contiguous, strided
from sage_kernels.common.quantize import (
    Copies,
    Quantized,
    empty_copies,
    load_block,
    padded_head_dim,
    padded_length,
    psi,
    quantize_tile,
)
from sage_kernels.common.tiles import Operand, group_columns, head_of, load_tokens, softmax_features
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_kernels.sla2.sums import padded_columns, sums_dtype
from sage_ref.sla2.blocks import block_count

LAUNCH = Launch(MASK_BLOCK_Q, MASK_BLOCK_KV, 8, 1, 128)  # more registers, and a multiprocessor runs one at a time
NARROW_LAUNCH = Launch(MASK_BLOCK_Q, MASK_BLOCK_KV, 4, 1, 128)  # of heads up to 64: on an H200 177 us instead of 256


class Blocks(NamedTuple):
    """The results of one read of Q, K and V. None is what nobody asked for."""

    sums: Tensor  # [B, Hkv, Tn padded, Dp (Dp + 1)]: h_j row by row, then z_j
    k_bar: Tensor  # float32 [B, Hkv, Tn, D]: block means of K
    q_bar: Tensor | None  # float32 [B, H, Tm, D]: block means of Q, times the sign of c
    q_hat: Quantized | None
    v_hat: Quantized | None  # transposed, in the order of tiles.group_columns


@triton.jit
def column_sums(x, ROWS: tl.constexpr):
    """Sum the rows of a 16-bit tile, in float32, by a matrix product with ones: no data crosses warps."""
    return tl.max(tl.dot(tl.full([16, ROWS], 1.0, x.dtype), x), 0)


@triton.jit(do_not_specialize=["n_q", "n_k", "query_programs", "sums_rows"])
def sla2_prepare_program(
    q_strided, k_strided, v_strided, q_bar_ptr, q_hat_ptr, q_scale_ptr, sums_ptr, k_bar_ptr, vt_hat_ptr, v_scale_ptr,
    heads, kv_heads, n_q, n_k, n_q_padded, n_k_padded, query_programs, sums_rows, factor,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Prepare a block of queries, or one of keys and values: programs come in this order.

    q_bar_ptr, q_hat_ptr, vt_hat_ptr None: not asked for. After a head's last block of keys come rows of zeros.
    """
    t, d = tl.program_id(0), tl.arange(0, DP)
    if t < query_programs:
        i, head = t % (n_q_padded // BLOCK_Q), (t // (n_q_padded // BLOCK_Q)).to(tl.int64)
        q_i = load_block(q_strided, head // heads, head % heads, i, n_q, D, DP, BLOCK_Q)
        # Q takes the sign of c: of scores with c < 0 the smallest count, and the INT8 tiles want s_Q >= 0.
        q_i = tl.where(factor < 0, -q_i, q_i)
        if q_bar_ptr is not None:
            q_bar_i = tl.sum(q_i, 0) / tl.minimum(n_q - i * BLOCK_Q, BLOCK_Q)
            tl.store(
                q_bar_ptr + (head * tl.cdiv(n_q, BLOCK_Q) + i) * D + d, q_bar_i, mask=(d < D) & (i * BLOCK_Q < n_q)
            )
        if q_hat_ptr is not None:
            out = Copies(q_hat_ptr + head * n_q_padded * DP, None, q_scale_ptr + head * (n_q_padded // BLOCK_Q))
            quantize_tile(q_i, out, i, n_q_padded, tl.abs(factor), DP, BLOCK_Q, False)
    else:
        t -= query_programs
        j, head = t % sums_rows, (t // sums_rows).to(tl.int64)
        batch, h = head // kv_heads, head % kv_heads
        key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        # [Bkv, D]
        k_j = load_tokens(Operand(head_of(k_strided, batch, h), k_strided.stride_n), key, n_k, D, DP, True)
        v_j = load_tokens(Operand(head_of(v_strided, batch, h), v_strided.stride_n), key, n_k, D, DP, True)
        dtype = sums_ptr.dtype.element_ty
        k_phi_j = tl.where(key[:, None] < n_k, softmax_features(k_j.to(tl.float32), D, DP), 0.0).to(dtype)
        if vt_hat_ptr is not None:
            v_hat_j, s_v = psi(v_j.to(tl.float32))
            vt_hat_j = group_columns(tl.trans(v_hat_j), DP, BLOCK_KV)
            pointers = vt_hat_ptr + head * DP * n_k_padded + d[:, None] * n_k_padded + key[None, :]
            tl.store(pointers, vt_hat_j, mask=key[None, :] < n_k_padded)
            tl.store(v_scale_ptr + head * (n_k_padded // BLOCK_KV) + j, s_v, mask=j < n_k_padded // BLOCK_KV)
        key_blocks = tl.cdiv(n_k, BLOCK_KV)
        k_bar_j = column_sums(k_j, BLOCK_KV) / tl.maximum(tl.minimum(n_k - j * BLOCK_KV, BLOCK_KV), 1)
        tl.store(k_bar_ptr + (head * key_blocks + j) * D + d, k_bar_j, mask=(d < D) & (j < key_blocks))
        sums_ptr += (head * sums_rows + j) * DP * (DP + 1)
        tl.store(sums_ptr + DP * DP + d, column_sums(k_phi_j, BLOCK_KV).to(dtype))
        h_j = tl.dot(tl.trans(k_phi_j), v_j.to(dtype))
        tl.store(sums_ptr + d[:, None] * DP + d[None, :], h_j.to(dtype))


def read_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Start = start_with_triton,
    *,
    int8: bool,
    means: bool,
    factor: float = 1.0,
) -> Blocks:
    """Read query [B, H, Nq, D], key and value [B, Hkv, Nk, D] once; query only if int8 or means.

    int8: Q^ and V^ too. means: q_bar too. factor: c log2(e), which goes into the scales of Q^, its sign into Q^ and
    q_bar.
    """
    query, key, value = (last_axis_contiguous(x) for x in (query, key, value))
    (batch, heads, n_q, head_dim), (kv_heads, n_k) = query.shape, key.shape[1:3]
    key_blocks, n_q_padded, dp = block_count(n_k, MASK_BLOCK_KV), padded_length(n_q), padded_head_dim(head_dim)
    rows = padded_columns(key_blocks)
    sums = key.new_empty(batch, kv_heads, rows, dp * (dp + 1), dtype=sums_dtype(key))
    k_bar = key.new_empty(batch, kv_heads, key_blocks, head_dim, dtype=torch.float32)
    q_bar = q_hat = v_hat = None
    if means:
        q_bar = query.new_empty(batch, heads, block_count(n_q, MASK_BLOCK_Q), head_dim, dtype=torch.float32)
    if int8:
        q_hat = empty_copies(query, MASK_BLOCK_Q)
        v_hat = empty_copies(value, MASK_BLOCK_KV, transposed=True)
    query_programs = batch * heads * (n_q_padded // MASK_BLOCK_Q) if int8 or means else 0
    arguments = (
        strided(query), strided(key), strided(value), q_bar,
        *((q_hat.values, q_hat.scale) if int8 else (None, None)), sums, k_bar, *(v_hat[1:] if int8 else (None, None)),
        heads, kv_heads, n_q, n_k, n_q_padded, padded_length(n_k), query_programs, rows, factor,
    )  # fmt: skip
    grid = (query_programs + batch * kv_heads * rows,)
    constants = {"D": head_dim, "DP": dp, "BLOCK_Q": MASK_BLOCK_Q, "BLOCK_KV": MASK_BLOCK_KV}
    launch = NARROW_LAUNCH if dp <= 64 else LAUNCH
    start(sla2_prepare_program, grid, arguments, constants, launch.options)
    return Blocks(sums, k_bar, q_bar, q_hat, v_hat)
