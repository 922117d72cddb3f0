"""The backward programs: dQ along a query block's list, dK and dV along a key block's; no atomics.

The linear branch comes first for queries: its program leaves dH_i and dZ_i, of which one matrix product makes what the
keys need, dh_j = sum_i (1 - M_ij) dH_i. The sparse programs then add their share; their loop bodies KEY_TILE and
QUERY_TILE are the SageBwd ladder's in 16 bit.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import last_axis_contiguous
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.signature import FLOATS, NUMBER, PADDED_SIZE, POINTERS, SIZE, Signature, strided
from sage_kernels.common.tiles import TINY, Operand, Tile, load_tokens, softmax_features
from sage_kernels.sagebwd.backward import level0_16bit
from sage_kernels.sagebwd.backward.program import KeyHead, KeyTile, QueryHead, QueryTile
from sage_kernels.sla2.forward.program import inverse_or_zero, tile_constants
from sage_kernels.sla2.lists import BlockLists, list_range
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_kernels.sla2.sums import SUMS_DTYPE


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


class QueryGradients(NamedTuple):
    grad_query: Tensor  # [B, H, Nq, D]; first the linear branch's share, then all of it
    grad_alpha: Tensor  # float32 [B, H, Tm]
    grad_sums: Tensor  # [B, H, Tm, Dp (Dp + 1)]: dH_i, then dZ_i
    delta: Tensor  # float32 [B, H, Nq padded]: rowsum(dO * O_s)
    log_sum_exp: Tensor  # L of the scores as they are
    alpha_log_sum_exp: Tensor  # L - log2(alpha): 2^(S - it) is alpha P


@triton.jit(do_not_specialize=["n_q"])
def linear_query_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, do_ptr, do_stride_b, do_stride_h, do_stride_n,
    k_mean_ptr, alpha_ptr, sums_ptr, o_s_ptr, log_sum_exp_ptr, dq_ptr, dalpha_ptr, dsums_ptr, delta_ptr,
    unsmoothed_ptr, alpha_log_sum_exp_ptr, heads, groups, n_q, log2_scale,
    D: tl.constexpr, DP: tl.constexpr, MASK_BLOCK_Q: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: one block of queries of one head. Alg. 3, lines 4 to 8, and dalpha. COLUMNS: at a time."""
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    block = head * tl.num_programs(0) + i
    row = tl.arange(0, MASK_BLOCK_Q)
    query, d = i * MASK_BLOCK_Q + row, tl.arange(0, DP)
    rows = head * n_q * D + query[:, None] * D
    alpha_i = tl.load(alpha_ptr + block)
    # [Bq, D]
    q_i = load_tokens(Operand(q_ptr + batch * q_stride_b + h * q_stride_h, q_stride_n), query, n_q, D, DP, True)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + block * MASK_BLOCK_Q + row)
    if k_mean_ptr is not None:  # give back what smoothing K took from every score of a row
        k_mean = tl.load(k_mean_ptr + (head // groups) * D + d, mask=d < D, other=0.0)
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
    do_ptrs = do_ptr + batch * do_stride_b + h * do_stride_h + query[:, None].to(tl.int64) * do_stride_n
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
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    tl.store(dq_ptr + rows + d[None, :], dq_i.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_q", "n_k", "width"])
def query_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, k_ptr, k_stride_b, k_stride_h, k_stride_n,
    v_ptr, v_stride_b, v_stride_h, v_stride_n, do_ptr, do_stride_b, do_stride_h, do_stride_n,
    entries_ptr, counts_ptr, alpha_ptr, delta_ptr, log_sum_exp_ptr, dq_ptr,
    heads, groups, n_q, n_k, n_q_padded, width, log2_scale, scale,
    KEY_TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr, MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one block of one head. Adds the sparse branch's share to dQ."""
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, MASK_BLOCK_KV, MASK_BLOCK_KV, False)
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    query, d = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DP)
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    offsets = head * n_q * D + query[:, None] * D + d[None, :]
    list_number = head * tl.cdiv(n_q, MASK_BLOCK_Q) + tile * BLOCK_Q // MASK_BLOCK_Q
    alpha_i = tl.load(alpha_ptr + list_number)
    # [Bq, D]
    q_i = load_tokens(Operand(q_ptr + batch * q_stride_b + h * q_stride_h, q_stride_n), query, n_q, D, DP, True)
    do_i = load_tokens(Operand(do_ptr + batch * do_stride_b + h * do_stride_h, do_stride_n), query, n_q, D, DP, True)
    delta_i = tl.load(delta_ptr + head * n_q_padded + query)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + head * n_q_padded + query)
    k = Operand(k_ptr + batch * k_stride_b + (h // groups) * k_stride_h, k_stride_n)
    v = Operand(v_ptr + batch * v_stride_b + (h // groups) * v_stride_h, v_stride_n)
    entries_ptr += list_number * width
    full, count = list_range(entries_ptr, counts_ptr + list_number, n_k, MASK_BLOCK_KV)
    s_q = tl.zeros([BLOCK_Q], tl.float32) + log2_scale
    queries, keys = QueryTile(query, q_i, s_q, do_i, log_sum_exp_i, delta_i), KeyHead(k, None, v)
    dq_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    for entry in range(0, full):
        dq_i = KEY_TILE(dq_i, queries, tl.load(entries_ptr + entry), keys, n_k, TILE, False, False)
    for entry in range(full, count):
        dq_i = KEY_TILE(dq_i, queries, tl.load(entries_ptr + entry), keys, n_k, TILE, True, False)
    dq_i = dq_i * scale * alpha_i + tl.load(dq_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(dq_ptr + offsets, dq_i.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_q", "n_k", "width"])
def key_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, k_ptr, k_stride_b, k_stride_h, k_stride_n,
    v_ptr, v_stride_b, v_stride_h, v_stride_n, do_ptr, do_stride_b, do_stride_h, do_stride_n,
    entries_ptr, counts_ptr, dsums_ptr, delta_ptr, alpha_log_sum_exp_ptr, dk_ptr, dv_ptr,
    heads, groups, n_q, n_k, n_q_padded, width, log2_scale, scale,
    QUERY_TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_Q: tl.constexpr, MASK_BLOCK_Q: tl.constexpr, MASK_BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program: one block of keys of one head. BLOCK_Q: queries of a block that are worked on at a time."""
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, MASK_BLOCK_KV, MASK_BLOCK_Q, False)
    j, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_blocks, kv_heads = tl.num_programs(0), heads // groups
    batch, h_kv = kv_head // kv_heads, kv_head % kv_heads
    key, d = j * MASK_BLOCK_KV + tl.arange(0, MASK_BLOCK_KV), tl.arange(0, DP)
    inside = (key[:, None] < n_k) & (d[None, :] < D)
    # [Bkv, D]
    k_j = load_tokens(Operand(k_ptr + batch * k_stride_b + h_kv * k_stride_h, k_stride_n), key, n_k, D, DP, True)
    v_j = load_tokens(Operand(v_ptr + batch * v_stride_b + h_kv * v_stride_h, v_stride_n), key, n_k, D, DP, True)
    keys = KeyTile(key, k_j, tl.zeros([MASK_BLOCK_KV], tl.float32) + log2_scale, v_j)
    dk_j = tl.zeros([MASK_BLOCK_KV, DP], tl.float32)
    dv_j = tl.zeros([MASK_BLOCK_KV, DP], tl.float32)
    for g in range(groups):  # the query heads that share this key head
        h = h_kv * groups + g
        head = batch * heads + h
        list_number = head * key_blocks + j
        count = tl.load(counts_ptr + list_number)
        q = Operand(q_ptr + batch * q_stride_b + h * q_stride_h, q_stride_n)
        do = Operand(do_ptr + batch * do_stride_b + h * do_stride_h, do_stride_n)
        rows = head * n_q_padded
        queries = QueryHead(q, None, do, None, alpha_log_sum_exp_ptr + rows, delta_ptr + rows)
        for step in range(count * (MASK_BLOCK_Q // BLOCK_Q)):
            block = tl.load(entries_ptr + list_number * width + step // (MASK_BLOCK_Q // BLOCK_Q))
            i = block * (MASK_BLOCK_Q // BLOCK_Q) + step % (MASK_BLOCK_Q // BLOCK_Q)
            dk_j, dv_j = QUERY_TILE(dk_j, dv_j, keys, i, queries, n_q, n_k, TILE, False, False, True, True)
    # The linear branch (Alg. 3, lines 16 to 18).
    dtype = dsums_ptr.dtype.element_ty
    dsums_ptr += (kv_head * key_blocks + j) * DP * (DP + 1)
    dh_j = tl.load(dsums_ptr + d[:, None] * DP + d[None, :])
    dz_j = tl.load(dsums_ptr + DP * DP + d).to(tl.float32)
    k_phi = softmax_features(k_j.to(tl.float32), D, DP)
    dv_j += tl.dot(k_phi.to(dtype), dh_j)
    offsets = kv_head * n_k * D + key[:, None] * D + d[None, :]
    tl.store(dv_ptr + offsets, dv_j.to(dv_ptr.dtype.element_ty), mask=inside)
    dk_phi = tl.dot(v_j.to(dtype), tl.trans(dh_j)) + dz_j[None, :]
    dk_j = dk_j * scale + k_phi * (dk_phi - tl.sum(k_phi * dk_phi, 1)[:, None])
    tl.store(dk_ptr + offsets, dk_j.to(dk_ptr.dtype.element_ty), mask=inside)


def linear_query_signature(*, smoothed: bool, dtype: torch.dtype = torch.bfloat16) -> Signature:
    """Triton's types of the parameters of `linear_query_program`. smoothed: whether there is a k_mean."""
    x, sums = POINTERS[dtype], POINTERS[SUMS_DTYPE]
    return strided("q", x) | strided("do", x) | {
        "k_mean_ptr": FLOATS if smoothed else None, "alpha_ptr": FLOATS, "sums_ptr": sums, "o_s_ptr": x,
        "log_sum_exp_ptr": FLOATS, "dq_ptr": x, "dalpha_ptr": FLOATS, "dsums_ptr": sums, "delta_ptr": FLOATS,
        "unsmoothed_ptr": FLOATS, "alpha_log_sum_exp_ptr": FLOATS, "heads": SIZE, "groups": SIZE, "n_q": SIZE,
        "log2_scale": NUMBER,
    }  # fmt: skip


def sparse_signature(dtype: torch.dtype) -> Signature:
    """Triton's types of the parameters that both sparse programs have."""
    x, lists = POINTERS[dtype], POINTERS[torch.int32]
    return strided("q", x) | strided("k", x) | strided("v", x) | strided("do", x) | {
        "entries_ptr": lists, "counts_ptr": lists, "delta_ptr": FLOATS, "heads": SIZE, "groups": SIZE, "n_q": SIZE,
        "n_k": SIZE, "n_q_padded": PADDED_SIZE, "width": SIZE, "log2_scale": NUMBER, "scale": NUMBER,
    }  # fmt: skip


def query_signature(dtype: torch.dtype = torch.bfloat16) -> Signature:
    """Triton's types of the parameters of `query_program`."""
    return sparse_signature(dtype) | {"alpha_ptr": FLOATS, "log_sum_exp_ptr": FLOATS, "dq_ptr": POINTERS[dtype]}


def key_signature(dtype: torch.dtype = torch.bfloat16) -> Signature:
    """Triton's types of the parameters of `key_program`."""
    outputs = {"dk_ptr": POINTERS[dtype], "dv_ptr": POINTERS[dtype]}
    return sparse_signature(dtype) | {"dsums_ptr": POINTERS[SUMS_DTYPE], "alpha_log_sum_exp_ptr": FLOATS} | outputs


def linear_query_constants(head_dim: int, launch: Launch) -> dict:
    """The constants of `linear_query_program`. launch.block_kv: columns at a time."""
    dp = padded_head_dim(head_dim)
    return {"D": head_dim, "DP": dp, "MASK_BLOCK_Q": MASK_BLOCK_Q, "COLUMNS": min(launch.block_kv, dp)}


def query_constants(head_dim: int, launch: Launch) -> dict:
    """The constants of `query_program`."""
    return {"KEY_TILE": level0_16bit.key_tile} | tile_constants(head_dim, launch)


def key_constants(head_dim: int, launch: Launch) -> dict:
    """The constants of `key_program`."""
    return {"QUERY_TILE": level0_16bit.query_tile} | tile_constants(head_dim, launch)


def run_linear_query(
    inputs: BackwardInputs, launch: Launch, start: Start = start_with_triton, *, scale: float
) -> QueryGradients:
    """What the linear branch adds to dQ, and what the other programs need. launch.block_kv: columns at a time."""
    do, query = (last_axis_contiguous(x) for x in inputs[:2])
    batch, heads, n_q, head_dim = query.shape
    gradients = QueryGradients(
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty_like(inputs.alpha),
        torch.empty_like(inputs.sums),
        *(torch.empty_like(inputs.log_sum_exp) for _ in range(3)),
    )
    arguments = (
        query, *query.stride()[:3], do, *do.stride()[:3], inputs.k_mean, inputs.alpha, inputs.sums,
        inputs.sparse_output, inputs.log_sum_exp, *gradients, heads, heads // inputs.key.shape[1], n_q,
        scale * math.log2(math.e),
    )  # fmt: skip
    grid, constants = (triton.cdiv(n_q, MASK_BLOCK_Q), batch * heads), linear_query_constants(head_dim, launch)
    start("linear_query", linear_query_program, grid, arguments, constants, launch.options)
    return gradients


def run_query(
    inputs: BackwardInputs,
    gradients: QueryGradients,
    lists: BlockLists,
    launch: Launch,
    start: Start = start_with_triton,
    *,
    scale: float,
) -> None:
    """Add the sparse branch's share to grad_query. lists: by query block. scale: c."""
    do, query, key, value = (last_axis_contiguous(x) for x in inputs[:4])
    batch, heads, n_q, head_dim = query.shape
    arguments = (
        query, *query.stride()[:3], key, *key.stride()[:3], value, *value.stride()[:3], do, *do.stride()[:3],
        *lists, inputs.alpha, gradients.delta, gradients.log_sum_exp, gradients.grad_query,
        heads, heads // key.shape[1], n_q, key.shape[2], gradients.delta.shape[-1], lists.entries.shape[-1],
        scale * math.log2(math.e), scale,
    )  # fmt: skip
    grid, constants = (triton.cdiv(n_q, launch.block_q), batch * heads), query_constants(head_dim, launch)
    start("query", query_program, grid, arguments, constants, launch.options)


def run_key(
    inputs: BackwardInputs,
    gradients: QueryGradients,
    grad_sums: Tensor,
    lists: BlockLists,
    launch: Launch,
    start: Start = start_with_triton,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dK and dV. grad_sums: dh_j and dz_j, [B, Hkv, Tn, Dp (Dp + 1)]. lists: by key block."""
    do, query, key, value = (last_axis_contiguous(x) for x in inputs[:4])
    heads, n_q, head_dim = query.shape[1:]
    dk, dv = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
    arguments = (
        query, *query.stride()[:3], key, *key.stride()[:3], value, *value.stride()[:3], do, *do.stride()[:3],
        *lists, grad_sums, gradients.delta, gradients.alpha_log_sum_exp, dk, dv,
        heads, heads // key.shape[1], n_q, key.shape[2], gradients.delta.shape[-1], lists.entries.shape[-1],
        scale * math.log2(math.e), scale,
    )  # fmt: skip
    grid = (triton.cdiv(key.shape[2], MASK_BLOCK_KV), key.shape[0] * key.shape[1])
    start("key", key_program, grid, arguments, key_constants(head_dim, launch), launch.options)
    return dk, dv
