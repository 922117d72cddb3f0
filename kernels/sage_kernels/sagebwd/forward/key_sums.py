"""The sums of keys that smoothing needs, in one pass over K: no scale is known before the mean key is.

Each program adds up a stretch of tokens, long enough to be worth a program. There are at most `PARTS` stretches: every
program that quantises keys can add up their sums itself, in the same order each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.signature import FLOATS, POINTERS, SIZE, Signature, strided
from sage_kernels.common.tiles import Operand
from sage_kernels.sagebwd.prologue import Rotary, load_rotated, prologue_signature
from sage_ref.prologue import Prologue

PARTS = 16  # of a sequence, at most
STEP = 32  # tokens that a program loads at once
LEAST_STEPS = 8  # of a program
WARPS = 8


@triton.jit(do_not_specialize=["n_k", "parts", "steps"])
def key_sums_program(
    k_ptr, k_stride_b, k_stride_h, k_stride_n, sums_ptr, cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, eps,
    kv_heads, n_k, parts, steps, D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program: the sum of STEP * steps keys of a head, normalised and rotated if there is a prologue."""
    t = tl.program_id(0).to(tl.int64)
    part, head = t % parts, t // parts
    k = Operand(k_ptr + head // kv_heads * k_stride_b + head % kv_heads * k_stride_h, k_stride_n)
    rotary = Rotary(cos_ptr, sin_ptr, k_gain_ptr, eps)
    total = tl.zeros([STEP, DP], tl.float32)
    for step in range(steps):
        token = (part * steps + step) * STEP + tl.arange(0, STEP)
        total += load_rotated(k, token, n_k, rotary, D, DP)
    d = tl.arange(0, DP)
    tl.store(sums_ptr + t * D + d, tl.sum(total, 0), mask=d < D)


@triton.jit
def load_mean(sums_ptr, head, parts, n, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr):
    """The mean key of a head [DP], from the sums of its parts."""
    part, d = tl.arange(0, PARTS), tl.arange(0, DP)
    pointers = sums_ptr + (head * parts + part)[:, None] * D + d[None, :]
    total = tl.sum(tl.load(pointers, mask=(part < parts)[:, None] & (d < D)[None, :], other=0.0), 0)
    return tl.math.div_rn(total, tl.zeros_like(total) + n)


def signature(*, with_prologue: bool, dtype: torch.dtype = torch.bfloat16) -> Signature:
    """Triton's types of the parameters of `key_sums_program`; a prologue has gains."""
    types = strided("k", POINTERS[dtype]) | {"sums_ptr": FLOATS} | prologue_signature(with_prologue)
    return types | dict.fromkeys(("kv_heads", "n_k", "parts", "steps"), SIZE)


def constants(head_dim: int) -> dict:
    """The constants of `key_sums_program`."""
    return {"D": head_dim, "DP": padded_head_dim(head_dim), "STEP": STEP}


def key_sums(key: Tensor, prologue: Prologue, start: Start) -> Tensor:
    """float32 [B, Hkv, parts, D], whose sum over parts is that of all keys of key [B, Hkv, Nk, D]."""
    batch, kv_heads, n_k, head_dim = key.shape
    steps = max(LEAST_STEPS, triton.cdiv(n_k, PARTS * STEP))
    sums = key.new_empty(batch, kv_heads, triton.cdiv(n_k, steps * STEP), head_dim, dtype=torch.float32)
    arguments = key, *key.stride()[:3], sums, *prologue, kv_heads, n_k, sums.shape[2], steps
    grid = (batch * kv_heads * sums.shape[2],)
    start(key_sums_program, grid, arguments, constants(head_dim), {"num_warps": WARPS})
    return sums
