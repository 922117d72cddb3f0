"""The parts that both programs of level 5 share: types of numbers, level 6's too, and the program after them.

- P and dS are float16 as soon as they are computed: an error of 2^-12 of each number, where INT8's is 1/254 of a row's
  largest. Two fit in one register, a *pair*, and one instruction multiplies, compares or rounds both.
- The parts of one dQ come from all blocks of keys, in no fixed order. A sum of floats would depend on that order; a sum
  of integers doesn't. So parts are rounded to integers, in a unit per block of queries, and results are still the same
  bit for bit on every run.
- P is stretched, dP - delta is made to fit float16, and the parts have a unit that keeps their sums within 31 bits:
  `backward/prepare.py` computes all of these before.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, heads_per_row, strided
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import Operand, head_of

from sage_kernels.hopper.toolbox import (  # isort: skip
    HALF, ROWS, SCALE_KV, SCALE_Q, TILE, accumulator, copy_own, descriptor, fast_exp2, fast_reciprocal,
    fetched_rows, operand, row_and_column, sizes_of, unpack,
)  # fmt: skip
from sage_kernels.sagebwd.backward.program import LOG2_E, BackwardInputs

DS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))  # the layout of half of dS^T in shared memory

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "k v kt q do qt dot log_sum_exp delta")
Pointers = namedtuple("Pointers", "k_scale factors step dk dv")
Factors = namedtuple("Factors", "s_q fit dk dv")  # of a block of queries; dk, dv: of dS^ Q^ and of P^ dO^


@builtin
def add_to_global(descriptor, coordinates, tile, _semantic=None):
    """Let the copy engine add a tile to memory, until `tma.store_wait`. Gluon's compiler has it, without a name."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, tile.handle)


# A matmul leaves two neighbouring numbers of a row with a thread. Stored in their order, those of neighbouring rows
# would meet in the same banks of the swizzled stage, and every store would take twice as long. So the sums of dQ have
# an order of columns of their own: of each 32, number 8 g + 4 h + u is at 16 h + 4 g + u.


