"""Level 4, Hopper: while one block of queries is finished, the next one's tiles are on their way.

Idea: lists are short, a dozen key blocks each, so what a program does before and after its loop counts. Here there are
only as many programs as multiprocessors. Each works on one block of queries after another, and its loading warp does
not wait for the end of one: it goes on with the next one's tiles as their places become free.

    loading warp     Q^  K^ V^ K^ V^ ... (as listed)  Q H_i | Q^  K^ V^ K^ V^ ...        (the next block's)
    2 warpgroups     each 64 queries:  S, softmax, P^ V^ ... | linear branch and mix, O | S, softmax, ...

Within a warpgroup the tensor cores don't wait for the softmax either: S of the next key block and P^ V^ of this one
are started together, and while the second is computed, the softmax of the next block goes on.

    S_1, P_0 V_0 started | wait for S_1 | softmax of S_1 gives P_1 | wait for P_0 V_0, O += | S_2, P_1 V_1 started ...

Q^ stays in registers: a matmul of 64 x 64 scores that reads both of its sides from shared memory takes all that shared
memory can deliver. The last listed key block comes first, since it may be the sequence's partial one: only the first
softmax of a block of queries needs a mask. How a row of O changes its unit is as in SageBwd's level 5.

Expect: a third less than level 3's sparse program. Came: a sixth; kernels/NOTES.md says where the rest is.
"""

from collections import namedtuple
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import empty_in_layout_of, heads_per_row
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import LOG2_E, LOG2_INT8_MAX, NO_KEY
from sage_kernels.hopper import multiprocessors
from sage_kernels.sagebwd.forward.level5_hopper import PARTS, SMALLEST_NORMAL, add_row_sums, exponentials, fast_log2
from sage_kernels.sla2 import routing
from sage_kernels.sla2.forward.program import SMALLEST_SUM, Forward, ForwardInputs

from sage_kernels.hopper.toolbox import (  # isort: skip
    LOADING_REGISTERS, ROWS, accumulator, accumulator_16bit, acquire, as_operand, descriptor, moved, fast_exp2,
    fast_reciprocal, fetch, fetch_tokens, fetched_tokens, matrix, operand, operand_16bit, release, ring,
    round_to_packed, start_int8, store_tokens,
)  # fmt: skip

QUERIES, KEYS = gl.constexpr(routing.MASK_BLOCK_Q), gl.constexpr(routing.MASK_BLOCK_KV)
WARPGROUPS = gl.constexpr(routing.MASK_BLOCK_Q // ROWS.value)
PLACES = gl.constexpr(4)  # tiles of K and of V in flight
# Of 64k registers a computing thread gets 240; until the warps part, all have the same number.
REGISTERS = gl.constexpr(240)
OPTIONS = {"num_warps": 4, "maxnreg": 168}
LAUNCHES = {
    "sla2_forward_hopper": Launch(QUERIES.value, KEYS.value, 4 * WARPGROUPS.value, PLACES.value, REGISTERS.value)
}


class Sizes(NamedTuple):
    items: int  # blocks of queries of all heads and batches
    programs: int  # which share them
    q_blocks: int  # of queries in one head
    kv_blocks: int  # of keys in one head of the INT8 copies, the last ones padded
    group_size: int  # query heads that share a head of keys
    n_q: int
    n_k: int
    width: int  # places for key blocks in a list
    # Heads that are side by side in a row of memory: one, or all where a tensor is [B, N, H, D] in memory.
    q_heads_per_row: int
    out_heads_per_row: int


SIZES = Sizes._fields

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "q_hat k vt q h")
Rings = namedtuple("Rings", "q_hat k v q h")
Pointers = namedtuple("Pointers", "q_scale k_scale v_scale alpha entries counts sums o o_s log_sum_exp")
Item = namedtuple("Item", "block i head kv_head entries count steps alpha")  # block: of all heads; i: of this one
Opening = namedtuple("Opening", "j following s_q s_k s_v")  # what the first key block of a list takes


class Rows(NamedTuple):
    """The numbers that a warpgroup carries from key block to key block besides O."""

    r: gl.tensor  # [ROWS]: 2^r / 127 is s_P of the last block
    largest: gl.tensor  # [ROWS], log2 of the most that a block has been worth, 2^r s_V
    l: gl.tensor  # [ROWS, 4], the row sum: each thread's part
    unit: gl.tensor  # s_V of the last block that had one


@gluon.jit
def count_items(sizes):
    """Return how many blocks of queries this program works on."""
    return (sizes.items - gl.program_id(0) + sizes.programs - 1) // sizes.programs


