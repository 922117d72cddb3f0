"""Level 4, Hopper: level 3's split backward by warps with different jobs, as in the forward's level 5.

Three programs: dQ by rows of queries, dK and dV by rows of keys. A warpgroup has 64 rows, one warp loads tiles for all
of them, and scales are level 1's: one per row of P and dS in each tile. What is new beside `hopper.py`:

- dQ and dK: a tile's last matmul and the next tile's S are started together, and the next dP while results are being
  taken in, so that there is work for the tensor cores while a warpgroup converts. Operands have a ring each, since
  they are wanted at different times. Two warpgroups: it takes 240 registers to hold S, dP and a gradient.
- dV: no dP, so three warpgroups, each with one matmul after the other as in the forward.
- At a head size of 64 both gradients fit beside S, if dP comes in two halves of its columns: dK and dV in one program.
- L and delta belong to columns in the programs of keys: the copy engine brings them with Q^ and dO.

Expect: tensor cores and issue slots are each busy for half to two thirds of the time, for they still take turns more
than they overlap.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_kernels.common.launch import Launch
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q, padded_head_dim, padded_length
from sage_kernels.common.tiles import NO_KEY, TINY
from sage_kernels.hopper.toolbox import (
    HEAD_DIMS,
    ROWS,
    TILE,
    accumulator,
    arrived,
    barrier,
    descriptor,
    fast_exp2,
    fast_reciprocal,
    fetch,
    heads_at_a_time,
    key_tiles,
    let_go,
    ring,
    rounded,
    work_item,
)
from sage_kernels.sagebwd.backward.program import LOG2_E, BackwardInputs

# Warpgroups that compute and places of each ring: many registers for few, or fewer for more.
LAUNCHES = {
    "dq": Launch(128, BLOCK_KV, 8, 2, 240),
    "dk": Launch(BLOCK_Q, 128, 8, 2, 240),
    "dv": Launch(BLOCK_Q, 192, 12, 3, 160),
    "dkdv": Launch(BLOCK_Q, 128, 8, 2, 240),
}
# Until the warps part, all have the same number of registers; the loading warpgroup keeps 24.
AT_START = {240: 168, 160: 128}
LOADING_REGISTERS = gl.constexpr(24)
HALF = gl.constexpr(64)  # columns of a tile
SCALE_Q, SCALE_KV = gl.constexpr(BLOCK_Q), gl.constexpr(BLOCK_KV)


@gluon.constexpr_function
def accumulator_16bit(columns):
    """Which thread holds what of the result [64, columns] of a 16-bit matmul: the same as of an INT8 one."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def start(left, tile, COLUMNS: gl.constexpr):
    """Start left x tile^T in INT8: int32 [ROWS, COLUMNS]."""
    result = gl.zeros([ROWS, COLUMNS], gl.int32, accumulator(COLUMNS))
    return warpgroup_mma(left, tile.permute((1, 0)), result, use_acc=False, is_async=True)


@gluon.jit
def start_16bit(left, tile, COLUMNS: gl.constexpr):
    """Start left x tile^T in 16 bit: float32 [ROWS, COLUMNS]."""
    result = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_16bit(COLUMNS))
    return warpgroup_mma(left, tile.permute((1, 0)), result, use_acc=False, is_async=True)


@gluon.jit
def start_gradient(left, ring, n, IN_HALVES: gl.constexpr):
    """Start dP, or the first half of its columns, once its tile is there."""
    if IN_HALVES:
        dp = start_16bit(left, arrived(ring, n).slice(0, HALF), HALF)
    else:
        dp = start_16bit(left, arrived(ring, n), TILE)
    return dp


@gluon.jit
def halves(x):
    """Columns 0 ... 63 and 64 ... 127 of [ROWS, TILE]; no instruction is left of this, nor of `joined`."""
    left, right = gl.split(x.reshape([ROWS, 2, HALF]).permute(0, 2, 1))
    left = gl.convert_layout(left, accumulator_16bit(HALF), assert_trivial=True)
    return left, gl.convert_layout(right, accumulator_16bit(HALF), assert_trivial=True)


