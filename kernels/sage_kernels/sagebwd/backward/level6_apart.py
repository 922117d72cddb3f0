"""Level 6, Hopper, head sizes 65 to 128: dK and dV in one pass of float16 pairs, dQ in a program of its own.

Level 5 adds up dQ in memory: 4 D bytes a query that must be zeros before and that a program reads after. Its two
warpgroups hand dS^T over to each other for it, and so wait for each other in every tile. Here they make dK and dV
alone, of level 5's numbers (`level5/units.py`), and `level6_queries.py` makes dQ. Both compute S and dP: seven matmuls
a tile instead of five. But nothing is handed over, zeroed or added in memory, and a warpgroup waits for nobody but the
loading warp. dK and dV are level 5's bit for bit; dQ rounds as level 3 does.

Expect: slower than level 5 where there are many tiles, faster where there are few: short sequences, a causal mask.

A warpgroup owns 64 rows of K^ and V. Its halves of dk_j and dv_j take 128 registers of a thread, and what is left of
240 holds halves of S and dP, both halves of P or dS as pairs and little else. So, as in `level5/wide.py`, a product is
added by halves of its columns, and the assembler takes its first level of optimisation. Only two matmuls run during
other work: the second half of S^T behind the first one, and the first half of dP^T while the second half of P^T is
computed.

Rings: Q^ with L, dO with delta, dO^T, Q^T. The order in which a warpgroup waits for them and releases them (r):

    Q^: P^T | dO: half of dS^T | dO^T: P^T dO^, r dO^T, r Q^ | other half of dS^T | Q^T: dS^T Q^, r dO and r Q^T

Q^ and dO are released later than they are read, for L and delta came with them. What was computed from these has gone
into a matmul by then, so no load of them is still on its way when the copy engine overwrites them.
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
    HALF, LOADING_REGISTERS, ROWS, SCALE_KV, SIZES, TILE, Fetched, Sizes, accumulator, acquire, add_scaled_half,
    allocate, barrier, copy_own, count_query_tiles, descriptor, fetch, fetch_with_lines, fetched_rows, key_work_item,
    release, ring, row_and_column, sizes_of, start_16bit, start_int8, store_halves,
)  # fmt: skip
from sage_kernels.sagebwd.backward import level6_queries
from sage_kernels.sagebwd.backward.level5.units import ds_half, join_pairs, load_factors, p_half, quantize_pairs
from sage_kernels.sagebwd.backward.program import LOG2_E, BackwardInputs

HEAD_DIMS = (128,)  # padded
LAUNCH = Launch(TILE.value, TILE.value, 8, 2, 240)
LAUNCHES = {"dq": level6_queries.LAUNCH, "dkdv_pairs": LAUNCH}
CONSTANTS = {"PLACES": LAUNCH.num_stages, "REGISTERS": LAUNCH.max_registers}
OPTIONS = {"num_warps": 4, "maxnreg": 168, "ptx_options": "--opt-level 1"}  # maxnreg until the warps part

# Arguments that travel together
Descriptors = namedtuple("Descriptors", "k v q do qt dot log_sum_exp delta")
Pointers = namedtuple("Pointers", "k_scale factors dk dv")
Keys = namedtuple("Keys", "k v ready")  # shared memory for a program's K^ and V, and their barrier
Rings = namedtuple("Rings", "q do qt dot")
Lines = namedtuple("Lines", "log_sum_exp delta")  # shared memory [places, TILE]: L with Q^, delta with dO


@gluon.jit
def query_tile(
    gradients, keys, rings, lines, pointers, s_k, n, at, first_key, first_query, n_k,
    RAGGED: gl.constexpr, IS_MASKED: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Return halves of dk_j and dv_j after the n-th query tile, the at-th of all. st is S_ij^T, a half at a time."""
    dk_0, dk_1, dv_0, dv_1 = gradients
    k_hat_j, v_j = keys.k.index(W), keys.v.index(W)
    s_q, fit, factor_k, factor_v = load_factors(pointers.factors, at)
    s = s_q * s_k
    log_sum_exp = lines.log_sum_exp.index(n % lines.log_sum_exp.shape[0])
    delta = lines.delta.index(n % lines.delta.shape[0])
    q_hat_i = acquire(rings.q, n)
    st_0 = start_int8(k_hat_j, q_hat_i.slice(0, HALF), HALF)
    st_1 = start_int8(k_hat_j, q_hat_i.slice(HALF, HALF), HALF)
    st_0 = warpgroup_mma_wait(1, deps=(st_0,))
    pt_0 = p_half(st_0, s, log_sum_exp.slice(0, HALF), first_key, first_query, IS_MASKED)
    st_1 = warpgroup_mma_wait(0, deps=(st_1,))
    do_i = acquire(rings.do, n)
    dpt_0 = start_16bit(v_j, do_i.slice(0, HALF), HALF)
    pt_1 = p_half(st_1, s, log_sum_exp.slice(HALF, HALF), first_key, first_query + HALF, IS_MASKED)
    dpt_0 = warpgroup_mma_wait(0, deps=(dpt_0,))
    dst_0 = ds_half(pt_0, dpt_0, fit, delta.slice(0, HALF), first_key, n_k, RAGGED)
    pt_hat_ij, s_p = quantize_pairs(join_pairs(pt_0, pt_1), HALF)
    s_p *= factor_v
    dot_i = acquire(rings.dot, n)
    product = warpgroup_mma_wait(0, deps=(start_int8(pt_hat_ij, dot_i.slice(0, HALF), HALF),))
    dv_0 = add_scaled_half(dv_0, product, s_p)
    product = warpgroup_mma_wait(0, deps=(start_int8(pt_hat_ij, dot_i.slice(HALF, HALF), HALF),))
    release(rings.dot, n)
    release(rings.q, n)
    dv_1 = add_scaled_half(dv_1, product, s_p)
    dpt_1 = warpgroup_mma_wait(0, deps=(start_16bit(v_j, do_i.slice(HALF, HALF), HALF),))
    dst_1 = ds_half(pt_1, dpt_1, fit, delta.slice(HALF, HALF), first_key, n_k, RAGGED)
    dst_hat_ij, s_ds = quantize_pairs(join_pairs(dst_0, dst_1), HALF)
    s_ds *= factor_k
    qt_i = acquire(rings.qt, n)
    product = warpgroup_mma_wait(0, deps=(start_int8(dst_hat_ij, qt_i.slice(0, HALF), HALF),))
    release(rings.do, n)
    dk_0 = add_scaled_half(dk_0, product, s_ds)
    product = warpgroup_mma_wait(0, deps=(start_int8(dst_hat_ij, qt_i.slice(HALF, HALF), HALF),))
    release(rings.qt, n)
    dk_1 = add_scaled_half(dk_1, product, s_ds)
    return dk_0, dk_1, dv_0, dv_1


