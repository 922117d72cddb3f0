"""Level 4's programs of keys: dK and dV in one at a head size of 64, in one each at 128.

A warpgroup owns 64 rows of K^ and V, and dk_j, dv_j in registers. It visits tiles of queries from the last one down,
for every query head that shares its keys. Everything is transposed: st_ij is S_ij^T [Bkv, Bq], so a row's scale of P
and of dS is that of a key. L and delta belong to columns; the copy engine brings them with Q^ and dO.

- dK: two warpgroups, matmuls in flight as in the program of dQ (`queries.py`).
- dV: no dP and so three warpgroups, each with one matmul after the other as in the forward.
- Both: beside S^T there is room for two gradients if dP^T comes in two halves of its columns.

Rings: Q^ for S^T, dO for dP^T, Q^T for dK, dO^T for dV. The order in which a warpgroup of both waits for them and
releases them (r): Q^ and dO (in the tile before) | P^T | dO^T: P^ dO^, r Q^, r | second half of dP^T, dS^T, r dO |
Q^T: dS^ Q^ and the next Q^: S^T, r Q^T | the next dO. L arrives with Q^, so Q^ is released only when a matmul that
needs L has its operands: then L has been read for certain.
"""

from collections import namedtuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, heads_per_row
from sage_kernels.common.quantize import padded_head_dim

from sage_kernels.hopper.toolbox import (  # isort: skip
    HALF, LOADING_REGISTERS, ROWS, SCALE_KV, SCALE_Q, SIZES, TILE, Fetched, Sizes, accumulator,
    accumulator_16bit, acquire, add_scaled, allocate, barrier, copy_own, count_query_tiles, descriptor, fast_exp2,
    fetch, fetch_with_lines, key_work_item, release, ring, row_and_column, sizes_of, skip, start_16bit,
    start_int8, store_tokens,
)  # fmt: skip
from sage_kernels.sagebwd.backward.level4.queries import add_product, launch_options, quantize_by_row, start_scores
from sage_kernels.sagebwd.backward.program import LOG2_E, BackwardInputs

LAUNCHES = {
    "dk": Launch(SCALE_Q.value, 128, 8, 2, 240),
    "dv": Launch(SCALE_Q.value, 192, 12, 3, 160),
    "dkdv": Launch(SCALE_Q.value, 128, 8, 2, 240),
}
BYTES_PER_NUMBER = {"dk": 4, "dv": 2, "dkdv": 5}  # of the tiles that a program reads

# Arguments that travel together; None stands for what a program doesn't need.
Descriptors = namedtuple("Descriptors", "k v q do qt dot log_sum_exp delta")
Pointers = namedtuple("Pointers", "k_scale q_scale do_scale dk dv")
Keys = namedtuple("Keys", "k v ready")  # shared memory for a program's K^ and V, and their barrier
Rings = namedtuple("Rings", "q do qt dot")
Lines = namedtuple("Lines", "log_sum_exp delta")  # shared memory [places, TILE]: L with Q^, delta with dO
Own = namedtuple("Own", "k_hat_j v_j s_k first_key")  # a warpgroup's keys
Queries = namedtuple("Queries", "n s_q s_do first_query")  # the n-th tile that a warpgroup visits


@gluon.jit
def probabilities(st_ij, own, queries, lines, IS_MASKED: gl.constexpr):
    """Return P^T_ij [Bkv, Bq] from integer scores."""
    column: gl.constexpr = gl.SliceLayout(0, accumulator(TILE))
    log_sum_exp_i = lines.log_sum_exp.index(queries.n % lines.log_sum_exp.shape[0]).load(column)
    pt_ij = fast_exp2(st_ij.to(gl.float32) * (queries.s_q * own.s_k) - log_sum_exp_i[None, :])
    if IS_MASKED:
        key = own.first_key + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
        query = queries.first_query + gl.arange(0, TILE, column)
        pt_ij = gl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    return pt_ij


@gluon.jit
def dk_tile(
    dk_j, st_ij, dpt_ij, own, queries, rings, lines, DP: gl.constexpr, IS_MASKED: gl.constexpr, IS_LAST: gl.constexpr
):
    """Return (dk_j after a query tile, S^T and dP^T in flight of the next one)."""
    n = queries.n
    pt_ij = probabilities(st_ij, own, queries, lines, IS_MASKED)
    delta_i = lines.delta.index(n % lines.delta.shape[0]).load(gl.SliceLayout(0, accumulator(TILE)))
    dpt = gl.convert_layout(warpgroup_mma_wait(0, deps=(dpt_ij,)), accumulator(TILE), assert_trivial=True)
    # [Bkv, Bq]
    dst_ij = pt_ij * (dpt - delta_i[None, :])
    release(rings.do, n)
    dst_hat_ij, s_ds = quantize_by_row(dst_ij, False, DP)
    dk_j, st_ij, dpt_ij = add_product(
        dk_j, st_ij, dpt_ij, dst_hat_ij, s_ds * queries.s_q, (own.k_hat_j, own.v_j), (rings.q, rings.do, rings.qt), n,
        DP, TILE, IS_LAST,
    )  # fmt: skip
    release(rings.q, n)
    return dk_j, st_ij, dpt_ij


