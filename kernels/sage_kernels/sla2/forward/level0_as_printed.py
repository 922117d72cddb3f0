"""Level 0: Algorithm 2 as it is printed.

Every query block walks over all key blocks. A selected one goes through softmax attention; of every other one h_j and
z_j are added to H_i and Z_i. At 97% sparsity that reads nearly all h_j for every query block: the D x D matrices of
unselected blocks, not the attention, are what this level spends its time on.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, last_axis_contiguous, strided
from sage_kernels.common.tiles import (
    NO_KEY,
    Operand,
    Tile,
    head_of,
    load_tokens,
    positively_scaled,
    softmax_features,
    store_tokens,
)
from sage_kernels.sagebwd.forward.level0_flash_attention import key_tile
from sage_kernels.sla2.forward.program import inverse_or_zero, tile_constants
from sage_ref.sla2.blocks import block_count


@triton.jit(do_not_specialize=["n_q", "n_k", "sums_rows"])
def sla2_as_printed_program(
    q_strided, k_strided, v_strided, mask_ptr, alpha_ptr, key_sums_ptr, o_strided, heads, group_size, n_q, n_k,
    sums_rows, log2_scale,
    NEGATED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr,
    MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q queries of one block of one head."""
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, MASK_BLOCK_KV, MASK_BLOCK_KV, False)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    key_blocks, d = tl.cdiv(n_k, MASK_BLOCK_KV), tl.arange(0, DP)
    query = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    block = head * tl.cdiv(n_q, MASK_BLOCK_Q) + tile * BLOCK_Q // MASK_BLOCK_Q
    # [Bq, D]
    q = Operand(head_of(q_strided, batch, h), q_strided.stride_n)
    q_i, s_q = positively_scaled(load_tokens(q, query, n_q, D, DP, True), log2_scale, BLOCK_Q, NEGATED)
    k = Operand(head_of(k_strided, batch, h // group_size), k_strided.stride_n)
    v = Operand(head_of(v_strided, batch, h // group_size), v_strided.stride_n)
    key_sums_ptr += (head // group_size) * sums_rows * DP * (DP + 1)
    m = tl.full([BLOCK_Q], NO_KEY, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    h_i = tl.zeros([DP, DP], tl.float32)
    z_i = tl.zeros([DP], tl.float32)
    for j in range(key_blocks):
        if tl.load(mask_ptr + block * key_blocks + j):
            m, l, o_i = key_tile(m, l, o_i, q_i, s_q, query, j, k, v, n_k, TILE, True)
        else:
            row_ptr = key_sums_ptr + j * DP * (DP + 1)
            h_i += tl.load(row_ptr + d[:, None] * DP + d[None, :]).to(tl.float32)
            z_i += tl.load(row_ptr + DP * DP + d).to(tl.float32)
    dtype = key_sums_ptr.dtype.element_ty
    q_phi_i = softmax_features(load_tokens(q, query, n_q, D, DP, True).to(tl.float32), D, DP).to(dtype)
    inverse = inverse_or_zero(tl.sum(q_phi_i.to(tl.float32) * z_i[None, :], 1))
    o_l = tl.dot(q_phi_i, h_i.to(dtype)) * inverse[:, None]
    alpha_i = tl.load(alpha_ptr + block)
    o_i = alpha_i * o_i * inverse_or_zero(l)[:, None] + (1.0 - alpha_i) * o_l
    store_tokens(o_i, Operand(head_of(o_strided, batch, h), o_strided.stride_n), query, n_q, D, DP)


def run_as_printed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    alpha: Tensor,
    key_sums: Tensor,
    launch: Launch,
    start: Start,
    *,
    scale: float,
) -> Tensor:
    """Compute O [B, H, Nq, D]. key_sums: h_j and z_j, [B, Hkv, Tn padded, Dp (Dp + 1)]."""
    output = empty_in_layout_of(query)
    query, key, value = (last_axis_contiguous(x) for x in (query, key, value))
    batch, heads, n_q, head_dim = query.shape
    arguments = (
        strided(query), strided(key), strided(value), block_mask, alpha, key_sums,
        strided(output), heads, heads // key.shape[1], n_q, key.shape[2], key_sums.shape[2],
        scale * math.log2(math.e),
    )  # fmt: skip
    grid = (block_count(n_q, launch.block_q), batch * heads)
    start(
        sla2_as_printed_program,
        grid,
        arguments,
        tile_constants(head_dim, launch) | {"NEGATED": scale < 0},
        launch.options,
    )
    return output
