"""Definitions that kernels share: where a head is, the size of a tile, masks, rounding, integer products."""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_INT8_MAX = tl.constexpr(6.988684686772166)
# 1.5 * 2^23: float32 numbers around it are 1 apart, so adding it rounds to the nearest integer (ties to even) and
# leaves that integer in the low bits. Its own bit pattern is 0x4B400000.
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)
# A running maximum that stands for "no key seen yet" without being -inf, whose difference with itself is NaN.
NO_KEY = tl.constexpr(-1.0e30)
TINY = tl.constexpr(1.0e-30)
LARGEST_STEP = tl.constexpr(3.0)  # that one step of an integer score may be worth in log2 P, in `folded_softmax`


class Operand(NamedTuple):
    """One head of a tensor: a row per token, or per feature of a transposed copy, its numbers side by side."""

    pointer: tl.tensor  # to the first row
    stride: tl.tensor  # from row to row
    scale: tl.tensor | None = None  # of an INT8 copy: pointer to one per SCALE_BLOCK tokens


class Strided(NamedTuple):
    """A tensor [B, H, N, D] as one argument of a program; `head_of` is where a head begins. See `memory.strided`."""

    pointer: tl.tensor
    stride_b: tl.tensor
    stride_h: tl.tensor
    stride_n: tl.tensor


class Tile(NamedTuple):
    """The compile-time constants of a tile of scores."""

    D: int  # head size
    DP: int  # head size, padded to a power of two
    BLOCK_Q: int  # queries
    BLOCK_KV: int  # keys
    SCALE_BLOCK: int  # tokens that share a scale
    IS_CAUSAL: bool


@triton.jit
def head_of(x, batch, h):
    """Return where one head of a `Strided` tensor begins."""
    return x.pointer + batch * x.stride_b + h * x.stride_h


@triton.jit
def is_visible(query, key, n_k, IS_CAUSAL: tl.constexpr):
    """Return a bool tile: key j exists and, if causal, j <= i. query and key are index vectors shaped to broadcast."""
    visible = key < n_k
    if IS_CAUSAL:
        visible = visible & (key <= query)
    return visible


@triton.jit
def key_tile_range(first_query, n_k, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return (full, end): tiles [0, full) need no mask for these queries, [full, end) do, later ones are skipped."""
    full = n_k // BLOCK_KV
    end = tl.cdiv(n_k, BLOCK_KV)
    if IS_CAUSAL:
        full = tl.minimum(full, (first_query + 1) // BLOCK_KV)
        end = tl.minimum(end, tl.cdiv(first_query + BLOCK_Q, BLOCK_KV))
    return full, end


@triton.jit
def load_tokens(x, token, n, D: tl.constexpr, DP: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load [tokens, DP] of a 16-bit operand [N, D]; zeros past D, and past N if IS_MASKED."""
    d = tl.arange(0, DP)
    pointers = x.pointer + token[:, None].to(tl.int64) * x.stride + d[None, :]
    if IS_MASKED:
        loaded = tl.load(pointers, mask=(token[:, None] < n) & (d[None, :] < D), other=0.0)
    elif D == DP:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=d[None, :] < D, other=0.0)
    return loaded


