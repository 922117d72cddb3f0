"""What both programs of level 5 share: pairs, a block of keys, halves of tiles and the integers that dQ is summed in.

P and dS are float16 as soon as they are computed: an error of 2^-12 of each number, where INT8's is 1/254 of a row's
largest. Two lie in one register, and one instruction multiplies, compares or rounds both.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sage_kernels.hopper.toolbox import ROWS, TILE, accumulator, fast_exp2, fast_reciprocal, operand, unpacked
from sage_kernels.sagebwd.backward.level4.programs import HALF, SCALE_KV, load_rows

STRETCH = tl.constexpr(15)  # log2; of P, for float16 ends at 2^16
HANDED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))  # how a half of dS^T lies in shared memory

# Pairs: two columns of float16 in an int32.


@gluon.jit
def paired(x):
    """float32 [ROWS, HALF] as pairs [ROWS, HALF / 2], kept within float16."""
    even, odd = gl.split(x.reshape([ROWS, HALF // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def columns_of(pairs, COLUMNS: gl.constexpr):
    """float16 [ROWS, COLUMNS] of pairs; no instruction is left of this, nor of `pairs_of`."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.join(even, odd).reshape([ROWS, COLUMNS])


@gluon.jit
def pairs_of(x, COLUMNS: gl.constexpr):
    even, odd = gl.split(x.reshape([ROWS, COLUMNS // 2, 2]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def product_of_pairs(x, y):
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def larger_pair(x, y):
    """The larger |x| of each half, with a sign that means nothing."""
    return gl.inline_asm_elementwise(
        "max.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def largest_of_pairs(pairs):
    """The largest |x| of each row, float32."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 even, odd;
        mov.b32 {even, odd}, $1; abs.f16 even, even; abs.f16 odd, odd; max.f16 even, even, odd;
        cvt.f32.f16 $0, even; }""",
        "=f,r", [gl.reduce(pairs, 1, larger_pair)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def quantized_pairs(pairs, COLUMNS: gl.constexpr):
    """(X^ as the left operand of a matmul with so many COLUMNS, s) of pairs [ROWS, TILE / 2], with a scale per row."""
    largest = gl.maximum(largest_of_pairs(pairs), 2.0**-15)  # 127 / 64 of its inverse is a float16
    # 1 / (64 s) twice, and once in float32: s is the scale of what has been rounded with it, not of what was meant.
    inverse, inverse_32 = gl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.f16x2.f32 $0, $2, $2; mov.b32 {low, high}, $0; cvt.f32.f16 $1, low; }""",
        "=&r,=f,f", [fast_reciprocal(largest) * (127 / 64)], dtype=(gl.int32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    inverse, pairs = gl.broadcast(inverse[:, None], pairs)
    # float16 numbers from 16 to 32 are 1/64 apart: x / (64 s) + 24 is rounded there, and its low byte is round(x / s).
    x = gl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x4E004E00; fma.rn.f16x2 $0, $1, $2, c; }",
        "=r,r,r", [pairs, inverse], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    # The low bytes of two pairs, columns grouped as in `hopper.group_columns`.
    low, high = gl.split(x.reshape([ROWS, TILE // 16, 2, 4]).permute(0, 1, 3, 2))
    packed = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )
    x_hat = gl.convert_layout(unpacked(packed.reshape([ROWS, TILE // 4])), operand(COLUMNS))
    return x_hat, fast_reciprocal(inverse_32 * 64.0)


@gluon.jit
def joined_pairs(left, right):
    """Pairs of columns 0 ... 63 and of 64 ... 127, as one [ROWS, TILE / 2]; no instruction is left of this."""
    return gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE // 2])


# A block of keys.


@gluon.jit
def load_keys(
    k_descriptor, v_descriptor, kt_descriptor, k_tiles, v_tiles, kt_tile, rows_ready, kv_head, first_key, n_k,
    kv_blocks, DP: gl.constexpr,
):  # fmt: skip
    """The loading warp: K^, V and K^T of a program's block of keys."""
    nbytes: gl.constexpr = k_descriptor.block_type.nbytes + v_descriptor.block_type.nbytes
    mbarrier.expect(rows_ready, 2 * nbytes + kt_descriptor.block_type.nbytes)
    load_rows(k_tiles, rows_ready, k_descriptor, kv_head * (kv_blocks * SCALE_KV) + first_key, 2)
    load_rows(v_tiles, rows_ready, v_descriptor, kv_head * n_k + first_key, 2)
    tma.async_copy_global_to_shared(kt_descriptor, [kv_head * DP, first_key], rows_ready, kt_tile)


# Halves of a tile: its keys by 64 of its queries.


@gluon.jit
def p_half(st, s, log_sum_exp, first_key, first_query, IS_MASKED: gl.constexpr):
    """Pairs of P^T of half a tile's queries."""
    column: gl.constexpr = gl.SliceLayout(0, accumulator(HALF))
    # [Bkv, Bq / 2], stretched
    pt = fast_exp2(st.to(gl.float32) * s - log_sum_exp.load(column)[None, :])
    if IS_MASKED:
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(HALF)))
        query = first_query + gl.arange(0, HALF, column)
        pt = gl.where(query[None, :] >= key[:, None], pt, 0.0)
    return paired(pt)


@gluon.jit
def ds_half(pt, dpt, fit, delta, first_key, n_k, RAGGED: gl.constexpr):
    """Pairs of dS^T of half a tile's queries, from pairs of P^T."""
    dpt = gl.convert_layout(dpt, accumulator(HALF), assert_trivial=True)
    difference = paired(dpt * fit - delta.load(gl.SliceLayout(0, accumulator(HALF)))[None, :])
    dst = product_of_pairs(pt, gl.convert_layout(difference, pt.type.layout, assert_trivial=True))
    if RAGGED:  # dS, not P: a V past the end, of the next head, may be NaN
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, dst.type.layout))
        dst = gl.where((key < n_k)[:, None], dst, 0)
    return dst


@gluon.jit
def load_factors(pointer, at):
    """(s_Q, fit, factor of dS^ Q^, factor of P^ dO^) of a block of queries."""
    pointer += at * 4
    return gl.load(pointer), gl.load(pointer + 1), gl.load(pointer + 2), gl.load(pointer + 3)


# Sums of integers.


@gluon.jit
def multiplier(f):
    """(m, half, k): (x m + half) >> k is round(x f) for integers x, but that m holds 9 bits of f: good to 2^-9 of it.

    A conversion of x f would wait for the unit that computes exponentials. |x f| < 2^31 and |x| < 2^21.
    """
    bits = f.to(gl.int32, bitcast=True)
    k = 135 - (bits >> 23)
    m = ((bits & 0x7FFFFF) + 0x804000) >> 15
    m = (m << gl.maximum(0 - k, 0)) >> gl.minimum(gl.maximum(k - 30, 0), 31)
    k = gl.minimum(gl.maximum(k, 0), 30)
    return m[:, None], ((1 << k) >> 1)[:, None], k[:, None]
