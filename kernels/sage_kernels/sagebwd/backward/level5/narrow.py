"""Level 5, Hopper: dS is computed once; dQ, dK and dV come from one pass over the tiles.

Level 4 computes S and dP in the program of dQ and again in that of keys. Here two warpgroups of keys make dK and dV as
there, and hand dS^T over through shared memory. Whoever is to make dQ reads it transposed, rounds it with a scale per
query, multiplies it by K^ and lets the copy engine add the part to dQ in memory. At a head size of 64, which this file
has, that is a third warpgroup. At 128 two gradients leave no registers for it: see `level5_wide.py`. What comes before
and after the program is the same for both, and here.

- The parts of one dQ come from all blocks of keys, in no fixed order. A sum of floats would depend on that order; a sum
  of integers doesn't. So parts are rounded to integers, in a unit per block of queries, and results are still the same
  bit for bit on every run.
- The unit keeps the sums within 31 bits. Rows of P add up to one, so a row of dS adds up to at most
  max|dP - delta| <= 2 D max|dO| max|V|, and dQ is at most max|K| times that.
- P and dS are pairs of float16 (`one_pass.py`). P is stretched by 2^15 and dP - delta by the power of two that makes
  it just fit: |dS| = P (1 - P) |dP - its mean over the other keys| is at most a quarter of the bound above.
- S and dP come in halves of a tile's queries, so that no warpgroup holds more than one of them in 32 bit.

Expect: five matmuls a tile instead of seven (at 128, instead of eight), fewer exponentials, and fewer instructions for
what is left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from sage_kernels.common.launch import Launch
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q, padded_head_dim, padded_length
from sage_kernels.hopper.toolbox import (
    HEAD_DIMS,
    ROWS,
    TILE,
    accumulator,
    add_to_global,
    arrived,
    barrier,
    descriptor,
    fetch,
    heads_at_a_time,
    let_go,
    place,
    ring,
    work_item,
)
from sage_kernels.sagebwd.backward.level4 import programs as level4_hopper
from sage_kernels.sagebwd.backward.level4.programs import (
    HALF,
    LOADING_REGISTERS,
    SIZES,
    accumulator_16bit,
    query_tiles,
    rows_of_16_bytes,
    start,
    start_16bit,
    store,
    taken_in,
)
from sage_kernels.sagebwd.backward.level5 import wide as level5_wide
from sage_kernels.sagebwd.backward.level5.one_pass import (
    HANDED,
    STRETCH,
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
from sage_kernels.sagebwd.backward.program import LOG2_E, BackwardInputs

# The warpgroups of keys and their registers, places of each ring.
LAUNCHES = {"dqdkdv": Launch(BLOCK_Q, BLOCK_KV, 8, 3, 200), "dqdkdv_wide": level5_wide.LAUNCH}
AT_START = 128  # registers until the warps part
LARGEST_SUM = tl.constexpr(30)  # log2; of the sums of dQ, for int32 ends at 2^31


# Rows of keys: everything is transposed, st_ij is S_ij^T.


@gluon.jit
def hand_over(exchange, n, pairs, H: gl.constexpr, W: gl.constexpr):
    """Put half H of dS^T of the n-th tile where the warpgroup of dQ finds it."""
    handed, full, empty = exchange
    mbarrier.wait(empty.index(H), (n & 1) ^ 1)
    dst = gl.convert_layout(columns_of(pairs, HALF), accumulator_16bit(HALF), assert_trivial=True)
    handed.index(H).slice(W * ROWS, ROWS).store(dst)
    mbarrier.arrive(full.index(H), count=1)


@gluon.jit
def query_tile(
    dk_j, dv_j, k_hat_j, v_j, s_k, factors, n, first_key, first_query, n_k, rings, lines, exchange,
    DP: gl.constexpr, RAGGED: gl.constexpr, IS_MASKED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dk_j, dv_j after the n-th query tile."""
    s_q, fit, factor_k, factor_v = factors
    q_ring, do_ring, qt_ring, dot_ring = rings
    log_sum_exps, deltas = lines
    log_sum_exp, delta = log_sum_exps.index(n % deltas.shape[0]), deltas.index(n % deltas.shape[0])
    q_hat_i = arrived(q_ring, n)
    st_0, st_1 = start(k_hat_j, q_hat_i.slice(0, HALF), HALF), start(k_hat_j, q_hat_i.slice(HALF, HALF), HALF)
    st_0 = warpgroup_mma_wait(1, deps=(st_0,))
    do_i = arrived(do_ring, n)
    pt_0 = p_half(st_0, s_q * s_k, log_sum_exp.slice(0, HALF), first_key, first_query, IS_MASKED)
    dpt_0 = start_16bit(v_j, do_i.slice(0, HALF), HALF)
    st_1 = warpgroup_mma_wait(1, deps=(st_1,))
    let_go(q_ring, n)
    pt_1 = p_half(st_1, s_q * s_k, log_sum_exp.slice(HALF, HALF), first_key, first_query + HALF, IS_MASKED)
    pt_hat_ij, s_p = quantized_pairs(joined_pairs(pt_0, pt_1), DP)
    product = start(pt_hat_ij, arrived(dot_ring, n), DP)
    dpt_0 = warpgroup_mma_wait(1, deps=(dpt_0,))
    dst_0 = ds_half(pt_0, dpt_0, fit, delta.slice(0, HALF), first_key, n_k, RAGGED)
    hand_over(exchange, n, dst_0, 0, W)
    product = warpgroup_mma_wait(0, deps=(product,))
    dpt_1 = start_16bit(v_j, do_i.slice(HALF, HALF), HALF)
    dv_j = taken_in(dv_j, product, s_p * factor_v, DP)
    dpt_1 = warpgroup_mma_wait(0, deps=(dpt_1,))
    dst_1 = ds_half(pt_1, dpt_1, fit, delta.slice(HALF, HALF), first_key, n_k, RAGGED)
    hand_over(exchange, n, dst_1, 1, W)
    # Not before: let go of right after the loads of a line, a ring of one place lost numbers on the GPU. The copy
    # engine overtook loads still on their way. Here L and delta have come, for dS was computed from them.
    let_go(do_ring, n)
    let_go(dot_ring, n)
    dst_hat_ij, s_ds = quantized_pairs(joined_pairs(dst_0, dst_1), DP)
    product = warpgroup_mma_wait(0, deps=(start(dst_hat_ij, arrived(qt_ring, n), DP),))
    let_go(qt_ring, n)
    return taken_in(dk_j, product, s_ds * factor_k, DP), dv_j