@triton.jit
def load_tile(x, first, n, TOKENS: tl.constexpr, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load TOKENS rows of a 16-bit operand from token `first` on, as load_tokens does.

    Addresses inside a tile are the same in every turn of a loop, so they are computed once.
    """
    rows = Operand(x.pointer + tl.cast(first, tl.int64) * x.stride, x.stride)
    return load_tokens(rows, tl.arange(0, TOKENS), n - first, TILE.D, TILE.DP, IS_MASKED)


@triton.jit
def store_tokens(tile, x, token, n, D: tl.constexpr, DP: tl.constexpr):
    """Store a tile [tokens, DP] into an operand [N, D], in its type; nothing past N or D."""
    d = tl.arange(0, DP)
    pointers = x.pointer + token[:, None].to(tl.int64) * x.stride + d[None, :]
    tl.store(pointers, tile.to(x.pointer.dtype.element_ty), mask=(token[:, None] < n) & (d[None, :] < D))


@triton.jit
def load_padded(x, token, DP: tl.constexpr):
    """Load [tokens, DP] of an INT8 operand [Np, Dp], which is padded and needs no mask."""
    return tl.load(x.pointer + token[:, None] * x.stride + tl.arange(0, DP)[None, :])


@triton.jit
def load_transposed(x, first_token, DP: tl.constexpr, TOKENS: tl.constexpr):
    """Load [DP, TOKENS] of a transposed INT8 operand [Dp, Np]."""
    return tl.load(x.pointer + first_token + tl.arange(0, DP)[:, None] * x.stride + tl.arange(0, TOKENS)[None, :])


@triton.jit
def load_with_scale(x, token, n, scale, TILE: tl.constexpr):
    """Load (X_i, s [tokens]) of an operand: INT8 with its scales, or 16 bit with `scale` for every token."""
    if x.scale is None:
        loaded = load_tokens(x, token, n, TILE.D, TILE.DP, True)
        s = tl.zeros(token.shape, tl.float32) + scale
    else:
        loaded = load_padded(x, token, TILE.DP)
        s = tl.load(x.scale + token // TILE.SCALE_BLOCK)
    return loaded, s


@triton.jit
def positively_scaled(q_i, scale, BLOCK_Q: tl.constexpr, NEGATED: tl.constexpr):
    """Return Q_i and s_q [Bq] > 0, whose product is that of Q_i and scale: so a masked score stays -inf.

    NEGATED: whether scale < 0. A program that asks for it while it runs takes 70 registers more.
    """
    s_q = tl.maximum(tl.zeros([BLOCK_Q], tl.float32) + tl.abs(scale), TINY)
    if NEGATED:
        q_i = -q_i
    return q_i, s_q


@triton.jit
def integer_dot(a, b):
    """Return A^ B^ of two int8 tiles, as float32."""
    return tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def offset_dot(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ROUNDER + A^ B^ as float32 without a conversion: the int32 sum starts at ROUNDER's bit pattern.

    This is exact while |A^ B^| < 2^22, that is for contractions of at most 256 int8 pairs.
    """
    start = tl.full([ROWS, COLUMNS], ROUNDER_BITS, tl.int32)
    return tl.dot(a, b, start, out_dtype=tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def round_to_int8(x):
    """Return round(x), ties up, as int8, with the conversion instruction."""
    return tl.floor(x + 0.5).to(tl.int8)


@triton.jit
def low_byte(x):
    """Return round(x) for |x| <= 127, ties to even, as int8: one addition and the low byte, no conversion."""
    return (x + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def dither(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return floor(x + t) as int8 of a tile from 0 to 127, with the reference's `ordered_thresholds` t.

    Numbers from 128 to 256 have 16 bits after the point and seven before it besides the leading one, so adding 128 + t
    leaves the integer in the third byte: one addition, no conversion instruction. t has a period of 8, and tiles begin
    at multiples of 8: few registers hold all of it.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, 8)
    eighth, part = (column[None, :] + 2 * row[:, None]) & 7, (5 * row & 7)[:, None]
    added = (8 * eighth + part).to(tl.float32) / 64 + (128 + 1 / 128)
    x = (x.reshape(ROWS, COLUMNS // 8, 8) + added[:, None, :]).reshape(ROWS, COLUMNS)
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int8)


@triton.jit
def group_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Reorder the columns in groups of 16: (half, quad, pair) -> (quad, half, pair).

    A thread of a matmul's result holds columns 2t, 2t+1, 2t+8, 2t+9 of each group; as an 8-bit operand it must hold
    4t ... 4t+3. After this reordering those are the same four, and no data crosses threads. The other operand's
    rows must be stored in the same order, which a sum does not depend on.
    """
    return x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


@triton.jit
def folded_softmax(s_ij, s_qk, m, l, IS_MASKED: tl.constexpr, IS_DITHERED: tl.constexpr = False):
    """Return (p_ij = 127 exp(S_ij - m_ij), s_p, m_new, l, rescale) from ROUNDER + integer scores and their row scales.

    S - m_ij + log2(127) is one multiply-add: s_ij s_qk - taken_out. taken_out is large, so it is rounded; m_ij becomes
    the maximum that the rounded value stands for, which is just as good a reference point while s_qk << 1. From
    s_qk = 0.0065 on that rounding, up to 0.88 s_qk, could lift 127 P above 127.5, which wraps around in INT8; from
    there on a little more is taken out. IS_DITHERED: P^ is up to 127 P + 127/128, so more is taken out everywhere; the
    other roundings on the way, up to 0.37 s_qk, count too.

    From s_qk = LARGEST_STEP on so much would be taken out that P^ becomes 0 or 1. All is NaN then, not silently wrong.
    """
    s_qk = tl.where(s_qk < LARGEST_STEP, s_qk, float("nan"))
    if IS_MASKED:
        s_qk += TINY  # a block of zeros has scale 0, and 0 times a masked score's -inf is NaN
        m_ij = tl.maximum((tl.max(s_ij, 1) - ROUNDER) * s_qk, NO_KEY)
    else:
        m_ij = (tl.max(s_ij, 1) - ROUNDER) * s_qk
    more = 1.3 * s_qk if IS_DITHERED else tl.maximum(s_qk - 0.005, 0.0)
    taken_out = tl.fma(s_qk, ROUNDER, m_ij - LOG2_INT8_MAX + more)
    m_ij = tl.fma(-s_qk, ROUNDER, taken_out) + LOG2_INT8_MAX
    m_new = tl.maximum(m, m_ij)
    p_ij = tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -taken_out[:, None]))
    s_p = tl.math.exp2(m_ij - m_new) / 127.0
    rescale = tl.math.exp2(m - m_new)
    return p_ij, s_p, m_new, l * rescale + tl.sum(p_ij, 1) * s_p, rescale


@triton.jit
def softmax_features(x, D: tl.constexpr, DP: tl.constexpr):
    """Return phi(x) of the linear branch, float32 [tokens, DP]: softmax over the first D features, then zeros."""
    x = tl.where(tl.arange(0, DP)[None, :] < D, x, -float("inf"))
    e = tl.math.exp2((x - tl.max(x, 1)[:, None]) * LOG2_E)
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def row_scale(x, PER_BLOCK: tl.constexpr):
    """Return (s, 1/s) with s = max|x| / 127: one per row of the tile, or with PER_BLOCK the tile's in every row."""
    largest = tl.max(tl.abs(x), 1)
    if PER_BLOCK:
        largest = tl.zeros_like(largest) + tl.max(tl.abs(x))
    largest = tl.maximum(largest, TINY)
    return largest * (1 / 127.0), 127.0 / largest