@gluon.jit
def work_item(turn, pointers, sizes):
    """Return a block of queries and its list. Without a key block it takes one step, in which no key is visible.

    One past the last has an empty list, from which nothing is read.
    """
    block = gl.program_id(0) + turn * sizes.programs
    head = block // sizes.q_blocks
    count = gl.load(pointers.counts + block, mask=block < sizes.items, other=0)
    alpha_i = gl.load(pointers.alpha + block, mask=block < sizes.items, other=0.0)
    entries = pointers.entries + block.to(gl.int64) * sizes.width
    steps = gl.maximum(count, 1)
    return Item(block, block % sizes.q_blocks, head, head // sizes.group_size, entries, count, steps, alpha_i)


@gluon.jit
def key_block(item, step):
    """Return the key block of a step: the list's last, then the others in their order. 0 past the list's end."""
    entry = gl.where(step == 0, item.count, step) - 1
    return gl.load(item.entries + entry, mask=step < item.count, other=0)


@gluon.jit
def opening(item, j, following, pointers, sizes):
    """Load the scales of the list's first key block j. An empty list has none: an unseen scale may be NaN."""
    is_listed = item.count > 0
    at = item.kv_head * sizes.kv_blocks + j
    s_q = gl.load(pointers.q_scale + item.block, mask=is_listed, other=0.0)
    s_k = gl.load(pointers.k_scale + at, mask=is_listed, other=0.0)
    return Opening(j, following, s_q, s_k, gl.load(pointers.v_scale + at, mask=is_listed, other=0.0))


@gluon.jit
def load_tiles(descriptors, rings, pointers, sizes, DP: gl.constexpr):
    """Load Q^ and the listed tiles of K^ and V^T of every block of queries, and for the end Q and H_i."""
    n = 0
    for turn in range(0, count_items(sizes)):
        item = work_item(turn, pointers, sizes)
        fetch(rings.q_hat, turn, descriptors.q_hat, item.block * QUERIES, 0)
        for step in range(0, item.steps):
            j = key_block(item, step)
            fetch(rings.k, n + step, descriptors.k, (item.kv_head * sizes.kv_blocks + j) * KEYS, 0)
            fetch(rings.v, n + step, descriptors.vt, item.kv_head * DP, j * KEYS)
        fetch_tokens(rings.q, turn, descriptors.q, item.head, item.i * QUERIES, sizes.q_heads_per_row, DP)
        fetch(rings.h, turn, descriptors.h, item.block * (DP + 1), 0)
        n += item.steps


@gluon.jit
def next_p(s_ij, s_q, s_k, s_v, rows, first_key, n_k, DP: gl.constexpr, IS_MASKED: gl.constexpr):
    """Return (P^_ij packed, O's change, the rows after this key block) from integer scores s_ij [Bq, Bkv]."""
    r, largest, l, unit = rows
    # A block of zeros adds nothing to O in any unit; its own would be a division by 0.
    s_v = gl.where(s_v < SMALLEST_NORMAL, unit, s_v)
    log2_s_v, exchange = fast_log2(s_v), unit * fast_reciprocal(s_v)
    p_ij, change, r, largest = exponentials(s_ij, s_q * s_k, log2_s_v, r, largest, 0, first_key, n_k, False, IS_MASKED)
    p_hat_ij, l = round_to_packed(p_ij, DP), add_row_sums(l, p_ij, change)
    change = gl.convert_layout(change * exchange, gl.SliceLayout(1, accumulator(DP)))
    return p_hat_ij, change, Rows(r, largest, l, s_v)


@gluon.jit
def sparse_branch(item, first, n, turn, rings, pointers, sizes, DP: gl.constexpr, W: gl.constexpr):
    """Return (O [ROWS, DP] in units of its rows, the rows) of warpgroup W's queries over the listed keys."""
    row: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    k_scale = pointers.k_scale + item.kv_head * sizes.kv_blocks
    v_scale = pointers.v_scale + item.kv_head * sizes.kv_blocks
    j, following, s_q, s_k, s_v = first
    n_k = gl.where(item.count > 0, sizes.n_k, 0)
    rows = Rows(
        gl.full([ROWS], NO_KEY, gl.float32, row), gl.full([ROWS], NO_KEY, gl.float32, row),
        gl.zeros([ROWS, 4], gl.float32, PARTS), 1.0,
    )  # fmt: skip
    o_i = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    # [Bq, D] in registers
    q_hat_i = acquire(rings.q_hat, turn).slice(W * ROWS, ROWS).load(operand(KEYS))
    # [Bq, Bkv]
    s_ij = warpgroup_mma_wait(0, deps=(start_int8(q_hat_i, acquire(rings.k, n), KEYS),))
    release(rings.q_hat, turn)  # now: a matmul has used it, so its read has ended
    release(rings.k, n)
    p_hat_ij, change, rows = next_p(s_ij, s_q, s_k, s_v, rows, j * KEYS, n_k, DP, True)
    s_k, s_v = gl.load(k_scale + following), gl.load(v_scale + following)
    for step in range(1, item.steps):
        scores = start_int8(q_hat_i, acquire(rings.k, n + step), KEYS)
        product = start_int8(as_operand(p_hat_ij, DP), acquire(rings.v, n + step - 1), DP)
        following = key_block(item, step + 1)
        s_ij = warpgroup_mma_wait(1, deps=(scores,))
        release(rings.k, n + step)
        next_p_hat, next_change, rows = next_p(s_ij, s_q, s_k, s_v, rows, 0, n_k, DP, False)
        s_k, s_v = gl.load(k_scale + following), gl.load(v_scale + following)
        # [Bq, D]
        pv_ij = warpgroup_mma_wait(0, deps=(product,))
        release(rings.v, n + step - 1)
        o_i = o_i * change[:, None] + pv_ij.to(gl.float32)
        change, p_hat_ij = next_change, moved(next_p_hat, step >> 30)
    last = n + item.steps - 1
    pv_ij = warpgroup_mma_wait(0, deps=(start_int8(as_operand(p_hat_ij, DP), acquire(rings.v, last), DP),))
    release(rings.v, last)
    return o_i * change[:, None] + pv_ij.to(gl.float32), rows


@gluon.jit
def inverse_or_zero(x):
    """Return what `program.inverse_or_zero` does."""
    is_zero = x < SMALLEST_SUM
    return gl.where(is_zero, 0.0, 1.0 / gl.where(is_zero, 1.0, x))


@gluon.jit
def softmax_features(x, D: gl.constexpr):
    """Return phi of x [ROWS, DP] as `tiles.softmax_features` does: softmax over the first D features, then zeros."""
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    x = gl.where((d < D)[None, :], x, -float("inf"))
    e = fast_exp2((x - gl.max(x, 1)[:, None]) * LOG2_E)
    return e * fast_reciprocal(gl.sum(e, 1))[:, None]


@gluon.jit
def linear_branch(z_i, turn, rings, D: gl.constexpr, DP: gl.constexpr, W: gl.constexpr):
    """Return (phi(Q_i) H_i [ROWS, DP], 1 / phi(Q_i) Z_i [ROWS]) of warpgroup W's queries."""
    layout: gl.constexpr = accumulator_16bit(DP)
    x = matrix(acquire(rings.q, turn)).slice(W * ROWS, ROWS).load(layout).to(gl.float32)
    q_phi_i = softmax_features(x, D).to(z_i.dtype)
    inverse = inverse_or_zero(gl.sum(q_phi_i.to(gl.float32) * z_i.to(gl.float32)[None, :], 1))
    nothing = gl.zeros([ROWS, DP], gl.float32, layout)
    left = gl.convert_layout(q_phi_i, operand_16bit(DP))
    h_i = acquire(rings.h, turn)
    product = warpgroup_mma_wait(0, deps=(warpgroup_mma(left, h_i, nothing, use_acc=False, is_async=True),))
    release(rings.q, turn)
    release(rings.h, turn)
    return product, inverse


@gluon.jit
def query_rows(rings, pointers, sizes, D: gl.constexpr, DP: gl.constexpr, W: gl.constexpr):
    """Compute O of warpgroup W's half of each block of queries, and where they are asked for O_s and L.

    A load takes as long as a key block. So what the next block of queries begins with is asked for during this one, in
    three steps, since each tells where the next is found: the list's length, its key blocks, their scales.
    """
    row: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    columns: gl.constexpr = gl.SliceLayout(1, accumulator(DP))
    d = gl.arange(0, DP, gl.SliceLayout(0, accumulator_16bit(DP)))
    n, item = 0, work_item(0, pointers, sizes)
    first = opening(item, key_block(item, 0), key_block(item, 1), pointers, sizes)
    for turn in range(0, count_items(sizes)):
        coming = work_item(turn + 1, pointers, sizes)
        z_i = gl.load(pointers.sums + item.block.to(gl.int64) * (DP * (DP + 1)) + DP * DP + d)
        first_query = item.i * QUERIES + W * ROWS
        o_i, rows = sparse_branch(item, first, n, turn, rings, pointers, sizes, DP, W)
        j, following = key_block(coming, 0), key_block(coming, 1)
        l = gl.sum(rows.l, 1)
        o_i *= gl.convert_layout(inverse_or_zero(l) * rows.unit, columns)[:, None]
        if pointers.o_s is not None:
            store_tokens(pointers.o_s, o_i, item.head, first_query, sizes.n_q, 1, D, DP)
            # A huge L where there is no key or no query: P is then 0 in the backward pass.
            query = first_query + gl.arange(0, ROWS, row)
            l = gl.convert_layout(l, row)
            log_sum_exp = rows.r + gl.log2(gl.where(l == 0.0, 1.0, l)) - LOG2_INT8_MAX
            log_sum_exp = gl.where((item.count > 0) & (query < sizes.n_q), log_sum_exp, 0.0 - NO_KEY)
            at = item.head.to(gl.int64) * (sizes.q_blocks * QUERIES) + query
            gl.store(pointers.log_sum_exp + at, log_sum_exp, mask=query < sizes.q_blocks * QUERIES)
        product, inverse = linear_branch(z_i, turn, rings, D, DP, W)
        coming_first = opening(coming, j, following, pointers, sizes)
        o_l = product * ((1.0 - item.alpha) * inverse)[:, None]
        o_i = item.alpha * o_i + gl.convert_layout(o_l, accumulator(DP))
        store_tokens(pointers.o, o_i, item.head, first_query, sizes.n_q, sizes.out_heads_per_row, D, DP)
        n += item.steps
        item, first = coming, coming_first


@gluon.jit(do_not_specialize=SIZES)
def sla2_forward_hopper_program(
    q_hat_descriptor, k_descriptor, vt_descriptor, q_descriptor, h_descriptor,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, alpha_ptr, entries_ptr, counts_ptr, sums_ptr, o_ptr, o_s_ptr,
    log_sum_exp_ptr,
    items, programs, q_blocks, kv_blocks, group_size, n_q, n_k, width, q_heads_per_row, out_heads_per_row,
    D: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Compute O of all blocks of queries. o_s_ptr, log_sum_exp_ptr None: O alone."""
    rings = Rings(
        ring(q_hat_descriptor, 2, WARPGROUPS), ring(k_descriptor, PLACES, WARPGROUPS),
        ring(vt_descriptor, PLACES, WARPGROUPS), ring(q_descriptor, 1, WARPGROUPS), ring(h_descriptor, 1, WARPGROUPS),
    )  # fmt: skip
    fence_async_shared()
    descriptors = Descriptors(q_hat_descriptor, k_descriptor, vt_descriptor, q_descriptor, h_descriptor)
    pointers = Pointers(
        q_scale_ptr, k_scale_ptr, v_scale_ptr, alpha_ptr, entries_ptr, counts_ptr, sums_ptr, o_ptr, o_s_ptr,
        log_sum_exp_ptr,
    )  # fmt: skip
    sizes = Sizes(items, programs, q_blocks, kv_blocks, group_size, n_q, n_k, width, q_heads_per_row, out_heads_per_row)
    # Constants must be named in each call: a variable would make numbers of the program of them.
    gl.warp_specialize(
        [
            (query_rows, (rings, pointers, sizes, D, DP, 0)),
            (query_rows, (rings, pointers, sizes, D, DP, 1)),
            (load_tiles, (descriptors, rings, pointers, sizes, DP)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def run_hopper_forward(inputs: ForwardInputs, start: Start = start_with_triton, *, save: bool) -> Forward:
    """Compute O, and with save O_s and L, as `run_sparse_forward` does, from level 3's inputs."""
    query, q_hat, k_hat, v_hat = inputs.query, inputs.q_hat, inputs.k_hat, inputs.v_hat
    batch, heads, n_q, head_dim = query.shape
    kv_heads, n_k = inputs.key.shape[1:3]
    dp, (q_blocks, width) = padded_head_dim(head_dim), inputs.lists.entries.shape[2:]
    output = empty_in_layout_of(query)
    o_s = query.new_empty(query.shape) if save else None
    log_sum_exp = query.new_empty(batch, heads, q_blocks * QUERIES.value, dtype=torch.float32) if save else None
    tokens, q_heads_per_row = fetched_tokens(query)
    items = batch * heads * q_blocks
    programs = min(items, multiprocessors(query.device))
    sizes = Sizes(
        items, programs, q_blocks, k_hat.values.shape[2] // KEYS.value, heads // kv_heads, n_q, n_k, width,
        q_heads_per_row, heads_per_row(output),
    )  # fmt: skip
    arguments = (
        descriptor(q_hat.values, QUERIES.value, dp), descriptor(k_hat.values, KEYS.value, dp),
        descriptor(v_hat.transposed, dp, KEYS.value), descriptor(tokens, 1, QUERIES.value, dp),
        descriptor(inputs.sums.view(-1, dp), dp, dp),
        q_hat.scale, k_hat.scale, v_hat.scale, inputs.alpha, *inputs.lists, inputs.sums, output, o_s, log_sum_exp,
        *sizes,
    )  # fmt: skip
    start(sla2_forward_hopper_program, (programs,), arguments, {"D": head_dim, "DP": dp}, OPTIONS)
    return Forward(output, o_s, log_sum_exp)