@gluon.jit
def dv_tile(dv_j, own, queries, rings, lines, DP: gl.constexpr, IS_MASKED: gl.constexpr):
    """Return dv_j after a query tile."""
    n = queries.n
    st_ij = warpgroup_mma_wait(0, deps=(start_int8(own.k_hat_j, acquire(rings.q, n), TILE),))
    # [Bkv, Bq]
    pt_hat_ij, s_p = quantize_by_row(probabilities(st_ij, own, queries, lines, IS_MASKED), True, DP)
    product = start_int8(pt_hat_ij, acquire(rings.dot, n), DP)
    release(rings.q, n)
    product = warpgroup_mma_wait(0, deps=(product,))
    release(rings.dot, n)
    return add_scaled(dv_j, product, s_p * queries.s_do, DP)


@gluon.jit
def split_halves(x):
    """Return columns 0 ... 63 and 64 ... 127 of [ROWS, TILE]; this and `join_halves` leave no instruction."""
    left, right = gl.split(x.reshape([ROWS, 2, HALF]).permute(0, 2, 1))
    left = gl.convert_layout(left, accumulator_16bit(HALF), assert_trivial=True)
    return left, gl.convert_layout(right, accumulator_16bit(HALF), assert_trivial=True)


@gluon.jit
def join_halves(left, right):
    x = gl.join(left, right).permute(0, 2, 1).reshape([ROWS, TILE])
    return gl.convert_layout(x, accumulator(TILE), assert_trivial=True)


