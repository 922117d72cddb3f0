"""The preparation of an INT8 forward program: Q^, K^ and V^ in one launch, each tensor read once.

Q and K are normalised and rotated on the way if there is a prologue. The mean key and the mean value, which smoothing
needs, take passes over K and V of their own before (`key_mean`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.candidates import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import strided
from sage_kernels.common.quantize import (
    SCALE_BLOCK,
    Copies,
    Quantized,
    empty_copies,
    largest_of,
    load_block,
    padded_head_dim,
    padded_length,
    quantize_tile,
    rounded,
    scale_of,
    without_mean,
)
from sage_kernels.common.tiles import Operand, head_of, load_tokens
from sage_kernels.sagebwd.prologue import Rotary, load_rotated
from sage_ref.prologue import Prologue

# No tile: blocks have SCALE_BLOCK tokens.
NARROW, WIDE = Launch(0, 0, 4, 1, 128), Launch(0, 0, 8, 1, 128)


def launch(head_dim: int) -> Launch:
    """Return the launch tuned on an H200: with 128 registers a thread several programs share a multiprocessor."""
    return NARROW if padded_head_dim(head_dim) <= 64 else WIDE


@triton.jit(do_not_specialize=["n_q", "n_k", "query_programs", "key_programs"])
def prepare_forward_program(
    q_strided, k_strided, v_strided, k_mean_ptr, v_mean_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, eps, q_hat_ptr,
    q_scale_ptr, k_hat_ptr, k_scale_ptr, vt_hat_ptr, v_scale_ptr, v_range_ptr, lengths_ptr, heads, kv_heads, n_q, n_k,
    n_q_padded, n_k_padded, query_programs, key_programs, factor,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Prepare a block of queries, of keys or of values: programs come in this order.

    k_mean_ptr None: K is not smoothed. v_mean_ptr and v_range_ptr None: V is not, and its scales are its range.
    cos_ptr None: no prologue; q_gain_ptr and k_gain_ptr None: one without a norm.
    v_scale_ptr None: there are no programs for values. lengths_ptr None: every sequence has n_q and n_k tokens.
    """
    t = tl.program_id(0)
    if t < query_programs:
        block, head = t % (n_q_padded // BLOCK), (t // (n_q_padded // BLOCK)).to(tl.int64)
        if lengths_ptr is not None:
            n_q = tl.load(lengths_ptr + head // heads)
        q = Operand(head_of(q_strided, head // heads, head % heads), q_strided.stride_n)
        q_out = Copies(q_hat_ptr + head * n_q_padded * DP, None, q_scale_ptr + head * (n_q_padded // BLOCK))
        rotary = Rotary(cos_ptr, sin_ptr, q_gain_ptr, eps)
        quantize_block(q, None, q_out, block, n_q, factor, rotary, D, DP, BLOCK)
    else:
        t = (t - query_programs) % key_programs
        block, head = t % (n_k_padded // BLOCK), (t // (n_k_padded // BLOCK)).to(tl.int64)
        batch, h = head // kv_heads, head % kv_heads
        if lengths_ptr is not None:
            n_k = tl.load(lengths_ptr + batch)
        if tl.program_id(0) < query_programs + key_programs:
            k = Operand(head_of(k_strided, batch, h), k_strided.stride_n)
            mean_ptr = None if k_mean_ptr is None else k_mean_ptr + head * D
            k_out = Copies(k_hat_ptr + head * n_k_padded * DP, None, k_scale_ptr + head * (n_k_padded // BLOCK))
            rotary = Rotary(cos_ptr, sin_ptr, k_gain_ptr, eps)
            quantize_block(k, mean_ptr, k_out, block, n_k, 1.0, rotary, D, DP, BLOCK)
        else:
            if v_scale_ptr is not None:
                v_j = load_block(v_strided, batch, h, block, n_k, D, DP, BLOCK)
                if v_mean_ptr is not None:
                    tl.store(v_range_ptr + head * (n_k_padded // BLOCK) + block, scale_of(largest_of(v_j)))
                    token, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
                    v_j = without_mean(v_j, v_mean_ptr + head * D, token < n_k, d, d < D)
                v_out = Copies(None, vt_hat_ptr + head * n_k_padded * DP, v_scale_ptr + head * (n_k_padded // BLOCK))
                quantize_tile(v_j, v_out, block, n_k_padded, 1.0, DP, BLOCK, GROUPED)


@triton.jit
def quantize_block(
    x, mean_ptr, out, block, n, factor, rotary, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantise one block of queries or keys, without their mean if there is one.

    factor: |factor| goes into the stored scale, its sign into X^: the running maximum from level 3 on wants s_Q >= 0.
    """
    token = block * BLOCK + tl.arange(0, BLOCK)
    if rotary.cos is None:
        d = tl.arange(0, DP)
        x_i = load_tokens(x, token, n, D, DP, True).to(tl.float32)
        if mean_ptr is not None:
            x_i = without_mean(x_i, mean_ptr, token < n, d, d < D)
        quantize_tile(tl.where(factor < 0, -x_i, x_i), out, block, 0, tl.abs(factor), DP, BLOCK, False)
    else:
        d = tl.arange(0, DP // 2)
        first, second = load_rotated(x, token, n, rotary, D, DP // 2)
        if mean_ptr is not None:
            first = without_mean(first, mean_ptr, token < n, d, d < D // 2)
            second = without_mean(second, mean_ptr + D // 2, token < n, d, d < D // 2)
        first, second = tl.where(factor < 0, -first, first), tl.where(factor < 0, -second, second)
        scale = scale_of(tl.maximum(largest_of(first), largest_of(second)))
        hats = out.hat + token[:, None] * DP + d[None, :]
        tl.store(hats, rounded(first, scale), mask=(d < D // 2)[None, :])
        tl.store(hats + D // 2, rounded(second, scale), mask=(d < D // 2)[None, :])
        if D < DP:
            beyond = D + tl.arange(0, DP // 2)
            zeros = tl.zeros([BLOCK, DP // 2], tl.int8)
            tl.store(out.hat + token[:, None] * DP + beyond[None, :], zeros, mask=(beyond < DP)[None, :])
        tl.store(out.scale + block, scale * tl.abs(factor))


def quantize_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prologue: Prologue,
    start: Start,
    *,
    k_mean: Tensor | None,
    v_mean: Tensor | None,
    factor: float,
    with_values: bool,
    grouped: bool,
    lengths: Tensor | None,
) -> tuple[Quantized, Quantized, Quantized | None, Tensor | None]:
    """Compute Q^, K^ and V^ of query [B, H, Nq, D], key, value [B, Hkv, Nk, D], and max|V| / 127.

    V^ is transposed, and there only if with_values. The last is float32 [B, Hkv, blocks], of V as it came: the scales
    of V^ unless V is smoothed.

    prologue: what happens to query and key first, its tensors contiguous and in float32; `NO_PROLOGUE`: nothing.
    k_mean, v_mean: float32 [B, Hkv, D], what smoothing takes from every key, every value; None: it is not smoothed.
    factor: c log2(e), which goes into the scales of Q, its sign into Q^. grouped: V^T in the order of
    `tiles.group_columns`. lengths: int32 [B], how many tokens of each sequence there are; the others count as zeros.
    """
    (heads, n_q, head_dim), (kv_heads, n_k) = query.shape[1:], key.shape[1:3]
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(n_k)
    q_hat, k_hat = (empty_copies(x, SCALE_BLOCK) for x in (query, key))
    v_hat = empty_copies(value, SCALE_BLOCK, transposed=True) if with_values else None
    v_range = None if v_mean is None else torch.empty_like(v_hat.scale)
    query_programs, key_programs = (x.scale.numel() for x in (q_hat, k_hat))
    arguments = (
        strided(query), strided(key), strided(value), k_mean, v_mean, *prologue,
        q_hat.values, q_hat.scale, k_hat.values, k_hat.scale, *(v_hat[1:] if with_values else (None, None)), v_range,
        lengths, heads, kv_heads, n_q, n_k, n_q_padded, n_k_padded, query_programs, key_programs, factor,
    )  # fmt: skip
    grid = (query_programs + key_programs * (2 if with_values else 1),)
    constants = {"D": head_dim, "DP": padded_head_dim(head_dim), "BLOCK": SCALE_BLOCK, "GROUPED": grouped}
    start(prepare_forward_program, grid, arguments, constants, launch(head_dim).options)
    return q_hat, k_hat, v_hat, v_hat.scale if with_values and v_mean is None else v_range
