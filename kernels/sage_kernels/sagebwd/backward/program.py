"""The programs that the backward levels share: dQ by rows of the score matrix, dK and dV by columns.

A split backward recomputes S and dP for the columns, and in return needs no atomic additions: every gradient tile is
summed by one program in a fixed order, so results are the same bit for bit on every run. The split also gives each
INT8 matmul a scale per row of its result for free: the row is exactly what a program's accumulator holds.

What differs between levels are the loop bodies QUERY_ROWS (dq_i after key tile j) and KEY_ROWS (dk_j, dv_j after query
tile i). In KEY_ROWS everything is transposed: st_ij is S_ij^T, [Bkv, Bq].
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q, Quantized, padded_head_dim, padded_length
from sage_kernels.common.tiles import key_tile_range, load_tokens

LOG2_E = math.log2(math.e)


class BackwardInputs(NamedTuple):
    """What a backward level reads: 16-bit tensors, and INT8 copies if the level uses them."""

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor
    grad_output: Tensor  # [B, H, Nq, D]
    log_sum_exp: Tensor  # [B, H, Nq padded], as the forward left it
    delta: Tensor  # [B, H, Nq padded]
    q_hat: Quantized | None
    k_hat: Quantized | None
    do_hat: Quantized | None


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dq_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, q_scale_ptr,
    k_ptr, k_stride_b, k_stride_h, k_stride_n, k_scale_ptr, kt_ptr,
    v_ptr, v_stride_b, v_stride_h, v_stride_n, do_ptr, do_stride_b, do_stride_h, do_stride_n,
    log_sum_exp_ptr, delta_ptr, dq_ptr, heads, groups, n_q, n_k, n_q_padded, n_k_padded, log2_scale, scale,
    QUERY_ROWS: tl.constexpr, IS_INT8: tl.constexpr, PER_BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_Q: tl.constexpr, SCALE_KV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of causal attention first
    head = tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    kv_head, h_kv = head // groups, h // groups
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DP)
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    q_ptrs = q_ptr + batch * q_stride_b + h * q_stride_h + query[:, None].to(tl.int64) * q_stride_n + d[None, :]
    if IS_INT8:
        q_i = tl.load(q_ptrs)
        s_q = tl.load(q_scale_ptr + head * (n_q_padded // SCALE_Q) + query // SCALE_Q)
    else:
        q_i = tl.load(q_ptrs, mask=inside, other=0.0)
        s_q = tl.zeros([BLOCK_Q], tl.float32) + log2_scale
    do_i = load_tokens(do_ptr + batch * do_stride_b + h * do_stride_h, query, do_stride_n, n_q, D, DP, True)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + head * n_q_padded + query)
    delta_i = tl.load(delta_ptr + head * n_q_padded + query)
    k_ptr += batch * k_stride_b + h_kv * k_stride_h
    kt_ptr += kv_head * n_k_padded * DP
    k_scale_ptr += kv_head * (n_k_padded // SCALE_KV)
    v_ptr += batch * v_stride_b + h_kv * v_stride_h
    dq_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    full, end = key_tile_range(i * BLOCK_Q, n_k, BLOCK_Q, BLOCK_KV, IS_CAUSAL)
    for j in range(0, full):
        dq_i = QUERY_ROWS(
            dq_i, q_i, s_q, do_i, log_sum_exp_i, delta_i, j, query, n_k, n_k_padded, k_ptr, k_stride_n, k_scale_ptr,
            kt_ptr, v_ptr, v_stride_n, D, DP, BLOCK_Q, BLOCK_KV, SCALE_KV, IS_CAUSAL, False, PER_BLOCK,
        )  # fmt: skip
    for j in range(full, end):
        dq_i = QUERY_ROWS(
            dq_i, q_i, s_q, do_i, log_sum_exp_i, delta_i, j, query, n_k, n_k_padded, k_ptr, k_stride_n, k_scale_ptr,
            kt_ptr, v_ptr, v_stride_n, D, DP, BLOCK_Q, BLOCK_KV, SCALE_KV, IS_CAUSAL, True, PER_BLOCK,
        )  # fmt: skip
    dq_ptrs = dq_ptr + head * n_q * D + query[:, None] * D + d[None, :]
    dq_i *= (scale + s_q * 0.0)[:, None]  # NaN where s_Q is
    tl.store(dq_ptrs, dq_i.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dkdv_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, q_scale_ptr, qt_ptr,
    k_ptr, k_stride_b, k_stride_h, k_stride_n, k_scale_ptr,
    v_ptr, v_stride_b, v_stride_h, v_stride_n, do_ptr, do_stride_b, do_stride_h, do_stride_n, dot_ptr, do_scale_ptr,
    log_sum_exp_ptr, delta_ptr, dk_ptr, dv_ptr, heads, groups, n_q, n_k, n_q_padded, n_k_padded, log2_scale, dk_scale,
    KEY_ROWS: tl.constexpr, IS_INT8: tl.constexpr, PER_BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_Q: tl.constexpr, SCALE_KV: tl.constexpr,
    IS_CAUSAL: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)  # the first keys, which most queries see, first
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = heads // groups
    batch, h_kv = kv_head // kv_heads, kv_head % kv_heads
    key, d = j * BLOCK_KV + tl.arange(0, BLOCK_KV), tl.arange(0, DP)
    inside = (key[:, None] < n_k) & (d[None, :] < D)
    k_ptrs = k_ptr + batch * k_stride_b + h_kv * k_stride_h + key[:, None].to(tl.int64) * k_stride_n + d[None, :]
    if IS_INT8:
        k_j = tl.load(k_ptrs)
        s_k = tl.load(k_scale_ptr + kv_head * (n_k_padded // SCALE_KV) + key // SCALE_KV)
    else:
        k_j = tl.load(k_ptrs, mask=inside, other=0.0)
        s_k = tl.zeros([BLOCK_KV], tl.float32) + log2_scale
    v_j = load_tokens(v_ptr + batch * v_stride_b + h_kv * v_stride_h, key, v_stride_n, n_k, D, DP, True)
    dk_j = tl.zeros([BLOCK_KV, DP], tl.float32)
    dv_j = tl.zeros([BLOCK_KV, DP], tl.float32)
    # Query tiles [first, full) cross the diagonal, [full, end) see every key of this tile.
    first, full, end = 0, 0, tl.cdiv(n_q, BLOCK_Q)
    if IS_CAUSAL:
        first = tl.minimum(j * BLOCK_KV // BLOCK_Q, end)
        full = tl.minimum(tl.cdiv((j + 1) * BLOCK_KV - 1, BLOCK_Q), end)
    for g in range(groups):  # the query heads that share this key head
        h = h_kv * groups + g
        head = batch * heads + h
        q_head_ptr = q_ptr + batch * q_stride_b + h * q_stride_h
        do_head_ptr = do_ptr + batch * do_stride_b + h * do_stride_h
        rows, copies, scales = head * n_q_padded, head * n_q_padded * DP, head * (n_q_padded // SCALE_Q)
        for i in range(first, full):
            dk_j, dv_j = KEY_ROWS(
                dk_j, dv_j, k_j, s_k, v_j, i, key, n_q, n_k, n_q_padded, q_head_ptr, q_stride_n, q_scale_ptr + scales,
                qt_ptr + copies, do_head_ptr, do_stride_n, dot_ptr + copies, do_scale_ptr + scales,
                log_sum_exp_ptr + rows, delta_ptr + rows, D, DP, BLOCK_Q, BLOCK_KV, SCALE_Q, True, PER_BLOCK,
                WITH_DK, WITH_DV,
            )  # fmt: skip
        for i in range(full, end):
            dk_j, dv_j = KEY_ROWS(
                dk_j, dv_j, k_j, s_k, v_j, i, key, n_q, n_k, n_q_padded, q_head_ptr, q_stride_n, q_scale_ptr + scales,
                qt_ptr + copies, do_head_ptr, do_stride_n, dot_ptr + copies, do_scale_ptr + scales,
                log_sum_exp_ptr + rows, delta_ptr + rows, D, DP, BLOCK_Q, BLOCK_KV, SCALE_Q, False, PER_BLOCK,
                WITH_DK, WITH_DV,
            )  # fmt: skip
    offsets = kv_head * n_k * D + key[:, None] * D + d[None, :]
    if WITH_DK:
        tl.store(dk_ptr + offsets, (dk_j * dk_scale).to(dk_ptr.dtype.element_ty), mask=inside)
    if WITH_DV:
        tl.store(dv_ptr + offsets, dv_j.to(dv_ptr.dtype.element_ty), mask=inside)


def run_dq(
    inputs: BackwardInputs, query_rows, launch: Launch, *, per_block: bool, is_causal: bool, scale: float
) -> Tensor:
    """dQ [B, H, Nq, D] with the loop body query_rows. scale: c."""
    query, key, heads, groups = (
        inputs.query,
        inputs.key,
        inputs.query.shape[1],
        inputs.query.shape[1] // inputs.key.shape[1],
    )
    n_q_padded, n_k_padded = padded_length(query.shape[2]), padded_length(key.shape[2])
    dq = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    q, k = _operand(query, inputs.q_hat), _operand(key, inputs.k_hat)
    v, do = inputs.value, inputs.grad_output
    dq_program[(n_q_padded // launch.block_q, query.shape[0] * heads)](
        q, *q.stride()[:3], _scale(inputs.q_hat, dq), k, *k.stride()[:3], _scale(inputs.k_hat, dq),
        _transposed(inputs.k_hat, dq), v, *v.stride()[:3], do, *do.stride()[:3], inputs.log_sum_exp, inputs.delta, dq,
        heads, groups, query.shape[2], key.shape[2], n_q_padded, n_k_padded, scale * LOG2_E, scale,
        QUERY_ROWS=query_rows, PER_BLOCK=per_block, **_constants(inputs, launch, is_causal),
    )  # fmt: skip
    return dq


def run_dkdv(
    inputs: BackwardInputs,
    key_rows,
    launch: Launch,
    *,
    per_block: bool,
    is_causal: bool,
    scale: float,
    outputs: str = "dkdv",
) -> tuple[Tensor, Tensor]:
    """dK and dV [B, Hkv, Nk, D] with the loop body key_rows; outputs "dk" or "dv" leaves the other unwritten."""
    query, key, heads, groups = (
        inputs.query,
        inputs.key,
        inputs.query.shape[1],
        inputs.query.shape[1] // inputs.key.shape[1],
    )
    n_q_padded, n_k_padded = padded_length(query.shape[2]), padded_length(key.shape[2])
    dk, dv = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
    q, k = _operand(query, inputs.q_hat), _operand(key, inputs.k_hat)
    v, do = inputs.value, inputs.grad_output
    dkdv_program[(n_k_padded // launch.block_kv, key.shape[0] * key.shape[1])](
        q, *q.stride()[:3], _scale(inputs.q_hat, dk), _transposed(inputs.q_hat, dk),
        k, *k.stride()[:3], _scale(inputs.k_hat, dk), v, *v.stride()[:3], do, *do.stride()[:3],
        _transposed(inputs.do_hat, dk), _scale(inputs.do_hat, dk), inputs.log_sum_exp, inputs.delta, dk, dv,
        heads, groups, query.shape[2], key.shape[2], n_q_padded, n_k_padded, scale * LOG2_E,
        scale if inputs.q_hat is None else 1 / LOG2_E,  # the scale of an INT8 Q carries c log2(e)
        KEY_ROWS=key_rows, PER_BLOCK=per_block, WITH_DK="dk" in outputs, WITH_DV="dv" in outputs,
        **_constants(inputs, launch, is_causal),
    )  # fmt: skip
    return dk, dv


def _constants(inputs: BackwardInputs, launch: Launch, is_causal: bool) -> dict:
    head_dim = inputs.query.shape[3]
    return {
        "IS_INT8": inputs.q_hat is not None, "D": head_dim, "DP": padded_head_dim(head_dim),
        "BLOCK_Q": launch.block_q, "BLOCK_KV": launch.block_kv, "SCALE_Q": BLOCK_Q, "SCALE_KV": BLOCK_KV,
        "IS_CAUSAL": is_causal, "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def _operand(x: Tensor, quantized: Quantized | None) -> Tensor:
    return x if quantized is None else quantized.values


def _scale(quantized: Quantized | None, placeholder: Tensor) -> Tensor:
    return placeholder if quantized is None else quantized.scale


def _transposed(quantized: Quantized | None, placeholder: Tensor) -> Tensor:
    return placeholder if quantized is None else quantized.transposed
