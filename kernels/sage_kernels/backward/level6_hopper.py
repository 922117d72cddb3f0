"""Level 6, Hopper: level 5's kept dS with level 4's division of work.

The program of keys is level 4's. It writes what it has anyway, dS^T over its row's scale, through shared memory and the
copy engine: tiles of [128 keys, 128 queries]. In the program of queries each warpgroup has a ring for the 64
queries of such tiles that are its own, and reads them transposed; K^T is for all three.

Expect: a multiprocessor's time goes to one matmul in INT8, one in 16 bit and an exponential per score less than in
level 4, and dQ waits for memory.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from sage_kernels.backward import level4_hopper
from sage_kernels.backward.kept import Kept, heads_together, in_rounds, room
from sage_kernels.backward.level4_hopper import (
    AT_START,
    HALF,
    LOADING_REGISTERS,
    SCALE_Q,
    SIZES,
    fetch_with_line,
    row_quantized,
    start,
    store,
    taken_in,
)
from sage_kernels.backward.program import BackwardInputs, Gradients
from sage_kernels.hopper import (
    ROWS,
    TILE,
    accumulator,
    arrived,
    descriptor,
    fetch,
    heads_at_a_time,
    key_tiles,
    let_go,
    ring,
    work_item,
)
from sage_kernels.launch import Launch
from sage_kernels.quantize import BLOCK_KV, BLOCK_Q, padded_head_dim, padded_length

LAUNCHES = level4_hopper.LAUNCHES | {"dq": Launch(192, BLOCK_KV, 12, 3, 160)}


@gluon.jit
def keep(kept, dst_ij, s_ds, head, first_key, first_query, sizes, W: gl.constexpr):
    """Write dS^T over its scale [ROWS, TILE], and the scales [ROWS]."""
    tiles, descriptor, scale_ptr = kept
    _, _, _, _, _, _, q_blocks, kv_blocks = sizes
    i, j = first_query // TILE, first_key // TILE
    tma.store_wait(0)  # the copy engine has read the tile before this one
    tiles.index(W).store(dst_ij.to(gl.float16))
    fence_async_shared()
    row = ((head * kv_blocks + j) * q_blocks + i) * TILE + W * ROWS
    tma.async_copy_shared_to_global(descriptor, [row, 0], tiles.index(W))
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(TILE)))
    gl.store(scale_ptr + (head * q_blocks + i) * (kv_blocks * TILE) + key, s_ds)


@gluon.jit
def key_tile(dq_i, s_k, j, n_k, kept_ring, scales, kt_ring, DP: gl.constexpr, IS_LAST: gl.constexpr):
    """dq_i after key tile j. Only the last tile needs a mask: a causal one is in dS already."""
    places: gl.constexpr = scales.shape[0]
    column: gl.constexpr = gl.SliceLayout(0, accumulator(TILE))
    # [Bq, Bkv]
    ds_ij = arrived(kept_ring, j).permute((1, 0)).load(accumulator(TILE)).to(gl.float32)
    ds_ij *= scales.index(j % places).load(column)[None, :]
    let_go(kept_ring, j)
    if IS_LAST:
        ds_ij = gl.where((j * TILE + gl.arange(0, TILE, column) < n_k)[None, :], ds_ij, 0.0)
    ds_hat_ij, s_ds = row_quantized(ds_ij, False, DP)
    product = warpgroup_mma_wait(0, deps=(start(ds_hat_ij, arrived(kt_ring, j), DP),))
    let_go(kt_ring, j)
    return taken_in(dq_i, product, s_ds * s_k, DP)


@gluon.jit
def own_tiles(first_query, n_q, kv_blocks, IS_CAUSAL: gl.constexpr):
    """How many key tiles a warpgroup's 64 queries visit; one if they lie past the end, for all to do the same."""
    return gl.where(first_query < n_q, key_tiles(first_query, ROWS, kv_blocks, IS_CAUSAL), 1)


