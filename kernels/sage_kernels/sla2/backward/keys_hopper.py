"""dK and dV on Hopper, of both branches: two small programs to a multiprocessor, each with one warpgroup.

A block of 64 keys is all that one warpgroup can have: dK and dV take 128 registers of a thread, S and dP 64 more.
Two warpgroups of one program would share no more than the tiles of queries, and would have to add up their sums. So a
program has one block of keys, or a piece of its list, and while its warpgroup waits, the other program's goes on.

    loading warp   K V dh | Q dO  Q dO  Q dO ...   in tiles of 64 queries, two in flight, with their L and delta
    a warpgroup    dV = phi(K) dh, dK from V dh^T | for each tile of queries:
                   S^T, dP^T started | wait for S^T | P^T | dV += P^T dO started | dS^T | dK += dS^T Q started | wait

The sums begin with the linear branch's share. dh_j lies where tiles of Q will, so the loading warp waits until it has
been read. A piece begins with zeros: the program that adds up pieces adds the linear share, too.

K and V stay in shared memory: with them in registers there is no room for the sums. P^T and dS^T go from the
accumulators to the next matmul's left operand within their thread.

Matched, S is the product of the forward's INT8 copies. Then K^ takes K's place, and Q is there for dS^T Q alone. K
itself, of which phi is computed, lies where tiles of Q^ will. Only the loading warp reads the lists, so it also puts
the scale of each tile of Q^ into shared memory.

Expect: limited by shared memory, from which S^T and dP^T read both of their sides, and by the L2 cache, which delivers
32 KB (matched 40) for every 64 x 64 scores. What came is in kernels/NOTES.md.
"""

import math
from collections import namedtuple
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.memory import empty_in_layout_of, heads_per_row
from sage_kernels.common.quantize import padded_head_dim, padded_length
from sage_kernels.sla2.backward.program import BackwardInputs, QueryGradients, run_join
from sage_kernels.sla2.forward.level4_hopper import softmax_features
from sage_kernels.sla2.lists import BlockLists
from sage_kernels.sla2.pieces import pieces_of
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q

from sage_kernels.hopper.toolbox import (  # isort: skip
    LOADING_REGISTERS, ROWS, accumulator_16bit, acquire, allocate, descriptor, fast_exp2, fetch,
    fetch_tokens, fetch_tokens_with_line, fetched_tokens, matrix, operand_16bit, release, ring, ring_of,
    start_16bit, start_int8, store_tokens,
)  # fmt: skip

PLACES = gl.constexpr(2)  # tiles of Q and of dO in flight
HALVES = gl.constexpr(MASK_BLOCK_Q // ROWS.value)  # tiles of queries in a listed block
BLOCK_KV = gl.constexpr(MASK_BLOCK_KV)
LINE = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=1))
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
REGISTERS = 232  # of a computing thread, when the loading warps have given theirs
OPTIONS = {"num_warps": 4, "maxnreg": 128}
SMALLEST_SCALE = 1e-20  # in place of a smaller c, by which the linear share of dK could not be divided
LAUNCHES = {"sla2_key_hopper": Launch(ROWS.value, MASK_BLOCK_KV, 4, PLACES.value, REGISTERS)}


class Sizes(NamedTuple):
    heads: int
    group_size: int  # query heads that share a head of keys
    n_q: int
    n_k: int
    n_q_padded: int
    key_blocks: int  # in one head
    places: int  # for pieces of long lists, in one head
    all_places: int
    kv_blocks: int  # in one head of the INT8 copies, the last ones padded
    width: int  # places for query blocks in a list
    sums_rows: int  # rows dh_j of a head
    # Heads that are side by side in a row of memory: one, or all where a tensor is [B, N, H, D] in memory.
    k_heads_per_row: int
    v_heads_per_row: int
    q_heads_per_row: int
    do_heads_per_row: int
    dk_heads_per_row: int
    dv_heads_per_row: int


