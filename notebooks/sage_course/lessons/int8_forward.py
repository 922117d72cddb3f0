"""Notebook 08: what each level of the INT8 forward ladder adds, in Triton; tried in the library's own program.

Needs Triton, and `teaching.triton_device()` before it is imported.
"""

import math

import torch
import triton
import triton.language as tl
from sage_kernels.common.device import triton_device
from sage_kernels.common.launch import Launch
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.tiles import (
    LOG2_INT8_MAX,
    NO_KEY,
    ROUNDER,
    ROUNDER_BITS,
    TINY,
    integer_dot,
    is_visible,
    load_padded,
    load_tile,
    load_transposed,
    round_to_int8,
)
from sage_kernels.sagebwd.forward.program import run_forward_program
from sage_kernels.sagebwd.ladder import LOG2_E, prepare_forward

from sage_course.gaps import Gap, source
from sage_course.lessons import with_mistakes

if not torch.cuda.is_available():
    import sage_kernels.common.interpreter  # noqa: F401

HEAD_DIM = 32
SMALL = Launch(block_q=32, block_kv=64, num_warps=4, num_stages=2)  # two tiles of keys share a scale


@triton.jit
def level1(m, l, o_i, q_hat_i, s_q, query, j, k, v, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_new = tl.maximum(m, tl.maximum(tl.max(s_ij, 1), NO_KEY))
    p_ij = tl.math.exp2(s_ij - m_new[:, None])
    rescale = tl.math.exp2(m - m_new)
    l = l * rescale + tl.sum(p_ij, 1)
    v_j = load_tile(v, j * TILE.BLOCK_KV, n_k, TILE.BLOCK_KV, TILE, IS_MASKED)
    o_i = tl.dot(p_ij.to(v_j.dtype), v_j, o_i * rescale[:, None])
    return m_new, l, o_i


@triton.jit
def level2(m, l, o_i, q_hat_i, s_q, query, j, k, vt, n_k, TILE: tl.constexpr, IS_MASKED: tl.constexpr):
    key = j * TILE.BLOCK_KV + tl.arange(0, TILE.BLOCK_KV)
    k_hat_j = load_padded(k, key, TILE.DP)
    s_k = tl.load(k.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    if IS_MASKED:
        s_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, TILE.IS_CAUSAL), s_ij, -float("inf"))
    m_ij = tl.maximum(tl.max(s_ij, 1), NO_KEY)
    m_new = tl.maximum(m, m_ij)
    rescale = tl.math.exp2(m - m_new)
    s_p = tl.math.exp2(m_ij - m_new) / 127.0
    p_ij = 127.0 * tl.math.exp2(s_ij - m_ij[:, None])
    l = l * rescale + tl.sum(p_ij, 1) * s_p
    p_hat_ij = round_to_int8(p_ij)
    vt_hat_j = load_transposed(vt, j * TILE.BLOCK_KV, TILE.DP, TILE.BLOCK_KV)
    s_v = tl.load(vt.scale + j * TILE.BLOCK_KV // TILE.SCALE_BLOCK)
    o_i = o_i * rescale[:, None] + integer_dot(p_hat_ij, tl.trans(vt_hat_j)) * (s_p * s_v)[:, None]
    return m_new, l, o_i


@triton.jit
def offset_dot(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    start = tl.full([ROWS, COLUMNS], ROUNDER_BITS, tl.int32)
    return tl.dot(a, b, start, out_dtype=tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def low_byte(x):
    return (x + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def folded_softmax(s_ij, s_qk, m, l):
    s_qk += TINY
    m_ij = tl.maximum((tl.max(s_ij, 1) - ROUNDER) * s_qk, NO_KEY)
    room = tl.maximum(s_qk - 0.005, 0.0)
    t = tl.fma(s_qk, ROUNDER, m_ij - LOG2_INT8_MAX + room)
    m_ij = tl.fma(-s_qk, ROUNDER, t) + LOG2_INT8_MAX
    p_ij = tl.math.exp2(tl.fma(s_ij, s_qk[:, None], -t[:, None]))
    m_new = tl.maximum(m, m_ij)
    rescale = tl.math.exp2(m - m_new)
    s_p = tl.math.exp2(m_ij - m_new) / 127.0
    return p_ij, s_p, m_new, l * rescale + tl.sum(p_ij, 1) * s_p, rescale


@triton.jit
def group_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


# Programs that try them


@triton.jit
def dot_program(a_ptr, b_ptr, out_ptr, DOT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    row, d = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    a, b = tl.load(a_ptr + row[:, None] * DEPTH + d[None, :]), tl.load(b_ptr + row[:, None] * DEPTH + d[None, :])
    tl.store(out_ptr + row[:, None] * ROWS + row[None, :], DOT(a, tl.trans(b), ROWS, ROWS))


@triton.jit
def byte_program(x_ptr, out_ptr, TO_BYTE: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, TO_BYTE(tl.load(x_ptr + i)))


@triton.jit
def softmax_program(s_ptr, s_qk_ptr, m_ptr, l_ptr, p_ptr, rows_ptr, SOFTMAX: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    matrix = i[:, None] * SIZE + i[None, :]
    s_ij, s_qk, m, l = tl.load(s_ptr + matrix), tl.load(s_qk_ptr + i), tl.load(m_ptr + i), tl.load(l_ptr + i)
    p_ij, s_p, m_new, l, rescale = SOFTMAX(s_ij, s_qk, m, l)
    tl.store(p_ptr + matrix, p_ij)
    tl.store(rows_ptr + i, s_p)
    tl.store(rows_ptr + SIZE + i, m_new)
    tl.store(rows_ptr + 2 * SIZE + i, l)
    tl.store(rows_ptr + 3 * SIZE + i, rescale)


@triton.jit
def group_program(x_ptr, out_ptr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    matrix = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + matrix, GROUP(tl.load(x_ptr + matrix), ROWS, COLUMNS))


def run_level(level):
    """Return run(key_tile, q, k, v) -> O, L: the library's program with this body of its loop, on a level's inputs."""

    def launch(key_tile, q, k, v):
        c = 1 / math.sqrt(q.shape[-1])
        inputs = prepare_forward(*(x.to(triton_device()) for x in (q, k, v)), level, scale=c, smooth_k=True)
        if level == 1:  # a reader may take the scale of a wrong block: numbers must be there
            scales = torch.linspace(3, 7, 256, device=triton_device())
            scales[: inputs.k_hat.scale.numel()] = inputs.k_hat.scale.flatten()
            inputs = inputs._replace(k_hat=inputs.k_hat._replace(scale=scales))
        o, log_sum_exp = run_forward_program(
            inputs, key_tile, SMALL, start_with_triton, is_causal=False, log2_scale=c * LOG2_E
        )
        return o.cpu(), log_sum_exp[..., : q.shape[2]].cpu()

    return launch


def run_dot(dot, a, b):
    a, b = a.to(triton_device()), b.to(triton_device())
    out = a.new_empty(len(a), len(b), dtype=torch.float32)
    dot_program[(1,)](a, b, out, DOT=dot, ROWS=len(a), DEPTH=a.shape[1])
    return out.cpu(), reads_bits(dot)


def run_byte(to_byte, x):
    out = torch.empty_like(x, dtype=torch.int32, device=triton_device())  # a store must not turn an int32 into int8
    byte_program[(1,)](x.to(triton_device()), out, TO_BYTE=to_byte, COUNT=len(x))
    return out.cpu(), reads_bits(to_byte)


def reads_bits(function):
    """Tell whether a function reads bits: a conversion may give the same numbers, but is what it should save."""
    return "it reads bits" if "bitcast=True" in source(function) else "it converts"


def run_softmax(softmax, s_ij, s_qk, m, l):
    arguments = [x.to(triton_device()) for x in (s_ij, s_qk, m, l)]
    p_ij, rows = torch.empty_like(arguments[0]), arguments[0].new_empty(4, len(m))
    softmax_program[(1,)](*arguments, p_ij, rows, SOFTMAX=softmax, SIZE=len(m))
    p_ij, (s_p, m_new, l, _) = p_ij.cpu(), rows.cpu()
    # Any m_new near the largest score will do, if P~ and l belong to it: compare them relative to the true one.
    shift = torch.exp2(m_new - torch.maximum(m, (s_ij.amax(1) - ROUNDER.value) * s_qk))
    largest = p_ij.amax().item()
    largest = "about 127" if 100 < largest < 127.5 else f"{largest:.4g}"
    return p_ij * (s_p * shift)[:, None], l * shift, f"the largest p_ij is {largest}"


def run_group(group, x):
    out = torch.empty_like(x, device=triton_device())
    group_program[(1,)](x.to(triton_device()), out, GROUP=group, ROWS=x.shape[0], COLUMNS=x.shape[1])
    return out.cpu()


# What they are tried on


def _attention() -> list[tuple]:
    """Return two full tiles of keys, and one that needs a mask and has larger keys and values: scales differ."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, HEAD_DIM, generator=generator) for n in (20, 140, 140))
    k[:, :, 128:] *= 1.2
    v[:, :, 128:] *= 3
    return [(q, k, v)]


def _integers() -> list[tuple]:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randint(-127, 128, (2, 32, 64), generator=generator, dtype=torch.int8)
    return [(a, b), (a, a)]


def _integer_scores() -> list[tuple]:
    """Return integer scores with scales that need no `room`, with scales that do, and with scales just above 2^-7.6.

    With the last ones a t that is rounded twice may be too small by more than `room`: P~ then exceeds 127.5.
    """
    generator = torch.Generator().manual_seed(2)
    s_hat = torch.round(4_000 * torch.randn(32, 32, generator=generator))
    m, l = torch.linspace(-5, 40, 32), torch.linspace(1, 50, 32)
    near = torch.linspace(5.3e-3, 5.6e-3, 4096)
    lost = near * ROUNDER.value - near.double() * ROUNDER.value  # by rounding the product
    scales = (torch.linspace(1e-3, 4e-3, 32), torch.linspace(2e-2, 4e-2, 32), near[lost.argsort()[:32]])
    return [(ROUNDER.value + s_hat, s_qk, m, l) for s_qk in scales]


GAPS = with_mistakes(
    __file__,
    {
        "level1": Gap(level1, _attention, run=run_level(1)),
        "level2": Gap(level2, _attention, run=run_level(2)),
        "offset_dot": Gap(offset_dot, _integers, run=run_dot),
        "low_byte": Gap(
            low_byte,
            lambda: [(torch.linspace(-127, 127, 256),), (torch.tensor([2.5, -2.5, 3.5, 0.4] * 4),)],
            run=run_byte,
        ),
        "folded_softmax": Gap(folded_softmax, _integer_scores, run=run_softmax),
        "group_columns": Gap(
            group_columns, lambda: [(torch.arange(32 * 64, dtype=torch.int32).reshape(32, 64),)], run=run_group
        ),
    },
)
