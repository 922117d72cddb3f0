"""Level 5, Hopper: one warp loads, three warpgroups compute.

Idea: within one warp matmuls and softmax take turns, so while one warpgroup (4 warps, 64 queries) is at its softmax,
the tensor cores should work for another. Each program has 192 queries, a warpgroup per 64; they share one stream of K
and V tiles, which a warp of its own fetches ahead with the copy engine (TMA). Sharing leaves a third of what the L2
cache had to deliver; the copy engine frees the computing warps from addresses. `hopper.py` holds how warps hand tiles
to each other.

What a score costs shrinks too: the row's maximum is found in integers, two instructions round four of P's values to
INT8 and pack them, P stays in its thread (level 4), and O is one conversion and one multiply-add:

    O is kept in units of what one step of P^ V^ is worth, u_j = 2^(r_j) s_V / 127, where 2^(r_j) / 127 = s_P is the
    scale of the row in tile j. A new tile adds P^ V^ as it is; the old sum changes units, O u_(j-1) / u_j.

r_j is rowmax(S_ij), as in Algorithm 1, unless the tile is worth 2^-24 of the row's largest or less: the change of units
must not overflow, and such a tile doesn't show in float32 anyway.

Expect: the tensor cores' time is half hidden, not all of it: tensor cores, exponentials (16 a clock), conversions and
maxima (64 a clock) and issue slots (128 a clock) each allow 16 to 18 scores a clock, and no two overlap fully.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_kernels.common.launch import Launch
from sage_kernels.common.quantize import BLOCK_KV, BLOCK_Q, padded_head_dim, padded_length
from sage_kernels.common.tiles import LOG2_INT8_MAX, NO_KEY, TINY
from sage_kernels.hopper import declared
from sage_kernels.hopper.toolbox import (
    ROWS,
    TILE,
    accumulator,
    arrived,
    barrier,
    descriptor,
    fast_exp2,
    fast_log2,
    fast_reciprocal,
    fetch,
    heads_at_a_time,
    key_tiles,
    let_go,
    ring,
    rounded,
    work_item,
)
from sage_kernels.sagebwd.forward.program import ForwardInputs

WARPGROUPS = gl.constexpr(3)
PLACES = gl.constexpr(3)  # tiles of K and of V in flight
SCALE_Q = gl.constexpr(BLOCK_Q)
# Of 64k registers a computing thread gets 160 and a loading one 24; until the warps part, all have the same number.
REGISTERS, LOADING_REGISTERS = gl.constexpr(160), gl.constexpr(24)
OPTIONS = {"num_warps": 4, "maxnreg": 128}
LAUNCH = Launch(ROWS.value * WARPGROUPS.value, BLOCK_KV, 4 * WARPGROUPS.value, PLACES.value, REGISTERS.value)
NEGLIGIBLE = gl.constexpr(24.0)  # a tile worth 2^-24 of the row's largest is below float32's last bit
SMALLEST_NORMAL = gl.constexpr(1.1754944e-38)
# [ROWS, 4]: of each row a number in each of the four threads that hold it.
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4],
    )
)  # fmt: skip


@gluon.jit
def softmax_tile(
    s_ij, s_qk, log2_s_v, r, largest, l, first_query, first_key, n_k,
    DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """(P^_ij, change of the row's unit, r, largest, l) from integer scores. l: each thread's part of the row sum."""
    x = s_ij.to(gl.float32)
    if IS_MASKED:
        s_qk += TINY  # a block of zeros has scale 0, and 0 times a masked score's -inf is NaN
        query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
        key = first_key + gl.arange(0, TILE, gl.SliceLayout(0, accumulator(TILE)))
        visible = (key < n_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        x = gl.where(visible, x, -float("inf"))
        m_ij = gl.max(x, 1) * s_qk
    else:
        m_ij = gl.max(s_ij, 1).to(gl.float32) * s_qk
    # 2^r s_V is what a tile is worth in O.
    largest = gl.maximum(largest, m_ij + log2_s_v)
    r_ij = gl.maximum(m_ij, largest - (log2_s_v + NEGLIGIBLE))
    change = fast_exp2(r - r_ij)
    # [Bq, Bkv]: 127 exp(S - r), Algorithm 1's P~ / s_P
    p_ij = fast_exp2(x * s_qk - (r_ij - LOG2_INT8_MAX)[:, None])
    p_hat_ij = rounded(p_ij, DP)
    sums = gl.sum(gl.sum(p_ij.reshape([ROWS, TILE // 8, 4, 2]), 3), 1)
    l = l * gl.convert_layout(change, gl.SliceLayout(1, PARTS))[:, None] + gl.convert_layout(sums, PARTS)
    return p_hat_ij, change, r_ij, largest, l


@gluon.jit
def key_tile(
    q_hat_i, s_q, r, largest, l, o_i, unit, s_k, s_v, j, first_query, n_k, k_ring, v_ring, k_scale_ptr, v_scale_ptr,
    DP: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_LAST: gl.constexpr,
):  # fmt: skip
    """(r, largest, l, o_i, unit) after key tile j, and the next tile's s_K and s_V. Only the last tile needs a mask."""
    # A block of zeros adds nothing to O in any unit; its own would be a division by 0.
    s_v = gl.where(s_v < SMALLEST_NORMAL, unit, s_v)
    log2_s_v, exchange = fast_log2(s_v), unit * fast_reciprocal(s_v)
    # [Bq, Bkv]
    s_ij = gl.zeros([ROWS, TILE], gl.int32, accumulator(TILE))
    s_ij = warpgroup_mma(q_hat_i, arrived(k_ring, j).permute((1, 0)), s_ij, use_acc=False, is_async=True)
    s_ij = warpgroup_mma_wait(0, deps=(s_ij,))
    let_go(k_ring, j)
    next_s_k, next_s_v = s_k, s_v
    if not IS_LAST:
        next_s_k, next_s_v = gl.load(k_scale_ptr + j + 1), gl.load(v_scale_ptr + j + 1)
    p_hat_ij, change, r, largest, l = softmax_tile(
        s_ij, s_q * s_k, log2_s_v, r, largest, l, first_query, j * TILE, n_k, DP, IS_CAUSAL, IS_LAST
    )
    # [Bq, D]
    pv_ij = gl.zeros([ROWS, DP], gl.int32, accumulator(DP))
    pv_ij = warpgroup_mma(p_hat_ij, arrived(v_ring, j).permute((1, 0)), pv_ij, use_acc=False, is_async=True)
    pv_ij = warpgroup_mma_wait(0, deps=(pv_ij,))
    let_go(v_ring, j)
    change = gl.convert_layout(change * exchange, gl.SliceLayout(1, accumulator(DP)))
    o_i = o_i * change[:, None] + pv_ij.to(gl.float32)
    return r, largest, l, o_i, s_v, next_s_k, next_s_v


@gluon.jit
def query_rows(
    q_tiles, q_ready, k_ring, v_ring, pointers, sizes,
    D: gl.constexpr, DP: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """O and L of warpgroup W's 64 queries."""
    q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, log_sum_exp_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    row: gl.constexpr = gl.SliceLayout(1, accumulator(TILE))
    i, head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_query = i * (ROWS * WARPGROUPS) + W * ROWS
    last = key_tiles(first_query, ROWS, kv_blocks, IS_CAUSAL) - 1
    last = gl.where(first_query < n_q, last, 0)
    all_tiles = key_tiles(i * (ROWS * WARPGROUPS), ROWS * WARPGROUPS, kv_blocks, IS_CAUSAL)
    k_scale_ptr += (head // groups) * kv_blocks
    v_scale_ptr += (head // groups) * kv_blocks
    s_q = gl.load(q_scale_ptr + head * q_blocks + gl.minimum(first_query // SCALE_Q, q_blocks - 1))
    s_k, s_v = gl.load(k_scale_ptr), gl.load(v_scale_ptr)
    r = gl.full([ROWS], NO_KEY, gl.float32, row)
    largest = gl.full([ROWS], NO_KEY, gl.float32, row)
    l = gl.zeros([ROWS, 4], gl.float32, PARTS)
    o_i = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    unit = 1.0
    mbarrier.wait(q_ready, 0)
    q_hat_i = q_tiles.index(W)
    for j in range(0, last):
        r, largest, l, o_i, unit, s_k, s_v = key_tile(
            q_hat_i, s_q, r, largest, l, o_i, unit, s_k, s_v, j, first_query, n_k, k_ring, v_ring,
            k_scale_ptr, v_scale_ptr, DP, IS_CAUSAL, False,
        )  # fmt: skip
    r, largest, l, o_i, unit, s_k, s_v = key_tile(
        q_hat_i, s_q, r, largest, l, o_i, unit, s_k, s_v, last, first_query, n_k, k_ring, v_ring,
        k_scale_ptr, v_scale_ptr, DP, IS_CAUSAL, True,
    )  # fmt: skip
    # Tiles for the warpgroups below: let go of them as they come.
    for j in range(last + 1, all_tiles):
        arrived(k_ring, j)
        let_go(k_ring, j)
        arrived(v_ring, j)
        let_go(v_ring, j)
    l = gl.sum(l, 1)
    o_i = o_i * gl.convert_layout(unit / l, gl.SliceLayout(1, accumulator(DP)))[:, None]
    query = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(DP)))
    d = gl.arange(0, DP, gl.SliceLayout(0, accumulator(DP)))
    offsets = head.to(gl.int64) * n_q * D + query[:, None] * D + d[None, :]
    gl.store(o_ptr + offsets, o_i.to(o_ptr.dtype.element_ty), mask=(query < n_q)[:, None] & (d < D)[None, :])
    # Rows past the end get a huge L: their P is then 0 in the backward pass.
    query = first_query + gl.arange(0, ROWS, row)
    log_sum_exp = gl.where(query < n_q, r + gl.log2(gl.convert_layout(l, row)) - LOG2_INT8_MAX, 0.0 - NO_KEY)
    n_q_padded = q_blocks * SCALE_Q
    gl.store(log_sum_exp_ptr + head.to(gl.int64) * n_q_padded + query, log_sum_exp, mask=query < n_q_padded)


@gluon.jit
def load_tiles(descriptors, q_tiles, q_ready, k_ring, v_ring, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """The loading warp: Q^, then K^ and V^T tiles as their places become free."""
    q_descriptor, k_descriptor, vt_descriptor = descriptors
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    i, head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_query, kv_head = i * (ROWS * WARPGROUPS), head // groups
    mbarrier.expect(q_ready, WARPGROUPS * q_descriptor.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        # Past a head's end lie the next head's queries, or zeros: computed and not stored.
        row = head * (q_blocks * SCALE_Q) + first_query + w * ROWS
        tma.async_copy_global_to_shared(q_descriptor, [row, 0], q_ready, q_tiles.index(w))
    for j in range(0, key_tiles(first_query, ROWS * WARPGROUPS, kv_blocks, IS_CAUSAL)):
        fetch(k_ring, j, k_descriptor, (kv_head * kv_blocks + j) * TILE, 0)
        fetch(v_ring, j, vt_descriptor, kv_head * DP, j * TILE)


SIZES = ("blocks", "heads_total", "heads_together", "groups", "n_q", "n_k", "q_blocks", "kv_blocks")


@gluon.jit(do_not_specialize=SIZES)  # one compilation for every size
def hopper_program(
    q_descriptor, k_descriptor, vt_descriptor, q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, log_sum_exp_ptr,
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks,
    D: gl.constexpr, DP: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(gl.int8, [WARPGROUPS, ROWS, DP], q_descriptor.layout)
    q_ready = barrier(1)
    k_ring, v_ring = ring(k_descriptor, PLACES, WARPGROUPS), ring(vt_descriptor, PLACES, WARPGROUPS)
    fence_async_shared()
    descriptors = (q_descriptor, k_descriptor, vt_descriptor)
    pointers = (q_scale_ptr, k_scale_ptr, v_scale_ptr, o_ptr, log_sum_exp_ptr)
    sizes = (blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks)
    gl.warp_specialize(
        [
            (query_rows, (q_tiles, q_ready, k_ring, v_ring, pointers, sizes, D, DP, IS_CAUSAL, 0)),
            (query_rows, (q_tiles, q_ready, k_ring, v_ring, pointers, sizes, D, DP, IS_CAUSAL, 1)),
            (query_rows, (q_tiles, q_ready, k_ring, v_ring, pointers, sizes, D, DP, IS_CAUSAL, 2)),
            (load_tiles, (descriptors, q_tiles, q_ready, k_ring, v_ring, sizes, DP, IS_CAUSAL)),
        ],
        [4, 4, 1], [REGISTERS, REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def tile_shapes(padded_head_dim: int) -> dict[str, tuple[int, int]]:
    """The tiles [rows, columns] that the program's descriptors fetch."""
    q, k = (ROWS.value, padded_head_dim), (BLOCK_KV, padded_head_dim)
    return {"q_descriptor": q, "k_descriptor": k, "vt_descriptor": k[::-1]}


def run(inputs: ForwardInputs, *, is_causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """O [B, H, Nq, D] and L [B, H, Nq padded], as `forward.program.run` gives them, from level 4's inputs."""
    query, key = inputs.query, inputs.key
    batch, heads, n_q, head_dim = query.shape
    n_q_padded, n_k_padded, dp = padded_length(n_q), padded_length(key.shape[2]), padded_head_dim(head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    log_sum_exp = query.new_empty(batch, heads, n_q_padded, dtype=torch.float32)
    blocks = -(-n_q_padded // LAUNCH.block_q)
    hats = (inputs.q_hat.values, inputs.k_hat.values, inputs.v_hat.transposed)
    tiles = (descriptor(x, *shape) for x, shape in zip(hats, tile_shapes(dp).values(), strict=True))
    hopper_program[(blocks * batch * heads,)](
        *tiles, inputs.q_hat.scale, inputs.k_hat.scale, inputs.v_hat.scale, output, log_sum_exp,
        blocks, batch * heads, heads_at_a_time(2 * n_k_padded * dp), heads // key.shape[1], n_q, key.shape[2],
        n_q_padded // BLOCK_Q, n_k_padded // BLOCK_KV,
        D=head_dim, DP=dp, IS_CAUSAL=is_causal, **OPTIONS,
    )  # fmt: skip
    return output, log_sum_exp


LAUNCHES = {"forward": LAUNCH}


def kernels(head_dim: int) -> tuple[str, ...]:
    return ("forward",)


def program_of(kernel: str):
    return hopper_program, {}, OPTIONS


def signature(kernel: str, padded_head_dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    tiles = {name: (torch.int8, shape) for name, shape in tile_shapes(padded_head_dim).items()}
    return declared.signature_of(hopper_program, {}, tiles, dtype)
