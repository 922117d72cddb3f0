"""Level 5 at a head size of 64: two warpgroups of keys make dK and dV, a third one makes dQ.

Each warpgroup of keys owns 64 rows of K^ and V, and dk_j and dv_j in registers; it hands dS^T over through shared
memory. The third reads dS^T of both, rounds it with a scale per query, multiplies it by K^ and lets the copy engine add
the part to dQ in memory. Barriers, besides those of the rings (Q^; dO with L and delta; dO^T; Q^T):

    ds.ready[half]   the two warpgroups of keys arrive, that of dQ waits: half of dS^T (64 queries) is there
    ds.empty[half]   the warpgroup of dQ arrives, the two of keys wait: it has read that half
    keys.ready       K^, V and K^T of the program's 128 keys have come; all three warpgroups wait for it once
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from sage_kernels.common.launch import Launch

from sage_kernels.hopper.toolbox import (  # isort: skip
    HALF, LOADING_REGISTERS, ROWS, SIZES, TILE, Sizes, accumulator, accumulator_16bit, acquire, add_scaled,
    allocate, barrier, count_query_tiles, fetch, fetch_with_lines, key_work_item, release, ring, ring_of,
    row_and_column, start_16bit, start_int8, store_tokens,
)  # fmt: skip
from sage_kernels.sagebwd.backward.level5.units import (  # isort: skip
    DS_LAYOUT, Descriptors, Pointers, add_to_global, columns_of, copy_keys, ds_half, join_pairs, load_factors,
    multiplier, p_half, pairs_of, quantize_pairs, spread_columns,
)  # fmt: skip

LAUNCH = Launch(TILE.value, TILE.value, 8, 3, 200)  # the warpgroups of keys and their registers, places of each ring
AT_START = 128  # registers until the warps part
CONSTANTS = {
    "PLACES": LAUNCH.num_stages, "REGISTERS": LAUNCH.max_registers,
    "QUERY_REGISTERS": 4 * AT_START - LOADING_REGISTERS.value - 2 * LAUNCH.max_registers,
}  # fmt: skip
OPTIONS = {"num_warps": 4, "maxnreg": AT_START}
QUERIES_ADDED = TILE.value  # of a part of dQ

# Arguments that travel together
Rings = namedtuple("Rings", "q do qt dot")
Lines = namedtuple("Lines", "log_sum_exp delta")  # shared memory [places, TILE], with dO
Keys = namedtuple("Keys", "k v ready")  # shared memory for a program's K^ and V; the barrier is K^T's, too
Own = namedtuple("Own", "k_hat_j v_j s_k first_key")  # a warpgroup's keys


@gluon.jit
def hand_over(ds, n, pairs, H: gl.constexpr, W: gl.constexpr):
    """Put half H of dS^T of the n-th tile where the warpgroup of dQ finds it."""
    mbarrier.wait(ds.empty.index(H), (n & 1) ^ 1)
    dst = gl.convert_layout(columns_of(pairs, HALF), accumulator_16bit(HALF), assert_trivial=True)
    ds.tiles.index(H).slice(W * ROWS, ROWS).store(dst)
    mbarrier.arrive(ds.ready.index(H), count=1)


@gluon.jit
def query_tile(
    dk_j, dv_j, own, factors, n, first_query, n_k, rings, lines, ds,
    DP: gl.constexpr, RAGGED: gl.constexpr, IS_MASKED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return dk_j, dv_j after the n-th query tile. All is transposed: st is S_ij^T, in halves [Bkv, Bq / 2]."""
    first_key, s_q, s_k = own.first_key, factors.s_q, own.s_k
    log_sum_exp = lines.log_sum_exp.index(n % lines.delta.shape[0])
    delta = lines.delta.index(n % lines.delta.shape[0])
    q_hat_i = acquire(rings.q, n)
    st_0 = start_int8(own.k_hat_j, q_hat_i.slice(0, HALF), HALF)
    st_1 = start_int8(own.k_hat_j, q_hat_i.slice(HALF, HALF), HALF)
    st_0 = warpgroup_mma_wait(1, deps=(st_0,))
    do_i = acquire(rings.do, n)
    pt_0 = p_half(st_0, s_q * s_k, log_sum_exp.slice(0, HALF), first_key, first_query, IS_MASKED)
    dpt_0 = start_16bit(own.v_j, do_i.slice(0, HALF), HALF)
    st_1 = warpgroup_mma_wait(1, deps=(st_1,))
    release(rings.q, n)
    pt_1 = p_half(st_1, s_q * s_k, log_sum_exp.slice(HALF, HALF), first_key, first_query + HALF, IS_MASKED)
    pt_hat_ij, s_p = quantize_pairs(join_pairs(pt_0, pt_1), DP)
    product = start_int8(pt_hat_ij, acquire(rings.dot, n), DP)
    dpt_0 = warpgroup_mma_wait(1, deps=(dpt_0,))
    dst_0 = ds_half(pt_0, dpt_0, factors.fit, delta.slice(0, HALF), first_key, n_k, RAGGED)
    hand_over(ds, n, dst_0, 0, W)
    product = warpgroup_mma_wait(0, deps=(product,))
    dpt_1 = start_16bit(own.v_j, do_i.slice(HALF, HALF), HALF)
    dv_j = add_scaled(dv_j, product, s_p * factors.dv, DP)
    dpt_1 = warpgroup_mma_wait(0, deps=(dpt_1,))
    dst_1 = ds_half(pt_1, dpt_1, factors.fit, delta.slice(HALF, HALF), first_key, n_k, RAGGED)
    hand_over(ds, n, dst_1, 1, W)
    # Not before: released right after the loads of L and delta, a ring of one place lost numbers on the GPU. The copy
    # engine overtook loads still on their way. Here they have come, for dS was computed from them.
    release(rings.do, n)
    release(rings.dot, n)
    dst_hat_ij, s_ds = quantize_pairs(join_pairs(dst_0, dst_1), DP)
    product = warpgroup_mma_wait(0, deps=(start_int8(dst_hat_ij, acquire(rings.qt, n), DP),))
    release(rings.qt, n)
    return add_scaled(dk_j, product, s_ds * factors.dk, DP), dv_j