SIZES = Sizes._fields

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "k v q do log_sum_exp delta q_hat dh raw_k")  # k: of K^ if there is a q_hat
Rings = namedtuple("Rings", "k v q do q_hat dh raw_k")  # raw_k is k if there is no q_hat
# A number for each query of a tile, with the tiles of Q and dO; the scale of a tile of Q^ is the first of its line.
Lines = namedtuple("Lines", "log_sum_exp delta q_scale")
Pointers = namedtuple("Pointers", "q_scale k_scale entries counts first_pieces piece_blocks dk dv partial dsums")
Work = namedtuple("Work", "kv_head first_head block first_list begin end is_piece is_busy")


@gluon.jit
def work_of(pointers, sizes):
    """Return this program's part of the lists of a block of keys: [begin, end) of its query heads' lists, end to end.

    Pieces come first; none is empty. A place without a piece is not busy, nor is a block whose pieces do the work.
    """
    t = gl.program_id(0)
    is_piece = t < sizes.all_places
    whole = gl.maximum(t - sizes.all_places, 0)
    kv_head = gl.where(is_piece, t // sizes.places, whole // sizes.key_blocks)
    piece_block = gl.load(pointers.piece_blocks + t, mask=is_piece, other=0)
    block = gl.where(is_piece, piece_block, whole % sizes.key_blocks)
    j = gl.maximum(block, 0)
    first_pieces = pointers.first_pieces + kv_head * (sizes.key_blocks + 1) + j
    first_piece = gl.load(first_pieces)
    pieces = gl.load(first_pieces + 1) - first_piece
    kv_heads = sizes.heads // sizes.group_size
    first_head = kv_head // kv_heads * sizes.heads + kv_head % kv_heads * sizes.group_size
    first_list = first_head * sizes.key_blocks + j
    length = 0
    for g in range(0, sizes.group_size):
        length += gl.load(pointers.counts + first_list + g * sizes.key_blocks)
    share = (length + gl.maximum(pieces, 1) - 1) // gl.maximum(pieces, 1)
    begin = gl.where(is_piece, t % sizes.places - first_piece, 0) * share
    end = gl.minimum(begin + share, length)
    is_busy = (block >= 0) & (is_piece | (pieces == 0))
    return Work(kv_head, first_head, j, first_list, begin, end, is_piece, is_busy)


@gluon.jit
def fetch_q_hat(rings, lines, n, descriptors, pointers, row):
    """Fetch the n-th tile of Q^ and store its scale. Whoever then waits for the tile of Q, fetched next, sees it."""
    s_q = gl.load(pointers.q_scale + row // (HALVES * ROWS))
    fetch(rings.q_hat, n, descriptors.q_hat, row, 0)
    lines.q_scale.index(n % PLACES).slice(0, 1).store(gl.full([1], s_q, gl.float32, ONE_WARP))


@gluon.jit
def load_tiles(descriptors, rings, lines, pointers, sizes, DP: gl.constexpr):
    """Load K, K^, V and dh (a piece needs one of K and K^, and no dh), then the listed tiles of Q^, Q and dO."""
    work = work_of(pointers, sizes)
    if work.is_busy:
        first_key = work.block * BLOCK_KV
        if rings.q_hat is not None:
            fetch(rings.k, 0, descriptors.k, (work.kv_head * sizes.kv_blocks + work.block) * BLOCK_KV, 0)
        if (rings.q_hat is None) | (work.is_piece == 0):
            fetch_tokens(rings.raw_k, 0, descriptors.raw_k, work.kv_head, first_key, sizes.k_heads_per_row, DP)
        fetch_tokens(rings.v, 0, descriptors.v, work.kv_head, first_key, sizes.v_heads_per_row, DP)
        if work.is_piece == 0:
            fetch(rings.dh, 0, descriptors.dh, (work.kv_head * sizes.sums_rows + work.block) * (DP + 1), 0)
            mbarrier.wait(rings.dh.empty.index(0), 0)  # dh has been read, and K: their places are for Q and Q^
        # The first entry is in the body, too: Triton 3.7 freezes what only the bounds of a nested loop use, see NOTES.
        passed, n = 0, 0  # entries in the lists of the heads before; tiles
        for g in range(0, sizes.group_size):
            head = work.first_head + g
            this_list = work.first_list + g * sizes.key_blocks
            count = gl.load(pointers.counts + this_list)
            entries = pointers.entries + this_list.to(gl.int64) * sizes.width
            first = gl.maximum(work.begin - passed, 0)
            for entry in range(0, gl.minimum(work.end - passed, count) - first):
                block = gl.load(entries + first + entry)
                for half in gl.static_range(HALVES):
                    query = block * (HALVES * ROWS) + half * ROWS
                    row = head * sizes.n_q_padded + query
                    if rings.q_hat is not None:
                        fetch_q_hat(rings, lines, n, descriptors, pointers, row)
                    fetch_tokens_with_line(
                        rings.q, lines.log_sum_exp, n, descriptors.q, head, query, sizes.q_heads_per_row, DP,
                        descriptors.log_sum_exp, row,
                    )  # fmt: skip
                    fetch_tokens_with_line(
                        rings.do, lines.delta, n, descriptors.do, head, query, sizes.do_heads_per_row, DP,
                        descriptors.delta, row,
                    )  # fmt: skip
                    n += 1
            passed += count


@gluon.jit
def query_tile(dk_j, dv_j, k_j, v_j, n, rings, lines, s, DP: gl.constexpr):
    """Return dK_j and dV_j [Bkv, D] after the n-th tile of queries. s: the factor of S, or its share that is K^'s."""
    column: gl.constexpr = gl.SliceLayout(0, accumulator_16bit(ROWS))
    place = n % PLACES
    q_i, do_i = matrix(acquire(rings.q, n)), matrix(acquire(rings.do, n))
    # [Bkv, Bq]
    scores = start_16bit(k_j, q_i, ROWS) if rings.q_hat is None else start_int8(k_j, acquire(rings.q_hat, n), ROWS)
    product = start_16bit(v_j, do_i, ROWS)
    st_ij = warpgroup_mma_wait(1, deps=(scores,))
    if rings.q_hat is not None:
        s = s * lines.q_scale.index(place).slice(0, 1).load(column)[None, :]
        st_ij = gl.convert_layout(st_ij.to(gl.float32), accumulator_16bit(ROWS))
    pt_ij = fast_exp2(st_ij * s - lines.log_sum_exp.index(place).load(column)[None, :])
    pt = gl.convert_layout(pt_ij.to(q_i.dtype), operand_16bit(DP))
    sum_of_dv = warpgroup_mma(pt, do_i, dv_j, use_acc=True, is_async=True)
    dpt_ij = warpgroup_mma_wait(1, deps=(product,))
    dst_ij = pt_ij * (dpt_ij - lines.delta.index(place).load(column)[None, :])
    dst = gl.convert_layout(dst_ij.to(q_i.dtype), operand_16bit(DP))
    sum_of_dk = warpgroup_mma(dst, q_i, dk_j, use_acc=True, is_async=True)
    dv_j = warpgroup_mma_wait(1, deps=(sum_of_dv,))
    release(rings.do, n)
    dk_j = warpgroup_mma_wait(0, deps=(sum_of_dk,))
    release(rings.q, n)
    if rings.q_hat is not None:
        release(rings.q_hat, n)
    return dk_j, dv_j


@gluon.jit
def linear_share(work, rings, pointers, sizes, D: gl.constexpr, DP: gl.constexpr):
    """Return the linear branch's share of dK_j and dV_j [Bkv, D]: Alg. 3, steps 9 and 10, and dK's part of 11."""
    layout: gl.constexpr = accumulator_16bit(DP)
    k_j, v_j, dh_j = matrix(acquire(rings.raw_k, 0)), matrix(acquire(rings.v, 0)), acquire(rings.dh, 0)
    k_phi = softmax_features(k_j.load(layout).to(gl.float32), D).to(dh_j.dtype)
    nothing = gl.zeros([ROWS, DP], gl.float32, layout)
    left = gl.convert_layout(k_phi, operand_16bit(DP))
    dv_j = warpgroup_mma_wait(0, deps=(warpgroup_mma(left, dh_j, nothing, use_acc=False, is_async=True),))
    if v_j.dtype != dh_j.dtype:
        v_j = v_j.load(operand_16bit(DP)).to(dh_j.dtype)
    product = start_16bit(v_j, dh_j, DP)
    row = (work.kv_head * sizes.sums_rows + work.block).to(gl.int64) * (DP + 1) + DP
    dz_j = gl.load(pointers.dsums + row * DP + gl.arange(0, DP, gl.SliceLayout(0, layout))).to(gl.float32)
    dk_phi = warpgroup_mma_wait(0, deps=(product,)) + dz_j[None, :]
    release(rings.dh, 0)  # of K, too: it is in a matmul that was waited for, so its read has ended
    k_phi = k_phi.to(gl.float32)
    return k_phi * (dk_phi - gl.sum(k_phi * dk_phi, 1)[:, None]), dv_j


@gluon.jit
def key_rows(rings, lines, pointers, sizes, log2_scale, scale, D: gl.constexpr, DP: gl.constexpr):
    """Sum dK and dV of one block of keys, or of a piece of its list. The sum of dK is without its factor c."""
    work = work_of(pointers, sizes)
    dk_j = gl.zeros([ROWS, DP], gl.float32, accumulator_16bit(DP))
    dv_j = gl.zeros([ROWS, DP], gl.float32, accumulator_16bit(DP))
    if work.is_busy:
        if work.is_piece == 0:
            dk_j, dv_j = linear_share(work, rings, pointers, sizes, D, DP)
            dk_j *= 1.0 / scale
        if rings.q_hat is None:
            k_j, s = matrix(acquire(rings.k, 0)), log2_scale
        else:
            k_j, s = acquire(rings.k, 0), gl.load(pointers.k_scale + work.kv_head * sizes.kv_blocks + work.block)
        v_j = matrix(acquire(rings.v, 0))
        for n in range(0, (work.end - work.begin) * HALVES):
            dk_j, dv_j = query_tile(dk_j, dv_j, k_j, v_j, n, rings, lines, s, DP)
        if work.is_piece:
            place = 2 * gl.program_id(0)
            store_tokens(pointers.partial, dk_j, place, 0, ROWS, 1, DP, DP)
            store_tokens(pointers.partial, dv_j, place + 1, 0, ROWS, 1, DP, DP)
        else:
            first_key = work.block * BLOCK_KV
            store_tokens(pointers.dk, dk_j * scale, work.kv_head, first_key, sizes.n_k, sizes.dk_heads_per_row, D, DP)
            store_tokens(pointers.dv, dv_j, work.kv_head, first_key, sizes.n_k, sizes.dv_heads_per_row, D, DP)


@gluon.jit(do_not_specialize=SIZES)
def sla2_key_hopper_program(
    k_descriptor, v_descriptor, q_descriptor, do_descriptor, log_sum_exp_descriptor, delta_descriptor,
    q_hat_descriptor, dh_descriptor, raw_k_descriptor, q_scale_ptr, k_scale_ptr,
    entries_ptr, counts_ptr, first_pieces_ptr, piece_blocks_ptr, dk_ptr, dv_ptr, partial_ptr, dsums_ptr,
    heads, group_size, n_q, n_k, n_q_padded, key_blocks, places, all_places, kv_blocks, width, sums_rows,
    k_heads_per_row, v_heads_per_row, q_heads_per_row, do_heads_per_row, dk_heads_per_row, dv_heads_per_row,
    log2_scale, scale, D: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Work on a piece of the list of one block of keys, or on the whole list of one: programs come in this order.

    q_hat_descriptor None: scores in 16 bit.
    """
    k, q = ring(k_descriptor, 1, 1), ring(q_descriptor, PLACES, 1)
    raw_k, q_hat = k, None
    if q_hat_descriptor is not None:
        q_hat = ring(q_hat_descriptor, PLACES, 1)
        raw_k = q_hat.tiles._reinterpret(raw_k_descriptor.dtype, [1, 1, ROWS, DP], raw_k_descriptor.layout)
        raw_k = ring_of(raw_k, 1, 1)
    dh = q.tiles._reinterpret(dh_descriptor.dtype, [PLACES * ROWS // DP, DP, DP], dh_descriptor.layout)
    rings = Rings(k, ring(v_descriptor, 1, 1), q, ring(do_descriptor, PLACES, 1), q_hat, ring_of(dh, 1, 1), raw_k)
    lines = Lines(
        allocate(log_sum_exp_descriptor, PLACES),
        allocate(delta_descriptor, PLACES),
        None if q_hat_descriptor is None else gl.allocate_shared_memory(gl.float32, [PLACES, 32], LINE),
    )
    fence_async_shared()
    descriptors = Descriptors(
        k_descriptor, v_descriptor, q_descriptor, do_descriptor, log_sum_exp_descriptor, delta_descriptor,
        q_hat_descriptor, dh_descriptor, raw_k_descriptor,
    )  # fmt: skip
    pointers = Pointers(
        q_scale_ptr, k_scale_ptr, entries_ptr, counts_ptr, first_pieces_ptr, piece_blocks_ptr, dk_ptr, dv_ptr,
        partial_ptr, dsums_ptr,
    )  # fmt: skip
    sizes = Sizes(
        heads, group_size, n_q, n_k, n_q_padded, key_blocks, places, all_places, kv_blocks, width, sums_rows,
        k_heads_per_row, v_heads_per_row, q_heads_per_row, do_heads_per_row, dk_heads_per_row, dv_heads_per_row,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (key_rows, (rings, lines, pointers, sizes, log2_scale, scale, D, DP)),
            (load_tiles, (descriptors, rings, lines, pointers, sizes, DP)),
        ],
        [1], [LOADING_REGISTERS],
    )  # fmt: skip


def run_key_hopper(
    inputs: BackwardInputs,
    gradients: QueryGradients,
    grad_sums: Tensor,
    lists: BlockLists,
    start: Start = start_with_triton,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute dK and dV, as `run_key` does: by this program, and of blocks in pieces by the one that adds them up.

    S is matched if the inputs have Q^ and K^.
    """
    query, key = inputs.query, inputs.key
    heads, n_q, head_dim = query.shape[1:]
    batch, kv_heads, n_k = key.shape[:3]
    dk, dv = outputs = empty_in_layout_of(inputs.key), empty_in_layout_of(inputs.value)
    pieces = pieces_of(lists.counts, kv_heads, start)
    dp, places, key_blocks = padded_head_dim(head_dim), pieces.blocks.shape[2], pieces.first.shape[2] - 1
    partial = query.new_empty(*pieces.blocks.shape, 2, MASK_BLOCK_KV, dp, dtype=torch.float32)
    fetched, rows = zip(*(fetched_tokens(x) for x in (key, inputs.value, query, inputs.grad_output)), strict=True)
    sizes = Sizes(
        heads, heads // kv_heads, n_q, n_k, gradients.delta.shape[-1], key_blocks, places, batch * kv_heads * places,
        padded_length(n_k) // MASK_BLOCK_KV, lists.entries.shape[-1], grad_sums.shape[2], *rows,
        heads_per_row(dk), heads_per_row(dv),
    )  # fmt: skip
    raw_k, *others = (descriptor(x, 1, ROWS.value, dp) for x in fetched)
    k, q_hat, q_scale, k_scale = raw_k, None, None, None
    if inputs.q_hat is not None:
        q_hat, q_scale = descriptor(inputs.q_hat.values, ROWS.value, dp), inputs.q_hat.scale
        k, k_scale = descriptor(inputs.k_hat.values, ROWS.value, dp), inputs.k_hat.scale
    arguments = (
        k, *others, descriptor(gradients.alpha_log_sum_exp, ROWS.value), descriptor(gradients.delta, ROWS.value),
        q_hat, descriptor(grad_sums.view(-1, dp), dp, dp), raw_k, q_scale, k_scale, *lists, *pieces, dk, dv, partial,
        grad_sums, *sizes, scale * math.log2(math.e), math.copysign(max(abs(scale), SMALLEST_SCALE), scale),
    )  # fmt: skip
    grid = (batch * kv_heads * (places + key_blocks),)
    start(sla2_key_hopper_program, grid, arguments, {"D": head_dim, "DP": dp}, OPTIONS)
    run_join(inputs, pieces, grad_sums, partial, outputs, start, scale=scale)
    return outputs
