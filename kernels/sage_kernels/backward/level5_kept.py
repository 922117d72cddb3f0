"""Level 5: level 3, whose program of keys keeps dS for dQ.

dK rounds dS^T with a scale per key, dQ rounds dS with a scale per query; for these two roundings of the same numbers
level 3 computes S, P and dP in both programs. Here the program of keys writes dS^T over its row's scale to memory, in
float16, which loses next to nothing beside INT8, in the order that suits dQ. The program of queries rounds it and
multiplies.

Expect: dQ does without its matmuls Q K^T and dO V^T and without an exponential, but waits for memory: 2 bytes per score
are written once and read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.backward import program
from sage_kernels.backward.kept import Kept, heads_together, in_rounds, room
from sage_kernels.backward.level3_folded import key_rows
from sage_kernels.backward.program import BackwardInputs, Gradients
from sage_kernels.launch import Launch
from sage_kernels.quantize import padded_head_dim, padded_length
from sage_kernels.tiles import ROUNDER, key_tile_range, load_padded, low_byte, offset_dot, row_scale

TILE, HALF = tl.constexpr(128), tl.constexpr(64)  # a tile is kept as two halves of 64 queries


@triton.jit
def in_memory(dst_ij, KEYS: tl.constexpr):
    """dS^T [KEYS, TILE] in the order in which it is kept: [2, KEYS / 32, 2048], the first axis for the halves.

    8 numbers that lie side by side are what a thread of the program of queries must hold of a matmul's left side: of
    one query, keys 2t, 2t+1, 2t+8 and 2t+9 of two groups of 16 (`tiles.group_columns`). So it loads them at once, and
    no data crosses threads there.
    """
    # keys (group of 32, group of 16, h, t, p), queries (half, warp, r, g)
    bits = dst_ij.reshape(KEYS // 32, 2, 2, 4, 2, 2, 4, 2, 8).permute(5, 0, 7, 6, 8, 3, 1, 4, 2)
    return bits.reshape(2, KEYS // 32, 2048)


@triton.jit
def from_memory(kept):
    """dS [HALF, TILE] of a kept half [TILE * HALF], its keys in the order of `tiles.group_columns`."""
    return kept.reshape(4, 2, 4, 8, 4, 2, 2, 2).permute(2, 1, 3, 0, 5, 4, 7, 6).reshape(HALF, TILE)


@triton.jit
def keep(kept, dst_ij, s_ds, i, key, n_q_padded, KEYS: tl.constexpr):
    """Write dS^T over its scale [KEYS, TILE], of a tile's keys or half, and the scales [KEYS], 0 past the last key."""
    kept_ptr, kept_scale_ptr, head, n_k, n_k_padded = kept
    q_blocks, first_key = n_q_padded // TILE, tl.program_id(0) * KEYS
    kept_ptr += head * n_q_padded * n_k_padded + (first_key // TILE * q_blocks + i).to(tl.int64) * (TILE * TILE)
    kept_ptr += first_key % TILE * HALF
    halves, groups, numbers = tl.arange(0, 2), tl.arange(0, KEYS // 32), tl.arange(0, 2048)
    offsets = halves[:, None, None] * (TILE * HALF) + groups[None, :, None] * 2048 + numbers[None, None, :]
    tl.store(kept_ptr + offsets, in_memory(dst_ij.to(tl.float16), KEYS))
    place = key // 16 * 16 + key % 8 // 2 * 4 + key % 16 // 8 * 2 + key % 2  # of tiles.group_columns
    tl.store(kept_scale_ptr + (head * q_blocks + i) * n_k_padded + place, tl.where(key < n_k, s_ds, 0.0))


@triton.jit
def query_rows(dq_i, j, n_k_padded, q_blocks, kept_ptr, kept_scale_ptr, k_scale_ptr, kt_ptr, DP: tl.constexpr):
    """dq_i after key tile j. No tile needs a mask: past the diagonal dS is 0, past the last key its scale is."""
    kept = tl.load(kept_ptr + (j * q_blocks).to(tl.int64) * (TILE * TILE) + tl.arange(0, TILE * HALF))
    # [Bq, Bkv]
    ds_ij = from_memory(kept).to(tl.float32) * tl.load(kept_scale_ptr + j * TILE + tl.arange(0, TILE))[None, :]
    s_ds, inverse = row_scale(ds_ij, False)
    ds_hat_ij = low_byte(ds_ij * inverse[:, None])
    kt_hat_j = load_padded(kt_ptr + j * TILE, tl.arange(0, DP), n_k_padded, TILE)
    s_dq = s_ds * tl.load(k_scale_ptr + j)
    return (dq_i - (s_dq * ROUNDER)[:, None]) + offset_dot(ds_hat_ij, tl.trans(kt_hat_j), HALF, DP) * s_dq[:, None]


@triton.jit(do_not_specialize=["n_q", "n_k"])
def query_program(
    kept_ptr, kept_scale_ptr, q_scale_ptr, k_scale_ptr, kt_ptr, dq_ptr, groups, n_q, n_k, n_q_padded, n_k_padded, scale,
    D: tl.constexpr, DP: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ from kept dS."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of causal attention first
    head = tl.program_id(1).to(tl.int64)
    kv_head, i, q_blocks = head // groups, block // 2, n_q_padded // TILE
    kept_ptr += head * n_q_padded * n_k_padded + i * (TILE * TILE) + block % 2 * (TILE * HALF)
    kept_scale_ptr += (head * q_blocks + i) * n_k_padded
    k_scale_ptr += kv_head * (n_k_padded // TILE)
    kt_ptr += kv_head * n_k_padded * DP
    dq_i = tl.zeros([HALF, DP], tl.float32)
    _, end = key_tile_range(block * HALF, n_k, HALF, TILE, IS_CAUSAL)
    for j in range(0, end):
        dq_i = query_rows(dq_i, j, n_k_padded, q_blocks, kept_ptr, kept_scale_ptr, k_scale_ptr, kt_ptr, DP)
    query, d = block * HALF + tl.arange(0, HALF), tl.arange(0, DP)
    dq_ptrs = dq_ptr + head * n_q * D + query[:, None] * D + d[None, :]
    dq_i *= scale + tl.load(q_scale_ptr + head * q_blocks + i) * 0.0  # NaN where s_Q is
    tl.store(dq_ptrs, dq_i.to(dq_ptr.dtype.element_ty), mask=(query[:, None] < n_q) & (d[None, :] < D))


def run_dkdv(inputs: BackwardInputs, gradients: Gradients, kept: Kept, launch: Launch, **options) -> None:
    """dK, and dV if options["outputs"] has it, and kept dS; the other options are those of `program.run_dkdv`."""
    into = gradients.key, gradients.value
    program.run_dkdv(inputs, key_rows, launch, per_block=False, into=into, keep=keep, kept=kept, **options)


def run_dq(
    inputs: BackwardInputs, gradients: Gradients, kept: Kept, launch: Launch, *, is_causal: bool, scale: float
) -> None:
    """dQ of the heads whose dS is kept. scale: c."""
    batch, heads, n_q, head_dim = inputs.query.shape
    kv_heads, n_k = inputs.key.shape[1:3]
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(n_k)
    query_program[(n_q_padded // launch.block_q, batch * heads)](
        *kept, inputs.q_hat.scale, inputs.k_hat.scale, inputs.k_hat.transposed, gradients.query, heads // kv_heads,
        n_q, n_k, n_q_padded, n_k_padded, scale, D=head_dim, DP=padded_head_dim(head_dim), IS_CAUSAL=is_causal,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def prepared(inputs: BackwardInputs) -> tuple[BackwardInputs, Gradients]:
    """(inputs that can be cut into heads without a copy, gradients, empty)."""
    query, key = inputs.query, inputs.key
    gradients = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, key))
    do, v = inputs.grad_output.contiguous(), inputs.value.contiguous()
    return inputs._replace(grad_output=do, value=v), Gradients(*gradients)


def run(
    inputs: BackwardInputs, launches: dict[str, Launch], *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, H, Nq, D], dK and dV [B, Hkv, Nk, D] with the programs in `launches`, of which dQ's is the last.

    At least one head's dS must fit (`kept.heads_together`).
    """
    options = {"is_causal": is_causal, "scale": scale}
    inputs, gradients = prepared(inputs)
    *alone, of_keys, of_queries = launches
    for kernel in alone:
        into = gradients.key, gradients.value
        program.run_dkdv(inputs, key_rows, launches[kernel], per_block=False, outputs=kernel, into=into, **options)
    together = heads_together(inputs)
    kept = room(inputs, together, TILE.value)
    outputs = of_keys.partition("_")[0]
    for some, theirs in in_rounds(inputs, gradients, together):
        run_dkdv(some, theirs, kept, launches[of_keys], outputs=outputs, **options)
        run_dq(some, theirs, kept, launches[of_queries], **options)
    return tuple(gradients)
