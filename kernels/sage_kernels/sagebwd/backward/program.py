"""The programs that backward levels 0 to 3 share: dQ by rows of the score matrix, dK and dV by columns.

A split backward recomputes S and dP for the columns, and in return needs no atomic additions: every gradient tile is
summed by one program in a fixed order, so results are the same bit for bit on every run. The split also gives each
INT8 matmul a scale per row of its result for free: the row is exactly what a program's accumulator holds.

What differs between levels are the loop bodies KEY_TILE (dq_i after key tile j) and QUERY_TILE (dk_j, dv_j after query
tile i). In QUERY_TILE everything is transposed: st_ij is S_ij^T, [Bkv, Bq].
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of, strided
from sage_kernels.common.quantize import SCALE_BLOCK, Quantized, padded_head_dim, padded_length
from sage_kernels.common.tiles import Operand, Tile, head_of, key_tile_range, load_tokens, load_with_scale
from sage_kernels.sagebwd.backward.prepare import Units

LOG2_E = math.log2(math.e)


class BackwardInputs(NamedTuple):
    """The inputs of a backward level: 16-bit tensors, and INT8 copies if the level uses them."""

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor
    grad_output: Tensor  # [B, H, Nq, D]
    log_sum_exp: Tensor  # float32 [B, H, Nq padded], of the forward: log2 of the sum of 2^x, x = S log2(e), K smoothed
    delta: Tensor  # [B, H, Nq padded]
    q_hat: Quantized | None
    k_hat: Quantized | None
    do_hat: Quantized | None
    units: Units | None  # of levels 5 and 6
    lengths: Tensor | None = None  # as in ForwardInputs


class QueryTile(NamedTuple):
    """The queries that a program of dQ holds."""

    query: tl.tensor  # their numbers [Bq]
    q_i: tl.tensor  # [Bq, D], 16 bit or INT8
    s_q: tl.tensor  # [Bq]
    do_i: tl.tensor  # [Bq, D]
    log_sum_exp_i: tl.tensor  # [Bq]
    delta_i: tl.tensor  # [Bq]


class KeyTile(NamedTuple):
    """The keys and values that a program of dK and dV holds."""

    key: tl.tensor  # their numbers [Bkv]
    k_j: tl.tensor  # [Bkv, D], 16 bit or INT8
    s_k: tl.tensor  # [Bkv]
    v_j: tl.tensor  # [Bkv, D]


class QueryHead(NamedTuple):
    """The operands of one head from which query tiles are read. Transposes are None for a 16-bit level."""

    q: Operand
    qt: Operand | None
    do: Operand
    dot: Operand | None
    log_sum_exp: tl.tensor  # pointer, as is delta
    delta: tl.tensor


class KeyHead(NamedTuple):
    """The operands of one head from which key tiles are read."""

    k: Operand
    kt: Operand | None
    v: Operand


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dq_program(
    q_strided, q_scale_ptr, k_strided, k_scale_ptr, kt_ptr, v_strided, do_strided, log_sum_exp_ptr, delta_ptr,
    dq_strided, lengths_ptr, heads, group_size, n_q, n_k, n_q_padded, n_k_padded, log2_scale, scale,
    KEY_TILE: tl.constexpr, PER_BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV:
    tl.constexpr, SCALE_BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_Q queries of one head."""
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, BLOCK_KV, SCALE_BLOCK, IS_CAUSAL)
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of causal attention first
    head = tl.program_id(1).to(tl.int64)
    batch, h = head // heads, head % heads
    if lengths_ptr is not None:
        n_q = tl.load(lengths_ptr + batch)
        n_k = tl.where(i * BLOCK_Q < n_q, n_q, 0)  # queries past the end visit no key
    kv_head, h_kv = head // group_size, h // group_size
    s_q_ptr = None if q_scale_ptr is None else q_scale_ptr + head * (n_q_padded // SCALE_BLOCK)
    s_k_ptr = None if k_scale_ptr is None else k_scale_ptr + kv_head * (n_k_padded // SCALE_BLOCK)
    q = Operand(head_of(q_strided, batch, h), q_strided.stride_n, s_q_ptr)
    do = Operand(head_of(do_strided, batch, h), do_strided.stride_n)
    k = Operand(head_of(k_strided, batch, h_kv), k_strided.stride_n, s_k_ptr)
    kt = None if kt_ptr is None else Operand(kt_ptr + kv_head * n_k_padded * DP, n_k_padded, s_k_ptr)
    v = Operand(head_of(v_strided, batch, h_kv), v_strided.stride_n)
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, DP)
    q_i, s_q = load_with_scale(q, query, n_q, log2_scale, TILE)
    do_i = load_tokens(do, query, n_q, D, DP, True)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + head * n_q_padded + query)
    delta_i = tl.load(delta_ptr + head * n_q_padded + query)
    queries = QueryTile(query, q_i, s_q, do_i, log_sum_exp_i, delta_i)
    keys = KeyHead(k, kt, v)
    dq_i = tl.zeros([BLOCK_Q, DP], tl.float32)
    full, end = key_tile_range(i * BLOCK_Q, n_k, BLOCK_Q, BLOCK_KV, IS_CAUSAL)
    for j in range(0, full):
        dq_i = KEY_TILE(dq_i, queries, j, keys, n_k, TILE, False, PER_BLOCK)
    for j in range(full, end):
        dq_i = KEY_TILE(dq_i, queries, j, keys, n_k, TILE, True, PER_BLOCK)
    dq = Operand(head_of(dq_strided, batch, h), dq_strided.stride_n)
    dq_ptrs = dq.pointer + query[:, None].to(tl.int64) * dq.stride + d[None, :]
    dq_i *= (scale + s_q * 0.0)[:, None]  # NaN where s_Q is
    inside = (query[:, None] < n_q) & (d[None, :] < D)
    tl.store(dq_ptrs, dq_i.to(dq.pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def dkdv_program(
    q_strided, q_scale_ptr, qt_ptr, k_strided, k_scale_ptr, v_strided, do_strided, dot_ptr, do_scale_ptr,
    log_sum_exp_ptr, delta_ptr, dk_strided, dv_ptr, lengths_ptr, heads, group_size, n_q, n_k, n_q_padded, n_k_padded,
    log2_scale, dk_scale,
    QUERY_TILE: tl.constexpr, PER_BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr, SCALE_BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV:
    tl.constexpr,
):  # fmt: skip
    """Compute dK, dV or both, laid out alike, of BLOCK_KV keys of one key head."""
    TILE: tl.constexpr = Tile(D, DP, BLOCK_Q, BLOCK_KV, SCALE_BLOCK, IS_CAUSAL)
    j = tl.program_id(0)  # the first keys, which most queries see, first
    kv_head = tl.program_id(1).to(tl.int64)
    kv_heads = heads // group_size
    batch, h_kv = kv_head // kv_heads, kv_head % kv_heads
    if lengths_ptr is not None:
        n_k = tl.load(lengths_ptr + batch)
        n_q = tl.where(j * BLOCK_KV < n_k, n_k, 0)  # keys past the end visit no query
    s_k_ptr = None if k_scale_ptr is None else k_scale_ptr + kv_head * (n_k_padded // SCALE_BLOCK)
    k = Operand(head_of(k_strided, batch, h_kv), k_strided.stride_n, s_k_ptr)
    v = Operand(head_of(v_strided, batch, h_kv), v_strided.stride_n)
    key, d = j * BLOCK_KV + tl.arange(0, BLOCK_KV), tl.arange(0, DP)
    k_j, s_k = load_with_scale(k, key, n_k, log2_scale, TILE)
    keys = KeyTile(key, k_j, s_k, load_tokens(v, key, n_k, D, DP, True))
    dk_j = tl.zeros([BLOCK_KV, DP], tl.float32)
    dv_j = tl.zeros([BLOCK_KV, DP], tl.float32)
    # Query tiles [first, full) cross the diagonal, [full, end) see every key of this tile.
    first, full, end = 0, 0, tl.cdiv(n_q, BLOCK_Q)
    if IS_CAUSAL:
        first = tl.minimum(j * BLOCK_KV // BLOCK_Q, end)
        full = tl.minimum(tl.cdiv((j + 1) * BLOCK_KV - 1, BLOCK_Q), end)
    for g in range(group_size):  # the query heads that share this key head
        h = h_kv * group_size + g
        head = batch * heads + h
        s_q_ptr = None if q_scale_ptr is None else q_scale_ptr + head * (n_q_padded // SCALE_BLOCK)
        s_do_ptr = None if do_scale_ptr is None else do_scale_ptr + head * (n_q_padded // SCALE_BLOCK)
        q = Operand(head_of(q_strided, batch, h), q_strided.stride_n, s_q_ptr)
        do = Operand(head_of(do_strided, batch, h), do_strided.stride_n)
        qt = None if qt_ptr is None else Operand(qt_ptr + head * n_q_padded * DP, n_q_padded, s_q_ptr)
        dot = None if dot_ptr is None else Operand(dot_ptr + head * n_q_padded * DP, n_q_padded, s_do_ptr)
        rows = head * n_q_padded
        queries = QueryHead(q, qt, do, dot, log_sum_exp_ptr + rows, delta_ptr + rows)
        for i in range(first, full):
            dk_j, dv_j = QUERY_TILE(
                dk_j, dv_j, keys, i, queries, n_q, n_k, TILE, True, PER_BLOCK, WITH_DK, WITH_DV
            )  # fmt: skip
        for i in range(full, end):
            dk_j, dv_j = QUERY_TILE(
                dk_j, dv_j, keys, i, queries, n_q, n_k, TILE, False, PER_BLOCK, WITH_DK, WITH_DV
            )  # fmt: skip
    dk_ptr, stride_b, stride_h, stride_n = dk_strided
    offsets = batch * stride_b + h_kv * stride_h + key[:, None].to(tl.int64) * stride_n + d[None, :]
    inside = (key[:, None] < n_k) & (d[None, :] < D)
    if WITH_DK:
        tl.store(dk_ptr + offsets, (dk_j * dk_scale).to(dk_ptr.dtype.element_ty), mask=inside)
    if WITH_DV:
        tl.store(dv_ptr + offsets, dv_j.to(dv_ptr.dtype.element_ty), mask=inside)


def constants_of(launch: Launch, head_dim: int, is_causal: bool, per_block: bool) -> dict:
    """Return the constants that both programs have."""
    return {
        "PER_BLOCK": per_block, "D": head_dim, "DP": padded_head_dim(head_dim), "BLOCK_Q": launch.block_q,
        "BLOCK_KV": launch.block_kv, "SCALE_BLOCK": SCALE_BLOCK, "IS_CAUSAL": is_causal,
    }  # fmt: skip


def run_dq(
    inputs: BackwardInputs,
    key_tile,
    launch: Launch,
    start: Start,
    *,
    per_block: bool,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Compute dQ [B, H, Nq, D], in Q's layout, with the loop body key_tile. scale: c."""
    query, key, v, do = inputs.query, inputs.key, inputs.value, inputs.grad_output
    (batch, heads, n_q, head_dim), n_k = query.shape, key.shape[2]
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(n_k)
    q, _, s_q = copies(query, inputs.q_hat)
    k, kt, s_k = copies(key, inputs.k_hat)
    dq = empty_in_layout_of(query)
    arguments = (
        strided(q), s_q, strided(k), s_k, kt, strided(v), strided(do),
        inputs.log_sum_exp, inputs.delta, strided(dq), inputs.lengths, heads, heads // key.shape[1], n_q, n_k,
        n_q_padded, n_k_padded, scale * LOG2_E, scale,
    )  # fmt: skip
    constants = constants_of(launch, head_dim, is_causal, per_block) | {"KEY_TILE": key_tile}
    start(dq_program, (n_q_padded // launch.block_q, batch * heads), arguments, constants, launch.options)
    return dq


def run_dkdv(
    inputs: BackwardInputs,
    query_tile,
    launch: Launch,
    start: Start,
    *,
    per_block: bool,
    is_causal: bool,
    scale: float,
    outputs: str,
) -> tuple[Tensor, Tensor]:
    """Compute dK and dV [B, Hkv, Nk, D], in V's layout, with the loop body query_tile.

    outputs "dk" or "dv" leaves the other unwritten.
    """
    query, key, value, do = inputs.query, inputs.key, inputs.value, inputs.grad_output
    (batch, heads, n_q, head_dim), (_, kv_heads, n_k, _) = query.shape, key.shape
    n_q_padded, n_k_padded = padded_length(n_q), padded_length(n_k)
    q, qt, s_q = copies(query, inputs.q_hat)
    k, _, s_k = copies(key, inputs.k_hat)
    _, dot, s_do = copies(do, inputs.do_hat)
    dk, dv = (empty_in_layout_of(value) for _ in range(2))
    dk_scale = scale if inputs.q_hat is None else 1 / LOG2_E  # the scale of an INT8 Q carries c log2(e)
    arguments = (
        strided(q), s_q, qt, strided(k), s_k, strided(value),
        strided(do), dot, s_do, inputs.log_sum_exp, inputs.delta, strided(dk), dv,
        inputs.lengths, heads, heads // kv_heads, n_q, n_k, n_q_padded, n_k_padded, scale * LOG2_E, dk_scale,
    )  # fmt: skip
    constants = constants_of(launch, head_dim, is_causal, per_block)
    constants |= {"QUERY_TILE": query_tile, "WITH_DK": "dk" in outputs, "WITH_DV": "dv" in outputs}
    grid = (n_k_padded // launch.block_kv, batch * kv_heads)
    start(dkdv_program, grid, arguments, constants, launch.options)
    return dk, dv


def copies(x: Tensor, quantized: Quantized | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (x or X^, its transpose, its scales) for a program; the last two are None in 16 bit."""
    return (x, None, None) if quantized is None else (quantized.values, quantized.transposed, quantized.scale)