@gluon.jit
def spread_columns(x):
    """Return x [ROWS, HALF] in the sums' order of columns; no data moves."""
    return x.reshape([ROWS, HALF // 32, 4, 2, 4]).permute(0, 1, 3, 2, 4).reshape([ROWS, HALF])


# Pairs: two neighbouring columns in float16, in one int32. One instruction multiplies, compares or rounds both.


@gluon.jit
def round_to_pairs(x):
    """Return float32 [ROWS, HALF] as pairs [ROWS, HALF / 2], kept within float16."""
    even, odd = gl.split(x.reshape([ROWS, HALF // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def columns_of(pairs, COLUMNS: gl.constexpr):
    """Return float16 [ROWS, COLUMNS] of pairs; no instruction is left of this, nor of the next two."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.join(even, odd).reshape([ROWS, COLUMNS])


@gluon.jit
def pairs_of(x, COLUMNS: gl.constexpr):
    """Return pairs of float16 [ROWS, COLUMNS]."""
    even, odd = gl.split(x.reshape([ROWS, COLUMNS // 2, 2]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def join_pairs(left, right):
    """Return pairs of columns 0 ... 63 and of 64 ... 127, as one [ROWS, TILE / 2]."""
    return gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE // 2])


@gluon.jit
def multiply_pairs(x, y):
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def larger_pair(x, y):
    """Return the larger |x| of each half, with a sign that means nothing."""
    return gl.inline_asm_elementwise(
        "max.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def row_maximum_of_pairs(pairs):
    """Return the largest |x| of each row, float32."""
    return gl.inline_asm_elementwise(
        """{ .reg .b16 even, odd;
        mov.b32 {even, odd}, $1; abs.f16 even, even; abs.f16 odd, odd; max.f16 even, even, odd;
        cvt.f32.f16 $0, even; }""",
        "=f,r", [gl.reduce(pairs, 1, larger_pair)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def quantize_pairs(pairs, COLUMNS: gl.constexpr):
    """Return `level6_queries.quantize_by_row` of pairs [ROWS, TILE / 2]."""
    largest = gl.maximum(row_maximum_of_pairs(pairs), 2.0**-15)  # 127 / 64 of its inverse is a float16
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
    # The low bytes of two pairs, columns grouped as in `group_columns`.
    low, high = gl.split(x.reshape([ROWS, TILE // 16, 2, 4]).permute(0, 1, 3, 2))
    packed = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )
    x_hat = gl.convert_layout(unpack(packed.reshape([ROWS, TILE // 4])), operand(COLUMNS))
    return x_hat, fast_reciprocal(inverse_32 * 64.0)


# Halves of a tile: 64 of its queries. So no warpgroup holds more than one half of S or dP in 32 bit.


@gluon.jit
def p_half(st, s, log_sum_exp, first_key, first_query, IS_MASKED: gl.constexpr):
    """Return pairs of P^T [Bkv, Bq / 2], stretched, from integer scores."""
    column: gl.constexpr = gl.SliceLayout(0, accumulator(HALF))
    pt = fast_exp2(st.to(gl.float32) * s - log_sum_exp.load(column)[None, :])
    if IS_MASKED:
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(HALF)))
        query = first_query + gl.arange(0, HALF, column)
        pt = gl.where(query[None, :] >= key[:, None], pt, 0.0)
    return round_to_pairs(pt)


@gluon.jit
def ds_half(pt, dpt, fit, delta, first_key, n_k, RAGGED: gl.constexpr):
    """Return pairs of dS^T [Bkv, Bq / 2] from pairs of P^T. RAGGED: the last block of keys is not full."""
    dpt = gl.convert_layout(dpt, accumulator(HALF), assert_trivial=True)
    difference = round_to_pairs(dpt * fit - delta.load(gl.SliceLayout(0, accumulator(HALF)))[None, :])
    dst = multiply_pairs(pt, gl.convert_layout(difference, pt.type.layout, assert_trivial=True))
    if RAGGED:  # dS, not P: a V past the end, of the next head, may be NaN
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, dst.type.layout))
        dst = gl.where((key < n_k)[:, None], dst, 0)
    return dst


@gluon.jit
def load_factors(pointer, at):
    pointer += at * 4
    return Factors(gl.load(pointer), gl.load(pointer + 1), gl.load(pointer + 2), gl.load(pointer + 3))


@gluon.jit
def multiplier(f):
    """Return (m, half, k) for which (x m + half) >> k is round(x f) of integers x, up to 2^-9 of it.

    m holds 9 bits of f. A conversion of x f would wait for the unit that computes exponentials. |x f| < 2^31 and
    |x| < 2^21.
    """
    bits = f.to(gl.int32, bitcast=True)
    k = 135 - (bits >> 23)
    m = ((bits & 0x7FFFFF) + 0x804000) >> 15
    m = (m << gl.maximum(0 - k, 0)) >> gl.minimum(gl.maximum(k - 30, 0), 31)
    k = gl.minimum(gl.maximum(k, 0), 30)
    return m[:, None], ((1 << k) >> 1)[:, None], k[:, None]


@gluon.jit
def copy_keys(descriptors, k_tiles, v_tiles, kt_tile, ready, kv_head, first_key, sizes, DP: gl.constexpr):
    """Start the copies of K^, V and K^T of a program's block of keys."""
    nbytes: gl.constexpr = descriptors.k.block_type.nbytes + descriptors.v.block_type.nbytes
    mbarrier.expect(ready, 2 * nbytes + descriptors.kt.block_type.nbytes)
    copy_own(k_tiles, ready, descriptors.k, kv_head * (sizes.kv_blocks * SCALE_KV) + first_key, 0, 2)
    row, column = row_and_column(kv_head, first_key, sizes.n_k, sizes.v_heads_per_row, DP)
    copy_own(v_tiles, ready, descriptors.v, row, column, 2)
    tma.async_copy_global_to_shared(descriptors.kt, [kv_head * DP, first_key], ready, kt_tile)


# After: dQ of its sums.


@triton.jit(do_not_specialize=["n_q"])
def finish_program(
    sums_ptr, unit_ptr, q_scale_ptr, dq_strided, heads, n_q, scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dQ in 16 bit of a block of queries."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = head * tl.num_programs(0) + block
    token, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    sums = tl.load(sums_ptr + (at * BLOCK + token)[:, None] * DP + d[None, :])
    factor = tl.load(unit_ptr + at) * scale + tl.load(q_scale_ptr + at) * 0.0  # NaN where s_Q is
    query = block * BLOCK + token
    out = Operand(head_of(dq_strided, head // heads, head % heads), dq_strided.stride_n)
    dq_ptrs = out.pointer + query[:, None].to(tl.int64) * out.stride + d[None, :]
    dq = (sums.to(tl.float32) * factor).to(out.pointer.dtype.element_ty)
    dq = dq.reshape(BLOCK, DP // 32, 2, 4, 4).permute(0, 1, 3, 2, 4).reshape(BLOCK, DP)  # back from `spread_columns`
    tl.store(dq_ptrs, dq, mask=(query < n_q)[:, None] & (d < D)[None, :])


def run_one_pass(
    inputs: BackwardInputs,
    program,
    constants,
    options,
    queries_added: int,
    start: Start,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] by one of the two programs, from inputs with units.

    queries_added: of how many queries the program adds parts of dQ at once.
    """
    query, key, q_hat, k_hat, do_hat = inputs.query, inputs.key, inputs.q_hat, inputs.k_hat, inputs.do_hat
    (grad_output, do_per_row), (value, v_per_row) = fetched_rows(inputs.grad_output), fetched_rows(inputs.value)
    (batch, heads, n_q, head_dim), n_k, dp = query.shape, key.shape[2], padded_head_dim(query.shape[3])
    log_sum_exp, delta, factors, step, unit, sums = inputs.units
    # Of tiles: Q^, Q^T, dO^T one byte each; dO two; sums four.
    sizes = sizes_of(
        query, key, TILE.value, of_keys=True, bytes_per_number=9, v_heads_per_row=v_per_row,
        do_heads_per_row=do_per_row, out_heads_per_row=heads_per_row(inputs.value),
    )  # fmt: skip
    if sums is None:
        sums = torch.zeros(batch, heads, sizes.q_blocks * SCALE_Q.value, dp, dtype=torch.int32, device=query.device)
    dq, dk, dv = (empty_in_layout_of(x) for x in (query, inputs.value, inputs.value))
    own, tile = (ROWS.value, dp), (TILE.value, dp)
    arguments = (
        descriptor(k_hat.values, *own), descriptor(value, *own), descriptor(k_hat.transposed, *tile[::-1]),
        descriptor(q_hat.values, *tile), descriptor(grad_output, *tile), descriptor(q_hat.transposed, *tile[::-1]),
        descriptor(do_hat.transposed, *tile[::-1]), descriptor(log_sum_exp, TILE.value),
        descriptor(delta, TILE.value), descriptor(sums, queries_added, HALF.value),
        k_hat.scale, factors, step, dk, dv, *sizes,
        1 / LOG2_E,  # of dK: the scale of Q^ carries c log2(e)
    )  # fmt: skip
    constants = constants | {"D": head_dim, "DP": dp, "RAGGED": n_k % TILE.value != 0, "IS_CAUSAL": is_causal}
    start(program, (sizes.blocks * sizes.heads_total,), arguments, constants, options)
    arguments = sums, unit, q_hat.scale, strided(dq), heads, n_q, scale
    constants = {"D": head_dim, "DP": dp, "BLOCK": SCALE_Q.value}
    start(finish_program, (sizes.q_blocks, batch * heads), arguments, constants, {})
    return dq, dk, dv
