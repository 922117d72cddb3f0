"""Notebook 07: masks, the tile loop of FlashAttention, and which tiles causal attention visits, in Triton.

Needs Triton, and `teaching.triton_device()` before it is imported.
"""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from sage_kernels.common.device import triton_device

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draws

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


BOTH_EXP = "tl.math.exp2(s_ij - m_new[:, None])\n        rescale = tl.math.exp2(m - m_new)"
BOTH_MAXIMA = "At the first tile m is -inf. p_ij is 2^(s - m_new), and rescale is 2^(m - m_new)."
STORE = "mask=(query[:, None] < n) & (key[None, :] < n)"
FULL = "tl.minimum(n // BLOCK_KV, (first_query + 1) // BLOCK_KV)"
END = "tl.minimum(tl.cdiv(n, BLOCK_KV), tl.cdiv(first_query + BLOCK_Q, BLOCK_KV))"
ROUND_DOWN = "A tile of which the first query sees only a part needs a mask: round down."
ROUND_UP = "The last tile of keys may be incomplete: round up."
BEYOND = (
    Mistake("mask=key[:, None] < n, other", "mask=key[:, None] <= n, other", "Key n doesn't exist: they count from 0."),
    Mistake("mask=key[:, None] < n, other", "mask=key[:, None] >= 0, other",
            "This mask lets through keys that do not exist. Which keys exist?"),
) if triton_device() == "cpu" else ()  # a GPU reads on without a word  # fmt: skip

GAPS = {
    "scores": Gap(scores, lambda: [(*draws(0, (n, 16), (n, 16)), 16) for n in (20, 10)], (
        Mistake(STORE, "mask=query[:, None] < n", "A key that does not exist is stored into the row below."),
        Mistake(STORE, "mask=key[None, :] < n",
                "Queries that don't exist are stored behind the matrix. (Masks are joined with `&`: `and` keeps one.)"),
        Mistake(STORE, "mask=query[:, None] < n & key[None, :] < n", "`&` binds before `<`: put brackets around each."),
        Mistake("mask=key[:, None] < n, other", "mask=key[None, :] < n, other",
                "In k_j keys are the rows, so their mask is a column: key[:, None]."),
        Mistake("mask=key[:, None] < n, other", "mask=query[:, None] < n, other",
                "Which of these keys exist does not depend on the queries."),
        Mistake(STORE, "mask=(query[:, None] <= n) & (key[None, :] < n)", "Query n doesn't exist: they count from 0."),
        Mistake(STORE, "mask=(query[:, None] <= n) & (key[None, :] <= n)",
                "Neither query n nor key n exists: they count from 0."),
        Mistake(STORE, "mask=(query[:, None] < n) | (key[None, :] < n)",
                "An entry exists only if its query *and* its key exist: `&`."),
        Mistake(STORE, "mask=(query < n) & (key < n)",
                "S is a matrix, so its mask has a column, query[:, None], and a row, key[None, :]."),
        Mistake(STORE, "mask=(query[None, :] < n) & (key[:, None] < n)",
                "In S queries are the rows and keys the columns: query[:, None], key[None, :]."),
        Mistake("mask=key[:, None] < n, other=0.0", "mask=key[:, None] < 0, other=0.0", "No key is loaded at all."),
        *BEYOND,
    ), run_scores, right=(
        ("tl.dot(q_i, tl.trans(k_j)) * c", "c * tl.dot(q_i, tl.trans(k_j))"),
    )),
    "flash": Gap(flash, _attention, (
        Mistake('tl.where(key[None, :] < n, s_ij, -float("inf"))', "s_ij",
                "Keys that don't exist are zeros and have score 0: hide them with -inf."),
        Mistake('s_ij, -float("inf"))', '-float("inf"), s_ij)',
                "tl.where(condition, x, y) takes x where the condition holds: where the key exists."),
        Mistake(BOTH_EXP, BOTH_EXP.replace("exp2", "exp"), "scale already contains log2(e): use exp2."),
        Mistake("s_ij - m_new[:, None]", "s_ij - m[:, None]", BOTH_MAXIMA),
        Mistake("exp2(m - m_new)", "exp2(m_new - m)", BOTH_MAXIMA),
        Mistake("tl.sum(p_ij, 1)", "p_ij", "l is one number per query: sum p_ij over the keys."),
        Mistake("o_i * rescale[:, None]", "o_i / l[:, None]",
                "O is divided by l once, after the loop. In the loop it shrinks by rescale, as l does."),
        Mistake("l * rescale + tl.sum(p_ij, 1)", "(l + tl.sum(p_ij, 1)) * rescale",
                "p_ij already belongs to the new maximum: only the old l shrinks."),
        Mistake("o_i * rescale[:, None]", "o_i", "O belongs to the old maximum: it shrinks as l does."),
    ), run_flash, right=(
        ("p_ij = tl.math.exp2(", "p_ij = tl.exp2("),
        ("l * rescale + tl.sum(p_ij, 1)", "tl.sum(p_ij, axis=1) + rescale * l"),
    )),
    "key_tile_range": Gap(key_tile_range, lambda: [(128, 16, 16), (100, 32, 16), (100, 16, 32)], (
        Mistake(FULL, "tl.cdiv(first_query + 1, BLOCK_KV)", ROUND_DOWN),
        Mistake(FULL, "tl.cdiv(first_query, BLOCK_KV)", ROUND_DOWN),
        Mistake("(first_query + 1) // BLOCK_KV", "(first_query + BLOCK_Q) // BLOCK_KV",
                "Without a mask only if the *first* query sees all keys of the tile: it sees the fewest."),
        Mistake(END, "tl.minimum(first_query + BLOCK_Q, n) // BLOCK_KV", ROUND_UP),
        Mistake(END, "(tl.minimum(first_query + BLOCK_Q, n) - 1) // BLOCK_KV",
                "That is the last tile; end is one more, as in range(0, end)."),
        Mistake(END, "tl.cdiv(n, BLOCK_KV)", "No query of the tile sees keys after the last query's own: skip them."),
        Mistake("tl.cdiv(first_query + BLOCK_Q, BLOCK_KV)", "tl.cdiv(first_query + 1, BLOCK_KV)",
                "The last query of the tile is first_query + BLOCK_Q - 1, and sees itself."),
        Mistake("tl.cdiv(first_query + BLOCK_Q, BLOCK_KV)", "tl.cdiv(first_query + BLOCK_Q + 1, BLOCK_KV)",
                "The last query of the tile is first_query + BLOCK_Q - 1, and sees itself."),
        Mistake("tl.cdiv(first_query + BLOCK_Q, BLOCK_KV)", "tl.cdiv(first_query, BLOCK_KV)",
                "The last query of the tile is first_query + BLOCK_Q - 1, and sees itself."),
        Mistake(END, "tl.cdiv(first_query + BLOCK_Q, BLOCK_KV)", "There are only cdiv(n, BLOCK_KV) tiles of keys."),
        Mistake(FULL, "n // BLOCK_KV", "A tile needs no mask if even the first query sees all of its keys."),
        Mistake("tl.cdiv(n, BLOCK_KV)", "n // BLOCK_KV", ROUND_UP),
    ), run_range, right=(
        ("tl.cdiv(first_query + BLOCK_Q, BLOCK_KV)", "(first_query + BLOCK_Q + BLOCK_KV - 1) // BLOCK_KV"),
    )),
}  # fmt: skip