@gluon.jit
def joined(left, right):
    x = gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE])
    return gl.convert_layout(x, accumulator(TILE), assert_trivial=True)


@gluon.jit
def largest_of(x, IS_POSITIVE: gl.constexpr):
    """The largest |x| of each row."""
    if IS_POSITIVE:  # floats >= 0 are ordered like their bits, and integers have a maximum of three in one instruction
        largest = gl.max(x.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
    else:
        largest = gl.max(gl.abs(x), 1)
    return gl.maximum(largest, TINY)


@gluon.jit
def row_quantized(x, IS_POSITIVE: gl.constexpr, DP: gl.constexpr):
    """(X^ as the left operand of a matmul, s) of [ROWS, TILE], with a scale per row."""
    largest = largest_of(x, IS_POSITIVE)
    x_hat = rounded(x * (fast_reciprocal(largest) * 127.0)[:, None], DP)
    return x_hat, largest * (1 / 127.0)


@gluon.jit
def taken_in(gradient, product, s, DP: gl.constexpr):
    """gradient + product * s, with a scale per row."""
    return gradient + product.to(gl.float32) * gl.convert_layout(s, gl.SliceLayout(1, accumulator(DP)))[:, None]


@gluon.jit
def first_matmuls(left, left_16bit, ring_1, ring_2, n, IN_HALVES: gl.constexpr):
    """(S, dP in flight) of tile n; transposed in the programs of keys."""
    s = start(left, arrived(ring_1, n), TILE)
    dp = start_gradient(left_16bit, ring_2, n, IN_HALVES)
    return warpgroup_mma_wait(1, deps=(s,)), dp


@gluon.jit
def last_matmul(
    gradient, s_ij, dp_ij, x_hat_ij, s_x, left, left_16bit, rings, n,
    DP: gl.constexpr, IN_HALVES: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """(gradient after tile n, S and dP in flight of tile n + 1)."""
    ring_1, ring_2, ring_3 = rings
    product = start(x_hat_ij, arrived(ring_3, n), DP)
    if IS_LAST:
        product = warpgroup_mma_wait(0, deps=(product,))
        let_go(ring_3, n)
        gradient = taken_in(gradient, product, s_x, DP)
    else:
        s_next = start(left, arrived(ring_1, n + 1), TILE)
        product = warpgroup_mma_wait(1, deps=(product,))
        let_go(ring_3, n)
        gradient = taken_in(gradient, product, s_x, DP)
        # After that, for dP takes the registers of the product.
        dp_ij = start_gradient(left_16bit, ring_2, n + 1, IN_HALVES)
        s_ij = warpgroup_mma_wait(1, deps=(s_next,))
    return gradient, s_ij, dp_ij


@gluon.jit
def key_tile(
    dq_i, s_ij, dp_ij, q_hat_i, do_i, s_q, s_k, log_sum_exp_i, delta_i, j, first_query, n_k, rings,
    DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """(dq_i after key tile j, S and dP in flight of the next one). Only the last tile needs a mask."""
    k_ring, v_ring, kt_ring = rings
    let_go(k_ring, j)
    # [Bq, Bkv]
    p_ij = fast_exp2(s_ij.to(gl.float32) * (s_q * s_k) - log_sum_exp_i[:, None])
    dp = gl.convert_layout(warpgroup_mma_wait(0, deps=(dp_ij,)), accumulator(TILE), assert_trivial=True)
    let_go(v_ring, j)
    ds_ij = p_ij * (dp - delta_i[:, None])
    if IS_LAST:
        query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
        key = j * TILE + gl.arange(0, TILE, gl.SliceLayout(0, accumulator(TILE)))
        visible = (key < n_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        ds_ij = gl.where(visible, ds_ij, 0.0)  # dS, not P: a V past the end, of the next head, may be NaN
    ds_hat_ij, s_ds = row_quantized(ds_ij, False, DP)
    return last_matmul(dq_i, s_ij, dp_ij, ds_hat_ij, s_ds * s_k, q_hat_i, do_i, rings, j, DP, False, IS_LAST)


@gluon.jit
def query_rows(
    q_tiles, do_tiles, rows_ready, rings, pointers, sizes, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dQ of warpgroup W's 64 queries."""
    k_ring, v_ring, kt_ring = rings
    q_scale_ptr, k_scale_ptr, log_sum_exp_ptr, delta_ptr, dq_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    i, head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_query = i * (ROWS * WARPGROUPS) + W * ROWS
    last = key_tiles(first_query, ROWS, kv_blocks, IS_CAUSAL) - 1
    last = gl.where(first_query < n_q, last, 0)
    all_tiles = key_tiles(i * (ROWS * WARPGROUPS), ROWS * WARPGROUPS, kv_blocks, IS_CAUSAL)
    k_scale_ptr += (head // groups) * kv_blocks
    s_q = gl.load(q_scale_ptr + head * q_blocks + gl.minimum(first_query // SCALE_Q, q_blocks - 1))
    s_k = gl.load(k_scale_ptr)
    n_q_padded = q_blocks * SCALE_Q
    query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
    offsets = head.to(gl.int64) * n_q_padded + query
    log_sum_exp_i = gl.load(log_sum_exp_ptr + offsets, mask=query < n_q_padded, other=0.0 - NO_KEY)
    delta_i = gl.load(delta_ptr + offsets, mask=query < n_q_padded, other=0.0)
    dq_i = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    mbarrier.wait(rows_ready, 0)
    q_hat_i, do_i = q_tiles.index(W), do_tiles.index(W)
    s_ij, dp_ij = first_matmuls(q_hat_i, do_i, k_ring, v_ring, 0, False)
    for j in range(0, last):
        next_s_k = gl.load(k_scale_ptr + j + 1)
        dq_i, s_ij, dp_ij = key_tile(
            dq_i, s_ij, dp_ij, q_hat_i, do_i, s_q, s_k, log_sum_exp_i, delta_i, j, first_query, n_k, rings,
            DP, IS_CAUSAL, False,
        )  # fmt: skip
        s_k = next_s_k
    dq_i, s_ij, dp_ij = key_tile(
        dq_i, s_ij, dp_ij, q_hat_i, do_i, s_q, s_k, log_sum_exp_i, delta_i, last, first_query, n_k, rings,
        DP, IS_CAUSAL, True,
    )  # fmt: skip
    # Tiles for the warpgroup below: let go of them as they come.
    for j in range(last + 1, all_tiles):
        arrived(k_ring, j)
        let_go(k_ring, j)
        arrived(v_ring, j)
        let_go(v_ring, j)
        arrived(kt_ring, j)
        let_go(kt_ring, j)
    dq_i *= scale + s_q * 0.0  # NaN where s_Q is
    store(dq_ptr + head.to(gl.int64) * n_q * D, dq_i, first_query, n_q, D, DP)


@gluon.jit
def store(pointer, x, first, n, D: gl.constexpr, DP: gl.constexpr):
    """Rows of x [ROWS, DP] in 16 bit: tokens first, first + 1, ... as far as there are any."""
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(DP)))
    d = gl.arange(0, DP, gl.SliceLayout(0, accumulator(DP)))
    mask = (token < n)[:, None] & (d < D)[None, :]
    gl.store(pointer + token[:, None] * D + d[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@gluon.jit
def load_rows(tiles, ready, descriptor, row, WARPGROUPS: gl.constexpr):
    """Every warpgroup's rows. Past a head's end lie the next head's, or zeros: computed with and not stored."""
    for w in gl.static_range(WARPGROUPS):
        tma.async_copy_global_to_shared(descriptor, [row + w * ROWS, 0], ready, tiles.index(w))


@gluon.jit
def load_for_queries(
    descriptors, q_tiles, do_tiles, rows_ready, rings, sizes,
    DP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """The loading warp: Q^ and dO, then K^, V and K^T tiles as their places become free."""
    q_descriptor, do_descriptor, k_descriptor, v_descriptor, kt_descriptor = descriptors
    k_ring, v_ring, kt_ring = rings
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    i, head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_query, kv_head = i * (ROWS * WARPGROUPS), head // groups
    mbarrier.expect(rows_ready, WARPGROUPS * (q_descriptor.block_type.nbytes + do_descriptor.block_type.nbytes))
    load_rows(q_tiles, rows_ready, q_descriptor, head * (q_blocks * SCALE_Q) + first_query, WARPGROUPS)
    load_rows(do_tiles, rows_ready, do_descriptor, head * n_q + first_query, WARPGROUPS)
    for j in range(0, key_tiles(first_query, ROWS * WARPGROUPS, kv_blocks, IS_CAUSAL)):
        fetch(k_ring, j, k_descriptor, (kv_head * kv_blocks + j) * TILE, 0)
        fetch(v_ring, j, v_descriptor, kv_head * n_k + j * TILE, 0)
        fetch(kt_ring, j, kt_descriptor, kv_head * DP, j * TILE)


# Rows of keys: everything is transposed, st_ij is S_ij^T.


@gluon.jit
def query_tiles(first_key, q_blocks, IS_CAUSAL: gl.constexpr):
    """How many query tiles these keys visit, from the last one down. The diagonal crosses only the one visited last.

    It is at least one, for every program to do the same; all of it is masked for keys that no query sees.
    """
    if IS_CAUSAL:
        q_blocks -= gl.minimum(first_key // TILE, q_blocks - 1)
    return q_blocks


@gluon.jit
def query_tile(
    dk_j, dv_j, st_ij, dpt_ij, k_hat_j, v_j, s_k, s_q, s_do, n, first_key, first_query, rings, lines,
    DP: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_MASKED: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """(dk_j, dv_j after the n-th query tile, S^T, dP^T in flight of the next one). dV alone starts nothing before."""
    q_ring, do_ring, qt_ring, dot_ring = rings
    log_sum_exps, deltas = lines
    places: gl.constexpr = log_sum_exps.shape[0]
    column: gl.constexpr = gl.SliceLayout(0, accumulator(TILE))
    st = st_ij if WITH_DK else warpgroup_mma_wait(0, deps=(start(k_hat_j, arrived(q_ring, n), TILE),))
    log_sum_exp_i = log_sum_exps.index(n % places).load(column)
    # [Bkv, Bq]
    pt_ij = fast_exp2(st.to(gl.float32) * (s_q * s_k) - log_sum_exp_i[None, :])
    let_go(q_ring, n)
    if IS_MASKED:
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
        query = first_query + gl.arange(0, TILE, column)
        pt_ij = gl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    if WITH_DV:
        pt_hat_ij, s_p = row_quantized(pt_ij, True, DP)
        if WITH_DK:
            dpt_0 = warpgroup_mma_wait(0, deps=(dpt_ij,))
        product = start(pt_hat_ij, arrived(dot_ring, n), DP)
        if WITH_DK:
            column_0: gl.constexpr = gl.SliceLayout(0, accumulator_16bit(HALF))
            delta = deltas.index(n % places)
            pt_0, pt_1 = halves(pt_ij)
            dst_0 = pt_0 * (dpt_0 - delta.slice(0, HALF).load(column_0)[None, :])
        product = warpgroup_mma_wait(0, deps=(product,))
        let_go(dot_ring, n)
        dv_j = taken_in(dv_j, product, s_p * s_do, DP)
        if WITH_DK:
            # The second half takes the registers of the product.
            dpt_1 = start_16bit(v_j, arrived(do_ring, n).slice(HALF, HALF), HALF)
            dpt_1 = warpgroup_mma_wait(0, deps=(dpt_1,))
            dst_ij = joined(dst_0, pt_1 * (dpt_1 - delta.slice(HALF, HALF).load(column_0)[None, :]))
    else:
        delta_i = deltas.index(n % places).load(column)
        dpt = gl.convert_layout(warpgroup_mma_wait(0, deps=(dpt_ij,)), accumulator(TILE), assert_trivial=True)
        dst_ij = pt_ij * (dpt - delta_i[None, :])
    if WITH_DK:
        let_go(do_ring, n)
        dst_hat_ij, s_ds = row_quantized(dst_ij, False, DP)
        dk_j, st_ij, dpt_ij = last_matmul(
            dk_j, st_ij, dpt_ij, dst_hat_ij, s_ds * s_q, k_hat_j, v_j, (q_ring, do_ring, qt_ring), n,
            DP, WITH_DV, IS_LAST,
        )  # fmt: skip
    return dk_j, dv_j, st_ij, dpt_ij


@gluon.jit
def key_rows(
    k_tiles, v_tiles, rows_ready, rings, lines, pointers, sizes, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr,
    IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dK and dV, or one of them, of warpgroup W's 64 keys, over the query heads that share them."""
    q_ring, do_ring, qt_ring, dot_ring = rings
    k_scale_ptr, q_scale_ptr, do_scale_ptr, dk_ptr, dv_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    block = blocks - 1 - block  # the first keys, which most queries see, first
    first_key = block * (ROWS * WARPGROUPS) + W * ROWS
    own = query_tiles(first_key, q_blocks, IS_CAUSAL)
    all_tiles = query_tiles(block * (ROWS * WARPGROUPS), q_blocks, IS_CAUSAL)
    s_k = gl.load(k_scale_ptr + kv_head * kv_blocks + gl.minimum(first_key // SCALE_KV, kv_blocks - 1))
    dk_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP)) if WITH_DK else 0
    dv_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP)) if WITH_DV else 0
    mbarrier.wait(rows_ready, 0)
    k_hat_j, v_j = k_tiles.index(W), v_tiles.index(W)
    n = 0
    for g in range(0, groups):
        i = q_blocks - 1
        scale_at = (kv_head * groups + g) * q_blocks + i
        s_q, s_do = gl.load(q_scale_ptr + scale_at), gl.load(do_scale_ptr + scale_at)
        if WITH_DK:
            st_ij, dpt_ij = first_matmuls(k_hat_j, v_j, q_ring, do_ring, n, WITH_DV)
        else:
            st_ij, dpt_ij = 0, 0
        for _ in range(1, own):
            scale_at -= 1
            next_s_q, next_s_do = gl.load(q_scale_ptr + scale_at), gl.load(do_scale_ptr + scale_at)
            dk_j, dv_j, st_ij, dpt_ij = query_tile(
                dk_j, dv_j, st_ij, dpt_ij, k_hat_j, v_j, s_k, s_q, s_do, n, first_key, i * TILE, rings, lines,
                DP, WITH_DK, WITH_DV, False, False,
            )  # fmt: skip
            s_q, s_do = next_s_q, next_s_do
            n += 1
            i -= 1
        dk_j, dv_j, st_ij, dpt_ij = query_tile(
            dk_j, dv_j, st_ij, dpt_ij, k_hat_j, v_j, s_k, s_q, s_do, n, first_key, i * TILE, rings, lines,
            DP, WITH_DK, WITH_DV, IS_CAUSAL, True,
        )  # fmt: skip
        n += 1
        # Tiles for the warpgroups above.
        for _ in range(own, all_tiles):
            arrived(q_ring, n)
            let_go(q_ring, n)
            if WITH_DV:
                arrived(dot_ring, n)
                let_go(dot_ring, n)
            if WITH_DK:
                arrived(do_ring, n)
                let_go(do_ring, n)
                arrived(qt_ring, n)
                let_go(qt_ring, n)
            n += 1
    offset = kv_head.to(gl.int64) * n_k * D
    if WITH_DK:
        store(dk_ptr + offset, dk_j * scale, first_key, n_k, D, DP)
    if WITH_DV:
        store(dv_ptr + offset, dv_j, first_key, n_k, D, DP)


@gluon.jit
def fetch_with_line(ring, line, n, descriptor, row, line_descriptor, token):
    """`fetch`, and one number for each of the tile's tokens."""
    tiles, ready, empty = ring
    places: gl.constexpr = tiles.shape[0]
    mbarrier.wait(empty.index(n % places), ((n // places) & 1) ^ 1)
    mbarrier.expect(ready.index(n % places), descriptor.block_type.nbytes + line_descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, 0], ready.index(n % places), tiles.index(n % places))
    tma.async_copy_global_to_shared(line_descriptor, [token], ready.index(n % places), line.index(n % places))


@gluon.jit
def load_for_keys(
    descriptors, k_tiles, v_tiles, rows_ready, rings, lines, sizes,
    DP: gl.constexpr, WARPGROUPS: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """The loading warp: K^ and V, then tiles of Q^ with L, dO^T for dV, and dO with delta and Q^T for dK."""
    (
        k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
        delta_descriptor,
    ) = descriptors  # fmt: skip
    q_ring, do_ring, qt_ring, dot_ring = rings
    log_sum_exps, deltas = lines
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_key = (blocks - 1 - block) * (ROWS * WARPGROUPS)
    nbytes: gl.constexpr = k_descriptor.block_type.nbytes
    if WITH_DK:
        mbarrier.expect(rows_ready, WARPGROUPS * (nbytes + v_descriptor.block_type.nbytes))
        load_rows(v_tiles, rows_ready, v_descriptor, kv_head * n_k + first_key, WARPGROUPS)
    else:
        mbarrier.expect(rows_ready, WARPGROUPS * nbytes)
    load_rows(k_tiles, rows_ready, k_descriptor, kv_head * (kv_blocks * SCALE_KV) + first_key, WARPGROUPS)
    n = 0
    for g in range(0, groups):
        head = kv_head * groups + g
        i = q_blocks - 1
        for _ in range(0, query_tiles(first_key, q_blocks, IS_CAUSAL)):
            token = (head * q_blocks + i) * TILE
            fetch_with_line(q_ring, log_sum_exps, n, q_descriptor, token, l_descriptor, token)
            if WITH_DK:
                fetch_with_line(do_ring, deltas, n, do_descriptor, head * n_q + i * TILE, delta_descriptor, token)
            if WITH_DV:
                fetch(dot_ring, n, dot_descriptor, head * DP, i * TILE)
            if WITH_DK:
                fetch(qt_ring, n, qt_descriptor, head * DP, i * TILE)
            n += 1
            i -= 1


SIZES = ("blocks", "heads_total", "heads_together", "groups", "n_q", "n_k", "q_blocks", "kv_blocks")


@gluon.jit(do_not_specialize=SIZES)  # one compilation for every size
def query_program(
    q_descriptor, do_descriptor, k_descriptor, v_descriptor, kt_descriptor,
    q_scale_ptr, k_scale_ptr, log_sum_exp_ptr, delta_ptr, dq_ptr,
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """dQ."""
    q_tiles = gl.allocate_shared_memory(gl.int8, [WARPGROUPS, ROWS, DP], q_descriptor.layout)
    do_tiles = gl.allocate_shared_memory(do_descriptor.dtype, [WARPGROUPS, ROWS, DP], do_descriptor.layout)
    rows_ready = barrier(1)
    k_ring, v_ring = ring(k_descriptor, PLACES, WARPGROUPS), ring(v_descriptor, PLACES, WARPGROUPS)
    rings = (k_ring, v_ring, ring(kt_descriptor, PLACES, WARPGROUPS))
    fence_async_shared()
    descriptors = (q_descriptor, do_descriptor, k_descriptor, v_descriptor, kt_descriptor)
    pointers = (q_scale_ptr, k_scale_ptr, log_sum_exp_ptr, delta_ptr, dq_ptr)
    sizes = (blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks)
    gl.warp_specialize(
        [
            (query_rows, (q_tiles, do_tiles, rows_ready, rings, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL,
                          0)),
            (query_rows, (q_tiles, do_tiles, rows_ready, rings, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL,
                          1)),
            (load_for_queries, (descriptors, q_tiles, do_tiles, rows_ready, rings, sizes, DP, WARPGROUPS, IS_CAUSAL)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def key_program(
    k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, k_scale_ptr, q_scale_ptr, do_scale_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr,
    WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK and dV, or one of them; what the other one needs is not read."""
    k_tiles = gl.allocate_shared_memory(gl.int8, [WARPGROUPS, ROWS, DP], k_descriptor.layout)
    rows_ready = barrier(1)
    q_ring = ring(q_descriptor, PLACES, WARPGROUPS)
    log_sum_exps = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], l_descriptor.layout)
    # What isn't there goes by the name of something that is.
    v_tiles, do_ring, qt_ring, dot_ring, deltas = k_tiles, q_ring, q_ring, q_ring, log_sum_exps
    if WITH_DK:
        v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [WARPGROUPS, ROWS, DP], v_descriptor.layout)
        do_ring, qt_ring = ring(do_descriptor, PLACES, WARPGROUPS), ring(qt_descriptor, PLACES, WARPGROUPS)
        deltas = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], delta_descriptor.layout)
    if WITH_DV:
        dot_ring = ring(dot_descriptor, PLACES, WARPGROUPS)
    fence_async_shared()
    rings, lines = (q_ring, do_ring, qt_ring, dot_ring), (log_sum_exps, deltas)
    descriptors = (
        k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
        delta_descriptor,
    )  # fmt: skip
    pointers = (k_scale_ptr, q_scale_ptr, do_scale_ptr, dk_ptr, dv_ptr)
    sizes = (blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks)
    # Constants must be named in each call: a variable would make numbers of the program of them.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, pointers, sizes, scale, D, DP, WARPGROUPS,
                            WITH_DK, WITH_DV, IS_CAUSAL, 0)),
                (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, pointers, sizes, scale, D, DP, WARPGROUPS,
                            WITH_DK, WITH_DV, IS_CAUSAL, 1)),
                (load_for_keys, (descriptors, k_tiles, v_tiles, rows_ready, rings, lines, sizes, DP, WARPGROUPS,
                                 WITH_DK, WITH_DV, IS_CAUSAL)),
            ],
            [4, 1], [REGISTERS, LOADING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, pointers, sizes, scale, D, DP, WARPGROUPS,
                            WITH_DK, WITH_DV, IS_CAUSAL, 0)),
                (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, pointers, sizes, scale, D, DP, WARPGROUPS,
                            WITH_DK, WITH_DV, IS_CAUSAL, 1)),
                (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, pointers, sizes, scale, D, DP, WARPGROUPS,
                            WITH_DK, WITH_DV, IS_CAUSAL, 2)),
                (load_for_keys, (descriptors, k_tiles, v_tiles, rows_ready, rings, lines, sizes, DP, WARPGROUPS,
                                 WITH_DK, WITH_DV, IS_CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, LOADING_REGISTERS],
        )  # fmt: skip


def kernels(head_dim: int) -> tuple[str, ...]:
    """The programs that a head size takes: the names in `LAUNCHES`."""
    return ("dq", "dkdv") if padded_head_dim(head_dim) == HEAD_DIMS[0] else ("dq", "dk", "dv")


def program_of(kernel: str):
    """(program, its constants besides sizes and IS_CAUSAL, options of its launch) of a name in `LAUNCHES`."""
    launch = LAUNCHES[kernel]
    constants = {
        "WARPGROUPS": launch.num_warps // 4, "PLACES": launch.num_stages, "REGISTERS": launch.max_registers
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": AT_START[launch.max_registers]}
    if kernel == "dq":
        return query_program, constants, options
    return key_program, constants | {"WITH_DK": "dk" in kernel, "WITH_DV": "dv" in kernel}, options


def tile_shapes(
    kernel: str, padded_head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of the tiles that a program's descriptors fetch, dO and V being of `dtype`."""
    rows, tile, line = (ROWS.value, padded_head_dim), (TILE.value, padded_head_dim), (TILE.value,)
    if kernel == "dq":
        return {
            "q_descriptor": (torch.int8, rows), "do_descriptor": (dtype, rows), "k_descriptor": (torch.int8, tile),
            "v_descriptor": (dtype, tile), "kt_descriptor": (torch.int8, tile[::-1]),
        }  # fmt: skip
    return {
        "k_descriptor": (torch.int8, rows), "v_descriptor": (dtype, rows), "q_descriptor": (torch.int8, tile),
        "do_descriptor": (dtype, tile), "qt_descriptor": (torch.int8, tile[::-1]),
        "dot_descriptor": (torch.int8, tile[::-1]), "l_descriptor": (torch.float32, line),
        "delta_descriptor": (torch.float32, line),
    }  # fmt: skip


def rows_of_16_bytes(x: Tensor, padded_head_dim: int) -> Tensor:
    """16-bit x [B, H, N, D], or a copy that the copy engine can fetch: contiguous, in rows of whole 16 bytes."""
    if x.shape[3] % 8:
        x = torch.nn.functional.pad(x, (0, padded_head_dim - x.shape[3]))
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def run_kernel(kernel: str, inputs: BackwardInputs, *, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
    """dQ [B, H, Nq, D]; dK, dV or both [B, Hkv, Nk, D]: what the program of that name computes."""
    query, key, q_hat, k_hat, do_hat = inputs.query, inputs.key, inputs.q_hat, inputs.k_hat, inputs.do_hat
    batch, heads, n_q, head_dim = query.shape
    kv_heads, n_k, dp = key.shape[1], key.shape[2], padded_head_dim(head_dim)
    groups, n_q_padded, n_k_padded = heads // kv_heads, padded_length(n_q), padded_length(n_k)
    do, v = (rows_of_16_bytes(x, dp) for x in (inputs.grad_output, inputs.value))
    if kernel == "dq":
        tensors = (q_hat.values, do, k_hat.values, v, k_hat.transposed)
        gradients = outputs = (torch.empty(query.shape, dtype=query.dtype, device=query.device),)
        pointers = (q_hat.scale, k_hat.scale, inputs.log_sum_exp, inputs.delta, *outputs)
        blocks, all_heads = -(-n_q_padded // LAUNCHES[kernel].block_q), batch * heads
        bytes_per_head = 4 * n_k_padded * dp
    else:
        tensors = (
            k_hat.values, v, q_hat.values, do, q_hat.transposed, do_hat.transposed, inputs.log_sum_exp, inputs.delta
        )  # fmt: skip
        gradients = tuple(torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(len(kernel) // 2))
        outputs = (gradients[0], gradients[-1])  # a program writes into the place of its own
        pointers = (k_hat.scale, q_hat.scale, do_hat.scale, *outputs)
        blocks, all_heads = -(-n_k_padded // LAUNCHES[kernel].block_kv), batch * kv_heads
        bytes_per_head = {"dk": 4, "dv": 2, "dkdv": 5}[kernel] * n_q_padded * dp * groups
        scale = 1 / LOG2_E  # of dK alone: the scale of Q^ carries c log2(e)
    program, constants, options = program_of(kernel)
    shapes = [shape for _, shape in tile_shapes(kernel, dp).values()]
    program[(blocks * all_heads,)](
        *(descriptor(x, *shape) for x, shape in zip(tensors, shapes, strict=True)), *pointers,
        blocks, all_heads, heads_at_a_time(bytes_per_head), groups, n_q, n_k, n_q_padded // BLOCK_Q,
        n_k_padded // BLOCK_KV, scale, D=head_dim, DP=dp, IS_CAUSAL=is_causal, **constants, **options,
    )  # fmt: skip
    return gradients


def run(inputs: BackwardInputs, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] from level 3's inputs."""
    head_dim = inputs.query.shape[3]
    # Once for all programs, where it takes a copy.
    do, v = (rows_of_16_bytes(x, padded_head_dim(head_dim)) for x in (inputs.grad_output, inputs.value))
    inputs = inputs._replace(grad_output=do, value=v)
    return tuple(x for name in kernels(head_dim) for x in run_kernel(name, inputs, is_causal=is_causal, scale=scale))
