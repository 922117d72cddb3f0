"""The sparse branch's share of dQ on Hopper, organised as forward level 4: one warp loads, two warpgroups compute.

There are as many programs as multiprocessors, each for one block of queries after another. A warpgroup has 64 queries,
whose Q and dO stay in registers. S and dP of the next key block are started together with dQ += dS K of this one:

    S_1, dP_1, dQ += dS_0 K_0 started | wait for S_1, dP_1 | dS_1 | wait for dQ | S_2, dP_2, dQ += dS_1 K_1 started ...

The last listed key block comes first, since it may be the sequence's partial one; only that one needs a mask.

Matched, S is the product of the forward's INT8 copies. Then Q^ takes Q's place, and K is there for dS K alone. The
scale of the next tile of K^ is asked for during this one.

Expect: limited by the tensor cores, which three matmuls in 16 bit keep busy for three times as long as a warpgroup's
exponentials take. What came is in kernels/NOTES.md.
"""

import math
from collections import namedtuple
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import heads_per_row
from sage_kernels.common.quantize import padded_head_dim, padded_length
from sage_kernels.hopper import multiprocessors
from sage_kernels.sla2.backward.program import BackwardInputs, QueryGradients
from sage_kernels.sla2.forward.level4_hopper import (
    KEYS,
    OPTIONS,
    QUERIES,
    REGISTERS,
    WARPGROUPS,
    count_items,
    key_block,
    work_item,
)
from sage_kernels.sla2.lists import BlockLists

from sage_kernels.hopper.toolbox import (  # isort: skip
    LOADING_REGISTERS, ROWS, accumulator_16bit, acquire, descriptor, fast_exp2, fetch, fetch_tokens, fetched_tokens,
    matrix, operand, operand_16bit, release, ring, start_16bit, start_int8, store_tokens, stored_tokens,
)  # fmt: skip

PLACES = gl.constexpr(4)  # tiles of K and of V in flight
LAUNCHES = {"sla2_query_hopper": Launch(QUERIES.value, KEYS.value, 4 * WARPGROUPS.value, PLACES.value, REGISTERS.value)}


class Sizes(NamedTuple):
    items: int  # blocks of queries of all heads and batches
    programs: int  # which share them
    q_blocks: int  # of queries in one head
    group_size: int  # query heads that share a head of keys
    n_q: int
    n_k: int
    kv_blocks: int  # of keys in one head of the INT8 copies, the last ones padded
    width: int  # places for key blocks in a list
    # Heads that are side by side in a row of memory: one, or all where a tensor is [B, N, H, D] in memory.
    q_heads_per_row: int
    do_heads_per_row: int
    k_heads_per_row: int
    v_heads_per_row: int
    dq_heads_per_row: int


SIZES = Sizes._fields

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "q do k v k_hat")  # q: of Q^ if there is a k_hat
Rings = namedtuple("Rings", "q do k v k_hat")
Pointers = namedtuple("Pointers", "q_scale k_scale entries counts alpha delta log_sum_exp dq")
Own = namedtuple("Own", "q_i s_q do_i log_sum_exp_i delta_i")  # a warpgroup's queries; in INT8 with a scale


@gluon.jit
def load_tiles(descriptors, rings, pointers, sizes, DP: gl.constexpr):
    """Load Q or Q^ and dO of every block of queries, and the listed tiles of K^, K and V."""
    n = 0
    for turn in range(0, count_items(sizes)):
        item = work_item(turn, pointers, sizes)
        first_query = item.i * QUERIES
        if rings.k_hat is None:
            fetch_tokens(rings.q, turn, descriptors.q, item.head, first_query, sizes.q_heads_per_row, DP)
        else:
            fetch(rings.q, turn, descriptors.q, item.block * QUERIES, 0)
        fetch_tokens(rings.do, turn, descriptors.do, item.head, first_query, sizes.do_heads_per_row, DP)
        for step in range(0, item.steps):
            j = key_block(item, step)
            if rings.k_hat is not None:
                row = (item.kv_head * sizes.kv_blocks + j) * KEYS
                fetch(rings.k_hat, n + step, descriptors.k_hat, row, 0)
            # Of an empty list the tile after the last key: zeros.
            first_key = gl.where(item.count > 0, j * KEYS, sizes.n_k)
            fetch_tokens(rings.k, n + step, descriptors.k, item.kv_head, first_key, sizes.k_heads_per_row, DP)
            fetch_tokens(rings.v, n + step, descriptors.v, item.kv_head, first_key, sizes.v_heads_per_row, DP)
        n += item.steps


@gluon.jit
def start_scores(own, n, rings):
    """Start S, from Q^ and K^ if there are any, and dP of the n-th tile: [Bq, Bkv]."""
    if rings.k_hat is None:
        s_ij = start_16bit(own.q_i, matrix(acquire(rings.k, n)), KEYS)
    else:
        s_ij = start_int8(own.q_i, acquire(rings.k_hat, n), KEYS)
    return s_ij, start_16bit(own.do_i, matrix(acquire(rings.v, n)), KEYS)


@gluon.jit
def key_scale(k_scale, j):
    """Return the scale of K^_j; 1 for scores in 16 bit."""
    s_k = 1.0
    if k_scale is not None:
        s_k = gl.load(k_scale + j)
    return s_k


@gluon.jit
def score_gradient(s_ij, dp_ij, own, s_k, first_key, n_k, DP: gl.constexpr, IS_MASKED: gl.constexpr):
    """Return dS [Bq, Bkv] in 16 bit, the left operand of dS K. s_ij: float32 or, of Q^ and K^, int32."""
    s = own.s_q * s_k
    s_ij = gl.convert_layout(s_ij.to(gl.float32), accumulator_16bit(KEYS))
    p_ij = fast_exp2(s_ij * s - own.log_sum_exp_i[:, None])
    ds_ij = p_ij * (dp_ij - own.delta_i[:, None])
    if IS_MASKED:  # past the last key S is 0, and 2^-L may be infinite
        key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, accumulator_16bit(KEYS)))
        ds_ij = gl.where((key < n_k)[None, :], ds_ij, 0.0)
    return gl.convert_layout(ds_ij.to(own.do_i.dtype), operand_16bit(DP))


@gluon.jit
def start_gradient(dq_i, ds_ij, n, rings):
    """Start dQ_i + dS K_j of the n-th tile."""
    return warpgroup_mma(ds_ij, matrix(acquire(rings.k, n)), dq_i, use_acc=True, is_async=True)


@gluon.jit
def own_rows(item, first_query, turn, rings, pointers, sizes, log2_scale, W: gl.constexpr):
    """Load warpgroup W's 64 queries of a block into registers."""
    row: gl.constexpr = gl.SliceLayout(1, accumulator_16bit(KEYS))
    if rings.k_hat is None:
        q_i, s_q = matrix(acquire(rings.q, turn)).slice(W * ROWS, ROWS).load(operand_16bit(KEYS)), log2_scale
    else:
        q_i = acquire(rings.q, turn).slice(W * ROWS, ROWS).load(operand(KEYS))
        s_q = gl.load(pointers.q_scale + item.block)
    do_i = matrix(acquire(rings.do, turn)).slice(W * ROWS, ROWS).load(operand_16bit(KEYS))
    at = item.head.to(gl.int64) * (sizes.q_blocks * QUERIES) + first_query + gl.arange(0, ROWS, row)
    return Own(q_i, s_q, do_i, gl.load(pointers.log_sum_exp + at), gl.load(pointers.delta + at))


@gluon.jit
def query_rows(rings, pointers, sizes, log2_scale, scale, D: gl.constexpr, DP: gl.constexpr, W: gl.constexpr):
    """Add the sparse branch's share to dQ of warpgroup W's half of each block of queries.

    As in the forward pass, the next block's list is asked for during this one.
    """
    n, item = 0, work_item(0, pointers, sizes)
    j = key_block(item, 0)
    for turn in range(0, count_items(sizes)):
        coming = work_item(turn + 1, pointers, sizes)
        first_query = item.i * QUERIES + W * ROWS
        own = own_rows(item, first_query, turn, rings, pointers, sizes, log2_scale, W)
        n_k = gl.where(item.count > 0, sizes.n_k, 0)
        dq_i = gl.zeros([ROWS, DP], gl.float32, accumulator_16bit(DP))
        k_scale = None if pointers.k_scale is None else pointers.k_scale + item.kv_head * sizes.kv_blocks
        s_k, following = key_scale(k_scale, j), key_block(item, 1)
        scores, product = start_scores(own, n, rings)
        s_ij = warpgroup_mma_wait(1, deps=(scores,))
        dp_ij = warpgroup_mma_wait(0, deps=(product,))
        release(rings.q, turn)  # now: matmuls have used the tiles of Q and dO, so their reads have ended
        release(rings.do, turn)
        release(rings.v, n)
        ds_ij = score_gradient(s_ij, dp_ij, own, s_k, j * KEYS, n_k, DP, True)
        if rings.k_hat is not None:
            release(rings.k_hat, n)
        s_k = key_scale(k_scale, following)
        for step in range(1, item.steps):
            scores, product = start_scores(own, n + step, rings)
            gradient = start_gradient(dq_i, ds_ij, n + step - 1, rings)
            following = key_block(item, step + 1)
            s_ij = warpgroup_mma_wait(2, deps=(scores,))
            dp_ij = warpgroup_mma_wait(1, deps=(product,))
            release(rings.v, n + step)
            ds_ij = score_gradient(s_ij, dp_ij, own, s_k, 0, n_k, DP, False)
            if rings.k_hat is not None:
                release(rings.k_hat, n + step)
            s_k = key_scale(k_scale, following)
            dq_i = warpgroup_mma_wait(0, deps=(gradient,))
            release(rings.k, n + step - 1)
        n += item.steps
        gradient = start_gradient(dq_i, ds_ij, n - 1, rings)
        linear_share = stored_tokens(
            pointers.dq, item.head, first_query, sizes.n_q, sizes.dq_heads_per_row, D, DP, accumulator_16bit(DP)
        )
        coming_j = key_block(coming, 0)
        dq_i = warpgroup_mma_wait(0, deps=(gradient,))
        release(rings.k, n - 1)
        dq_i = dq_i * (scale * item.alpha) + linear_share.to(gl.float32)
        store_tokens(pointers.dq, dq_i, item.head, first_query, sizes.n_q, sizes.dq_heads_per_row, D, DP)
        item, j = coming, coming_j


@gluon.jit(do_not_specialize=SIZES)
def sla2_query_hopper_program(
    q_descriptor, do_descriptor, k_descriptor, v_descriptor, k_hat_descriptor, q_scale_ptr, k_scale_ptr,
    entries_ptr, counts_ptr, alpha_ptr, delta_ptr, log_sum_exp_ptr, dq_ptr,
    items, programs, q_blocks, group_size, n_q, n_k, kv_blocks, width,
    q_heads_per_row, do_heads_per_row, k_heads_per_row, v_heads_per_row, dq_heads_per_row, log2_scale, scale,
    D: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Add the sparse branch's share to dQ of all blocks of queries. k_hat_descriptor None: scores in 16 bit."""
    rings = Rings(
        ring(q_descriptor, 1, WARPGROUPS), ring(do_descriptor, 1, WARPGROUPS),
        ring(k_descriptor, PLACES, WARPGROUPS), ring(v_descriptor, PLACES, WARPGROUPS),
        None if k_hat_descriptor is None else ring(k_hat_descriptor, PLACES, WARPGROUPS),
    )  # fmt: skip
    fence_async_shared()
    descriptors = Descriptors(q_descriptor, do_descriptor, k_descriptor, v_descriptor, k_hat_descriptor)
    pointers = Pointers(
        q_scale_ptr, k_scale_ptr, entries_ptr, counts_ptr, alpha_ptr, delta_ptr, log_sum_exp_ptr, dq_ptr
    )
    sizes = Sizes(
        items, programs, q_blocks, group_size, n_q, n_k, kv_blocks, width,
        q_heads_per_row, do_heads_per_row, k_heads_per_row, v_heads_per_row, dq_heads_per_row,
    )  # fmt: skip
    # Constants must be named in each call: a variable would make numbers of the program of them.
    gl.warp_specialize(
        [
            (query_rows, (rings, pointers, sizes, log2_scale, scale, D, DP, 0)),
            (query_rows, (rings, pointers, sizes, log2_scale, scale, D, DP, 1)),
            (load_tiles, (descriptors, rings, pointers, sizes, DP)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def run_query_hopper(
    inputs: BackwardInputs,
    gradients: QueryGradients,
    lists: BlockLists,
    start: Start,
    *,
    scale: float,
) -> None:
    """Add the sparse branch's share to grad_query, as `run_query` does; S is matched if the inputs have Q^ and K^."""
    query, key = inputs.query, inputs.key
    (batch, heads, n_q, head_dim), n_k = query.shape, key.shape[2]
    dp, (q_blocks, width) = padded_head_dim(head_dim), lists.entries.shape[2:]
    fetched, rows = zip(*(fetched_tokens(x) for x in (query, inputs.grad_output, key, inputs.value)), strict=True)
    q, do, k, v = fetched
    q, k_hat, q_scale, k_scale = descriptor(q, 1, QUERIES.value, dp), None, None, None
    if inputs.q_hat is not None:
        q, q_scale = descriptor(inputs.q_hat.values, QUERIES.value, dp), inputs.q_hat.scale
        k_hat, k_scale = descriptor(inputs.k_hat.values, KEYS.value, dp), inputs.k_hat.scale
    items = batch * heads * q_blocks
    programs = min(items, multiprocessors(query.device))
    sizes = Sizes(
        items, programs, q_blocks, heads // key.shape[1], n_q, n_k, padded_length(n_k) // KEYS.value, width, *rows,
        heads_per_row(gradients.grad_query),
    )  # fmt: skip
    arguments = (
        q, descriptor(do, 1, QUERIES.value, dp), descriptor(k, 1, KEYS.value, dp), descriptor(v, 1, KEYS.value, dp),
        k_hat, q_scale, k_scale, *lists, inputs.alpha, gradients.delta, gradients.log_sum_exp,
        gradients.grad_query, *sizes, scale * math.log2(math.e), scale,
    )  # fmt: skip
    start(sla2_query_hopper_program, (programs,), arguments, {"D": head_dim, "DP": dp}, OPTIONS)
