"""Notebook 07: masks, the tile loop of FlashAttention, and which tiles causal attention visits, in Triton.

Needs Triton, and `teaching.triton_device()` before it is imported.
"""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from sage_kernels.common.device import triton_device

from sage_course.gaps import Gap
from sage_course.lessons import draws, with_mistakes

if not torch.cuda.is_available():
    import sage_kernels.common.interpreter  # noqa: F401

GUARD = 777.0  # a number that no computation here produces
ROOM = 64 * 64  # of guards behind a tensor


@triton.jit
def scores(q_ptr, k_ptr, s_ptr, n, c, D: tl.constexpr, BLOCK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    query, key, d = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    q_i = tl.load(q_ptr + query[:, None] * D + d[None, :], mask=query[:, None] < n, other=0.0)
    k_j = tl.load(k_ptr + key[:, None] * D + d[None, :], mask=key[:, None] < n, other=0.0)
    s_ij = tl.dot(q_i, tl.trans(k_j)) * c
    tl.store(s_ptr + query[:, None] * n + key[None, :], s_ij, mask=(query[:, None] < n) & (key[None, :] < n))


@triton.jit
def flash(q_ptr, k_ptr, v_ptr, o_ptr, n, scale, D: tl.constexpr, BLOCK: tl.constexpr, HIDE: tl.constexpr):
    i = tl.program_id(0)
    query, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    q_i = tl.load(q_ptr + query[:, None] * D + d[None, :], mask=query[:, None] < n, other=0.0)
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    o_i = tl.zeros([BLOCK, D], tl.float32)
    for j in range(0, tl.cdiv(n, BLOCK)):
        key = j * BLOCK + tl.arange(0, BLOCK)
        rows = key[:, None] * D + d[None, :]
        k_j = tl.load(k_ptr + rows, mask=key[:, None] < n, other=0.0)
        v_j = tl.load(v_ptr + rows, mask=key[:, None] < n, other=0.0)
        s_ij = tl.dot(q_i, tl.trans(k_j)) * scale
        if HIDE:
            s_ij = tl.where(key[None, :] < n, s_ij, -float("inf"))
        m_new = tl.maximum(m, tl.max(s_ij, 1))
        p_ij = tl.math.exp2(s_ij - m_new[:, None])
        rescale = tl.math.exp2(m - m_new)
        l = l * rescale + tl.sum(p_ij, 1)
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, o_i * rescale[:, None])
        m = m_new
    o_i = o_i / l[:, None]
    tl.store(o_ptr + query[:, None] * D + d[None, :], o_i.to(q_i.dtype), mask=query[:, None] < n)


@triton.jit
def key_tile_range(first_query, n, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    full = tl.minimum(n // BLOCK_KV, (first_query + 1) // BLOCK_KV)
    end = tl.minimum(tl.cdiv(n, BLOCK_KV), tl.cdiv(first_query + BLOCK_Q, BLOCK_KV))
    return full, end


# Programs that try them


@triton.jit
def range_program(out_ptr, n, RANGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    i = tl.program_id(0)
    full, end = RANGE(i * BLOCK_Q, n, BLOCK_Q, BLOCK_KV)
    tl.store(out_ptr + 2 * i, full)
    tl.store(out_ptr + 2 * i + 1, end)


def guarded(x):
    """Return a copy of x, and the memory that holds it: the room behind the copy is filled with GUARD."""
    memory = torch.full((x.numel() + ROOM,), GUARD, dtype=x.dtype, device=triton_device())
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape), memory


def bounded(x):
    """Return a copy of x. What stands behind it belongs to no tensor, so the interpreter stops a program that reads it.

    No result shows that: S has no entry for a key that does not exist.
    """
    memory = np.pad(x.numpy().flatten(), (0, ROOM))
    return torch.from_numpy(memory[: x.numel()]).view(x.shape).to(triton_device())


def run_scores(program, q, k, block):
    """Return S [n, n], and how many numbers behind it were overwritten."""
    n, head_dim = q.shape
    s, memory = guarded(torch.zeros(n, n))
    grid = (math.ceil(n / block), math.ceil(n / block))
    program[grid](guarded(q)[0], bounded(k), s, n, 1 / math.sqrt(head_dim), D=head_dim, BLOCK=block)
    return s.cpu(), int((memory[n * n :] != GUARD).sum())


def run_flash(program, q, k, v, block):
    """Return O with the keys that don't exist hidden, and with them as zeros."""
    n, head_dim = q.shape
    q, k, v = (x.to(triton_device()) for x in (q, k, v))
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def launch(hide):
        o = torch.empty_like(q)
        program[(math.ceil(n / block),)](q, k, v, o, n, scale, D=head_dim, BLOCK=block, HIDE=hide)
        return o.cpu()

    return launch(True), launch(False)


def run_range(function, n, block_q, block_kv):
    """Return int32 [tiles of queries, 2]: full and end of each tile."""
    tiles = math.ceil(n / block_q)
    out = torch.zeros(tiles, 2, dtype=torch.int32, device=triton_device())
    range_program[(tiles,)](out, n, RANGE=function, BLOCK_Q=block_q, BLOCK_KV=block_kv)
    return out.cpu()


def _attention() -> list[tuple]:
    q, k, v = draws(0, *[(40, 16)] * 3)
    k[16:] *= 2  # so that later tiles hold larger scores
    return [(q, k, v, 16)]


GAPS = with_mistakes(
    __file__,
    {
        "scores": Gap(scores, lambda: [(*draws(0, (n, 16), (n, 16)), 16) for n in (20, 10)], run=run_scores),
        "flash": Gap(flash, _attention, run=run_flash),
        "key_tile_range": Gap(key_tile_range, lambda: [(128, 16, 16), (100, 32, 16), (100, 16, 32)], run=run_range),
    },
)
