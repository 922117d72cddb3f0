"""Level 5 at a head size of 128: the two warpgroups of keys make dQ, too.

dK and dV of 64 keys take 128 registers of a thread. What is left of 240, all that two warpgroups can have, holds one
half of S or dP, both halves of P as pairs and little else, so a warpgroup does one thing after the other and leaves the
overlap to its neighbour:

- dS^T goes to shared memory for both of them. Of the queries each takes one half, reads it transposed and adds its part
  to dQ; its own rows it reads back when their turn comes, for dK.
- A product is taken in by halves of its columns.
- The fewer barriers, the less the four warps of a warpgroup wait for one another: `full` says that dS^T lies there and
  that Q^, dO, L and delta are done with, `empty` that dS^T has been read and that dO^T and Q^T are done with. The
  loading warp waits for both.
- Addresses of tiles are the same for every query tile, and the compiler would keep dozens of them in registers that it
  hasn't got. `n >> 30` is 0, but it can't know: it computes them where they are needed.
- The assembler's usual optimisations move every product's sum to the end and spill for it; its first level doesn't.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from sage_kernels.common.launch import Launch
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q
from sage_kernels.hopper.toolbox import ROWS, TILE, accumulator, add_to_global, barrier, place, work_item
from sage_kernels.sagebwd.backward.level4.programs import (
    HALF,
    LOADING_REGISTERS,
    SIZES,
    accumulator_16bit,
    query_tiles,
    start,
    start_16bit,
)
from sage_kernels.sagebwd.backward.level5.one_pass import (
    HANDED,
    columns_of,
    ds_half,
    joined_pairs,
    load_factors,
    load_keys,
    multiplier,
    p_half,
    pairs_of,
    quantized_pairs,
)

LAUNCH = Launch(BLOCK_Q, BLOCK_KV, 8, 1, 240)
OPTIONS = {"num_warps": 4, "maxnreg": 168, "ptx_options": "--opt-level 1"}  # maxnreg until the warps part


@gluon.jit
def taken_in_half(gradient, product, s):
    """gradient + product * s of half its columns, where it stands: `level4_hopper.taken_in` might come later."""
    s = gl.convert_layout(s, gl.SliceLayout(1, accumulator(HALF)))
    product, s = gl.broadcast(product.to(gl.float32), s[:, None])
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, s, gradient], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def hand_over(handed, pairs, full, empty, n, zero, H: gl.constexpr, W: gl.constexpr):
    """Put half H of dS^T of the n-th tile where both warpgroups find it."""
    if H == 0:
        mbarrier.wait(empty, (n & 1) ^ 1)
    dst = gl.convert_layout(columns_of(pairs, HALF), accumulator_16bit(HALF), assert_trivial=True)
    handed.index(H + zero).slice(W * ROWS, ROWS).store(dst)
    if H == 1:
        mbarrier.arrive(full, count=1)


@gluon.jit
def read_back(handed, zero, H: gl.constexpr, W: gl.constexpr):
    """Pairs of this warpgroup's own rows of half H."""
    return pairs_of(handed.index(H + zero).slice(W * ROWS, ROWS).load(accumulator_16bit(HALF)), HALF)


@gluon.jit
def add_part(
    handed, kt_tile, stage, full, empty, step, n, zero, dq_descriptor, first_query, DP: gl.constexpr, W: gl.constexpr
):
    """Add dS K^ of half W of the n-th tile's queries to dQ. step: integers per dS^ of scale one."""
    mbarrier.wait(full, n & 1)
    ds = handed.index(W + zero).permute((1, 0)).load(accumulator(TILE))
    ds_hat_ij, s_ds = quantized_pairs(pairs_of(ds, TILE), HALF)
    mbarrier.arrive(empty, count=1)
    m, half, k = multiplier(gl.convert_layout(s_ds * step, gl.SliceLayout(1, accumulator(HALF))))
    for part in gl.static_range(DP // HALF):
        product = warpgroup_mma_wait(0, deps=(start(ds_hat_ij, kt_tile.slice(part * HALF, HALF), HALF),))
        tma.store_wait(0)  # the copy engine has read what lay in the stage
        stage.store((product * m + half) >> k)
        fence_async_shared()
        add_to_global(dq_descriptor, [first_query + W * HALF, part * HALF], stage)


@gluon.jit
def query_tile(
    gradients, rows, tiles, barriers, handed, stages, s_k, factors_ptr, step_ptr, n, at, first_key, first_query, n_k,
    dq_descriptor, DP: gl.constexpr, RAGGED: gl.constexpr, IS_MASKED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Halves of dk_j and dv_j after the n-th query tile, the at-th of all."""
    dk_0, dk_1, dv_0, dv_1 = gradients
    queries_ready, dot_ready, qt_ready, full, empty = barriers
    k_tiles, v_tiles, kt_tiles = rows
    q_tiles, do_tiles, dot_tiles, qt_tiles, log_sum_exps, deltas = tiles
    zero = n >> 30
    k_hat_j, v_j, kt_j = k_tiles.index(W + zero), v_tiles.index(W + zero), kt_tiles.index(zero)
    q_hat_i, do_i, dot_i, qt_i = q_tiles.index(zero), do_tiles.index(zero), dot_tiles.index(zero), qt_tiles.index(zero)
    log_sum_exp, delta = log_sum_exps.index(zero), deltas.index(zero)
    s_q, fit, factor_k, factor_v = load_factors(factors_ptr, at)
    mbarrier.wait(queries_ready, n & 1)
    st_0 = warpgroup_mma_wait(0, deps=(start(k_hat_j, q_hat_i.slice(0, HALF), HALF),))
    pt_0 = p_half(st_0, s_q * s_k, log_sum_exp.slice(0, HALF), first_key, first_query, IS_MASKED)
    dpt_0 = warpgroup_mma_wait(0, deps=(start_16bit(v_j, do_i.slice(0, HALF), HALF),))
    dst_0 = ds_half(pt_0, dpt_0, fit, delta.slice(0, HALF), first_key, n_k, RAGGED)
    st_1 = start(k_hat_j, q_hat_i.slice(HALF, HALF), HALF)
    hand_over(handed, dst_0, full, empty, n, zero, 0, W)
    st_1 = warpgroup_mma_wait(0, deps=(st_1,))
    pt_1 = p_half(st_1, s_q * s_k, log_sum_exp.slice(HALF, HALF), first_key, first_query + HALF, IS_MASKED)
    dpt_1 = warpgroup_mma_wait(0, deps=(start_16bit(v_j, do_i.slice(HALF, HALF), HALF),))
    dst_1 = ds_half(pt_1, dpt_1, fit, delta.slice(HALF, HALF), first_key, n_k, RAGGED)
    mbarrier.wait(dot_ready, n & 1)
    hand_over(handed, dst_1, full, empty, n, zero, 1, W)
    pt_hat_ij, s_p = quantized_pairs(joined_pairs(pt_0, pt_1), HALF)
    s_p *= factor_v
    product = warpgroup_mma_wait(0, deps=(start(pt_hat_ij, dot_i.slice(0, HALF), HALF),))
    dv_0 = taken_in_half(dv_0, product, s_p)
    product = warpgroup_mma_wait(0, deps=(start(pt_hat_ij, dot_i.slice(HALF, HALF), HALF),))
    dv_1 = taken_in_half(dv_1, product, s_p)
    dst_0, dst_1 = read_back(handed, zero, 0, W), read_back(handed, zero, 1, W)
    dst_hat_ij, s_ds = quantized_pairs(joined_pairs(dst_0, dst_1), HALF)
    s_ds *= factor_k
    mbarrier.wait(qt_ready, n & 1)
    product = warpgroup_mma_wait(0, deps=(start(dst_hat_ij, qt_i.slice(0, HALF), HALF),))
    dk_0 = taken_in_half(dk_0, product, s_ds)
    product = warpgroup_mma_wait(0, deps=(start(dst_hat_ij, qt_i.slice(HALF, HALF), HALF),))
    dk_1 = taken_in_half(dk_1, product, s_ds)
    step = gl.load(step_ptr + at) * s_k
    add_part(handed, kt_j, stages.index(W + zero), full, empty, step, n, zero, dq_descriptor, at * TILE, DP, W)
    return dk_0, dk_1, dv_0, dv_1


@gluon.jit
def store_halves(pointer, left, right, first, n, D: gl.constexpr):
    """`level4_hopper.store` of a gradient in halves of its columns."""
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(HALF)))
    d = gl.arange(0, HALF, gl.SliceLayout(0, accumulator(HALF)))
    pointers, is_token = pointer + token[:, None] * D + d[None, :], (token < n)[:, None]
    gl.store(pointers, left.to(pointer.dtype.element_ty), mask=is_token)
    gl.store(pointers + HALF, right.to(pointer.dtype.element_ty), mask=is_token & (HALF + d < D)[None, :])


@gluon.jit
def key_rows(
    rows, rows_ready, tiles, barriers, handed, stages, dq_descriptor, pointers, sizes, scale,
    D: gl.constexpr, DP: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dK and dV of warpgroup W's 64 keys, over the query heads that share them, and what they add to dQ."""
    k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    block = blocks - 1 - block  # the first keys, which most queries see, first
    first_key = block * TILE + W * ROWS
    count = query_tiles(block * TILE, q_blocks, IS_CAUSAL)
    s_k = gl.load(k_scale_ptr + kv_head * kv_blocks + block)
    zeros = gl.zeros([ROWS, HALF], gl.float32, accumulator(HALF))
    gradients = (zeros, zeros, zeros, zeros)
    mbarrier.wait(rows_ready, 0)
    n = 0
    for g in range(0, groups):
        i = q_blocks - 1
        at = (kv_head * groups + g) * q_blocks + i
        for _ in range(1, count):
            gradients = query_tile(
                gradients, rows, tiles, barriers, handed, stages, s_k, factors_ptr, step_ptr, n, at, first_key,
                i * TILE, n_k, dq_descriptor, DP, RAGGED, False, W,
            )  # fmt: skip
            n += 1
            i -= 1
            at -= 1
        gradients = query_tile(
            gradients, rows, tiles, barriers, handed, stages, s_k, factors_ptr, step_ptr, n, at, first_key,
            i * TILE, n_k, dq_descriptor, DP, RAGGED, IS_CAUSAL, W,
        )  # fmt: skip
        n += 1
    dk_0, dk_1, dv_0, dv_1 = gradients
    offset = kv_head.to(gl.int64) * n_k * D
    store_halves(dk_ptr + offset, dk_0 * scale, dk_1 * scale, first_key, n_k, D)
    store_halves(dv_ptr + offset, dv_0, dv_1, first_key, n_k, D)
    tma.store_wait(0)


@gluon.jit
def load_for_keys(descriptors, rows, rows_ready, tiles, barriers, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """The loading warp: K^, V and K^T, then tiles of Q^ and dO with L and delta, of dO^T and of Q^T."""
    (
        k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor,
        l_descriptor, delta_descriptor,
    ) = descriptors  # fmt: skip
    k_tiles, v_tiles, kt_tiles = rows
    q_tiles, do_tiles, dot_tiles, qt_tiles, log_sum_exps, deltas = tiles
    queries_ready, dot_ready, qt_ready, full, empty = barriers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_key = (blocks - 1 - block) * TILE
    load_keys(
        k_descriptor, v_descriptor, kt_descriptor, k_tiles, v_tiles, kt_tiles.index(0), rows_ready, kv_head, first_key,
        n_k, kv_blocks, DP,
    )  # fmt: skip
    of_queries: gl.constexpr = q_descriptor.block_type.nbytes + do_descriptor.block_type.nbytes
    n = 0
    for g in range(0, groups):
        head = kv_head * groups + g
        i = q_blocks - 1
        for _ in range(0, query_tiles(first_key, q_blocks, IS_CAUSAL)):
            token = (head * q_blocks + i) * TILE
            mbarrier.wait(full, (n & 1) ^ 1)
            mbarrier.expect(queries_ready, of_queries + 2 * l_descriptor.block_type.nbytes)
            tma.async_copy_global_to_shared(q_descriptor, [token, 0], queries_ready, q_tiles.index(0))
            tma.async_copy_global_to_shared(do_descriptor, [head * n_q + i * TILE, 0], queries_ready, do_tiles.index(0))
            tma.async_copy_global_to_shared(l_descriptor, [token], queries_ready, log_sum_exps.index(0))
            tma.async_copy_global_to_shared(delta_descriptor, [token], queries_ready, deltas.index(0))
            mbarrier.wait(empty, (n & 1) ^ 1)
            mbarrier.expect(dot_ready, dot_descriptor.block_type.nbytes)
            tma.async_copy_global_to_shared(dot_descriptor, [head * DP, i * TILE], dot_ready, dot_tiles.index(0))
            mbarrier.expect(qt_ready, qt_descriptor.block_type.nbytes)
            tma.async_copy_global_to_shared(qt_descriptor, [head * DP, i * TILE], qt_ready, qt_tiles.index(0))
            n += 1
            i -= 1


@gluon.jit(do_not_specialize=SIZES)
def wide_program(
    k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, dq_descriptor, k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks, scale,
    D: gl.constexpr, DP: gl.constexpr, REGISTERS: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK, dV and sums of dQ. RAGGED: the last block of keys isn't full."""
    k_tiles = gl.allocate_shared_memory(gl.int8, [2, ROWS, DP], k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [2, ROWS, DP], v_descriptor.layout)
    rows, rows_ready = (k_tiles, v_tiles, place(kt_descriptor)), barrier(1)
    tiles = (
        place(q_descriptor), place(do_descriptor), place(dot_descriptor), place(qt_descriptor), place(l_descriptor),
        place(delta_descriptor),
    )  # fmt: skip
    barriers = (barrier(1), barrier(1), barrier(1), barrier(2), barrier(2))
    handed = gl.allocate_shared_memory(gl.float16, [2, TILE, HALF], HANDED)
    stages = gl.allocate_shared_memory(gl.int32, [2] + dq_descriptor.block_shape, dq_descriptor.layout)
    fence_async_shared()
    descriptors = (
        k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor,
        l_descriptor, delta_descriptor,
    )  # fmt: skip
    pointers = (k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr)
    sizes = (blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks)
    gl.warp_specialize(
        [
            (key_rows, (rows, rows_ready, tiles, barriers, handed, stages, dq_descriptor, pointers, sizes, scale, D, DP,
                        RAGGED, IS_CAUSAL, 0)),
            (key_rows, (rows, rows_ready, tiles, barriers, handed, stages, dq_descriptor, pointers, sizes, scale, D, DP,
                        RAGGED, IS_CAUSAL, 1)),
            (load_for_keys, (descriptors, rows, rows_ready, tiles, barriers, sizes, DP, IS_CAUSAL)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip
