"""Attention in 16 bit as a first attempt: one pass for the maxima and sums, one for O, and a mask in every tile.

An autotuner chooses the tile size.
"""

import torch
import triton
import triton.language as tl

CONFIGURATIONS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (64, 32)]


@triton.jit
def load(pointer, strides, head, heads, token, n, D: tl.constexpr):
    d = tl.arange(0, D)
    offsets = (head // heads).to(tl.int64) * strides[0] + (head % heads) * strides[1]
    offsets += token[:, None] * strides[2] + d[None, :] * strides[3]
    return tl.load(pointer + offsets, mask=(token < n)[:, None], other=0.0)


@triton.jit
def scores(q_i, k_j, query, key, n_q, n_k, scale, IS_CAUSAL: tl.constexpr):
    s = tl.dot(q_i, tl.trans(k_j)) * scale
    seen = (key < n_k)[None, :]
    if IS_CAUSAL:
        seen = seen & (key[None, :] <= query[:, None] + n_k - n_q)
    return tl.where(seen, s, -float("inf"))


@triton.autotune(CONFIGURATIONS, key=["n_k"])
@triton.jit
def two_passes(
    q_ptr, k_ptr, v_ptr, o_ptr, q_strides, k_strides, v_strides, o_strides, heads, group, n_q, n_k, scale,
    D: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    q_i = load(q_ptr, q_strides, head, heads, query, n_q, D)
    m, l = tl.full([BLOCK], -1.0e30, tl.float32), tl.zeros([BLOCK], tl.float32)
    for j in range(0, tl.cdiv(n_k, BLOCK)):
        key = j * BLOCK + tl.arange(0, BLOCK)
        k_j = load(k_ptr, k_strides, head // group, heads // group, key, n_k, D)
        s = scores(q_i, k_j, query, key, n_q, n_k, scale, IS_CAUSAL)
        m_new = tl.maximum(m, tl.max(s, 1))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(s - m_new[:, None]), 1)
        m = m_new
    o = tl.zeros([BLOCK, D], tl.float32)
    for j in range(0, tl.cdiv(n_k, BLOCK)):
        key = j * BLOCK + tl.arange(0, BLOCK)
        k_j = load(k_ptr, k_strides, head // group, heads // group, key, n_k, D)
        s = scores(q_i, k_j, query, key, n_q, n_k, scale, IS_CAUSAL)
        v_j = load(v_ptr, v_strides, head // group, heads // group, key, n_k, D)
        o = tl.dot(tl.exp(s - m[:, None]).to(v_j.dtype), v_j, o)
    o = o / tl.where(l == 0, 1, l)[:, None]
    d = tl.arange(0, D)
    offsets = (head // heads).to(tl.int64) * o_strides[0] + (head % heads) * o_strides[1]
    offsets += query[:, None] * o_strides[2] + d[None, :] * o_strides[3]
    tl.store(o_ptr + offsets, o.to(o_ptr.dtype.element_ty), mask=(query < n_q)[:, None])


def attention(q, k, v, is_causal=False):
    o, (batch, heads, n_q, head_dim) = torch.empty_like(q), q.shape
    strides = (x.stride() for x in (q, k, v, o))
    sizes = heads, heads // k.shape[1], n_q, k.shape[2], head_dim**-0.5
    two_passes[lambda options: (triton.cdiv(n_q, options["BLOCK"]), batch * heads)](
        q, k, v, o, *strides, *sizes, D=head_dim, IS_CAUSAL=is_causal
    )
    return o