@gluon.jit
def key_rows(
    keys, rings, lines, pointers, sizes, dk_scale,
    D: gl.constexpr, RAGGED: gl.constexpr, IS_CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of warpgroup W's 64 keys, over the query heads that share them."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * TILE + W * ROWS
    tiles = count_query_tiles(block * TILE, sizes.q_blocks, IS_CAUSAL)
    s_k = gl.load(pointers.k_scale + kv_head * sizes.kv_blocks + block)
    zeros = gl.zeros([ROWS, HALF], gl.float32, accumulator(HALF))
    gradients = (zeros, zeros, zeros, zeros)
    mbarrier.wait(keys.ready, 0)
    n = 0
    for g in range(0, sizes.group_size):
        i = sizes.q_blocks - 1
        at = (kv_head * sizes.group_size + g) * sizes.q_blocks + i
        for _ in range(1, tiles):
            gradients = query_tile(
                gradients, keys, rings, lines, pointers, s_k, n, at, first_key, i * TILE, sizes.n_k,
                RAGGED, False, W,
            )  # fmt: skip
            n += 1
            i -= 1
            at -= 1
        gradients = query_tile(
            gradients, keys, rings, lines, pointers, s_k, n, at, first_key, i * TILE, sizes.n_k,
            RAGGED, IS_CAUSAL, W,
        )  # fmt: skip
        n += 1
    dk_0, dk_1, dv_0, dv_1 = gradients
    dk_0, dk_1 = dk_0 * dk_scale, dk_1 * dk_scale
    store_halves(pointers.dk, dk_0, dk_1, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D)
    store_halves(pointers.dv, dv_0, dv_1, kv_head, first_key, sizes.n_k, sizes.out_heads_per_row, D)


@gluon.jit
def load_tiles(descriptors, keys, rings, lines, sizes, DP: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Load K^ and V, then tiles of Q^ with L, dO with delta, dO^T and Q^T."""
    block, kv_head = key_work_item(gl.program_id(0), sizes)
    first_key = block * TILE
    nbytes: gl.constexpr = descriptors.k.block_type.nbytes + descriptors.v.block_type.nbytes
    mbarrier.expect(keys.ready, 2 * nbytes)
    copy_own(keys.k, keys.ready, descriptors.k, kv_head * (sizes.kv_blocks * SCALE_KV) + first_key, 0, 2)
    row, column = row_and_column(kv_head, first_key, sizes.n_k, sizes.v_heads_per_row, DP)
    copy_own(keys.v, keys.ready, descriptors.v, row, column, 2)
    n = 0
    for g in range(0, sizes.group_size):
        head = kv_head * sizes.group_size + g
        i = sizes.q_blocks - 1
        for _ in range(0, count_query_tiles(first_key, sizes.q_blocks, IS_CAUSAL)):
            token = (head * sizes.q_blocks + i) * TILE
            fetch_with_lines(
                rings.q, (lines.log_sum_exp,), n, descriptors.q, token, 0, (descriptors.log_sum_exp,), token
            )  # fmt: skip
            row, column = row_and_column(head, i * TILE, sizes.n_q, sizes.do_heads_per_row, DP)
            fetch_with_lines(rings.do, (lines.delta,), n, descriptors.do, row, column, (descriptors.delta,), token)
            fetch(rings.dot, n, descriptors.dot, head * DP, i * TILE)
            fetch(rings.qt, n, descriptors.qt, head * DP, i * TILE)
            n += 1
            i -= 1


@gluon.jit(do_not_specialize=SIZES)
def dkdv_pairs_program(
    k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
    delta_descriptor, k_scale_ptr, factors_ptr, dk_ptr, dv_ptr,
    blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
    v_heads_per_row, do_heads_per_row, out_heads_per_row, dk_scale,
    D: gl.constexpr, DP: gl.constexpr, PLACES: gl.constexpr, REGISTERS: gl.constexpr, RAGGED: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    keys = Keys(allocate(k_descriptor, 2), allocate(v_descriptor, 2), barrier(1))
    q_ring, do_ring = ring(q_descriptor, PLACES, 2), ring(do_descriptor, PLACES, 2)
    rings = Rings(q_ring, do_ring, ring(qt_descriptor, PLACES, 2), ring(dot_descriptor, PLACES, 2))
    lines = Lines(allocate(l_descriptor, PLACES), allocate(delta_descriptor, PLACES))
    fence_async_shared()
    descriptors = Descriptors(
        k_descriptor, v_descriptor, q_descriptor, do_descriptor, qt_descriptor, dot_descriptor, l_descriptor,
        delta_descriptor,
    )  # fmt: skip
    pointers = Pointers(k_scale_ptr, factors_ptr, dk_ptr, dv_ptr)
    sizes = Sizes(
        blocks, heads_total, heads_together, group_size, n_q, n_k, q_blocks, kv_blocks,
        v_heads_per_row, do_heads_per_row, out_heads_per_row,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, RAGGED, IS_CAUSAL, 0)),
            (key_rows, (keys, rings, lines, pointers, sizes, dk_scale, D, RAGGED, IS_CAUSAL, 1)),
            (load_tiles, (descriptors, keys, rings, lines, sizes, DP, IS_CAUSAL)),
        ],
        [4, 1], [REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def kernels(head_dim: int) -> tuple[str, ...]:
    """Return the programs that a head size takes: names in `LAUNCHES`."""
    return ("dq", "dkdv_pairs") if padded_head_dim(head_dim) in HEAD_DIMS else ()


def run_dkdv_pairs(
    inputs: BackwardInputs, do: Fetched, v: Fetched, start: Start, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute dK and dV [B, Hkv, Nk, D], in V's layout. do, v: the inputs' dO and V."""
    key, q_hat, k_hat, do_hat = inputs.key, inputs.q_hat, inputs.k_hat, inputs.do_hat
    head_dim, dp = key.shape[3], padded_head_dim(key.shape[3])
    # Of tiles: Q^, Q^T, dO^T one byte each; dO two.
    sizes = sizes_of(
        inputs.query, key, TILE.value, of_keys=True, bytes_per_number=5, v_heads_per_row=v.heads_per_row,
        do_heads_per_row=do.heads_per_row, out_heads_per_row=heads_per_row(inputs.value),
    )  # fmt: skip
    dk, dv = empty_in_layout_of(inputs.value), empty_in_layout_of(inputs.value)
    own, tile = (ROWS.value, dp), (TILE.value, dp)
    arguments = (
        descriptor(k_hat.values, *own), descriptor(v.rows, *own), descriptor(q_hat.values, *tile),
        descriptor(do.rows, *tile), descriptor(q_hat.transposed, *tile[::-1]),
        descriptor(do_hat.transposed, *tile[::-1]), descriptor(inputs.units.log_sum_exp, TILE.value),
        descriptor(inputs.units.delta, TILE.value), k_hat.scale, inputs.units.factors, dk, dv, *sizes,
        1 / LOG2_E,  # of dK: the scale of Q^ carries c log2(e)
    )  # fmt: skip
    ragged = key.shape[2] % TILE.value != 0
    constants = CONSTANTS | {"D": head_dim, "DP": dp, "RAGGED": ragged, "IS_CAUSAL": is_causal}
    start(dkdv_pairs_program, (sizes.blocks * sizes.heads_total,), arguments, constants, OPTIONS)
    return dk, dv


def run_hopper_backward(
    inputs: BackwardInputs, start: Start, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] from level 5's inputs."""
    do, v = fetched_rows(inputs.grad_output), fetched_rows(inputs.value)
    dq = level6_queries.run_dq(inputs, do, v, start, is_causal=is_causal, scale=scale)
    return dq, *run_dkdv_pairs(inputs, do, v, start, is_causal=is_causal)
