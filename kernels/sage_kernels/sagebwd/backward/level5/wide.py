"""Level 5 at a head size of 128: the two warpgroups of keys make dQ, too.

dK and dV of 64 keys take 128 registers of a thread. What is left of 240, all that two warpgroups can have, holds one
half of S or dP, both halves of P as pairs and little else, so a warpgroup does one thing after the other and leaves the
overlap to its neighbour. dS^T goes to shared memory for both. Of the queries each takes one half, reads it transposed
and adds its part to dQ; its own rows it reads back for dK. A product is added by halves of its columns. With fewer
barriers the four warps of a warpgroup wait less for one another, so two serve two purposes each. Once a tile:

    barrier   who arrives       who waits               what it says
    queries   the copy engine   both warpgroups         Q^, dO, L and delta are there
    full      both warpgroups   both and loading warp   dS^T is there; Q^, dO, L and delta may be overwritten
    dot, qt   the copy engine   both warpgroups         dO^T is there; Q^T is there
    empty     both warpgroups   both and loading warp   dS^T has been read; dO^T and Q^T may be overwritten

- Addresses of tiles are the same for every query tile, and the compiler would keep dozens of them in registers that it
  hasn't got. `n >> 30` is 0, but it can't know: it computes them where they are needed.
- The assembler's usual optimisations move every product's sum to the end and spill for it; its first level doesn't.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from sage_kernels.common.launch import Launch

from sage_kernels.hopper.toolbox import (  # isort: skip
    HALF, LOADING_REGISTERS, ROWS, SIZES, TILE, Sizes, accumulator, accumulator_16bit, add_scaled_half, allocate,
    barrier, count_query_tiles, key_work_item, row_and_column, start_16bit, start_int8, store_halves,
)  # fmt: skip
from sage_kernels.sagebwd.backward.level5.units import (  # isort: skip
    DS_LAYOUT, Descriptors, Pointers, add_to_global, columns_of, copy_keys, ds_half, join_pairs, load_factors,
    multiplier, p_half, pairs_of, quantize_pairs, spread_columns,
)  # fmt: skip

LAUNCH = Launch(TILE.value, TILE.value, 8, 1, 240)
CONSTANTS = {"REGISTERS": LAUNCH.max_registers}
OPTIONS = {"num_warps": 4, "maxnreg": 168, "ptx_options": "--opt-level 1"}  # maxnreg until the warps part
QUERIES_ADDED = HALF.value  # of a part of dQ

# Arguments that travel together: shared memory and its barriers.
Keys = namedtuple("Keys", "k v kt")  # a program's K^, V and K^T
Tiles = namedtuple("Tiles", "q do dot qt log_sum_exp delta")  # one place each
Barriers = namedtuple("Barriers", "queries dot qt full empty")
Memory = namedtuple("Memory", "keys keys_ready tiles barriers ds stages")  # stages: parts of dQ on their way


@gluon.jit
def hand_over(ds, pairs, barriers, n, zero, H: gl.constexpr, W: gl.constexpr):
    """Put half H of dS^T of the n-th tile where both warpgroups find it."""
    if H == 0:
        mbarrier.wait(barriers.empty, (n & 1) ^ 1)
    dst = gl.convert_layout(columns_of(pairs, HALF), accumulator_16bit(HALF), assert_trivial=True)
    ds.index(H + zero).slice(W * ROWS, ROWS).store(dst)
    if H == 1:
        mbarrier.arrive(barriers.full, count=1)


@gluon.jit
def read_back(ds, zero, H: gl.constexpr, W: gl.constexpr):
    """Return pairs of this warpgroup's own rows of half H."""
    return pairs_of(ds.index(H + zero).slice(W * ROWS, ROWS).load(accumulator_16bit(HALF)), HALF)


