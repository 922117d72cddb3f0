"""Level 5, Hopper: one warp loads, three warpgroups compute.

Idea: within one warp matmuls and softmax take turns, so while one warpgroup (4 warps, 64 queries) is at its softmax,
the tensor cores should work for another. Each program has 192 queries, a warpgroup per 64; they share one stream of K
and V tiles, which a warp of its own fetches ahead with the copy engine (TMA). Sharing leaves a third of what the L2
cache had to deliver; the copy engine frees the computing warps from addresses. `hopper/toolbox.py` holds how warps hand
tiles to each other. One of three warpgroups, and whom it waits for (r: releases the place):

    loading warp   Q^   K^_0  V^_0  K^_1  V^_1  K^_2  V^_2  (K^_3 waits until all three have released K^_0) ...
    warpgroup      waits for Q^ | K^_0: S_i0, r | softmax | V^_0: P^ V^, r | O += | K^_1: S_i1, r | softmax | ...

What a score costs shrinks too: the row's maximum is found in integers, two instructions round four of P's values to
INT8 and pack them, P stays in its thread (level 4), and O is one conversion and one multiply-add:

    O is kept in units of what one step of P^ V^ is worth, u_j = 2^(r_j) s_V / 127, where 2^(r_j) / 127 = s_P is the
    scale of the row in tile j. A new tile adds P^ V^ as it is; the old sum changes units, O u_(j-1) / u_j.

r_j is rowmax(S_ij), as in Algorithm 1, unless the tile is worth 2^-24 of the row's largest or less: the change of units
must not overflow, and such a tile doesn't show in float32 anyway.

With v_mean (unbiased O) P is rounded by ordered dither: one addition more (`toolbox.dither_to_int8`).

Expect: the tensor cores' time is half hidden, not all of it: tensor cores, exponentials (16 a clock), conversions and
maxima (64 a clock) and issue slots (128 a clock) each allow 16 to 18 scores a clock, and no two overlap fully.
"""

from collections import namedtuple
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import empty_in_layout_of, heads_per_row
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import LOG2_INT8_MAX, NO_KEY, TINY

from sage_kernels.hopper.toolbox import (  # isort: skip
    LOADING_REGISTERS, ROWS, SCALE_Q, SIZES, TILE, Sizes, accumulator, acquire, allocate, barrier, copy_own,
    count_key_tiles, descriptor, dither_to_int8, fast_exp2, fast_reciprocal, fetch, release, ring, round_to_int8,
    sizes_of, skip, start_int8, store_tokens, work_item,
)  # fmt: skip
from sage_kernels.sagebwd.forward.program import ForwardInputs

WARPGROUPS = gl.constexpr(3)
PLACES = gl.constexpr(3)  # tiles of K and of V in flight
# Of 64k registers a computing thread gets 160; until the warps part, all have the same number.
REGISTERS = gl.constexpr(160)
OPTIONS = {"num_warps": 4, "maxnreg": 128}
LAUNCHES = {
    "forward": Launch(ROWS.value * WARPGROUPS.value, TILE.value, 4 * WARPGROUPS.value, PLACES.value, REGISTERS.value)
}
NEGLIGIBLE = gl.constexpr(24.0)  # a tile worth 2^-24 of the row's largest is below float32's last bit
SMALLEST_NORMAL = gl.constexpr(1.1754944e-38)
# [ROWS, 4]: of each row a number in each of the four threads that hold it.
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4],
    )
)  # fmt: skip


# Arguments that travel together
Descriptors = namedtuple("Descriptors", "q k vt")
Pointers = namedtuple("Pointers", "q_scale k_scale v_scale v_mean o log_sum_exp")
Queries = namedtuple("Queries", "tiles ready")  # shared memory for a program's Q^, and its barrier
Rings = namedtuple("Rings", "k v")  # of K^ and of V^^T
Own = namedtuple("Own", "q_hat_i s_q first_query")  # a warpgroup's queries


class State(NamedTuple):
    """The numbers that a warpgroup carries from tile to tile."""

    r: gl.tensor  # [ROWS]: 2^r / 127 is s_P of the last tile
    largest: gl.tensor  # [ROWS], log2 of the most that a tile has been worth, 2^r s_V
    l: gl.tensor  # [ROWS, 4], the row sum: each thread's part
    o_i: gl.tensor  # [ROWS, DP]
    unit: gl.tensor  # s_V of the last tile that had one


@gluon.jit
def fast_log2(x):
    """Return log2 of a normal number, by one instruction. The library's handles subnormal ones and takes a dozen.

    It is declared impure so that the compiler leaves it where it is.
    """
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def exponentials(
    s_ij, s_qk, log2_s_v, r, largest, first_query, first_key, n_k, IS_CAUSAL: gl.constexpr, IS_MASKED: gl.constexpr
):
    """Return (P~ / s_P of Algorithm 1, change of the row's unit, r, largest) from integer scores s_ij [Bq, Bkv]."""
    keys: gl.constexpr = s_ij.shape[1]
    x = s_ij.to(gl.float32)
    if IS_MASKED:
        s_qk += TINY  # a block of zeros has scale 0, and 0 times a masked score's -inf is NaN
        query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(keys)))
        key = first_key + gl.arange(0, keys, gl.SliceLayout(0, accumulator(keys)))
        visible = (key < n_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        x = gl.where(visible, x, -float("inf"))
        m_ij = gl.max(x, 1) * s_qk
    else:
        m_ij = gl.max(s_ij, 1).to(gl.float32) * s_qk
    # 2^r s_V is what a tile is worth in O.
    largest = gl.maximum(largest, m_ij + log2_s_v)
    r_ij = gl.maximum(m_ij, largest - (log2_s_v + NEGLIGIBLE))
    change = fast_exp2(r - r_ij)
    # [Bq, Bkv]: 127 exp(S - r)
    p_ij = fast_exp2(x * s_qk - (r_ij - LOG2_INT8_MAX)[:, None])
    return p_ij, change, r_ij, largest


@gluon.jit
def add_row_sums(l, p_ij, change):
    """Return l [ROWS, 4] after a tile's p_ij: each thread's part."""
    sums = gl.sum(gl.sum(p_ij.reshape([ROWS, p_ij.shape[1] // 8, 4, 2]), 3), 1)
    return l * gl.convert_layout(change, gl.SliceLayout(1, PARTS))[:, None] + gl.convert_layout(sums, PARTS)


@gluon.jit
def softmax(
    s_ij, s_qk, log2_s_v, r, largest, l, first_query, first_key, n_k,
    DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_MASKED: gl.constexpr, IS_UNBIASED: gl.constexpr,
):  # fmt: skip
    """Return (P^_ij, change of the row's unit, r, largest, l) from integer scores s_ij [Bq, Bkv]."""
    p_ij, change, r, largest = exponentials(
        s_ij, s_qk, log2_s_v, r, largest, first_query, first_key, n_k, IS_CAUSAL, IS_MASKED
    )
    p_hat_ij = dither_to_int8(p_ij, DP) if IS_UNBIASED else round_to_int8(p_ij, DP)
    return p_hat_ij, change, r, largest, add_row_sums(l, p_ij, change)


@gluon.jit
def key_tile(
    state, s_k, s_v, own, j, n_k, rings, pointers,
    DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_UNBIASED: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """Return (state after key tile j, the next tile's s_K and s_V). Only the last tile needs a mask."""
    r, largest, l, o_i, unit = state
    # A block of zeros adds nothing to O in any unit; its own would be a division by 0.
    s_v = gl.where(s_v < SMALLEST_NORMAL, unit, s_v)
    log2_s_v, exchange = fast_log2(s_v), unit * fast_reciprocal(s_v)
    # [Bq, Bkv]
    s_ij = warpgroup_mma_wait(0, deps=(start_int8(own.q_hat_i, acquire(rings.k, j), TILE),))
    release(rings.k, j)
    next_s_k, next_s_v = s_k, s_v
    if not IS_LAST:
        next_s_k, next_s_v = gl.load(pointers.k_scale + j + 1), gl.load(pointers.v_scale + j + 1)
    p_hat_ij, change, r, largest, l = softmax(
        s_ij, own.s_q * s_k, log2_s_v, r, largest, l, own.first_query, j * TILE, n_k,
        DP, IS_CAUSAL, IS_LAST, IS_UNBIASED,
    )  # fmt: skip
    # [Bq, D]
    pv_ij = warpgroup_mma_wait(0, deps=(start_int8(p_hat_ij, acquire(rings.v, j), DP),))
    release(rings.v, j)
    change = gl.convert_layout(change * exchange, gl.SliceLayout(1, accumulator(DP)))
    o_i = o_i * change[:, None] + pv_ij.to(gl.float32)
    return State(r, largest, l, o_i, s_v), next_s_k, next_s_v


@gluon.jit
def query_rows(
    queries, rings, pointers, sizes,
    D: gl.constexpr, DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_UNBIASED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute O and L of warpgroup W's 64 queries."""
    row: gl.constexpr = gl.SliceLayout(1, accumulator(TILE))
    i, head = work_item(gl.program_id(0), sizes)
    first_query = i * (ROWS * WARPGROUPS) + W * ROWS
    last = count_key_tiles(first_query, ROWS, sizes.kv_blocks, IS_CAUSAL) - 1
    last = gl.where(first_query < sizes.n_q, last, 0)
    all_tiles = count_key_tiles(i * (ROWS * WARPGROUPS), ROWS * WARPGROUPS, sizes.kv_blocks, IS_CAUSAL)
    q_scale, k_scale, v_scale, v_mean, o, log_sum_exp = pointers
    k_scale += (head // sizes.group_size) * sizes.kv_blocks
    v_scale += (head // sizes.group_size) * sizes.kv_blocks
    pointers = Pointers(q_scale, k_scale, v_scale, v_mean, o, log_sum_exp)
    s_q = gl.load(q_scale + head * sizes.q_blocks + gl.minimum(first_query // SCALE_Q, sizes.q_blocks - 1))
    s_k, s_v = gl.load(k_scale), gl.load(v_scale)
    state = State(
        gl.full([ROWS], NO_KEY, gl.float32, row), gl.full([ROWS], NO_KEY, gl.float32, row),
        gl.zeros([ROWS, 4], gl.float32, PARTS), gl.zeros([ROWS, DP], gl.float32, accumulator(DP)), 1.0,
    )  # fmt: skip
    mbarrier.wait(queries.ready, 0)
    own = Own(queries.tiles.index(W), s_q, first_query)
    for j in range(0, last):
        state, s_k, s_v = key_tile(
            state, s_k, s_v, own, j, sizes.n_k, rings, pointers, DP, IS_CAUSAL, IS_UNBIASED, False
        )
    state, s_k, s_v = key_tile(state, s_k, s_v, own, last, sizes.n_k, rings, pointers, DP, IS_CAUSAL, IS_UNBIASED, True)
    for j in range(last + 1, all_tiles):  # tiles for the warpgroups below
        skip(rings.k, j)
        skip(rings.v, j)
    l = gl.sum(state.l, 1)
    o_i = state.o_i * gl.convert_layout(state.unit / l, gl.SliceLayout(1, accumulator(DP)))[:, None]
    if IS_UNBIASED:
        d = gl.arange(0, DP, gl.SliceLayout(0, accumulator(DP)))
        o_i += gl.load(v_mean + head // sizes.group_size * D + d, mask=d < D, other=0.0)[None, :]
    store_tokens(o, o_i, head, first_query, sizes.n_q, sizes.out_heads_per_row, D, DP)
    # Rows past the end get a huge L: their P is then 0 in the backward pass.
    query = first_query + gl.arange(0, ROWS, row)
    l_i = gl.where(query < sizes.n_q, state.r + gl.log2(gl.convert_layout(l, row)) - LOG2_INT8_MAX, 0.0 - NO_KEY)
    n_q_padded = sizes.q_blocks * SCALE_Q
    gl.store(log_sum_exp + head.to(gl.int64) * n_q_padded + query, l_i, mask=query < n_q_padded)


@gluon.jit
def load_tiles(descriptors, queries, rings, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Load Q^, then K^ and V^T tiles as their places become free."""
    i, head = work_item(gl.program_id(0), sizes)
    first_query, kv_head = i * (ROWS * WARPGROUPS), head // sizes.group_size
    mbarrier.expect(queries.ready, WARPGROUPS * descriptors.q.block_type.nbytes)
    row = head * (sizes.q_blocks * SCALE_Q) + first_query
    copy_own(queries.tiles, queries.ready, descriptors.q, row, 0, WARPGROUPS)
    for j in range(0, count_key_tiles(first_query, ROWS * WARPGROUPS, sizes.kv_blocks, IS_CAUSAL)):
        fetch(rings.k, j, descriptors.k, (kv_head * sizes.kv_blocks + j) * TILE, 0)
        fetch(rings.v, j, descriptors.vt, kv_head * DP, j * TILE)


@gluon.jit(do_not_specialize=SIZES)
def forward_hopper_program(
    q_descriptor, k_descriptor, vt_descriptor, q_scale_ptr, k_scale_ptr, v_scale_ptr, v_mean_ptr, o_ptr,
    log_sum_exp_ptr,
    blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
    v_heads_per_row, do_heads_per_row, out_heads_per_row,
    D: gl.constexpr, DP: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute O and L. v_mean_ptr: what V^ lacks; None: nothing, and P is rounded to nearest."""
    IS_UNBIASED: gl.constexpr = v_mean_ptr is not None
    queries = Queries(allocate(q_descriptor, WARPGROUPS), barrier(1))
    rings = Rings(ring(k_descriptor, PLACES, WARPGROUPS), ring(vt_descriptor, PLACES, WARPGROUPS))
    fence_async_shared()
    descriptors = Descriptors(q_descriptor, k_descriptor, vt_descriptor)
    pointers = Pointers(q_scale_ptr, k_scale_ptr, v_scale_ptr, v_mean_ptr, o_ptr, log_sum_exp_ptr)
    sizes = Sizes(
        blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
        v_heads_per_row, do_heads_per_row, out_heads_per_row,
    )  # fmt: skip
    # Constants must be named in each call: a variable would make numbers of the program of them.
    gl.warp_specialize(
        [
            (query_rows, (queries, rings, pointers, sizes, D, DP, IS_CAUSAL, IS_UNBIASED, 0)),
            (query_rows, (queries, rings, pointers, sizes, D, DP, IS_CAUSAL, IS_UNBIASED, 1)),
            (query_rows, (queries, rings, pointers, sizes, D, DP, IS_CAUSAL, IS_UNBIASED, 2)),
            (load_tiles, (descriptors, queries, rings, sizes, DP, IS_CAUSAL)),
        ],
        [4, 4, 1], [REGISTERS, REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def run_hopper_forward(
    inputs: ForwardInputs, start: Start = start_with_triton, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute O [B, H, Nq, D] and L [B, H, Nq padded], as `run_forward_program` does, from level 4's inputs.

    scale: as for every level; s_Q has it already.
    """
    query, q_hat, k_hat, v_hat = inputs.query, inputs.q_hat, inputs.k_hat, inputs.v_hat
    batch, heads, _, head_dim = query.shape
    dp = padded_head_dim(head_dim)
    output = empty_in_layout_of(query)
    sizes = sizes_of(
        query, inputs.key, LAUNCHES["forward"].block_q, of_keys=False, bytes_per_number=2,
        out_heads_per_row=heads_per_row(output),
    )  # fmt: skip
    log_sum_exp = query.new_empty(batch, heads, sizes.q_blocks * SCALE_Q.value, dtype=torch.float32)
    arguments = (
        descriptor(q_hat.values, ROWS.value, dp), descriptor(k_hat.values, TILE.value, dp),
        descriptor(v_hat.transposed, dp, TILE.value),
        q_hat.scale, k_hat.scale, v_hat.scale, inputs.v_mean, output, log_sum_exp, *sizes,
    )  # fmt: skip
    constants = {"D": head_dim, "DP": dp, "IS_CAUSAL": is_causal}
    start(forward_hopper_program, (sizes.blocks * sizes.heads_total,), arguments, constants, OPTIONS)
    return output, log_sum_exp