@gluon.jit
def key_rows(
    k_tiles, v_tiles, rows_ready, rings, lines, exchange, pointers, sizes, scale,
    D: gl.constexpr, DP: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dK and dV of warpgroup W's 64 keys, over the query heads that share them."""
    k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    block = blocks - 1 - block  # the first keys, which most queries see, first
    first_key = block * TILE + W * ROWS
    tiles = query_tiles(block * TILE, q_blocks, IS_CAUSAL)
    s_k = gl.load(k_scale_ptr + kv_head * kv_blocks + block)
    dk_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    dv_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    mbarrier.wait(rows_ready, 0)
    k_hat_j, v_j = k_tiles.index(W), v_tiles.index(W)
    n = 0
    for g in range(0, groups):
        i = q_blocks - 1
        at = (kv_head * groups + g) * q_blocks + i
        factors = load_factors(factors_ptr, at)
        for _ in range(1, tiles):
            at -= 1
            next_factors = load_factors(factors_ptr, at)
            dk_j, dv_j = query_tile(
                dk_j, dv_j, k_hat_j, v_j, s_k, factors, n, first_key, i * TILE, n_k, rings, lines, exchange,
                DP, RAGGED, False, W,
            )  # fmt: skip
            factors = next_factors
            n += 1
            i -= 1
        dk_j, dv_j = query_tile(
            dk_j, dv_j, k_hat_j, v_j, s_k, factors, n, first_key, i * TILE, n_k, rings, lines, exchange,
            DP, RAGGED, IS_CAUSAL, W,
        )  # fmt: skip
        n += 1
    offset = kv_head.to(gl.int64) * n_k * D
    store(dk_ptr + offset, dk_j * scale, first_key, n_k, D, DP)
    store(dv_ptr + offset, dv_j, first_key, n_k, D, DP)


# Rows of queries.


@gluon.jit
def add_part(exchange, n, step, kt_tile, stage, dq_descriptor, first_query, H: gl.constexpr, DP: gl.constexpr):
    """Add dS K^ of half H of the n-th tile's queries to dQ; both halves at once, with the second one.

    step: integers per dS^ of scale one.
    """
    handed, full, empty = exchange
    mbarrier.wait(full.index(H), n & 1)
    ds = handed.index(H).permute((1, 0)).load(accumulator(TILE))
    ds_hat_ij, s_ds = quantized_pairs(pairs_of(ds, TILE), DP)
    m, half, k = multiplier(gl.convert_layout(s_ds * step, gl.SliceLayout(1, accumulator(DP))))
    product = warpgroup_mma_wait(0, deps=(start(ds_hat_ij, kt_tile, DP),))
    mbarrier.arrive(empty.index(H), count=1)
    if H == 0:
        tma.store_wait(0)  # the copy engine has read what lay in the stage
    stage.slice(H * HALF, HALF).store((product * m + half) >> k)
    if H == 1:
        fence_async_shared()
        add_to_global(dq_descriptor, [first_query, 0], stage)


@gluon.jit
def query_rows(
    kt_tile, rows_ready, exchange, stage, dq_descriptor, pointers, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """What this block of keys adds to dQ."""
    k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    block = blocks - 1 - block
    s_k = gl.load(k_scale_ptr + kv_head * kv_blocks + block)
    mbarrier.wait(rows_ready, 0)
    n = 0
    for g in range(0, groups):
        i = (kv_head * groups + g) * q_blocks + q_blocks - 1
        for _ in range(0, query_tiles(block * TILE, q_blocks, IS_CAUSAL)):
            step = gl.load(step_ptr + i) * s_k
            for half in gl.static_range(2):
                add_part(exchange, n, step, kt_tile, stage, dq_descriptor, i * TILE, half, DP)
            n += 1
            i -= 1
    tma.store_wait(0)


@gluon.jit
def fetch_with_lines(ring, lines, n, descriptor, row, l_descriptor, delta_descriptor, token):
    """`fetch`, and L and delta of the tile's queries."""
    tiles, ready, empty = ring
    log_sum_exps, deltas = lines
    places: gl.constexpr = tiles.shape[0]
    mbarrier.wait(empty.index(n % places), ((n // places) & 1) ^ 1)
    here = ready.index(n % places)
    mbarrier.expect(here, descriptor.block_type.nbytes + 2 * l_descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, 0], here, tiles.index(n % places))
    tma.async_copy_global_to_shared(l_descriptor, [token], here, log_sum_exps.index(n % places))
    tma.async_copy_global_to_shared(delta_descriptor, [token], here, deltas.index(n % places))


@gluon.jit
def load_for_keys(
    descriptors, k_tiles, v_tiles, kt_tile, rows_ready, rings, lines, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """The loading warp: K^, V and K^T, then tiles of Q^, dO with L and delta, dO^T and Q^T."""
    (
        k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor,
        l_descriptor, delta_descriptor,
    ) = descriptors  # fmt: skip
    q_ring, do_ring, qt_ring, dot_ring = rings
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    block, kv_head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_key = (blocks - 1 - block) * TILE
    load_keys(
        k_descriptor, v_descriptor, kt_descriptor, k_tiles, v_tiles, kt_tile, rows_ready, kv_head, first_key, n_k,
        kv_blocks, DP,
    )  # fmt: skip
    n = 0
    for g in range(0, groups):
        head = kv_head * groups + g
        i = q_blocks - 1
        for _ in range(0, query_tiles(first_key, q_blocks, IS_CAUSAL)):
            token = (head * q_blocks + i) * TILE
            fetch(q_ring, n, q_descriptor, token, 0)
            fetch_with_lines(
                do_ring, lines, n, do_descriptor, head * n_q + i * TILE, l_descriptor, delta_descriptor, token
            )
            fetch(dot_ring, n, dot_descriptor, head * DP, i * TILE)
            fetch(qt_ring, n, qt_descriptor, head * DP, i * TILE)
            n += 1
            i -= 1


@gluon.jit(do_not_specialize=SIZES)
def one_pass_program(
    k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, dq_descriptor, k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks, scale,
    D: gl.constexpr, DP: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr, QUERY_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK, dV and sums of dQ. RAGGED: the last block of keys isn't full."""
    k_tiles = gl.allocate_shared_memory(gl.int8, [2, ROWS, DP], k_descriptor.layout)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, [2, ROWS, DP], v_descriptor.layout)
    kt_tile = place(kt_descriptor).index(0)
    rows_ready = barrier(1)
    q_ring, do_ring = ring(q_descriptor, PLACES, 2), ring(do_descriptor, PLACES, 2)
    rings = (q_ring, do_ring, ring(qt_descriptor, PLACES, 2), ring(dot_descriptor, PLACES, 2))
    log_sum_exps = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], l_descriptor.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], delta_descriptor.layout)
    # A place for each half of a tile's dS^T, filled by two warpgroups and emptied by one.
    handed = gl.allocate_shared_memory(gl.float16, [2, TILE, HALF], HANDED)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(full.index(half), count=2)
        mbarrier.init(empty.index(half), count=1)
    stage = place(dq_descriptor).index(0)
    fence_async_shared()
    lines, exchange = (log_sum_exps, deltas), (handed, full, empty)
    descriptors = (
        k_descriptor, v_descriptor, kt_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor,
        l_descriptor, delta_descriptor,
    )  # fmt: skip
    pointers = (k_scale_ptr, factors_ptr, step_ptr, dk_ptr, dv_ptr)
    sizes = (blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks)
    gl.warp_specialize(
        [
            (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, exchange, pointers, sizes, scale, D, DP, RAGGED,
                        IS_CAUSAL, 0)),
            (key_rows, (k_tiles, v_tiles, rows_ready, rings, lines, exchange, pointers, sizes, scale, D, DP, RAGGED,
                        IS_CAUSAL, 1)),
            (query_rows, (kt_tile, rows_ready, exchange, stage, dq_descriptor, pointers, sizes, DP, IS_CAUSAL)),
            (load_for_keys, (descriptors, k_tiles, v_tiles, kt_tile, rows_ready, rings, lines, sizes, DP, IS_CAUSAL)),
        ],
        [4, 4, 1], [REGISTERS, QUERY_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


# Before and after: units of dS and of the sums, and dQ of its sums.


@triton.jit
def largest_number(pointer, n, BLOCK: tl.constexpr):
    """The largest |x| of n numbers. NaN and infinity are passed over: they reach the gradients through s_Q, s_dO."""
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(pointer + offset, mask=offset < n, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, 0.0))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["n_k"])
def _largest_kernel(v_ptr, largest_ptr, n_k, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the largest |V| of a block of keys."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = block * TOKENS
    largest = largest_number(v_ptr + (head * n_k + first) * D, tl.minimum(n_k - first, TOKENS) * D, BLOCK)
    tl.store(largest_ptr + head * tl.num_programs(0) + block, largest)


@triton.jit(do_not_specialize=["groups", "kv_blocks"])
def _units_kernel(
    largest_v_ptr, q_scale_ptr, k_scale_ptr, do_scale_ptr, log_sum_exp_ptr, delta_ptr, stretched_ptr, fitted_ptr,
    factors_ptr, step_ptr, unit_ptr, groups, kv_blocks,
    D: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries. P is stretched by 2^15, dP - delta by fit; a one in dQ is 2^bits integers.

    stretched = L - 15, fitted = delta fit, factors = (s_Q, fit, s_Q shrink, s_dO 2^-15), step = 2^bits shrink,
    unit = 2^-bits, where shrink = 2^-15 / fit
    """
    at, kv_head = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1) // groups
    visible = kv_blocks
    if IS_CAUSAL:  # what comes later must not change a bit; blocks of queries and of keys are equally long
        visible = tl.minimum(kv_blocks, tl.program_id(0) + 1)
    largest_do = 127 * largest_number(do_scale_ptr + at, 1, 1)
    bound = 2 * D * largest_do * largest_number(largest_v_ptr + kv_head * kv_blocks, visible, BLOCK)
    bound = tl.log2(tl.minimum(tl.maximum(bound, 1e-30), 1e37))
    largest_k = 127 * largest_number(k_scale_ptr + kv_head * kv_blocks, visible, BLOCK)
    bits = tl.floor(-bound - tl.log2(tl.maximum(largest_k, 1e-30)) + LARGEST_SUM)
    bits = tl.minimum(tl.maximum(bits, -120.0), 120.0)  # 2^-bits is a float32
    shift = tl.floor(1 - bound)
    s_q, fit, shrink = tl.load(q_scale_ptr + at), tl.exp2(shift), tl.exp2(-shift - STRETCH)
    tl.store(factors_ptr + 4 * at, s_q)
    tl.store(factors_ptr + 4 * at + 1, fit)
    tl.store(factors_ptr + 4 * at + 2, s_q * shrink)
    tl.store(factors_ptr + 4 * at + 3, tl.load(do_scale_ptr + at) * tl.exp2(0.0 - STRETCH))
    tl.store(step_ptr + at, tl.exp2(bits) * shrink)
    tl.store(unit_ptr + at, tl.exp2(-bits))
    query = at.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    tl.store(stretched_ptr + query, tl.load(log_sum_exp_ptr + query) - STRETCH)
    tl.store(fitted_ptr + query, tl.load(delta_ptr + query) * fit)


@triton.jit(do_not_specialize=["n_q"])
def _finish_kernel(
    sums_ptr, unit_ptr, q_scale_ptr, dq_ptr, n_q, scale, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: dQ in 16 bit of a block of queries."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = head * tl.num_programs(0) + block
    token, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    sums = tl.load(sums_ptr + (at * BLOCK + token)[:, None] * DP + d[None, :])
    factor = tl.load(unit_ptr + at) * scale + tl.load(q_scale_ptr + at) * 0.0  # NaN where s_Q is
    query = block * BLOCK + token
    dq_ptrs = dq_ptr + head * n_q * D + query[:, None] * D + d[None, :]
    dq = (sums.to(tl.float32) * factor).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptrs, dq, mask=(query < n_q)[:, None] & (d < D)[None, :])


def kernels(head_dim: int) -> tuple[str, ...]:
    """The program that a head size takes: a name in `LAUNCHES`."""
    return ("dqdkdv",) if padded_head_dim(head_dim) == HEAD_DIMS[0] else ("dqdkdv_wide",)


def program_of(kernel: str):
    """(program, its constants besides sizes, RAGGED and IS_CAUSAL, options of its launch) of a name in `LAUNCHES`."""
    launch = LAUNCHES[kernel]
    if kernel == "dqdkdv_wide":
        return level5_wide.wide_program, {"REGISTERS": launch.max_registers}, level5_wide.OPTIONS
    query_registers = 4 * AT_START - LOADING_REGISTERS.value - 2 * launch.max_registers
    constants = {"PLACES": launch.num_stages, "REGISTERS": launch.max_registers, "QUERY_REGISTERS": query_registers}
    return one_pass_program, constants, {"num_warps": 4, "maxnreg": AT_START}


def tile_shapes(
    kernel: str, padded_head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of the tiles that its descriptors fetch or add, dO and V being of `dtype`."""
    of_keys = level4_hopper.tile_shapes("dkdv", padded_head_dim, dtype)
    names = ("k_descriptor", "v_descriptor")
    rows = {name: of_keys.pop(name) for name in names}
    queries_at_once = HALF.value if kernel == "dqdkdv_wide" else TILE.value
    dq = {"dq_descriptor": (torch.int32, (queries_at_once, HALF.value))}
    return rows | {"kt_descriptor": of_keys["qt_descriptor"]} | of_keys | dq


def units(inputs: BackwardInputs, is_causal: bool) -> tuple[Tensor, ...]:
    """(L and delta [B, H, Nq padded], factors [..., 4], step, unit [B, H, blocks of queries]): see `_units_kernel`.

    The inputs' V is contiguous.
    """
    q_hat, k_hat, do_hat, value = inputs.q_hat, inputs.k_hat, inputs.do_hat, inputs.value
    batch, heads, q_blocks = do_hat.scale.shape
    kv_heads, n_k, d = value.shape[1:]
    kv_blocks = k_hat.scale.shape[2]
    largest_v = torch.empty(batch, kv_heads, kv_blocks, device=value.device)
    _largest_kernel[(kv_blocks, batch * kv_heads)](value, largest_v, n_k, D=d, TOKENS=BLOCK_KV, BLOCK=4096)
    stretched, fitted = torch.empty_like(inputs.log_sum_exp), torch.empty_like(inputs.delta)
    factors = torch.empty(batch, heads, q_blocks, 4, device=value.device)
    step, unit = torch.empty_like(do_hat.scale), torch.empty_like(do_hat.scale)
    _units_kernel[(q_blocks, batch * heads)](
        largest_v, q_hat.scale, k_hat.scale, do_hat.scale, inputs.log_sum_exp, inputs.delta, stretched, fitted,
        factors, step, unit, heads // kv_heads, kv_blocks,
        D=inputs.key.shape[3], TOKENS=BLOCK_Q, BLOCK=128, IS_CAUSAL=is_causal,
    )  # fmt: skip
    return stretched, fitted, factors, step, unit


def run(inputs: BackwardInputs, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] from level 3's inputs."""
    query, key, q_hat, k_hat, do_hat = inputs.query, inputs.key, inputs.q_hat, inputs.k_hat, inputs.do_hat
    batch, heads, n_q, head_dim = query.shape
    kv_heads, n_k, dp = key.shape[1], key.shape[2], padded_head_dim(head_dim)
    grad_output, value = (rows_of_16_bytes(x, dp) for x in (inputs.grad_output, inputs.value))
    groups, n_q_padded, n_k_padded = heads // kv_heads, padded_length(n_q), padded_length(n_k)
    q_blocks, kv_blocks = n_q_padded // BLOCK_Q, n_k_padded // BLOCK_KV
    stretched, fitted, factors, step, unit = units(inputs._replace(value=value), is_causal)
    sums = torch.zeros(batch, heads, n_q_padded, dp, dtype=torch.int32, device=query.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, key))
    (kernel,) = kernels(head_dim)
    program, constants, options = program_of(kernel)
    tensors = (
        k_hat.values, value, k_hat.transposed, q_hat.values, grad_output, q_hat.transposed, do_hat.transposed,
        stretched, fitted, sums,
    )  # fmt: skip
    shapes = [shape for _, shape in tile_shapes(kernel, dp).values()]
    blocks, all_heads = kv_blocks, batch * kv_heads
    bytes_per_head = 9 * n_q_padded * dp * groups  # Q^, Q^T, dO^T: one each; dO: two; sums: four
    program[(blocks * all_heads,)](
        *(descriptor(x, *shape) for x, shape in zip(tensors, shapes, strict=True)),
        k_hat.scale, factors, step, dk, dv,
        blocks, all_heads, heads_at_a_time(bytes_per_head), groups, n_q, n_k, q_blocks, kv_blocks, 1 / LOG2_E,
        D=head_dim, DP=dp, RAGGED=n_k % BLOCK_KV != 0, IS_CAUSAL=is_causal, **constants, **options,
    )  # fmt: skip
    _finish_kernel[(q_blocks, batch * heads)](
        sums, unit, q_hat.scale, dq, n_q, scale, D=head_dim, DP=dp, BLOCK=BLOCK_Q
    )  # fmt: skip
    return dq, dk, dv