@gluon.jit
def add_part(ds, kt_j, stage, barriers, step, n, zero, dq_descriptor, first_query, DP: gl.constexpr, W: gl.constexpr):
    """Add dS K^ of half W of the n-th tile's queries to dQ. step: integers per dS^ of scale one."""
    mbarrier.wait(barriers.full, n & 1)
    # [Bq / 2, Bkv]
    ds_ij = ds.index(W + zero).permute((1, 0)).load(accumulator(TILE))
    ds_hat_ij, s_ds = quantize_pairs(pairs_of(ds_ij, TILE), HALF)
    mbarrier.arrive(barriers.empty, count=1)
    m, half, k = multiplier(gl.convert_layout(s_ds * step, gl.SliceLayout(1, accumulator(HALF))))
    for part in gl.static_range(DP // HALF):
        product = warpgroup_mma_wait(0, deps=(start_int8(ds_hat_ij, kt_j.slice(part * HALF, HALF), HALF),))
        tma.store_wait(0)  # the copy engine has read the stage
        stage.store(spread_columns((product * m + half) >> k))
        fence_async_shared()
        add_to_global(dq_descriptor, [first_query + W * HALF, part * HALF], stage)


@gluon.jit
def query_tile(
    gradients, memory, pointers, dq_descriptor, s_k, n, at, first_key, first_query, n_k,
    DP: gl.constexpr, RAGGED: gl.constexpr, IS_MASKED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return halves of dk_j and dv_j after the n-th query tile, the at-th of all. st is S_ij^T, a half at a time."""
    dk_0, dk_1, dv_0, dv_1 = gradients
    keys, tiles, barriers, ds = memory.keys, memory.tiles, memory.barriers, memory.ds
    zero = n >> 30
    k_hat_j, v_j, kt_j = keys.k.index(W + zero), keys.v.index(W + zero), keys.kt.index(zero)
    q_hat_i, do_i, dot_i, qt_i = tiles.q.index(zero), tiles.do.index(zero), tiles.dot.index(zero), tiles.qt.index(zero)
    log_sum_exp, delta = tiles.log_sum_exp.index(zero), tiles.delta.index(zero)
    s_q, fit, factor_k, factor_v = load_factors(pointers.factors, at)
    mbarrier.wait(barriers.queries, n & 1)
    st_0 = warpgroup_mma_wait(0, deps=(start_int8(k_hat_j, q_hat_i.slice(0, HALF), HALF),))
    pt_0 = p_half(st_0, s_q * s_k, log_sum_exp.slice(0, HALF), first_key, first_query, IS_MASKED)
    dpt_0 = warpgroup_mma_wait(0, deps=(start_16bit(v_j, do_i.slice(0, HALF), HALF),))
    dst_0 = ds_half(pt_0, dpt_0, fit, delta.slice(0, HALF), first_key, n_k, RAGGED)
    st_1 = start_int8(k_hat_j, q_hat_i.slice(HALF, HALF), HALF)
    hand_over(ds, dst_0, barriers, n, zero, 0, W)
    st_1 = warpgroup_mma_wait(0, deps=(st_1,))
    pt_1 = p_half(st_1, s_q * s_k, log_sum_exp.slice(HALF, HALF), first_key, first_query + HALF, IS_MASKED)
    dpt_1 = warpgroup_mma_wait(0, deps=(start_16bit(v_j, do_i.slice(HALF, HALF), HALF),))
    dst_1 = ds_half(pt_1, dpt_1, fit, delta.slice(HALF, HALF), first_key, n_k, RAGGED)
    mbarrier.wait(barriers.dot, n & 1)
    hand_over(ds, dst_1, barriers, n, zero, 1, W)
    pt_hat_ij, s_p = quantize_pairs(join_pairs(pt_0, pt_1), HALF)
    s_p *= factor_v
    product = warpgroup_mma_wait(0, deps=(start_int8(pt_hat_ij, dot_i.slice(0, HALF), HALF),))
    dv_0 = add_scaled_half(dv_0, product, s_p)
    product = warpgroup_mma_wait(0, deps=(start_int8(pt_hat_ij, dot_i.slice(HALF, HALF), HALF),))
    dv_1 = add_scaled_half(dv_1, product, s_p)
    dst_0, dst_1 = read_back(ds, zero, 0, W), read_back(ds, zero, 1, W)
    dst_hat_ij, s_ds = quantize_pairs(join_pairs(dst_0, dst_1), HALF)
    s_ds *= factor_k
    mbarrier.wait(barriers.qt, n & 1)
    product = warpgroup_mma_wait(0, deps=(start_int8(dst_hat_ij, qt_i.slice(0, HALF), HALF),))
    dk_0 = add_scaled_half(dk_0, product, s_ds)
    product = warpgroup_mma_wait(0, deps=(start_int8(dst_hat_ij, qt_i.slice(HALF, HALF), HALF),))
    dk_1 = add_scaled_half(dk_1, product, s_ds)
    step = gl.load(pointers.step + at) * s_k
    add_part(ds, kt_j, memory.stages.index(W + zero), barriers, step, n, zero, dq_descriptor, at * TILE, DP, W)
    return dk_0, dk_1, dv_0, dv_1


@gluon.jit
def key_rows(
    memory, dq_descriptor, pointers, sizes, dk_scale,
    D: gl.constexpr, DP: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of warpgroup W's 64 keys, over the query heads that share them, and what they add to dQ."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * TILE + W * ROWS
    tiles = count_query_tiles(block * TILE, sizes.q_blocks, IS_CAUSAL)
    s_k = gl.load(pointers.k_scale + kv_head * sizes.kv_blocks + block)
    zeros = gl.zeros([ROWS, HALF], gl.float32, accumulator(HALF))
    gradients = (zeros, zeros, zeros, zeros)
    mbarrier.wait(memory.keys_ready, 0)
    n = 0
    for g in range(0, sizes.group_size):
        i = sizes.q_blocks - 1
        at = (kv_head * sizes.group_size + g) * sizes.q_blocks + i
        for _ in range(1, tiles):
            gradients = query_tile(
                gradients, memory, pointers, dq_descriptor, s_k, n, at, first_key, i * TILE, sizes.n_k,
                DP, RAGGED, False, W,
            )  # fmt: skip
            n += 1
            i -= 1
            at -= 1
        gradients = query_tile(
            gradients, memory, pointers, dq_descriptor, s_k, n, at, first_key, i * TILE, sizes.n_k,
            DP, RAGGED, IS_CAUSAL, W,
        )  # fmt: skip
        n += 1
    dk_0, dk_1, dv_0, dv_1 = gradients
    dk_0, dk_1 = dk_0 * dk_scale, dk_1 * dk_scale
    store_halves(pointers.dk, dk_0, dk_1, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D)
    store_halves(pointers.dv, dv_0, dv_1, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D)
    tma.store_wait(0)


@gluon.jit
def load_tiles(descriptors, memory, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Load K^, V and K^T, then tiles of Q^ and dO with L and delta, of dO^T and of Q^T."""
    keys, tiles, barriers = memory.keys, memory.tiles, memory.barriers
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * TILE
    copy_keys(descriptors, keys.k, keys.v, keys.kt.index(0), memory.keys_ready, kv_head, first_key, sizes, DP)
    of_queries: gl.constexpr = descriptors.q.block_type.nbytes + descriptors.do.block_type.nbytes
    n = 0
    for g in range(0, sizes.group_size):
        head = kv_head * sizes.group_size + g
        i = sizes.q_blocks - 1
        for _ in range(0, count_query_tiles(first_key, sizes.q_blocks, IS_CAUSAL)):
            token, here = (head * sizes.q_blocks + i) * TILE, barriers.queries
            mbarrier.wait(barriers.full, (n & 1) ^ 1)
            mbarrier.expect(here, of_queries + 2 * descriptors.delta.block_type.nbytes)
            tma.async_copy_global_to_shared(descriptors.q, [token, 0], here, tiles.q.index(0))
            row, column = row_and_column(head, i * TILE, sizes.n_q, sizes.do_heads_per_row, DP)
            tma.async_copy_global_to_shared(descriptors.do, [row, column], here, tiles.do.index(0))
            tma.async_copy_global_to_shared(descriptors.log_sum_exp, [token], here, tiles.log_sum_exp.index(0))
            tma.async_copy_global_to_shared(descriptors.delta, [token], here, tiles.delta.index(0))
            mbarrier.wait(barriers.empty, (n & 1) ^ 1)
            mbarrier.expect(barriers.dot, descriptors.dot.block_type.nbytes)
            tma.async_copy_global_to_shared(descriptors.dot, [head * DP, i * TILE], barriers.dot, tiles.dot.index(0))
            mbarrier.expect(barriers.qt, descriptors.qt.block_type.nbytes)
            tma.async_copy_global_to_shared(descriptors.qt, [head * DP, i * TILE], barriers.qt, tiles.qt.index(0))
            n += 1
            i -= 1


@gluon.jit(do_not_specialize=SIZES)
def dqdkdv_wide_program(
    k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, dq_descriptor, k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
    v_heads_per_row, do_heads_per_row, out_heads_per_row, dk_scale,
    D: gl.constexpr, DP: gl.constexpr, REGISTERS: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    keys, keys_ready = (
        Keys(allocate(k_descriptor, 2), allocate(v_descriptor, 2), allocate(kt_descriptor, 1)),
        barrier(1),
    )
    tiles = Tiles(
        allocate(q_descriptor, 1), allocate(do_descriptor, 1), allocate(dot_descriptor, 1), allocate(qt_descriptor, 1),
        allocate(l_descriptor, 1), allocate(delta_descriptor, 1),
    )  # fmt: skip
    barriers = Barriers(barrier(1), barrier(1), barrier(1), barrier(2), barrier(2))
    ds = gl.allocate_shared_memory(gl.float16, [2, TILE, HALF], DS_LAYOUT)
    memory = Memory(keys, keys_ready, tiles, barriers, ds, allocate(dq_descriptor, 2))
    fence_async_shared()
    descriptors = Descriptors(
        k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor,
        l_descriptor, delta_descriptor,
    )  # fmt: skip
    pointers = Pointers(k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr)
    sizes = Sizes(
        blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
        v_heads_per_row, do_heads_per_row, out_heads_per_row,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (key_rows, (memory, dq_descriptor, pointers, sizes, dk_scale, D, DP, RAGGED, IS_CAUSAL, 0)),
            (key_rows, (memory, dq_descriptor, pointers, sizes, dk_scale, D, DP, RAGGED, IS_CAUSAL, 1)),
            (load_tiles, (descriptors, memory, sizes, DP, IS_CAUSAL)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip
