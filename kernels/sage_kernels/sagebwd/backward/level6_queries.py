"""Level 6's program of dQ: two warpgroups with 64 queries each, which visit the tiles of keys that they may see.

Warpgroup W owns its rows of Q^, dO, L and delta, and dq_i in registers. The loading warp fills three rings: K^ for S,
V for dP, K^T for dQ, since they are wanted at different times. Matmuls in flight while a warpgroup computes:

    computes   | P_ij      | dS_ij, dS^_ij |             dq_i +=  | P_i,j+1    | dS_i,j+1 ...
    matmuls    | dP_ij                     | dS^ K^, S_i,j+1      | dP_i,j+1             ...
    releases   | K^_j      | V_j           | K^T_j                | K^_j+1     | V_j+1   ...

Behind S, whose result P needs first, runs dP; behind dS^ K^ runs the next S, so that the tensor cores have work while
the product is added. The next dP starts after that addition, for it takes the registers of the product.
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
from sage_kernels.common.tiles import NO_KEY, TINY

from sage_kernels.hopper.toolbox import (  # isort: skip
    LOADING_REGISTERS, ROWS, SCALE_Q, SIZES, TILE, Fetched, Sizes, accumulator, acquire, add_scaled, allocate,
    barrier, copy_own, count_key_tiles, descriptor, fast_exp2, fast_reciprocal, fetch, release, ring, round_to_int8,
    row_and_column, sizes_of, skip, start_16bit, start_int8, store_tokens, work_item,
)  # fmt: skip
from sage_kernels.sagebwd.backward.program import BackwardInputs

LAUNCH = Launch(128, TILE.value, 8, 2, 240)
CONSTANTS = {"WARPGROUPS": LAUNCH.num_warps // 4, "PLACES": LAUNCH.num_stages, "REGISTERS": LAUNCH.max_registers}
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # maxnreg until the warps part

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "q do k v kt")
Pointers = namedtuple("Pointers", "q_scale k_scale log_sum_exp delta dq")
Queries = namedtuple("Queries", "q do ready")  # shared memory for a program's Q^ and dO, and their barrier
Rings = namedtuple("Rings", "k v kt")
Own = namedtuple("Own", "q_hat_i do_i s_q log_sum_exp_i delta_i first_query")  # a warpgroup's queries


@gluon.jit
def row_maximum(x):
    """Return the largest |x| of each row."""
    return gl.maximum(gl.max(gl.abs(x), 1), TINY)


@gluon.jit
def quantize_by_row(x, COLUMNS: gl.constexpr):
    """Return psi by rows of [ROWS, TILE]: (X^ as left operand of a matmul with so many COLUMNS, s [ROWS])."""
    largest = row_maximum(x)
    x_hat = round_to_int8(x * (fast_reciprocal(largest) * 127.0)[:, None], COLUMNS)
    return x_hat, largest * (1 / 127.0)


@gluon.jit
def start_scores(own, rings, j):
    """Return (S, dP in flight) of key tile j."""
    s_ij = start_int8(own.q_hat_i, acquire(rings.k, j), TILE)
    dp_ij = start_16bit(own.do_i, acquire(rings.v, j), TILE)
    return warpgroup_mma_wait(1, deps=(s_ij,)), dp_ij


@gluon.jit
def key_tile(
    dq_i, s_ij, dp_ij, own, s_k, j, n_k, rings, DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_LAST: gl.constexpr
):
    """Return (dq_i after key tile j, S and dP in flight of the next one). Only the last tile needs a mask."""
    release(rings.k, j)
    # [Bq, Bkv]
    p_ij = fast_exp2(s_ij.to(gl.float32) * (own.s_q * s_k) - own.log_sum_exp_i[:, None])
    dp = gl.convert_layout(warpgroup_mma_wait(0, deps=(dp_ij,)), accumulator(TILE), assert_trivial=True)
    release(rings.v, j)
    ds_ij = p_ij * (dp - own.delta_i[:, None])
    if IS_LAST:
        query = own.first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
        key = j * TILE + gl.arange(0, TILE, gl.SliceLayout(0, accumulator(TILE)))
        visible = (key < n_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        ds_ij = gl.where(visible, ds_ij, 0.0)  # dS, not P: a V past the end, of the next head, may be NaN
    ds_hat_ij, s_ds = quantize_by_row(ds_ij, DP)
    product = start_int8(ds_hat_ij, acquire(rings.kt, j), DP)
    if IS_LAST:
        product = warpgroup_mma_wait(0, deps=(product,))
        release(rings.kt, j)
        dq_i = add_scaled(dq_i, product, s_ds * s_k, DP)
    else:
        s_next = start_int8(own.q_hat_i, acquire(rings.k, j + 1), TILE)
        product = warpgroup_mma_wait(1, deps=(product,))
        release(rings.kt, j)
        dq_i = add_scaled(dq_i, product, s_ds * s_k, DP)
        dp_ij = start_16bit(own.do_i, acquire(rings.v, j + 1), TILE)
        s_ij = warpgroup_mma_wait(1, deps=(s_next,))
    return dq_i, s_ij, dp_ij


@gluon.jit
def query_rows(
    queries, rings, pointers, sizes, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute dQ of warpgroup W's 64 queries."""
    i, head = work_item(gl.program_id(0), sizes)
    first_query = i * (ROWS * WARPGROUPS) + W * ROWS
    last = count_key_tiles(first_query, ROWS, sizes.kv_blocks, IS_CAUSAL) - 1
    last = gl.where(first_query < sizes.n_q, last, 0)
    all_tiles = count_key_tiles(i * (ROWS * WARPGROUPS), ROWS * WARPGROUPS, sizes.kv_blocks, IS_CAUSAL)
    k_scale = pointers.k_scale + (head // sizes.group_size) * sizes.kv_blocks
    s_q = gl.load(pointers.q_scale + head * sizes.q_blocks + gl.minimum(first_query // SCALE_Q, sizes.q_blocks - 1))
    s_k = gl.load(k_scale)
    n_q_padded = sizes.q_blocks * SCALE_Q
    query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
    offsets = head.to(gl.int64) * n_q_padded + query
    log_sum_exp_i = gl.load(pointers.log_sum_exp + offsets, mask=query < n_q_padded, other=0.0 - NO_KEY)
    delta_i = gl.load(pointers.delta + offsets, mask=query < n_q_padded, other=0.0)
    dq_i = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    mbarrier.wait(queries.ready, 0)
    own = Own(queries.q.index(W), queries.do.index(W), s_q, log_sum_exp_i, delta_i, first_query)
    s_ij, dp_ij = start_scores(own, rings, 0)
    for j in range(0, last):
        next_s_k = gl.load(k_scale + j + 1)
        dq_i, s_ij, dp_ij = key_tile(dq_i, s_ij, dp_ij, own, s_k, j, sizes.n_k, rings, DP, IS_CAUSAL, False)
        s_k = next_s_k
    dq_i, s_ij, dp_ij = key_tile(dq_i, s_ij, dp_ij, own, s_k, last, sizes.n_k, rings, DP, IS_CAUSAL, True)
    for j in range(last + 1, all_tiles):  # tiles for the warpgroup below
        skip(rings.k, j)
        skip(rings.v, j)
        skip(rings.kt, j)
    dq_i *= scale + s_q * 0.0  # NaN where s_Q is
    store_tokens(pointers.dq, dq_i, head, first_query, sizes.n_q, sizes.out_heads_per_row, D, DP)


@gluon.jit
def load_tiles(descriptors, queries, rings, sizes, DP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Load Q^ and dO, then K^, V and K^T tiles as their places become free."""
    i, head = work_item(gl.program_id(0), sizes)
    first_query, kv_head = i * (ROWS * WARPGROUPS), head // sizes.group_size
    nbytes: gl.constexpr = descriptors.q.block_type.nbytes + descriptors.do.block_type.nbytes
    mbarrier.expect(queries.ready, WARPGROUPS * nbytes)
    copy_own(queries.q, queries.ready, descriptors.q, head * (sizes.q_blocks * SCALE_Q) + first_query, 0, WARPGROUPS)
    row, column = row_and_column(head, first_query, sizes.n_q, sizes.do_heads_per_row, DP)
    copy_own(queries.do, queries.ready, descriptors.do, row, column, WARPGROUPS)
    for j in range(0, count_key_tiles(first_query, ROWS * WARPGROUPS, sizes.kv_blocks, IS_CAUSAL)):
        fetch(rings.k, j, descriptors.k, (kv_head * sizes.kv_blocks + j) * TILE, 0)
        row, column = row_and_column(kv_head, j * TILE, sizes.n_k, sizes.v_heads_per_row, DP)
        fetch(rings.v, j, descriptors.v, row, column)
        fetch(rings.kt, j, descriptors.kt, kv_head * DP, j * TILE)


@gluon.jit(do_not_specialize=SIZES)
def dq_hopper_program(
    q_descriptor, do_descriptor, k_descriptor, v_descriptor, kt_descriptor,
    q_scale_ptr, k_scale_ptr, log_sum_exp_ptr, delta_ptr, dq_ptr,
    blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
    v_heads_per_row, do_heads_per_row, out_heads_per_row, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    queries = Queries(allocate(q_descriptor, WARPGROUPS), allocate(do_descriptor, WARPGROUPS), barrier(1))
    k_ring, v_ring = ring(k_descriptor, PLACES, WARPGROUPS), ring(v_descriptor, PLACES, WARPGROUPS)
    rings = Rings(k_ring, v_ring, ring(kt_descriptor, PLACES, WARPGROUPS))
    fence_async_shared()
    descriptors = Descriptors(q_descriptor, do_descriptor, k_descriptor, v_descriptor, kt_descriptor)
    pointers = Pointers(q_scale_ptr, k_scale_ptr, log_sum_exp_ptr, delta_ptr, dq_ptr)
    sizes = Sizes(
        blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
        v_heads_per_row, do_heads_per_row, out_heads_per_row,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (query_rows, (queries, rings, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL, 0)),
            (query_rows, (queries, rings, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL, 1)),
            (load_tiles, (descriptors, queries, rings, sizes, DP, WARPGROUPS, IS_CAUSAL)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def run_dq(inputs: BackwardInputs, do: Fetched, v: Fetched, start: Start, *, is_causal: bool, scale: float) -> Tensor:
    """Compute dQ [B, H, Nq, D], in Q's layout. do, v: the inputs' dO and V."""
    query, q_hat, k_hat = inputs.query, inputs.q_hat, inputs.k_hat
    head_dim = query.shape[3]
    sizes = sizes_of(
        query, inputs.key, LAUNCH.block_q, of_keys=False, bytes_per_number=4, v_heads_per_row=v.heads_per_row,
        do_heads_per_row=do.heads_per_row, out_heads_per_row=heads_per_row(query),
    )  # fmt: skip
    dq = empty_in_layout_of(query)
    dp = padded_head_dim(head_dim)
    own, tile = (ROWS.value, dp), (TILE.value, dp)
    arguments = (
        descriptor(q_hat.values, *own), descriptor(do.rows, *own), descriptor(k_hat.values, *tile),
        descriptor(v.rows, *tile), descriptor(k_hat.transposed, *tile[::-1]),
        q_hat.scale, k_hat.scale, inputs.log_sum_exp, inputs.delta, dq, *sizes, scale,
    )  # fmt: skip
    constants = CONSTANTS | {"D": head_dim, "DP": dp, "IS_CAUSAL": is_causal}
    start(dq_hopper_program, (sizes.blocks * sizes.heads_total,), arguments, constants, OPTIONS)
    return dq