@gluon.jit
def query_rows(
    kept_ring, scales, kt_ring, pointers, sizes, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """dQ of warpgroup W's 64 queries."""
    q_scale_ptr, k_scale_ptr, dq_ptr = pointers
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    i, head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    first_query = i * (ROWS * WARPGROUPS) + W * ROWS
    own = own_tiles(first_query, n_q, kv_blocks, IS_CAUSAL)
    k_scale_ptr += (head // groups) * kv_blocks
    s_q = gl.load(q_scale_ptr + head * q_blocks + gl.minimum(first_query // SCALE_Q, q_blocks - 1))
    s_k = gl.load(k_scale_ptr)
    dq_i = gl.zeros([ROWS, DP], gl.float32, accumulator(DP))
    for j in range(0, own - 1):
        next_s_k = gl.load(k_scale_ptr + j + 1)
        dq_i = key_tile(dq_i, s_k, j, n_k, kept_ring, scales, kt_ring, DP, False)
        s_k = next_s_k
    dq_i = key_tile(dq_i, s_k, own - 1, n_k, kept_ring, scales, kt_ring, DP, True)
    # Tiles for the warpgroups below.
    for j in range(own, key_tiles(i * (ROWS * WARPGROUPS), ROWS * WARPGROUPS, kv_blocks, IS_CAUSAL)):
        arrived(kt_ring, j)
        let_go(kt_ring, j)
    dq_i *= scale + s_q * 0.0  # NaN where s_Q is
    store(dq_ptr + head.to(gl.int64) * n_q * D, dq_i, first_query, n_q, D, DP)


@gluon.jit
def load_for_queries(
    kept_descriptor, scale_descriptor, kt_descriptor, kept_rings, scales, kt_ring, sizes,
    DP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """The loading warp: each warpgroup's tiles of dS with their keys' scales, and K^T for all."""
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks = sizes
    i, head = work_item(gl.program_id(0), blocks, heads_total, heads_together)
    for j in range(0, key_tiles(i * (ROWS * WARPGROUPS), ROWS * WARPGROUPS, kv_blocks, IS_CAUSAL)):
        for w in gl.static_range(WARPGROUPS):
            half = i * WARPGROUPS + w  # of a block of queries
            if j < own_tiles(half * ROWS, n_q, kv_blocks, IS_CAUSAL):
                row = ((head * kv_blocks + j) * q_blocks + half // 2) * TILE
                line = ((head * q_blocks + half // 2) * kv_blocks + j) * TILE
                fetch_with_line(
                    kept_rings[w], scales[w], j, kept_descriptor, row, half % 2 * HALF, scale_descriptor, line
                )
        fetch(kt_ring, j, kt_descriptor, (head // groups) * DP, j * TILE)


@gluon.jit(do_not_specialize=SIZES)
def query_program(
    kept_descriptor, scale_descriptor, kt_descriptor, q_scale_ptr, k_scale_ptr, dq_ptr,
    blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks, scale,
    D: gl.constexpr, DP: gl.constexpr, WARPGROUPS: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """dQ from kept dS."""
    kept_0, kept_1 = ring(kept_descriptor, PLACES, 1), ring(kept_descriptor, PLACES, 1)
    kept_2, kt_ring = ring(kept_descriptor, PLACES, 1), ring(kt_descriptor, PLACES, WARPGROUPS)
    scales_0 = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], scale_descriptor.layout)
    scales_1 = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], scale_descriptor.layout)
    scales_2 = gl.allocate_shared_memory(gl.float32, [PLACES, TILE], scale_descriptor.layout)
    fence_async_shared()
    pointers = (q_scale_ptr, k_scale_ptr, dq_ptr)
    sizes = (blocks, heads_total, heads_together, groups, n_q, n_k, q_blocks, kv_blocks)
    gl.warp_specialize(
        [
            (query_rows, (kept_0, scales_0, kt_ring, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL, 0)),
            (query_rows, (kept_1, scales_1, kt_ring, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL, 1)),
            (query_rows, (kept_2, scales_2, kt_ring, pointers, sizes, scale, D, DP, WARPGROUPS, IS_CAUSAL, 2)),
            (load_for_queries, (kept_descriptor, scale_descriptor, kt_descriptor, (kept_0, kept_1, kept_2),
                                (scales_0, scales_1, scales_2), kt_ring, sizes, DP, WARPGROUPS, IS_CAUSAL)),
        ],
        [4, 4, 1], [REGISTERS, REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def kernels(head_dim: int) -> tuple[str, ...]:
    """The programs that a head size takes, in their order."""
    return (*level4_hopper.kernels(head_dim)[:0:-1], "dq")


def program_of(kernel: str):
    """As level 4's; of dK and dV with `keep`."""
    if kernel != "dq":
        program, constants, options = level4_hopper.program_of(kernel)
        return program, constants | {"KEEP": keep if "dk" in kernel else None}, options
    launch = LAUNCHES[kernel]
    constants = {
        "WARPGROUPS": launch.num_warps // 4, "PLACES": launch.num_stages, "REGISTERS": launch.max_registers
    }  # fmt: skip
    return query_program, constants, {"num_warps": 4, "maxnreg": AT_START[launch.max_registers]}


def tile_shapes(
    kernel: str, padded_head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of the tiles that a program's descriptors fetch, or write: dS."""
    if kernel == "dq":
        return {
            "kept_descriptor": (torch.float16, (TILE.value, HALF.value)),
            "scale_descriptor": (torch.float32, (TILE.value,)),
            "kt_descriptor": (torch.int8, (padded_head_dim, TILE.value)),
        }
    shapes = level4_hopper.tile_shapes(kernel, padded_head_dim, dtype)
    return shapes | {"kept_descriptor": (torch.float16, (ROWS.value, TILE.value))} if "dk" in kernel else shapes


def run_kernel(
    kernel: str, inputs: BackwardInputs, gradients: Gradients, kept: Kept | None, *, is_causal: bool, scale: float
) -> None:
    """What the program of that name computes. kept: where dK's writes dS and dQ's reads it; dV's takes None."""
    if kernel != "dq":
        of_dk = (
            {} if kept is None else {"keep": keep, "kept": (descriptor(kept.ds, ROWS.value, TILE.value), kept.scale)}
        )
        return level4_hopper.run_kernel(kernel, inputs, gradients, is_causal=is_causal, scale=scale, **of_dk)
    batch, heads, n_q, head_dim = inputs.query.shape
    kv_heads, n_k, dp = inputs.key.shape[1], inputs.key.shape[2], padded_head_dim(head_dim)
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(n_k)
    program, constants, options = program_of(kernel)
    tensors = (*kept, inputs.k_hat.transposed)
    shapes = [shape for _, shape in tile_shapes(kernel, dp).values()]
    blocks = -(-n_q_padded // LAUNCHES[kernel].block_q)
    program[(blocks * batch * heads,)](
        *(descriptor(x, *shape) for x, shape in zip(tensors, shapes, strict=True)),
        inputs.q_hat.scale, inputs.k_hat.scale, gradients.query,
        blocks, batch * heads, heads_at_a_time(n_k_padded * dp), heads // kv_heads, n_q, n_k, n_q_padded // BLOCK_Q,
        n_k_padded // BLOCK_KV, scale, D=head_dim, DP=dp, IS_CAUSAL=is_causal, **constants, **options,
    )  # fmt: skip
    return None


def run(inputs: BackwardInputs, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] from level 3's inputs."""
    options = {"is_causal": is_causal, "scale": scale}
    if (together := heads_together(inputs)) == 0:
        return level4_hopper.run(inputs, **options)
    inputs, gradients = level4_hopper.prepared(inputs)
    *alone, of_keys, of_queries = kernels(inputs.query.shape[3])
    for kernel in alone:
        run_kernel(kernel, inputs, gradients, None, **options)
    kept = room(inputs, together, TILE.value)
    for some, theirs in in_rounds(inputs, gradients, together):
        run_kernel(of_keys, some, theirs, kept, **options)
        run_kernel(of_queries, some, theirs, kept, **options)
    return tuple(gradients)