@gluon.jit
def dkdv_tile(
    dk_j, dv_j, st_ij, dpt_0, own, queries, rings, lines,
    DP: gl.constexpr, IS_MASKED: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """Return (dk_j, dv_j after a query tile, S^T and the first half of dP^T in flight of the next one)."""
    n = queries.n
    column: gl.constexpr = gl.SliceLayout(0, accumulator_16bit(HALF))
    pt_ij = probabilities(st_ij, own, queries, lines, IS_MASKED)
    pt_hat_ij, s_p = quantize_by_row(pt_ij, True, DP)
    dpt = warpgroup_mma_wait(0, deps=(dpt_0,))
    product = start_int8(pt_hat_ij, acquire(rings.dot, n), DP)
    delta_i = lines.delta.index(n % lines.delta.shape[0])
    pt_0, pt_1 = split_halves(pt_ij)
    dst_0 = pt_0 * (dpt - delta_i.slice(0, HALF).load(column)[None, :])
    product = warpgroup_mma_wait(0, deps=(product,))
    release(rings.q, n)
    release(rings.dot, n)
    dv_j = add_scaled(dv_j, product, s_p * queries.s_do, DP)
    # Only now, for the second half takes the registers of the product.
    dpt = warpgroup_mma_wait(0, deps=(start_16bit(own.v_j, acquire(rings.do, n).slice(HALF, HALF), HALF),))
    dst_ij = join_halves(dst_0, pt_1 * (dpt - delta_i.slice(HALF, HALF).load(column)[None, :]))
    release(rings.do, n)
    dst_hat_ij, s_ds = quantize_by_row(dst_ij, False, DP)
    dk_j, st_ij, dpt_0 = add_product(
        dk_j, st_ij, dpt_0, dst_hat_ij, s_ds * queries.s_q, (own.k_hat_j, own.v_j), (rings.q, rings.do, rings.qt), n,
        DP, HALF, IS_LAST,
    )  # fmt: skip
    return dk_j, dv_j, st_ij, dpt_0


@gluon.jit
def query_tile(
    dk_j, dv_j, st_ij, dpt_ij, own, queries, rings, lines,
    DP: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_MASKED: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """Run the loop body of whichever program this is."""
    if WITH_DK and WITH_DV:
        dk_j, dv_j, st_ij, dpt_ij = dkdv_tile(
            dk_j, dv_j, st_ij, dpt_ij, own, queries, rings, lines, DP, IS_MASKED, IS_LAST
        )
    elif WITH_DK:
        dk_j, st_ij, dpt_ij = dk_tile(dk_j, st_ij, dpt_ij, own, queries, rings, lines, DP, IS_MASKED, IS_LAST)
    else:
        dv_j = dv_tile(dv_j, own, queries, rings, lines, DP, IS_MASKED)
    return dk_j, dv_j, st_ij, dpt_ij


@gluon.jit
def key_rows(
    keys, rings, lines, pointers, sizes, dk_scale, D: gl.constexpr, DP: gl.constexpr,
    WARPGROUPS: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV, or one of them, of warpgroup W's 64 keys, over the query heads that share them."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * (ROWS * WARPGROUPS) + W * ROWS
    tiles = count_query_tiles(first_key, sizes.q_blocks, IS_CAUSAL)
    all_tiles = count_query_tiles(block * (ROWS * WARPGROUPS), sizes.q_blocks, IS_CAUSAL)
    k_scale = pointers.k_scale + kv_head * sizes.kv_blocks
    s_k = gl.load(k_scale + gl.minimum(first_key // SCALE_KV, sizes.kv_blocks - 1))
    dk_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP)) if WITH_DK else 0
    dv_j = gl.zeros([ROWS, DP], gl.float32, accumulator(DP)) if WITH_DV else 0
    mbarrier.wait(keys.ready, 0)
    own = Own(keys.k.index(W), keys.v.index(W) if WITH_DK else None, s_k, first_key)
    n = 0
    for g in range(0, sizes.group_size):
        i = sizes.q_blocks - 1
        scale_at = (kv_head * sizes.group_size + g) * sizes.q_blocks + i
        s_q, s_do = gl.load(pointers.q_scale + scale_at), gl.load(pointers.do_scale + scale_at)
        if WITH_DK:
            st_ij, dpt_ij = start_scores((own.k_hat_j, own.v_j), (rings.q, rings.do), n, HALF if WITH_DV else TILE)
        else:
            st_ij, dpt_ij = 0, 0
        for _ in range(1, tiles):
            scale_at -= 1
            next_s_q, next_s_do = gl.load(pointers.q_scale + scale_at), gl.load(pointers.do_scale + scale_at)
            dk_j, dv_j, st_ij, dpt_ij = query_tile(
                dk_j, dv_j, st_ij, dpt_ij, own, Queries(n, s_q, s_do, i * TILE), rings, lines,
                DP, WITH_DK, WITH_DV, False, False,
            )  # fmt: skip
            s_q, s_do = next_s_q, next_s_do
            n += 1
            i -= 1
        dk_j, dv_j, st_ij, dpt_ij = query_tile(
            dk_j, dv_j, st_ij, dpt_ij, own, Queries(n, s_q, s_do, i * TILE), rings, lines,
            DP, WITH_DK, WITH_DV, IS_CAUSAL, True,
        )  # fmt: skip
        n += 1
        for _ in range(tiles, all_tiles):  # tiles for the warpgroups above
            skip(rings.q, n)
            if WITH_DV:
                skip(rings.dot, n)
            if WITH_DK:
                skip(rings.do, n)
                skip(rings.qt, n)
            n += 1
    if WITH_DK:
        store_tokens(pointers.dk, dk_j * dk_scale, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D, DP)
    if WITH_DV:
        store_tokens(pointers.dv, dv_j, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D, DP)


@gluon.jit
def load_tiles(
    descriptors, keys, rings, lines, sizes,
    DP: gl.constexpr, WARPGROUPS: gl.constexpr, WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Load K^ and V, then tiles of Q^ with L, dO^T for dV, and dO with delta and Q^T for dK."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * (ROWS * WARPGROUPS)
    nbytes: gl.constexpr = descriptors.k.block_type.nbytes
    if WITH_DK:
        mbarrier.expect(keys.ready, WARPGROUPS * (nbytes + descriptors.v.block_type.nbytes))
        row, column = row_and_column(kv_head, first_key, sizes.n_k, sizes.v_heads_per_row, DP)
        copy_own(keys.v, keys.ready, descriptors.v, row, column, WARPGROUPS)
    else:
        mbarrier.expect(keys.ready, WARPGROUPS * nbytes)
    copy_own(keys.k, keys.ready, descriptors.k, kv_head * (sizes.kv_blocks * SCALE_KV) + first_key, 0, WARPGROUPS)
    n = 0
    for g in range(0, sizes.group_size):
        head = kv_head * sizes.group_size + g
        i = sizes.q_blocks - 1
        for _ in range(0, count_query_tiles(first_key, sizes.q_blocks, IS_CAUSAL)):
            token = (head * sizes.q_blocks + i) * TILE
            fetch_with_lines(
                rings.q, (lines.log_sum_exp,), n, descriptors.q, token, 0, (descriptors.log_sum_exp,), token
            )  # fmt: skip
            if WITH_DK:
                row, column = row_and_column(head, i * TILE, sizes.n_q, sizes.do_heads_per_row, DP)
                fetch_with_lines(rings.do, (lines.delta,), n, descriptors.do, row, column, (descriptors.delta,), token)
            if WITH_DV:
                fetch(rings.dot, n, descriptors.dot, head * DP, i * TILE)
            if WITH_DK:
                fetch(rings.qt, n, descriptors.qt, head * DP, i * TILE)
            n += 1
            i -= 1


@gluon.jit(do_not_specialize=SIZES)
def dkdv_hopper_program(
    k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, k_scale_ptr, q_scale_ptr, do_scale_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
    v_heads_per_row, do_heads_per_row, out_heads_per_row, dk_scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr,
    WITH_DK: gl.constexpr, WITH_DV: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    k_tiles, ready = allocate(k_descriptor, WARPGROUPS), barrier(1)
    q_ring, log_sum_exps = ring(q_descriptor, PLACES, WARPGROUPS), allocate(l_descriptor, PLACES)
    v_tiles, do_ring, qt_ring, dot_ring, deltas = None, None, None, None, None
    if WITH_DK:
        v_tiles = allocate(v_descriptor, WARPGROUPS)
        do_ring, qt_ring = ring(do_descriptor, PLACES, WARPGROUPS), ring(qt_descriptor, PLACES, WARPGROUPS)
        deltas = allocate(delta_descriptor, PLACES)
    if WITH_DV:
        dot_ring = ring(dot_descriptor, PLACES, WARPGROUPS)
    fence_async_shared()
    keys, lines = Keys(k_tiles, v_tiles, ready), Lines(log_sum_exps, deltas)
    rings = Rings(q_ring, do_ring, qt_ring, dot_ring)
    descriptors = Descriptors(
        k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
        delta_descriptor,
    )  # fmt: skip
    pointers = Pointers(k_scale_ptr, q_scale_ptr, do_scale_ptr, dk_ptr, dv_ptr)
    sizes = Sizes(
        blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
        v_heads_per_row, do_heads_per_row, out_heads_per_row,
    )  # fmt: skip
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, DP, 2, WITH_DK, WITH_DV, IS_CAUSAL, 0)),
                (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, DP, 2, WITH_DK, WITH_DV, IS_CAUSAL, 1)),
                (load_tiles, (descriptors, keys, rings, lines, sizes, DP, 2, WITH_DK, WITH_DV, IS_CAUSAL)),
            ],
            [4, 1], [REGISTERS, LOADING_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, DP, 3, WITH_DK, WITH_DV, IS_CAUSAL, 0)),
                (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, DP, 3, WITH_DK, WITH_DV, IS_CAUSAL, 1)),
                (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, DP, 3, WITH_DK, WITH_DV, IS_CAUSAL, 2)),
                (load_tiles, (descriptors, keys, rings, lines, sizes, DP, 3, WITH_DK, WITH_DV, IS_CAUSAL)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, LOADING_REGISTERS],
        )  # fmt: skip


