"""The backward programs: dQ along a query block's list, dK and dV along a key block's; no atomics.

The linear branch comes first for queries: its program leaves dH_i and dZ_i, of which one matrix product makes what the
keys need, dh_j = sum_i (1 - M_ij) dH_i. The sparse programs then add their share; their loop bodies are in `tiles.py`.
A key block with a long list gets several programs (`pieces.py`), and one more that adds up what they leave.

Algorithm 3 multiplies dO by alpha first. Here dO and delta stay without it: dQ is multiplied by alpha at the end, and
for dK and dV alpha comes with P, as 2^(S - (L - log2 alpha)).
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, last_axis_contiguous, strided
from sage_kernels.common.quantize import Quantized, padded_head_dim, padded_length
from sage_kernels.common.tiles import (
    TINY,
    Operand,
    Tile,
    head_of,
    load_padded,
    load_tokens,
    softmax_features,
    store_tokens,
)
from sage_kernels.sla2.backward.tiles import KeyHead, KeyTile, QueryHead, QueryTile, key_tile, query_tile
from sage_kernels.sla2.forward.program import inverse_or_zero, log2_weight_at, tile_constants
from sage_kernels.sla2.lists import BlockLists, list_range
from sage_kernels.sla2.pieces import Pieces, pieces_of
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_ref.sla2.blocks import block_count

JOIN_WARPS = 8


class BackwardInputs(NamedTuple):
    """16-bit tensors and what the forward pass left."""

    grad_output: Tensor  # [B, H, Nq, D]
    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor
    alpha: Tensor  # float32 [B, H, Tm]
    sums: Tensor  # [B, H, Tm, Dp (Dp + 1)]: H_i, then Z_i
    sparse_output: Tensor  # [B, H, Nq, D]
    log_sum_exp: Tensor  # [B, H, Nq padded], of the scores with smoothed keys if there is a k_mean
    k_mean: Tensor | None  # float32 [B, Hkv, D]
    q_hat: Quantized | None = None  # the forward's copies, from which S is computed again; None: from Q and K
    k_hat: Quantized | None = None
    log2_weights: Tensor | None = None  # float32 [B, H, Tm, Tn]: log2 W of every block, in stage 1


class QueryGradients(NamedTuple):
    grad_query: Tensor  # [B, H, Nq, D]; first the linear branch's share, then all of it
    grad_alpha: Tensor  # float32 [B, H, Tm]
    grad_sums: Tensor  # [B, H, Tm, Dp (Dp + 1)]: dH_i, then dZ_i
    delta: Tensor  # float32 [B, H, Nq padded]: rowsum(dO * O_s)
    log_sum_exp: Tensor  # L of the scores as they are
    alpha_log_sum_exp: Tensor  # L - log2(alpha): 2^(S - this) is alpha P


@triton.jit(do_not_specialize=["n_q"])
def sla2_linear_query_program(
    q_strided, do_strided, k_mean_ptr, alpha_ptr, sums_ptr, o_s_ptr, log_sum_exp_ptr, dq_strided, dalpha_ptr, dsums_ptr,
    delta_ptr, unsmoothed_ptr, alpha_log_sum_exp_ptr, heads, group_size, n_q, log2_scale,
    D: tl.constexpr, DP: tl.constexpr, MASK_BLOCK_Q: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one head. COLUMNS: columns of H_i at a time.

    Alg. 3, steps 1, 2, 5, 6, the divisor of step 4, and of step 11 dQ's part and dalpha; H_i and Z_i are the forward's.
    """
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    block = head * tl.num_programs(0) + i
    row = tl.arange(0, MASK_BLOCK_Q)
    query, d = i * MASK_BLOCK_Q + row, tl.arange(0, DP)
    rows = head * n_q * D + query[:, None] * D
    alpha_i = tl.load(alpha_ptr + block)
    # [Bq, D]
    q_i = load_tokens(Operand(head_of(q_strided, batch, h), q_strided.stride_n), query, n_q, D, DP, True)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + block * MASK_BLOCK_Q + row)
    if k_mean_ptr is not None:  # give back what smoothing K took from every score of a row
        k_mean = tl.load(k_mean_ptr + (head // group_size) * D + d, mask=d < D, other=0.0)
        log_sum_exp_i += tl.sum(q_i.to(tl.float32) * k_mean[None, :], 1) * log2_scale
    tl.store(unsmoothed_ptr + block * MASK_BLOCK_Q + row, log_sum_exp_i)
    log2_alpha = tl.math.log2(tl.where(alpha_i == 0.0, TINY, alpha_i))
    tl.store(alpha_log_sum_exp_ptr + block * MASK_BLOCK_Q + row, log_sum_exp_i - log2_alpha)
    dtype = sums_ptr.dtype.element_ty
    sums_ptr += block * DP * (DP + 1)
    dsums_ptr += block * DP * (DP + 1)
    q_phi_i = softmax_features(q_i.to(tl.float32), D, DP).to(dtype)
    z_i = tl.load(sums_ptr + DP * DP + d).to(tl.float32)
    inverse = inverse_or_zero(tl.sum(q_phi_i.to(tl.float32) * z_i[None, :], 1))
    do = Operand(head_of(do_strided, batch, h), do_strided.stride_n)
    do_ptrs = do.pointer + query[:, None].to(tl.int64) * do.stride
    # Sums over columns first: rowsum(dO * O_s) and rowsum(dO * O_l), some columns at a time to spare registers.
    delta_i = tl.zeros([MASK_BLOCK_Q], tl.float32)
    do_o_l = tl.zeros([MASK_BLOCK_Q], tl.float32)
    for first in tl.static_range(0, DP, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (query[:, None] < n_q) & (column[None, :] < D)
        do_i = tl.load(do_ptrs + column[None, :], mask=inside, other=0.0).to(tl.float32)
        o_s = tl.load(o_s_ptr + rows + column[None, :], mask=inside, other=0.0).to(tl.float32)
        delta_i += tl.sum(do_i * o_s, 1)
        h_i = tl.load(sums_ptr + d[:, None] * DP + column[None, :])
        do_o_l += tl.sum(do_i * tl.dot(q_phi_i, h_i), 1) * inverse
    tl.store(delta_ptr + block * MASK_BLOCK_Q + row, delta_i)
    # A column, not a vector: Triton 3.7 can't compile a vector's sum after a matmul for sm_100.
    tl.store(dalpha_ptr + block + tl.arange(0, 1), tl.sum((delta_i - do_o_l)[:, None], 0))
    d_l = (1.0 - alpha_i) * do_o_l
    q_share = (q_phi_i.to(tl.float32) * inverse[:, None]).to(dtype)
    tl.store(dsums_ptr + DP * DP + d, (-tl.sum(q_share.to(tl.float32) * d_l[:, None], 0)).to(dtype))
    dq_phi = tl.zeros([MASK_BLOCK_Q, DP], tl.float32)
    for first in tl.static_range(0, DP, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (query[:, None] < n_q) & (column[None, :] < D)
        do_i = tl.load(do_ptrs + column[None, :], mask=inside, other=0.0).to(tl.float32)
        do_l = ((1.0 - alpha_i) * do_i).to(dtype)
        dh_i = tl.dot(tl.trans(q_share), do_l)
        tl.store(dsums_ptr + d[:, None] * DP + column[None, :], dh_i.to(dtype))
        h_i = tl.load(sums_ptr + d[:, None] * DP + column[None, :])
        dq_phi = tl.dot(do_l, tl.trans(h_i), dq_phi)
    dq_phi = (dq_phi - d_l[:, None] * z_i[None, :]) * inverse[:, None]
    q_phi = q_phi_i.to(tl.float32)
    dq_i = q_phi * (dq_phi - tl.sum(q_phi * dq_phi, 1)[:, None])
    store_tokens(dq_i, Operand(head_of(dq_strided, batch, h), dq_strided.stride_n), query, n_q, D, DP)


@triton.jit
def int8_head(values_ptr, scale_ptr, head, n_padded, DP: tl.constexpr, BLOCK: tl.constexpr):
    """Return one head of an INT8 copy [B, H, N padded, Dp], with a scale per block of tokens."""
    return Operand(values_ptr + head * n_padded * DP, DP, scale_ptr + head * (n_padded // BLOCK))


@triton.jit(do_not_specialize=["n_q", "n_k", "width"])
def sla2_query_program(
    q_strided, k_strided, v_strided, do_strided, q_hat_ptr, q_scale_ptr, k_hat_ptr, k_scale_ptr, entries_ptr,
    counts_ptr, alpha_ptr, delta_ptr, log_sum_exp_ptr, dq_strided, weights_ptr, ds_ptr, heads, group_size, n_q, n_k,
    n_q_padded, n_k_padded, width, log2_scale, scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr, MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Add the sparse branch's share to dQ of BLOCK_Q queries of one block of one head.

    q_hat_ptr None: scores in 16 bit. weights_ptr None: blocks have no weights, and ds_ptr gets no sums of dS.
    """
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, MASK_BLOCK_KV, MASK_BLOCK_KV, False)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    query = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    list_number = head * tl.cdiv(n_q, MASK_BLOCK_Q) + tile * BLOCK_Q // MASK_BLOCK_Q
    alpha_i = tl.load(alpha_ptr + list_number)
    # [Bq, D]
    q_i = load_tokens(Operand(head_of(q_strided, batch, h), q_strided.stride_n), query, n_q, D, DP, True)
    do_i = load_tokens(Operand(head_of(do_strided, batch, h), do_strided.stride_n), query, n_q, D, DP, True)
    delta_i = tl.load(delta_ptr + head * n_q_padded + query)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + head * n_q_padded + query)
    k = Operand(head_of(k_strided, batch, h // group_size), k_strided.stride_n)
    v = Operand(head_of(v_strided, batch, h // group_size), v_strided.stride_n)
    entries_ptr += list_number * width
    full, count = list_range(entries_ptr, counts_ptr + list_number, n_k, MASK_BLOCK_KV)
    q_hat_i, s_q, k_hat = None, log2_scale, None
    if q_hat_ptr is not None:
        q_hat_i = load_padded(Operand(q_hat_ptr, DP), head * n_q_padded + query, DP)
        s_q = tl.load(q_scale_ptr + (head * n_q_padded + tile * BLOCK_Q) // MASK_BLOCK_Q)
        k_hat = int8_head(k_hat_ptr, k_scale_ptr, head // group_size, n_k_padded, DP, MASK_BLOCK_KV)
    queries, keys = QueryTile(q_i, q_hat_i, s_q, do_i, log_sum_exp_i, delta_i), KeyHead(k, k_hat, v)
    key_blocks = tl.cdiv(n_k, MASK_BLOCK_KV)
    ds_row = (head * tl.num_programs(0) + tile) * key_blocks
    dq_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    for entry in range(0, full):
        j = tl.load(entries_ptr + entry)
        log2_weight = log2_weight_at(weights_ptr, list_number * key_blocks + j)
        dq_i, ds_sum = key_tile(dq_i, queries, j, keys, log2_weight, n_k, TILE, False)
        if weights_ptr is not None:
            tl.store(ds_ptr + ds_row + j, ds_sum)
    for entry in range(full, count):
        j = tl.load(entries_ptr + entry)
        log2_weight = log2_weight_at(weights_ptr, list_number * key_blocks + j)
        dq_i, ds_sum = key_tile(dq_i, queries, j, keys, log2_weight, n_k, TILE, True)
        if weights_ptr is not None:
            tl.store(ds_ptr + ds_row + j, ds_sum)
    dq = Operand(head_of(dq_strided, batch, h), dq_strided.stride_n)
    dq_i = dq_i * scale * alpha_i + load_tokens(dq, query, n_q, D, DP, True).to(tl.float32)
    store_tokens(dq_i, dq, query, n_q, D, DP)


class KeyGradients(NamedTuple):
    """In a kernel: what the linear branch of one block of keys needs, and where the block's gradients go."""

    k: Operand
    v: Operand
    dsums: tl.tensor  # pointer to dh_j, then dz_j
    dk: Operand
    dv: Operand


@triton.jit
def store_key_gradients(dk_j, dv_j, out, key, n_k, scale, D: tl.constexpr, DP: tl.constexpr):
    """Add the linear branch's share to the sparse one's sums, and write dK_j and dV_j.

    Alg. 3, steps 9 and 10, and dK's part of step 11. K_j and V_j are loaded here, since it takes registers to keep them
    through a loop.

    out: KeyGradients.
    """
    dtype = out.dsums.dtype.element_ty
    d = tl.arange(0, DP)
    dh_j = tl.load(out.dsums + d[:, None] * DP + d[None, :])
    dz_j = tl.load(out.dsums + DP * DP + d).to(tl.float32)
    k_phi = softmax_features(load_tokens(out.k, key, n_k, D, DP, True).to(tl.float32), D, DP)
    dv_j += tl.dot(k_phi.to(dtype), dh_j)
    store_tokens(dv_j, out.dv, key, n_k, D, DP)
    dk_phi = tl.dot(load_tokens(out.v, key, n_k, D, DP, True).to(dtype), tl.trans(dh_j)) + dz_j[None, :]
    k_phi = softmax_features(load_tokens(out.k, key, n_k, D, DP, True).to(tl.float32), D, DP)
    dk_j = dk_j * scale + k_phi * (dk_phi - tl.sum(k_phi * dk_phi, 1)[:, None])
    store_tokens(dk_j, out.dk, key, n_k, D, DP)


@triton.jit
def partial_pointers(partial_ptr, number, DP: tl.constexpr, MASK_BLOCK_KV: tl.constexpr):
    """Return where float32 tile [Bkv, DP] number 2 p, dK of the piece at place p, is; or 2 p + 1, its dV."""
    row, d = tl.arange(0, MASK_BLOCK_KV), tl.arange(0, DP)
    return partial_ptr + number.to(tl.int64) * MASK_BLOCK_KV * DP + row[:, None] * DP + d[None, :]


@triton.jit(do_not_specialize=["n_q", "n_k", "width", "sums_rows", "places"])
def sla2_key_program(
    q_strided, k_strided, v_strided, do_strided, q_hat_ptr, q_scale_ptr, k_hat_ptr, k_scale_ptr, entries_ptr,
    counts_ptr, first_pieces_ptr, piece_blocks_ptr, dsums_ptr, delta_ptr, alpha_log_sum_exp_ptr, dk_strided, dv_strided,
    partial_ptr, weights_ptr, heads, group_size, n_q, n_k, n_q_padded, n_k_padded, width, sums_rows, places, log2_scale,
    scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr, MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Work on a piece of the list of one block of keys, or on the whole list of one: programs come in this order.

    BLOCK_Q: queries of a block that are worked on at a time. A piece leaves its sums at partial_ptr.
    """
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, MASK_BLOCK_KV, MASK_BLOCK_Q, False)
    STEPS: tl.constexpr = MASK_BLOCK_Q // BLOCK_Q  # per entry
    t, key_blocks, kv_heads = tl.program_id(0), tl.cdiv(n_k, MASK_BLOCK_KV), heads // group_size
    all_places = tl.num_programs(0) // (key_blocks + places) * places
    is_piece = t < all_places
    if is_piece:
        kv_head, block = (t // places).to(tl.int64), tl.load(piece_blocks_ptr + t)
    else:
        kv_head, block = ((t - all_places) // key_blocks).to(tl.int64), (t - all_places) % key_blocks
    j = tl.maximum(block, 0)
    first_pieces_ptr += kv_head * (key_blocks + 1) + j
    first_piece = tl.load(first_pieces_ptr)
    pieces = tl.load(first_pieces_ptr + 1) - first_piece
    # A place without a piece; a block whose pieces do the work.
    if (block < 0) | ((t >= all_places) & (pieces > 0)):
        return
    batch, h_kv = kv_head // kv_heads, kv_head % kv_heads
    first_list = (batch * heads + h_kv * group_size) * key_blocks + j
    length = 0
    for g in range(group_size):  # the query heads that share this key head: their lists, one after another
        length += tl.load(counts_ptr + first_list + g * key_blocks)
    share = tl.cdiv(length, tl.maximum(pieces, 1))
    begin = tl.where(is_piece, t % places - first_piece, 0) * share
    end = tl.minimum(begin + share, length)
    key = j * MASK_BLOCK_KV + tl.arange(0, MASK_BLOCK_KV)
    # [Bkv, D]
    k = Operand(head_of(k_strided, batch, h_kv), k_strided.stride_n)
    v = Operand(head_of(v_strided, batch, h_kv), v_strided.stride_n)
    k_hat_j, s_k = None, 1.0
    if k_hat_ptr is not None:
        k_hat = int8_head(k_hat_ptr, k_scale_ptr, kv_head, n_k_padded, DP, MASK_BLOCK_KV)
        k_hat_j, s_k = load_padded(k_hat, key, DP), tl.load(k_hat.scale + j)
    keys = KeyTile(load_tokens(k, key, n_k, D, DP, True), k_hat_j, s_k, load_tokens(v, key, n_k, D, DP, True))
    dk_j = tl.zeros([MASK_BLOCK_KV, DP], tl.float32)
    dv_j = tl.zeros([MASK_BLOCK_KV, DP], tl.float32)
    passed = 0  # entries in the lists of the heads before
    for g in range(group_size):
        h = h_kv * group_size + g
        head = batch * heads + h
        list_number = first_list + g * key_blocks
        count = tl.load(counts_ptr + list_number)
        q = Operand(head_of(q_strided, batch, h), q_strided.stride_n)
        do = Operand(head_of(do_strided, batch, h), do_strided.stride_n)
        rows = head * n_q_padded
        q_hat = None
        if q_hat_ptr is not None:
            q_hat = int8_head(q_hat_ptr, q_scale_ptr, head, n_q_padded, DP, MASK_BLOCK_Q)
        queries = QueryHead(q, q_hat, do, alpha_log_sum_exp_ptr + rows, delta_ptr + rows)
        first = tl.maximum(begin - passed, 0) * STEPS
        for step in range(0, tl.minimum(end - passed, count) * STEPS - first):
            step += first  # in the body, too: Triton 3.7 freezes what only the bounds of a nested loop use, see NOTES
            query_block = tl.load(entries_ptr + list_number * width + step // STEPS)
            i = query_block * STEPS + step % STEPS
            place = (head * (n_q_padded // MASK_BLOCK_Q) + query_block) * key_blocks + j
            log2_weight = log2_weight_at(weights_ptr, place)
            dk_j, dv_j = query_tile(dk_j, dv_j, keys, i, queries, log2_weight, n_q, log2_scale, TILE)
        passed += count
    if is_piece:
        tl.store(partial_pointers(partial_ptr, 2 * t, DP, MASK_BLOCK_KV), dk_j)
        tl.store(partial_pointers(partial_ptr, 2 * t + 1, DP, MASK_BLOCK_KV), dv_j)
    else:
        dk = Operand(head_of(dk_strided, batch, h_kv), dk_strided.stride_n)
        dv = Operand(head_of(dv_strided, batch, h_kv), dv_strided.stride_n)
        out = KeyGradients(k, v, dsums_ptr + (kv_head * sums_rows + j) * DP * (DP + 1), dk, dv)
        store_key_gradients(dk_j, dv_j, out, key, n_k, scale, D, DP)


@triton.jit(do_not_specialize=["n_k", "sums_rows", "places"])
def sla2_join_program(
    k_strided, v_strided, first_pieces_ptr, piece_blocks_ptr, dsums_ptr, partial_ptr, dk_strided, dv_strided, kv_heads,
    n_k, sums_rows, places, scale,
    D: tl.constexpr, DP: tl.constexpr, MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Add up all pieces of a block, in their order, if this place is that of its first piece."""
    t, key_blocks = tl.program_id(0), tl.cdiv(n_k, MASK_BLOCK_KV)
    kv_head, block = (t // places).to(tl.int64), tl.load(piece_blocks_ptr + t)
    j = tl.maximum(block, 0)
    first_pieces_ptr += kv_head * (key_blocks + 1) + j
    first_piece = tl.load(first_pieces_ptr)
    if (block < 0) | (t % places != first_piece):
        return
    pieces = tl.load(first_pieces_ptr + 1) - first_piece
    key = j * MASK_BLOCK_KV + tl.arange(0, MASK_BLOCK_KV)
    dk_j = tl.zeros([MASK_BLOCK_KV, DP], tl.float32)
    dv_j = tl.zeros([MASK_BLOCK_KV, DP], tl.float32)
    for piece in range(pieces):
        place = t + piece
        dk_j += tl.load(partial_pointers(partial_ptr, 2 * place, DP, MASK_BLOCK_KV))
        dv_j += tl.load(partial_pointers(partial_ptr, 2 * place + 1, DP, MASK_BLOCK_KV))
    batch, h = kv_head // kv_heads, kv_head % kv_heads
    k = Operand(head_of(k_strided, batch, h), k_strided.stride_n)
    v = Operand(head_of(v_strided, batch, h), v_strided.stride_n)
    dk = Operand(head_of(dk_strided, batch, h), dk_strided.stride_n)
    dv = Operand(head_of(dv_strided, batch, h), dv_strided.stride_n)
    out = KeyGradients(k, v, dsums_ptr + (kv_head * sums_rows + j) * DP * (DP + 1), dk, dv)
    store_key_gradients(dk_j, dv_j, out, key, n_k, scale, D, DP)


def empty_gradients(inputs: BackwardInputs) -> QueryGradients:
    """Allocate the gradients; dQ is laid out as Q is."""
    lines = (torch.empty_like(inputs.log_sum_exp) for _ in range(3))
    return QueryGradients(
        empty_in_layout_of(inputs.query), torch.empty_like(inputs.alpha), torch.empty_like(inputs.sums), *lines
    )


def run_linear_query(inputs: BackwardInputs, launch: Launch, start: Start, *, scale: float) -> QueryGradients:
    """Compute what the linear branch adds to dQ, and what the other programs need. launch.block_kv: columns."""
    do, query = (last_axis_contiguous(x) for x in inputs[:2])
    batch, heads, n_q, head_dim = query.shape
    gradients = empty_gradients(inputs)
    arguments = (
        strided(query), strided(do), inputs.k_mean, inputs.alpha, inputs.sums,
        inputs.sparse_output, inputs.log_sum_exp, strided(gradients.grad_query),
        *gradients[1:], heads, heads // inputs.key.shape[1], n_q, scale * math.log2(math.e),
    )  # fmt: skip
    dp = padded_head_dim(head_dim)
    constants = {"D": head_dim, "DP": dp, "MASK_BLOCK_Q": MASK_BLOCK_Q, "COLUMNS": min(launch.block_kv, dp)}
    grid = (block_count(n_q, MASK_BLOCK_Q), batch * heads)
    start(sla2_linear_query_program, grid, arguments, constants, launch.options)
    return gradients


def run_query(
    inputs: BackwardInputs,
    gradients: QueryGradients,
    lists: BlockLists,
    launch: Launch,
    start: Start,
    *,
    scale: float,
) -> Tensor | None:
    """Add the sparse branch's share to grad_query. lists: by query block. scale: c.

    With weights, return the sum of dS over each block, float32 [B, H, Tm, Tn], for an alpha of 1.
    """
    do, query, key, value = (last_axis_contiguous(x) for x in inputs[:4])
    batch, heads, n_q, head_dim = query.shape
    n_k, grid = key.shape[2], (padded_length(n_q) // launch.block_q, batch * heads)
    ds = None
    if inputs.log2_weights is not None:
        ds = query.new_zeros(batch, heads, grid[0], block_count(n_k, MASK_BLOCK_KV), dtype=torch.float32)
    arguments = (
        strided(query), strided(key), strided(value), strided(do), *int8_copies(inputs), *lists, inputs.alpha,
        gradients.delta, gradients.log_sum_exp, strided(gradients.grad_query), inputs.log2_weights, ds,
        heads, heads // key.shape[1], n_q, n_k, padded_length(n_q), padded_length(n_k),
        lists.entries.shape[-1], scale * math.log2(math.e), scale,
    )  # fmt: skip
    start(sla2_query_program, grid, arguments, tile_constants(head_dim, launch), launch.options)
    return None if ds is None else ds.unflatten(2, (-1, MASK_BLOCK_Q // launch.block_q)).sum(3)


def int8_copies(inputs: BackwardInputs) -> tuple[Tensor | None, ...]:
    """Return Q^, its scales, K^ and its scales, or None for each."""
    if inputs.q_hat is None:
        return (None,) * 4
    return inputs.q_hat.values, inputs.q_hat.scale, inputs.k_hat.values, inputs.k_hat.scale


def run_key(
    inputs: BackwardInputs,
    gradients: QueryGradients,
    grad_sums: Tensor,
    lists: BlockLists,
    launch: Launch,
    start: Start,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute dK and dV. grad_sums: dh_j and dz_j, [B, Hkv, Tn padded, Dp (Dp + 1)]. lists: by key block."""
    do, query, key, value = (last_axis_contiguous(x) for x in inputs[:4])
    heads, n_q, head_dim = query.shape[1:]
    (batch, kv_heads, n_k), dp = key.shape[:3], padded_head_dim(head_dim)
    first, blocks = pieces = pieces_of(lists.counts, kv_heads, start)
    dk, dv = empty_in_layout_of(inputs.key), empty_in_layout_of(inputs.value)
    partial = query.new_empty(*blocks.shape, 2, MASK_BLOCK_KV, dp, dtype=torch.float32)
    rows, places, outputs = grad_sums.shape[2], blocks.shape[2], (strided(dk), strided(dv))
    tensors = strided(key), strided(value)
    arguments = (
        strided(query), *tensors, strided(do), *int8_copies(inputs), *lists, *pieces, grad_sums, gradients.delta,
        gradients.alpha_log_sum_exp, *outputs, partial, inputs.log2_weights, heads, heads // kv_heads, n_q, n_k,
        padded_length(n_q), padded_length(n_k), lists.entries.shape[-1], rows, places, scale * math.log2(math.e), scale,
    )  # fmt: skip
    grid = (batch * kv_heads * (places + first.shape[2] - 1),)
    start(sla2_key_program, grid, arguments, tile_constants(head_dim, launch), launch.options)
    run_join(inputs, pieces, grad_sums, partial, (dk, dv), start, scale=scale)
    return dk, dv


def run_join(
    inputs: BackwardInputs,
    pieces: Pieces,
    grad_sums: Tensor,
    partial: Tensor,
    outputs: tuple[Tensor, Tensor],
    start: Start,
    *,
    scale: float,
) -> None:
    """Compute dK and dV, `outputs`, of the blocks whose lists are in pieces. partial: the pieces' sums of them."""
    key, value = (last_axis_contiguous(x) for x in (inputs.key, inputs.value))
    dk, dv = outputs
    arguments = (
        strided(key), strided(value), *pieces, grad_sums, partial, strided(dk),
        strided(dv), key.shape[1], key.shape[2], grad_sums.shape[2], pieces.blocks.shape[2], scale,
    )  # fmt: skip
    constants = {"D": key.shape[3], "DP": padded_head_dim(key.shape[3]), "MASK_BLOCK_KV": MASK_BLOCK_KV}
    start(sla2_join_program, (pieces.blocks.numel(),), arguments, constants, {"num_warps": JOIN_WARPS})