@gluon.jit
def key_rows(
    keys, rings, lines, ds, pointers, sizes, dk_scale,
    D: gl.constexpr, DP: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of warpgroup W's 64 keys, over the query heads that share them."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * TILE + W * ROWS
    tiles = count_query_tiles(block * TILE, sizes.q_blocks, IS_CAUSAL)
    s_k = gl.load(pointers.k_scale + kv_head * sizes.kv_blocks + block)
    dk_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    dv_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    mbarrier.wait(keys.ready, 0)
    own = Own(keys.k.index(W), keys.v.index(W), s_k, first_key)
    n = 0
    for g in range(0, sizes.group_size):
        i = sizes.q_blocks - 1
        at = (kv_head * sizes.group_size + g) * sizes.q_blocks + i
        factors = load_factors(pointers.factors, at)
        for _ in range(1, tiles):
            at -= 1
            next_factors = load_factors(pointers.factors, at)
            dk_j, dv_j = query_tile(
                dk_j, dv_j, own, factors, n, i * TILE, sizes.n_k, rings, lines, ds, DP, RAGGED, False, W
            )
            factors = next_factors
            n += 1
            i -= 1
        dk_j, dv_j = query_tile(
            dk_j, dv_j, own, factors, n, i * TILE, sizes.n_k, rings, lines, ds, DP, RAGGED, IS_CAUSAL, W
        )
        n += 1
    store_tokens(pointers.dk, dk_j * dk_scale, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D, DP)
    store_tokens(pointers.dv, dv_j, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D, DP)


@gluon.jit
def add_part(ds, n, step, kt_tile, stage, dq_descriptor, first_query, H: gl.constexpr, DP: gl.constexpr):
    """Add dS K^ of half H of the n-th tile's queries to dQ; both halves at once, with the second one.

    step: integers per dS^ of scale one.
    """
    mbarrier.wait(ds.ready.index(H), n & 1)
    # [Bq / 2, Bkv]
    ds_ij = ds.tiles.index(H).permute((1, 0)).load(accumulator(TILE))
    ds_hat_ij, s_ds = quantize_pairs(pairs_of(ds_ij, TILE), DP)
    m, half, k = multiplier(gl.convert_layout(s_ds * step, gl.SliceLayout(1, accumulator(DP))))
    product = warpgroup_mma_wait(0, deps=(start_int8(ds_hat_ij, kt_tile, DP),))
    mbarrier.arrive(ds.empty.index(H), count=1)
    if H == 0:
        tma.store_wait(0)  # the copy engine has read the stage
    stage.slice(H * HALF, HALF).store(spread_columns((product * m + half) >> k))
    if H == 1:
        fence_async_shared()
        add_to_global(dq_descriptor, [first_query, 0], stage)


@gluon.jit
def query_rows(kt_tile, ready, ds, stage, dq_descriptor, pointers, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Compute what this block of keys adds to dQ."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    s_k = gl.load(pointers.k_scale + kv_head * sizes.kv_blocks + block)
    mbarrier.wait(ready, 0)
    n = 0
    for g in range(0, sizes.group_size):
        i = (kv_head * sizes.group_size + g) * sizes.q_blocks + sizes.q_blocks - 1
        for _ in range(0, count_query_tiles(block * TILE, sizes.q_blocks, IS_CAUSAL)):
            step = gl.load(pointers.step + i) * s_k
            for half in gl.static_range(2):
                add_part(ds, n, step, kt_tile, stage, dq_descriptor, i * TILE, half, DP)
            n += 1
            i -= 1
    tma.store_wait(0)


@gluon.jit
def load_tiles(descriptors, keys, kt_tile, rings, lines, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Load K^, V and K^T, then tiles of Q^, dO with L and delta, dO^T and Q^T."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * TILE
    copy_keys(descriptors, keys.k, keys.v, kt_tile, keys.ready, kv_head, first_key, sizes, DP)
    line_descriptors = (descriptors.log_sum_exp, descriptors.delta)
    n = 0
    for g in range(0, sizes.group_size):
        head = kv_head * sizes.group_size + g
        i = sizes.q_blocks - 1
        for _ in range(0, count_query_tiles(first_key, sizes.q_blocks, IS_CAUSAL)):
            token = (head * sizes.q_blocks + i) * TILE
            fetch(rings.q, n, descriptors.q, token, 0)
            row, column = row_and_column(head, i * TILE, sizes.n_q, sizes.do_heads_per_row, DP)
            fetch_with_lines(rings.do, lines, n, descriptors.do, row, column, line_descriptors, token)
            fetch(rings.dot, n, descriptors.dot, head * DP, i * TILE)
            fetch(rings.qt, n, descriptors.qt, head * DP, i * TILE)
            n += 1
            i -= 1


@gluon.jit(do_not_specialize=SIZES)
def dqdkdv_program(
    k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, dq_descriptor, k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
    v_heads_per_row, do_heads_per_row, out_heads_per_row, dk_scale,
    D: gl.constexpr, DP: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr, QUERY_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, kt_tile = (
        allocate(k_descriptor, 2),
        allocate(v_descriptor, 2),
        allocate(kt_descriptor, 1).index(0),
    )
    keys = Keys(k_tiles, v_tiles, barrier(1))
    q_ring, do_ring = ring(q_descriptor, PLACES, 2), ring(do_descriptor, PLACES, 2)
    rings = Rings(q_ring, do_ring, ring(qt_descriptor, PLACES, 2), ring(dot_descriptor, PLACES, 2))
    lines = Lines(allocate(l_descriptor, PLACES), allocate(delta_descriptor, PLACES))
    # A place for each half of a tile's dS^T, filled by two warpgroups and read by one.
    ds = ring_of(gl.allocate_shared_memory(gl.float16, [2, TILE, HALF], DS_LAYOUT), 2, 1)
    stage = allocate(dq_descriptor, 1).index(0)
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
            (key_rows, (keys, rings, lines, ds, pointers, sizes, dk_scale, D, DP, RAGGED, IS_CAUSAL, 0)),
            (key_rows, (keys, rings, lines, ds, pointers, sizes, dk_scale, D, DP, RAGGED, IS_CAUSAL, 1)),
            (query_rows, (kt_tile, keys.ready, ds, stage, dq_descriptor, pointers, sizes, DP, IS_CAUSAL)),
            (load_tiles, (descriptors, keys, kt_tile, rings, lines, sizes, DP, IS_CAUSAL)),
        ],
        [4, 4, 1], [REGISTERS, QUERY_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip
