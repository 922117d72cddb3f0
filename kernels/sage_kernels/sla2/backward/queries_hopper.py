"""The sparse branch's share of dQ on Hopper, organised as forward level 4: one warp loads, two warpgroups compute.

There are as many programs as multiprocessors, each for one block of queries after another. A warpgroup has 64 queries,
whose Q and dO stay in registers. S and dP of the next key block are started together with dQ += dS K of this one:

    S_1, dP_1, dQ += dS_0 K_0 started | wait for S_1, dP_1 | dS_1 | wait for dQ | S_2, dP_2, dQ += dS_1 K_1 started ...

The last listed key block comes first, since it may be the sequence's partial one; only that one needs a mask.

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
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import heads_per_row
from sage_kernels.common.quantize import padded_head_dim
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
    LOADING_REGISTERS, ROWS, accumulator_16bit, acquire, descriptor, fast_exp2, fetch_tokens, fetched_tokens,
    matrix, operand_16bit, release, ring, start_16bit, store_tokens, stored_tokens,
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
    width: int  # places for key blocks in a list
    # Heads that are side by side in a row of memory: one, or all where a tensor is [B, N, H, D] in memory.
    q_heads_per_row: int
    do_heads_per_row: int
    k_heads_per_row: int
    v_heads_per_row: int
    dq_heads_per_row: int


SIZES = Sizes._fields

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "q do k v")
Rings = namedtuple("Rings", "q do k v")
Pointers = namedtuple("Pointers", "entries counts alpha delta log_sum_exp dq")
Own = namedtuple("Own", "q_i do_i log_sum_exp_i delta_i")  # a warpgroup's queries


@gluon.jit
def load_tiles(descriptors, rings, pointers, sizes, DP: gl.constexpr):
    """Load Q and dO of every block of queries, and the listed tiles of K and V."""
    n = 0
    for turn in range(0, count_items(sizes)):
        item = work_item(turn, pointers, sizes)
        first_query = item.i * QUERIES
        fetch_tokens(rings.q, turn, descriptors.q, item.head, first_query, sizes.q_heads_per_row, DP)
        fetch_tokens(rings.do, turn, descriptors.do, item.head, first_query, sizes.do_heads_per_row, DP)
        for step in range(0, item.steps):
            # Of an empty list the tile after the last key: zeros.
            first_key = gl.where(item.count > 0, key_block(item, step) * KEYS, sizes.n_k)
            fetch_tokens(rings.k, n + step, descriptors.k, item.kv_head, first_key, sizes.k_heads_per_row, DP)
            fetch_tokens(rings.v, n + step, descriptors.v, item.kv_head, first_key, sizes.v_heads_per_row, DP)
        n += item.steps


@gluon.jit
def start_scores(own, n, rings):
    """Start S and dP of the n-th tile: float32 [Bq, Bkv]."""
    s_ij = start_16bit(own.q_i, matrix(acquire(rings.k, n)), KEYS)
    return s_ij, start_16bit(own.do_i, matrix(acquire(rings.v, n)), KEYS)


@gluon.jit
def score_gradient(s_ij, dp_ij, own, log2_scale, first_key, n_k, DP: gl.constexpr, IS_MASKED: gl.constexpr):
    """Return dS [Bq, Bkv] in 16 bit, the left operand of dS K."""
    p_ij = fast_exp2(s_ij * log2_scale - own.log_sum_exp_i[:, None])
    ds_ij = p_ij * (dp_ij - own.delta_i[:, None])
    if IS_MASKED:  # past the last key S is 0, and 2^-L may be infinite
        key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, accumulator_16bit(KEYS)))
        ds_ij = gl.where((key < n_k)[None, :], ds_ij, 0.0)
    return gl.convert_layout(ds_ij.to(own.q_i.dtype), operand_16bit(DP))


@gluon.jit
def start_gradient(dq_i, ds_ij, n, rings):
    """Start dQ_i + dS K_j of the n-th tile."""
    return warpgroup_mma(ds_ij, matrix(acquire(rings.k, n)), dq_i, use_acc=True, is_async=True)


@gluon.jit
def own_rows(first_query, head, turn, rings, pointers, sizes, W: gl.constexpr):
    """Load warpgroup W's 64 queries of a block into registers."""
    row: gl.constexpr = gl.SliceLayout(1, accumulator_16bit(KEYS))
    q_i = matrix(acquire(rings.q, turn)).slice(W * ROWS, ROWS).load(operand_16bit(KEYS))
    release(rings.q, turn)
    do_i = matrix(acquire(rings.do, turn)).slice(W * ROWS, ROWS).load(operand_16bit(KEYS))
    release(rings.do, turn)
    at = head.to(gl.int64) * (sizes.q_blocks * QUERIES) + first_query + gl.arange(0, ROWS, row)
    return Own(q_i, do_i, gl.load(pointers.log_sum_exp + at), gl.load(pointers.delta + at))


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
        own = own_rows(first_query, item.head, turn, rings, pointers, sizes, W)
        n_k = gl.where(item.count > 0, sizes.n_k, 0)
        dq_i = gl.zeros([ROWS, DP], gl.float32, accumulator_16bit(DP))
        scores, product = start_scores(own, n, rings)
        s_ij = warpgroup_mma_wait(1, deps=(scores,))
        dp_ij = warpgroup_mma_wait(0, deps=(product,))
        release(rings.v, n)
        ds_ij = score_gradient(s_ij, dp_ij, own, log2_scale, j * KEYS, n_k, DP, True)
        for step in range(1, item.steps):
            scores, product = start_scores(own, n + step, rings)
            gradient = start_gradient(dq_i, ds_ij, n + step - 1, rings)
            s_ij = warpgroup_mma_wait(2, deps=(scores,))
            dp_ij = warpgroup_mma_wait(1, deps=(product,))
            release(rings.v, n + step)
            ds_ij = score_gradient(s_ij, dp_ij, own, log2_scale, 0, n_k, DP, False)
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
    q_descriptor, do_descriptor, k_descriptor, v_descriptor,
    entries_ptr, counts_ptr, alpha_ptr, delta_ptr, log_sum_exp_ptr, dq_ptr,
    items, programs, q_blocks, group_size, n_q, n_k, width,
    q_heads_per_row, do_heads_per_row, k_heads_per_row, v_heads_per_row, dq_heads_per_row, log2_scale, scale,
    D: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    rings = Rings(
        ring(q_descriptor, 1, WARPGROUPS), ring(do_descriptor, 1, WARPGROUPS),
        ring(k_descriptor, PLACES, WARPGROUPS), ring(v_descriptor, PLACES, WARPGROUPS),
    )  # fmt: skip
    fence_async_shared()
    descriptors = Descriptors(q_descriptor, do_descriptor, k_descriptor, v_descriptor)
    pointers = Pointers(entries_ptr, counts_ptr, alpha_ptr, delta_ptr, log_sum_exp_ptr, dq_ptr)
    sizes = Sizes(
        items, programs, q_blocks, group_size, n_q, n_k, width,
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
    start: Start = start_with_triton,
    *,
    scale: float,
) -> None:
    """Add the sparse branch's share to grad_query, as `run_query` does."""
    query, key = inputs.query, inputs.key
    batch, heads, n_q, head_dim = query.shape
    dp, (q_blocks, width) = padded_head_dim(head_dim), lists.entries.shape[2:]
    fetched, rows = zip(*(fetched_tokens(x) for x in (query, inputs.grad_output, key, inputs.value)), strict=True)
    q, do, k, v = fetched
    items = batch * heads * q_blocks
    programs = min(items, multiprocessors(query.device))
    sizes = Sizes(
        items, programs, q_blocks, heads // key.shape[1], n_q, key.shape[2], width, *rows,
        heads_per_row(gradients.grad_query),
    )  # fmt: skip
    arguments = (
        descriptor(q, 1, QUERIES.value, dp), descriptor(do, 1, QUERIES.value, dp), descriptor(k, 1, KEYS.value, dp),
        descriptor(v, 1, KEYS.value, dp), *lists, inputs.alpha, gradients.delta, gradients.log_sum_exp,
        gradients.grad_query, *sizes, scale * math.log2(math.e), scale,
    )  # fmt: skip
    start(sla2_query_hopper_program, (programs,), arguments, {"D": head_dim, "DP": dp}, OPTIONS)
