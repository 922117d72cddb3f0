"""The program that forward levels 0 to 4 share: one tile of queries visits the key tiles it may see.

Inputs come prepared by `prepare_forward`: a level says which of Q, K, V it reads in INT8. What differs between levels
is the loop's body, the function KEY_TILE: (m, l, o_i) after key tile j from (m, l, o_i) before it.

Scores are kept multiplied by log2(e), so that exp becomes exp2, the instruction the GPU has: s_q holds c log2(e).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, strided
from sage_kernels.common.quantize import SCALE_BLOCK, Quantized, padded_head_dim, padded_length
from sage_kernels.common.tiles import NO_KEY, Operand, Tile, head_of, key_tile_range, load_with_scale, positively_scaled


class ForwardInputs(NamedTuple):
    """The inputs of a forward level: 16-bit tensors, and INT8 copies of those its `prepare_forward` asked for."""

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor
    q_hat: Quantized | None
    k_hat: Quantized | None
    v_hat: Quantized | None
    v_range: Tensor | None = None  # [B, Hkv, blocks]: max|V| / 127 of each block, if V was quantised
    v_mean: Tensor | None = None  # [B, Hkv, D], what V^ lacks; then P is rounded by ordered dither
    lengths: Tensor | None = None  # int32 [B]: how many tokens of each sequence there are, queries and keys, if not all


@triton.jit(do_not_specialize=["n_q", "n_k"])  # one compilation for every length
def forward_program(
    q_strided, q_scale_ptr, k_strided, k_scale_ptr, v_strided, v_scale_ptr, v_mean_ptr, o_strided, log_sum_exp_ptr,
    lengths_ptr, heads, group_size, n_q, n_k, n_q_padded, n_k_padded, log2_scale,
    KEY_TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr, NEGATED: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_Q queries of one head. A scale that is None belongs to a 16-bit tensor.

    v_mean_ptr: what V^ lacks; None: nothing. lengths_ptr None: every sequence has n_q and n_k tokens.
    """
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, BLOCK_KV, SCALE_BLOCK, IS_CAUSAL)
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of causal attention first
    head = tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    if lengths_ptr is not None:
        n_q = tl.load(lengths_ptr + batch)
        n_k = tl.where(i * BLOCK_Q < n_q, n_q, 0)  # queries past the end visit no key
    kv_head, h_kv = head // group_size, h // group_size
    s_q_ptr = None if q_scale_ptr is None else q_scale_ptr + head * (n_q_padded // SCALE_BLOCK)
    s_k_ptr = None if k_scale_ptr is None else k_scale_ptr + kv_head * (n_k_padded // SCALE_BLOCK)
    s_v_ptr = None if v_scale_ptr is None else v_scale_ptr + kv_head * (n_k_padded // SCALE_BLOCK)
    q = Operand(head_of(q_strided, batch, h), q_strided.stride_n, s_q_ptr)
    k = Operand(head_of(k_strided, batch, h_kv), k_strided.stride_n, s_k_ptr)
    v = Operand(head_of(v_strided, batch, h_kv), v_strided.stride_n, s_v_ptr)
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DP)
    # [Bq, D], [Bq]
    q_i, s_q = load_with_scale(q, query, n_q, log2_scale, TILE)
    if q_scale_ptr is None:
        q_i, s_q = positively_scaled(q_i, log2_scale, BLOCK_Q, NEGATED)
    m = tl.full([BLOCK_Q], NO_KEY, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    full, end = key_tile_range(i * BLOCK_Q, n_k, BLOCK_Q, BLOCK_KV, IS_CAUSAL)
    for j in range(0, full):
        m, l, o_i = KEY_TILE(m, l, o_i, q_i, s_q, query, j, k, v, n_k, TILE, False)
    for j in range(full, end):
        m, l, o_i = KEY_TILE(m, l, o_i, q_i, s_q, query, j, k, v, n_k, TILE, True)
    o = Operand(head_of(o_strided, batch, h), o_strided.stride_n)
    o_ptrs = o.pointer + query[:, None].to(tl.int64) * o.stride + d[None, :]
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    o_i = o_i / l[:, None]
    if v_mean_ptr is not None:
        o_i += tl.load(v_mean_ptr + kv_head * D + d, mask=d < D, other=0.0)[None, :]
    tl.store(o_ptrs, o_i.to(o.pointer.dtype.element_ty), mask=inside)
    # Rows past the end get a huge L: their P is then 0 in the backward pass.
    log_sum_exp = tl.where(query < n_q, m + tl.math.log2(l), 0.0 - NO_KEY)
    tl.store(log_sum_exp_ptr + head * n_q_padded + query, log_sum_exp)


def run_forward_program(
    inputs: ForwardInputs, key_tile, launch: Launch, start: Start, *, is_causal: bool, log2_scale: float
) -> tuple[Tensor, Tensor]:
    """Compute O [B, H, Nq, D] and L [B, H, Nq padded]: log2(sum 2^x) with x = S log2(e), of the smoothed K if it is.

    log2_scale: c log2(e), for levels that read Q in 16 bit; the INT8 copy of Q carries it in its scale.
    """
    query, key, q_hat, k_hat, v_hat = inputs.query, inputs.key, inputs.q_hat, inputs.k_hat, inputs.v_hat
    batch, heads, n_q, head_dim = query.shape
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(key.shape[2])
    q, s_q = (query, None) if q_hat is None else (q_hat.values, q_hat.scale)
    k, s_k = (key, None) if k_hat is None else (k_hat.values, k_hat.scale)
    v, s_v = (inputs.value, None) if v_hat is None else (v_hat.transposed, v_hat.scale)
    output = empty_in_layout_of(query)
    log_sum_exp = query.new_empty(batch, heads, n_q_padded, dtype=torch.float32)
    arguments = (
        strided(q), s_q, strided(k), s_k, strided(v), s_v, inputs.v_mean,
        strided(output), log_sum_exp,
        inputs.lengths, heads, heads // key.shape[1], n_q, key.shape[2], n_q_padded, n_k_padded, log2_scale,
    )  # fmt: skip
    constants = {
        "KEY_TILE": key_tile, "D": head_dim, "DP": padded_head_dim(head_dim), "BLOCK_Q": launch.block_q,
        "BLOCK_KV": launch.block_kv, "SCALE_BLOCK": SCALE_BLOCK, "IS_CAUSAL": is_causal,
        "NEGATED": q_hat is None and log2_scale < 0,
    }  # fmt: skip
    start(forward_program, (n_q_padded // launch.block_q, batch * heads), arguments, constants, launch.options)
    return output, log_sum_exp
