"""The program that forward levels 0 to 4 share: one tile of queries visits the key tiles it may see.

Inputs come prepared by `prepare`: a level says which of Q, K, V it reads in INT8. What differs between levels is the
loop's body, the function KEY_TILE: (m, l, o_i) after key tile j from (m, l, o_i) before it.

Scores are kept in units of log2(e), so that exp becomes exp2, the instruction the GPU has: s_q holds c log2(e).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q, Quantized, padded_head_dim, padded_length
from sage_kernels.common.tiles import NO_KEY, key_tile_range


class ForwardInputs(NamedTuple):
    """What a forward level reads: 16-bit tensors, and INT8 copies of those its `prepare` asked for."""

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor
    q_hat: Quantized | None
    k_hat: Quantized | None
    v_hat: Quantized | None


@triton.jit(do_not_specialize=["n_q", "n_k"])  # one compilation for every length
def forward_program(
    q_ptr, q_stride_b, q_stride_h, q_stride_n, q_scale_ptr,
    k_ptr, k_stride_b, k_stride_h, k_stride_n, k_scale_ptr,
    v_ptr, v_stride_b, v_stride_h, v_stride_n, v_scale_ptr,
    o_ptr, log_sum_exp_ptr, heads, groups, n_q, n_k, n_q_padded, n_k_padded, scale,
    KEY_TILE: tl.constexpr, INT8_QK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_Q: tl.constexpr, SCALE_KV: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of causal attention first
    head = tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    kv_head = head // groups
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DP)
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    # [Bq, D]
    q_ptrs = q_ptr + batch * q_stride_b + h * q_stride_h + query[:, None].to(tl.int64) * q_stride_n + d[None, :]
    if INT8_QK:
        q_i = tl.load(q_ptrs)
        s_q = tl.load(q_scale_ptr + head * (n_q_padded // SCALE_Q) + query // SCALE_Q)
    else:
        q_i = tl.load(q_ptrs, mask=inside, other=0.0)
        s_q = tl.zeros([BLOCK_Q], tl.float32) + scale
    k_ptr += batch * k_stride_b + (h // groups) * k_stride_h
    v_ptr += batch * v_stride_b + (h // groups) * v_stride_h
    k_scale_ptr += kv_head * (n_k_padded // SCALE_KV)
    v_scale_ptr += kv_head * (n_k_padded // SCALE_KV)
    m = tl.full([BLOCK_Q], NO_KEY, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    full, end = key_tile_range(i * BLOCK_Q, n_k, BLOCK_Q, BLOCK_KV, IS_CAUSAL)
    for j in range(0, full):
        m, l, o_i = KEY_TILE(
            q_i, s_q, m, l, o_i, j, query, n_k, k_ptr, k_stride_n, k_scale_ptr, v_ptr, v_stride_n, v_scale_ptr,
            D, DP, BLOCK_Q, BLOCK_KV, SCALE_KV, IS_CAUSAL, False,
        )  # fmt: skip
    for j in range(full, end):
        m, l, o_i = KEY_TILE(
            q_i, s_q, m, l, o_i, j, query, n_k, k_ptr, k_stride_n, k_scale_ptr, v_ptr, v_stride_n, v_scale_ptr,
            D, DP, BLOCK_Q, BLOCK_KV, SCALE_KV, IS_CAUSAL, True,
        )  # fmt: skip
    o_ptrs = o_ptr + head * n_q * D + query[:, None] * D + d[None, :]
    tl.store(o_ptrs, (o_i / l[:, None]).to(o_ptr.dtype.element_ty), mask=inside)
    # Rows past the end get a huge L: their P is then 0 in the backward pass.
    log_sum_exp = tl.where(query < n_q, m + tl.math.log2(l), 0.0 - NO_KEY)
    tl.store(log_sum_exp_ptr + head * n_q_padded + query, log_sum_exp)


def run(inputs: ForwardInputs, key_tile, launch: Launch, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """O [B, H, Nq, D] and L [B, H, Nq padded], the log2-sum-exp2 of the (smoothed) scores in units of log2(e).

    scale: c log2(e), for levels that read Q in 16 bit; the INT8 copy of Q carries it in its scale.
    """
    query, key = inputs.query, inputs.key
    batch, heads, n_q, head_dim = query.shape
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(key.shape[2])
    q = query if inputs.q_hat is None else inputs.q_hat.values
    k = key if inputs.k_hat is None else inputs.k_hat.values
    v = inputs.value if inputs.v_hat is None else inputs.v_hat.transposed
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    log_sum_exp = query.new_empty(batch, heads, n_q_padded, dtype=torch.float32)
    grid = (n_q_padded // launch.block_q, batch * heads)
    forward_program[grid](
        q, *q.stride()[:3], _scale(inputs.q_hat, output), k, *k.stride()[:3], _scale(inputs.k_hat, output),
        v, *v.stride()[:3], _scale(inputs.v_hat, output), output, log_sum_exp,
        heads, heads // key.shape[1], n_q, key.shape[2], n_q_padded, n_k_padded, scale,
        KEY_TILE=key_tile, INT8_QK=inputs.q_hat is not None, D=head_dim, DP=padded_head_dim(head_dim),
        BLOCK_Q=launch.block_q, BLOCK_KV=launch.block_kv, SCALE_Q=BLOCK_Q, SCALE_KV=BLOCK_KV, IS_CAUSAL=is_causal,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return output, log_sum_exp


def _scale(quantized: Quantized | None, placeholder: Tensor) -> Tensor:
    return placeholder if quantized is None else quantized.scale
