"""The linear branch's share of dQ, dH_i, dZ_i and dalpha on Hopper, and what the sparse programs need: delta, L.

The portable program keeps all of a block of 128 queries in the registers of one program, and spills. Here two
warpgroups have 64 queries each, one warp loads the next block's tiles, and matmuls read from shared memory.

    loading warp    Q  dO  O_s  H_i | Q  dO  O_s  H_i                          (the next block's, as places become free)
    2 warpgroups    phi(Q), phi(Q) H, sums of rows | hand over phi(Q) / (phi(Q) Z) and (1 - alpha) dO |
                    dO H^T gives dQ | wait for both halves, dH_i

dH_i sums over all 128 queries: each warpgroup makes half of its rows, from both warpgroups' queries. dZ_i and dalpha
are sums of 64 queries each, which the first warpgroup adds up.

Expect: limited by memory, which moves 194 KB for each block of queries. What came is in kernels/NOTES.md.
"""

from collections import namedtuple
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import heads_per_row
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.common.tiles import LOG2_E, TINY
from sage_kernels.hopper import multiprocessors
from sage_kernels.sla2.backward.program import BackwardInputs, QueryGradients, empty_gradients
from sage_kernels.sla2.forward.level4_hopper import (
    OPTIONS,
    QUERIES,
    REGISTERS,
    WARPGROUPS,
    count_items,
    inverse_or_zero,
    softmax_features,
)

from sage_kernels.hopper.toolbox import (  # isort: skip
    LOADING_REGISTERS, ROWS, Ring, accumulator_16bit, acquire, descriptor, fetch, fetch_tokens, fetched_tokens,
    matrix, matrix_layout, operand_16bit, release, ring, ring_of, start_16bit, store_tokens,
)  # fmt: skip

LAUNCHES = {"sla2_linear_query_hopper": Launch(QUERIES.value, 0, 4 * WARPGROUPS.value, 1, REGISTERS.value)}
LINE = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=1))


class Sizes(NamedTuple):
    items: int  # blocks of queries of all heads and batches
    programs: int  # which share them
    q_blocks: int  # of queries in one head
    group_size: int  # query heads that share a head of keys
    n_q: int
    # Heads that are side by side in a row of memory: one, or all where a tensor is [B, N, H, D] in memory.
    q_heads_per_row: int
    do_heads_per_row: int
    o_heads_per_row: int
    dq_heads_per_row: int


SIZES = Sizes._fields

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "q do o_s h")
Rings = namedtuple("Rings", "q do o_s h")
Pointers = namedtuple("Pointers", "k_mean alpha sums log_sum_exp dq dalpha dsums delta unsmoothed alpha_log_sum_exp")


class Shared(NamedTuple):
    """The memory that both warpgroups write and read, with the barriers of one ring."""

    q_share: Ring  # its tile [QUERIES, DP]: phi(Q) / (phi(Q) Z)
    do_l: gl.shared_memory_descriptor  # [1, QUERIES, DP]: (1 - alpha) dO
    dz: gl.shared_memory_descriptor  # float32 [WARPGROUPS, DP]: -dZ, of each warpgroup's queries
    dalpha: gl.shared_memory_descriptor  # float32 [1, QUERIES]: what each query adds


@gluon.jit
def load_tiles(descriptors, rings, sizes, DP: gl.constexpr):
    """Load Q, dO, O_s and H_i of every block of queries; their places become free in this order."""
    for turn in range(0, count_items(sizes)):
        block = gl.program_id(0) + turn * sizes.programs
        head, query = block // sizes.q_blocks, block % sizes.q_blocks * QUERIES
        fetch_tokens(rings.q, turn, descriptors.q, head, query, sizes.q_heads_per_row, DP)
        fetch_tokens(rings.do, turn, descriptors.do, head, query, sizes.do_heads_per_row, DP)
        fetch_tokens(rings.o_s, turn, descriptors.o_s, head, query, sizes.o_heads_per_row, DP)
        fetch(rings.h, turn, descriptors.h, block * (DP + 1), 0)


@gluon.jit
def own_tile(ring, turn, W: gl.constexpr, DP: gl.constexpr):
    """Load warpgroup W's rows of a tile of tokens, 16-bit [ROWS, DP]. Release it once a matmul or a store used them."""
    return matrix(acquire(ring, turn)).slice(W * ROWS, ROWS).load(accumulator_16bit(DP))


@gluon.jit
def store_log_sum_exp(x, head, rows, alpha_i, pointers, sizes, log2_scale, D: gl.constexpr, DP: gl.constexpr):
    """Store L of the scores as they are, from that of smoothed keys, and L - log2(alpha)."""
    log_sum_exp_i = gl.load(pointers.log_sum_exp + rows)
    if pointers.k_mean is not None:  # give back what smoothing K took from every score of a row
        d = gl.arange(0, DP, gl.SliceLayout(0, accumulator_16bit(DP)))
        k_mean = gl.load(pointers.k_mean + head // sizes.group_size * D + d, mask=d < D, other=0.0)
        log_sum_exp_i += gl.sum(x * k_mean[None, :], 1) * log2_scale
    gl.store(pointers.unsmoothed + rows, log_sum_exp_i)
    log2_alpha = gl.log2(gl.where(alpha_i == 0.0, TINY, alpha_i))
    gl.store(pointers.alpha_log_sum_exp + rows, log_sum_exp_i - log2_alpha)


@gluon.jit
def linear_rows(rings, shared, pointers, sizes, log2_scale, D: gl.constexpr, DP: gl.constexpr, W: gl.constexpr):
    """Compute all of warpgroup W's half of each block of queries: Alg. 3, as in `sla2_linear_query_program`."""
    layout: gl.constexpr = accumulator_16bit(DP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, DP, gl.SliceLayout(0, layout))
    for turn in range(0, count_items(sizes)):
        block = gl.program_id(0) + turn * sizes.programs
        head = block // sizes.q_blocks
        first_query = block % sizes.q_blocks * QUERIES + W * ROWS
        rows = block * QUERIES + W * ROWS + row
        alpha_i = gl.load(pointers.alpha + block)
        sums = block.to(gl.int64) * (DP * (DP + 1))
        z_i = gl.load(pointers.sums + sums + DP * DP + d)
        x = own_tile(rings.q, turn, W, DP).to(gl.float32)
        store_log_sum_exp(x, head, rows, alpha_i, pointers, sizes, log2_scale, D, DP)
        q_phi_i = softmax_features(x, D).to(z_i.dtype)
        inverse = inverse_or_zero(gl.sum(q_phi_i.to(gl.float32) * z_i.to(gl.float32)[None, :], 1))
        # [Bq, D]
        h_i = acquire(rings.h, turn)
        nothing = gl.zeros([ROWS, DP], gl.float32, layout)
        left = gl.convert_layout(q_phi_i, operand_16bit(DP))
        o_l = warpgroup_mma_wait(0, deps=(warpgroup_mma(left, h_i, nothing, use_acc=False, is_async=True),))
        release(rings.q, turn)
        do_i = own_tile(rings.do, turn, W, DP)
        do_o_l = gl.sum(do_i.to(gl.float32) * o_l, 1) * inverse
        delta_i = gl.sum(do_i.to(gl.float32) * own_tile(rings.o_s, turn, W, DP).to(gl.float32), 1)
        gl.store(pointers.delta + rows, delta_i)
        release(rings.do, turn)  # now: what is stored was computed from both, so their reads have ended
        release(rings.o_s, turn)
        d_l = (1.0 - alpha_i) * do_o_l
        do_l = ((1.0 - alpha_i) * do_i.to(gl.float32)).to(z_i.dtype)
        q_share = (q_phi_i.to(gl.float32) * inverse[:, None]).to(z_i.dtype)
        dz = gl.sum(q_share.to(gl.float32) * d_l[:, None], 0)
        hand_over(shared, turn, q_share, do_l, dz, delta_i - do_o_l, W)
        dq_phi = start_16bit(gl.convert_layout(do_l, operand_16bit(DP)), h_i, DP)
        z_i = gl.load(pointers.sums + sums + DP * DP + d)  # again: to keep it takes registers that there aren't
        dq_phi = warpgroup_mma_wait(0, deps=(dq_phi,))
        release(rings.h, turn)
        dq_phi -= d_l[:, None] * z_i.to(gl.float32)[None, :]
        q_share = shared.q_share.tiles.index(0).slice(W * ROWS, ROWS).load(layout).to(gl.float32)
        # phi(Q) rowsum(dQ_phi phi(Q)), of what is there: phi(Q) / (phi(Q) Z)
        of_rows = gl.sum(q_share * dq_phi, 1) * inverse_or_zero(inverse)
        dq_i = q_share * (dq_phi - of_rows[:, None])
        store_tokens(pointers.dq, dq_i, head, first_query, sizes.n_q, sizes.dq_heads_per_row, D, DP)
        store_sums(shared, turn, pointers, sums, block, DP, W)


@gluon.jit
def hand_over(shared, turn, q_share, do_l, dz, dalpha, W: gl.constexpr):
    """Put what warpgroup W's queries add where both warpgroups find it."""
    mbarrier.wait(shared.q_share.empty.index(0), (turn & 1) ^ 1)
    shared.q_share.tiles.index(0).slice(W * ROWS, ROWS).store(q_share)
    shared.do_l.index(0).slice(W * ROWS, ROWS).store(do_l)
    shared.dz.index(W).store(dz)
    shared.dalpha.index(0).slice(W * ROWS, ROWS).store(dalpha)
    fence_async_shared()  # matmuls read it
    mbarrier.arrive(shared.q_share.ready.index(0), count=1)


@gluon.jit
def store_sums(shared, turn, pointers, sums, block, DP: gl.constexpr, W: gl.constexpr):
    """Store warpgroup W's rows of dH_i, if there are so many; the first one's dZ_i and dalpha, too."""
    layout: gl.constexpr = accumulator_16bit(DP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, DP, gl.SliceLayout(0, layout))
    q_share = acquire(shared.q_share, turn)
    if W * ROWS < DP:
        nothing = gl.zeros([ROWS, DP], gl.float32, layout)
        # [D / 2, Bq] x [Bq, D]
        left = q_share.slice(W * ROWS, ROWS, 1).permute((1, 0))
        product = warpgroup_mma(left, shared.do_l.index(0), nothing, use_acc=False, is_async=True)
        dh_i = warpgroup_mma_wait(0, deps=(product,))
        at = pointers.dsums + sums + (W * ROWS + row)[:, None] * DP + d[None, :]
        gl.store(at, dh_i.to(pointers.dsums.dtype.element_ty))
    if W == 0:
        dz = shared.dz.index(0).load(gl.SliceLayout(0, layout)) + shared.dz.index(1).load(gl.SliceLayout(0, layout))
        gl.store(pointers.dsums + sums + DP * DP + d, (0.0 - dz).to(pointers.dsums.dtype.element_ty))
        of_queries = shared.dalpha.index(0)
        first = of_queries.slice(0, ROWS).load(gl.SliceLayout(1, layout))
        second = of_queries.slice(ROWS, ROWS).load(gl.SliceLayout(1, layout))
        gl.store(pointers.dalpha + block, gl.sum(first + second, 0))
    release(shared.q_share, turn)


@gluon.jit(do_not_specialize=SIZES)
def sla2_linear_query_hopper_program(
    q_descriptor, do_descriptor, o_s_descriptor, h_descriptor,
    k_mean_ptr, alpha_ptr, sums_ptr, log_sum_exp_ptr, dq_ptr, dalpha_ptr, dsums_ptr, delta_ptr, unsmoothed_ptr,
    alpha_log_sum_exp_ptr,
    items, programs, q_blocks, group_size, n_q, q_heads_per_row, do_heads_per_row, o_heads_per_row, dq_heads_per_row,
    log2_scale, D: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Compute the linear branch's part of every block of queries. k_mean_ptr None: K was not smoothed."""
    rings = Rings(
        ring(q_descriptor, 1, WARPGROUPS), ring(do_descriptor, 1, WARPGROUPS), ring(o_s_descriptor, 1, WARPGROUPS),
        ring(h_descriptor, 1, WARPGROUPS),
    )  # fmt: skip
    dtype: gl.constexpr = h_descriptor.dtype
    in_rows: gl.constexpr = matrix_layout(QUERIES, DP, dtype)
    shared = Shared(
        ring_of(gl.allocate_shared_memory(dtype, [1, QUERIES, DP], in_rows), WARPGROUPS, WARPGROUPS),
        gl.allocate_shared_memory(dtype, [1, QUERIES, DP], in_rows),
        gl.allocate_shared_memory(gl.float32, [WARPGROUPS, DP], LINE),
        gl.allocate_shared_memory(gl.float32, [1, QUERIES], LINE),
    )
    fence_async_shared()
    descriptors = Descriptors(q_descriptor, do_descriptor, o_s_descriptor, h_descriptor)
    pointers = Pointers(
        k_mean_ptr, alpha_ptr, sums_ptr, log_sum_exp_ptr, dq_ptr, dalpha_ptr, dsums_ptr, delta_ptr, unsmoothed_ptr,
        alpha_log_sum_exp_ptr,
    )  # fmt: skip
    sizes = Sizes(
        items, programs, q_blocks, group_size, n_q, q_heads_per_row, do_heads_per_row, o_heads_per_row, dq_heads_per_row
    )
    # Constants must be named in each call: a variable would make numbers of the program of them.
    gl.warp_specialize(
        [
            (linear_rows, (rings, shared, pointers, sizes, log2_scale, D, DP, 0)),
            (linear_rows, (rings, shared, pointers, sizes, log2_scale, D, DP, 1)),
            (load_tiles, (descriptors, rings, sizes, DP)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def run_linear_query_hopper(inputs: BackwardInputs, start: Start, *, scale: float) -> QueryGradients:
    """Compute what `run_linear_query` does."""
    query = inputs.query
    batch, heads, n_q, head_dim = query.shape
    dp, q_blocks = padded_head_dim(head_dim), inputs.alpha.shape[2]
    gradients = empty_gradients(inputs)
    tokens = query, inputs.grad_output, inputs.sparse_output
    fetched, rows = zip(*(fetched_tokens(x) for x in tokens), strict=True)
    items = batch * heads * q_blocks
    programs = min(items, multiprocessors(query.device))
    sizes = Sizes(
        items, programs, q_blocks, heads // inputs.key.shape[1], n_q, *rows, heads_per_row(gradients.grad_query)
    )
    arguments = (
        *(descriptor(x, 1, QUERIES.value, dp) for x in fetched), descriptor(inputs.sums.view(-1, dp), dp, dp),
        inputs.k_mean, inputs.alpha, inputs.sums, inputs.log_sum_exp, *gradients, *sizes, scale * LOG2_E.value,
    )  # fmt: skip
    start(sla2_linear_query_hopper_program, (programs,), arguments, {"D": head_dim, "DP": dp}, OPTIONS)
    return gradients
