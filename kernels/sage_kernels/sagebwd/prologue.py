"""QK-norm and rotary positions, within the reads of Q and K (`sage_ref.prologue` has the equations).

A token's features come in pairs (x_i, x_(i + D/2)) that share an angle. So a block is read as two halves of its
columns, and every cosine and sine is read once.
Before the forward pass: `load_rotated` stands where a program would load a block.
After the backward pass: `rotate_back` makes of dZ, the gradient of the rotated tensor, that of the raw one, in one
launch for queries and keys. The rotation is undone by the opposite angles. Then, with x^ = x r and r the inverse RMS,
  dgamma = sum over tokens of dY x^,   dX = r (dY gamma - x^ mean(dY gamma x^)).
Each program leaves its part of dgamma, and the parts are added up in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, last_axis_contiguous, strided
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import Operand, head_of
from sage_ref.prologue import Prologue

NO_PROLOGUE = Prologue(None, None, None, None, 0.0)  # Q and K as they are
ROWS, WARPS = 64, 4  # of `rotate_back_program`: tokens of a program


class Rotary(NamedTuple):
    """In a kernel: `Prologue` for one tensor. cos and sin None: no prologue; gain None: no norm."""

    cos: tl.tensor | None  # [tokens, D/2]
    sin: tl.tensor | None
    gain: tl.tensor | None  # [D]
    eps: tl.tensor


@triton.jit
def load_halves(x, token, n, D: tl.constexpr, HALF: tl.constexpr):
    """Load features 0 to D/2 and D/2 to D of some tokens of an operand [N, D]: two of float32 [tokens, HALF].

    There are zeros past the last token and past D/2 columns; HALF is a power of two.
    """
    d = tl.arange(0, HALF)
    pointers = x.pointer + token[:, None].to(tl.int64) * x.stride + d[None, :]
    inside = (token < n)[:, None] & (d < D // 2)[None, :]
    first = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(pointers + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_halves(out, first, second, token, n, D: tl.constexpr, HALF: tl.constexpr):
    """Store what `load_halves` loads, into an operand of any type."""
    d = tl.arange(0, HALF)
    dtype = out.pointer.dtype.element_ty
    pointers = out.pointer + token[:, None].to(tl.int64) * out.stride + d[None, :]
    inside = (token < n)[:, None] & (d < D // 2)[None, :]
    tl.store(pointers, first.to(dtype), mask=inside)
    tl.store(pointers + D // 2, second.to(dtype), mask=inside)


@triton.jit
def load_rotated(x, token, n, rotary, D: tl.constexpr, HALF: tl.constexpr):
    """Load both halves, normalised if there is a gain, and rotated."""
    first, second = load_halves(x, token, n, D, HALF)
    if rotary.gain is not None:
        inverse = inverse_rms(first, second, rotary.eps, D)
        gain_first, gain_second = load_gain(rotary, D, HALF)
        first, second = first * inverse * gain_first, second * inverse * gain_second
    cos, sin = load_angles(rotary, token, n, D, HALF)
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def load_angles(rotary, token, n, D: tl.constexpr, HALF: tl.constexpr):
    """Load (cos, sin), [tokens, HALF]."""
    d = tl.arange(0, HALF)
    at = token[:, None].to(tl.int64) * (D // 2) + d[None, :]
    inside = (token < n)[:, None] & (d < D // 2)[None, :]
    return tl.load(rotary.cos + at, mask=inside, other=0.0), tl.load(rotary.sin + at, mask=inside, other=0.0)


@triton.jit
def load_gain(rotary, D: tl.constexpr, HALF: tl.constexpr):
    """Load both halves of gamma, [1, HALF]."""
    d = tl.arange(0, HALF)
    inside = d < D // 2
    first = tl.load(rotary.gain + d, mask=inside, other=0.0)[None, :]
    return first, tl.load(rotary.gain + D // 2 + d, mask=inside, other=0.0)[None, :]


@triton.jit
def inverse_rms(first, second, eps, D: tl.constexpr):
    """Return r [tokens, 1] of QK-norm."""
    return tl.math.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]


@triton.jit
def rotate_back(dz, x, out, gain_sums_ptr, token, n, rotary, D: tl.constexpr, HALF: tl.constexpr):
    """Write dX of some tokens, and their part of dgamma. dz, x, out: operands [N, D] of one head."""
    cos, sin = load_angles(rotary, token, n, D, HALF)
    dz_first, dz_second = load_halves(dz, token, n, D, HALF)
    # dY, then dX
    first, second = dz_first * cos + dz_second * sin, dz_second * cos - dz_first * sin
    if rotary.gain is not None:
        d = tl.arange(0, HALF)
        x_first, x_second = load_halves(x, token, n, D, HALF)
        inverse = inverse_rms(x_first, x_second, rotary.eps, D)
        x_first, x_second = x_first * inverse, x_second * inverse
        tl.store(gain_sums_ptr + d, tl.sum(first * x_first, 0), mask=d < D // 2)
        tl.store(gain_sums_ptr + D // 2 + d, tl.sum(second * x_second, 0), mask=d < D // 2)
        gain_first, gain_second = load_gain(rotary, D, HALF)
        first, second = first * gain_first, second * gain_second
        along = (tl.sum(first * x_first + second * x_second, 1) / D)[:, None]
        first, second = inverse * (first - x_first * along), inverse * (second - x_second * along)
    store_halves(out, first, second, token, n, D, HALF)


@triton.jit(do_not_specialize=["n_q", "n_k", "query_blocks", "key_blocks", "query_programs"])
def rotate_back_program(
    dzq_strided, dzk_strided, q_strided, k_strided, dq_strided, dk_strided, gain_sums_ptr, cos_ptr, sin_ptr, q_gain_ptr,
    k_gain_ptr, eps, heads, kv_heads, n_q, n_k, query_blocks, key_blocks, query_programs,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Undo the prologue for a block of queries, or in programs after those of keys.

    q_gain_ptr None: there is no norm, and Q and K are not needed.
    """
    t = tl.program_id(0)
    sums_ptr = None if gain_sums_ptr is None else gain_sums_ptr + t.to(tl.int64) * D
    if t < query_programs:
        token, head = t % query_blocks * BLOCK + tl.arange(0, BLOCK), (t // query_blocks).to(tl.int64)
        batch, h = head // heads, head % heads
        dz = Operand(head_of(dzq_strided, batch, h), dzq_strided.stride_n)
        out = Operand(head_of(dq_strided, batch, h), dq_strided.stride_n)
        x = dz if q_gain_ptr is None else Operand(head_of(q_strided, batch, h), q_strided.stride_n)
        rotate_back(dz, x, out, sums_ptr, token, n_q, Rotary(cos_ptr, sin_ptr, q_gain_ptr, eps), D, HALF)
    else:
        t -= query_programs
        token, head = t % key_blocks * BLOCK + tl.arange(0, BLOCK), (t // key_blocks).to(tl.int64)
        batch, h = head // kv_heads, head % kv_heads
        dz = Operand(head_of(dzk_strided, batch, h), dzk_strided.stride_n)
        out = Operand(head_of(dk_strided, batch, h), dk_strided.stride_n)
        x = dz if k_gain_ptr is None else Operand(head_of(k_strided, batch, h), k_strided.stride_n)
        rotate_back(dz, x, out, sums_ptr, token, n_k, Rotary(cos_ptr, sin_ptr, k_gain_ptr, eps), D, HALF)


def run_rotate_back(
    grad_query: Tensor, grad_key: Tensor, query: Tensor | None, key: Tensor | None, prologue: Prologue, start: Start
) -> tuple[Tensor, ...]:
    """Compute (dQ, dK), and the gains' gradients in float32 [D] if there are gains, from those of the rotated tensors.

    grad_query, query: [B, H, Nq, D]; grad_key, key: [B, Hkv, Nk, D]; query and key, the raw ones, only with gains.
    """
    with_norm = prologue.query_gain is not None
    (batch, heads, n_q, head_dim), (kv_heads, n_k) = grad_query.shape, grad_key.shape[1:3]
    query_blocks, key_blocks = triton.cdiv(n_q, ROWS), triton.cdiv(n_k, ROWS)
    query_programs = batch * heads * query_blocks
    programs = query_programs + batch * kv_heads * key_blocks
    dz = tuple(last_axis_contiguous(x) for x in (grad_query, grad_key))
    raw = tuple(last_axis_contiguous(x) for x in (query, key)) if with_norm else (None, None)
    out = tuple(empty_in_layout_of(x) for x in dz)
    gain_sums = grad_query.new_empty(programs, head_dim, dtype=torch.float32) if with_norm else None
    tensors = [x if x is None else strided(x) for x in (*dz, *raw, *out)]
    arguments = (
        *tensors, gain_sums, *prologue, heads, kv_heads, n_q, n_k, query_blocks, key_blocks, query_programs,
    )  # fmt: skip
    constants = {"D": head_dim, "HALF": padded_head_dim(head_dim) // 2, "BLOCK": ROWS}
    start(rotate_back_program, (programs,), arguments, constants, {"num_warps": WARPS})
    if not with_norm:
        return out
    return *out, gain_sums[:query_programs].sum(0), gain_sums[query_programs:].sum(0)
