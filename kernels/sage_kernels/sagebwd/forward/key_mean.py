"""The mean key of every head, which smoothing needs before any scale of K is known: a pass over K of its own.

The mean value, where V is smoothed, likewise.

One program adds up a stretch of tokens, which is long enough to be worth a program; a sequence has at most PARTS
stretches. Then one program a head adds up the sums of its stretches. The order is the same each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import strided
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import Operand, head_of, load_tokens
from sage_kernels.sagebwd.prologue import Rotary, load_rotated
from sage_ref.prologue import Prologue

PARTS = 16  # of a sequence, at most
STEP = 32  # tokens that a program loads at once
LEAST_STEPS = 8  # of a program
LONGEST_ALIKE = PARTS * STEP * LEAST_STEPS  # tokens: up to here stretches are equally long
WARPS = 4


@triton.jit(do_not_specialize=["n_k", "parts", "steps"])
def key_sums_program(
    k_strided, sums_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, eps, lengths_ptr, kv_heads, n_k, parts, steps,
    D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sum STEP * steps keys of a head, normalised and rotated if there is a prologue."""
    t = tl.program_id(0).to(tl.int64)
    part, head = t % parts, t // parts
    if lengths_ptr is not None:
        n_k = tl.load(lengths_ptr + head // kv_heads)
    k = Operand(head_of(k_strided, head // kv_heads, head % kv_heads), k_strided.stride_n)
    sums_ptr += t * D
    first_key = part * steps * STEP
    if cos_ptr is None:
        total = tl.zeros([STEP, DP], tl.float32)
        for step in range(steps):
            total += load_tokens(k, first_key + step * STEP + tl.arange(0, STEP), n_k, D, DP, True).to(tl.float32)
        d = tl.arange(0, DP)
        tl.store(sums_ptr + d, tl.sum(total, 0), mask=d < D)
    else:
        rotary = Rotary(cos_ptr, sin_ptr, k_gain_ptr, eps)
        total_first, total_second = tl.zeros([STEP, DP // 2], tl.float32), tl.zeros([STEP, DP // 2], tl.float32)
        for step in range(steps):
            token = first_key + step * STEP + tl.arange(0, STEP)
            first, second = load_rotated(k, token, n_k, rotary, D, DP // 2)
            total_first, total_second = total_first + first, total_second + second
        half = tl.arange(0, DP // 2)
        tl.store(sums_ptr + half, tl.sum(total_first, 0), mask=half < D // 2)
        tl.store(sums_ptr + D // 2 + half, tl.sum(total_second, 0), mask=half < D // 2)


@triton.jit(do_not_specialize=["n_k", "parts"])
def key_mean_program(
    sums_ptr, mean_ptr, lengths_ptr, kv_heads, n_k, parts, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Compute the mean of one head from the sums of its stretches."""
    head, part, d = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, DP)
    if lengths_ptr is not None:
        n_k = tl.load(lengths_ptr + head // kv_heads)
    pointers = sums_ptr + (head * parts + part)[:, None] * D + d[None, :]
    total = tl.sum(tl.load(pointers, mask=(part < parts)[:, None] & (d < D)[None, :], other=0.0), 0)
    tl.store(mean_ptr + head * D + d, tl.math.div_rn(total, tl.zeros_like(total) + n_k), mask=d < D)


def key_mean(key: Tensor, prologue: Prologue, start: Start, lengths: Tensor | None = None) -> Tensor:
    """Return the mean over the tokens of key [B, Hkv, Nk, D], through the prologue: float32 [B, Hkv, D].

    The mean value likewise, with `NO_PROLOGUE`. lengths: int32 [B], how many tokens of each sequence count. Up to
    LONGEST_ALIKE its bits don't depend on Nk.
    """
    batch, kv_heads, n_k, head_dim = key.shape
    steps = max(LEAST_STEPS, triton.cdiv(n_k, PARTS * STEP))
    parts = triton.cdiv(n_k, steps * STEP)
    sums = key.new_empty(batch, kv_heads, parts, head_dim, dtype=torch.float32)
    mean = key.new_empty(batch, kv_heads, head_dim, dtype=torch.float32)
    arguments = strided(key), sums, *prologue, lengths, kv_heads, n_k, parts, steps
    counted = None if lengths is None else kv_heads
    heads, sizes = batch * kv_heads, {"D": head_dim, "DP": padded_head_dim(head_dim)}
    start(key_sums_program, (heads * parts,), arguments, sizes | {"STEP": STEP}, {"num_warps": WARPS})
    start(key_mean_program, (heads,), (sums, mean, lengths, counted, n_k, parts), sizes | {"PARTS": PARTS}, {})
    return mean