def run_dkdv(
    kernel: str, inputs: BackwardInputs, do: Fetched, v: Fetched, start: Start, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Compute dK, dV or both [B, Hkv, Nk, D], in V's layout. do, v: the inputs' dO and V."""
    key, q_hat, k_hat, do_hat = inputs.key, inputs.q_hat, inputs.k_hat, inputs.do_hat
    head_dim, launch = key.shape[3], LAUNCHES[kernel]
    constants, options = launch_options(launch)
    sizes = sizes_of(
        inputs.query, key, launch.block_kv, of_keys=True, bytes_per_number=BYTES_PER_NUMBER[kernel],
        v_heads_per_row=v.heads_per_row, do_heads_per_row=do.heads_per_row,
        out_heads_per_row=heads_per_row(inputs.value),
    )  # fmt: skip
    gradients = tuple(empty_in_layout_of(inputs.value) for _ in range(len(kernel) // 2))
    dp = padded_head_dim(head_dim)
    own, tile = (ROWS.value, dp), (TILE.value, dp)
    arguments = (
        descriptor(k_hat.values, *own), descriptor(v.rows, *own), descriptor(q_hat.values, *tile),
        descriptor(do.rows, *tile), descriptor(q_hat.transposed, *tile[::-1]),
        descriptor(do_hat.transposed, *tile[::-1]), descriptor(inputs.log_sum_exp, TILE.value),
        descriptor(inputs.delta, TILE.value),
        k_hat.scale, q_hat.scale, do_hat.scale, gradients[0], gradients[-1], *sizes,
        1 / LOG2_E,  # of dK alone: the scale of Q^ carries c log2(e)
    )  # fmt: skip
    constants |= {"D": head_dim, "DP": dp, "IS_CAUSAL": is_causal}
    constants |= {"WITH_DK": "dk" in kernel, "WITH_DV": "dv" in kernel}
    start(dkdv_hopper_program, (sizes.blocks * sizes.heads_total,), arguments, constants, options)
    return gradients
