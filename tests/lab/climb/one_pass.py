"""Attention in 16 bit in one pass: tiles that need no mask first, and exp2."""

import math

import torch
import triton
import triton.language as tl
from two_passes import load

BLOCK_Q = BLOCK_K = 64


@triton.jit
def step(
    m, l, o, q_i, k_ptr, v_ptr, k_strides, v_strides, head, heads, group, j, query, n_q, n_k, log2_scale,
    D: tl.constexpr, BLOCK_K: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    key = j * BLOCK_K + tl.arange(0, BLOCK_K)
    s = tl.dot(q_i, tl.trans(load(k_ptr, k_strides, head // group, heads // group, key, n_k, D)))
    if IS_MASKED:
        seen = (key < n_k)[None, :]
        if IS_CAUSAL:
            seen = seen & (key[None, :] <= query[:, None] + n_k - n_q)
        s = tl.where(seen, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
    p = tl.exp2(s * log2_scale - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    v_j = load(v_ptr, v_strides, head // group, heads // group, key, n_k, D)
    return m_new, l * rescale + tl.sum(p, 1), tl.dot(p.to(v_j.dtype), v_j, o * rescale[:, None])


@triton.jit
def one_pass(
    q_ptr, k_ptr, v_ptr, o_ptr, q_strides, k_strides, v_strides, o_strides, heads, group, n_q, n_k, log2_scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    query, head = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.program_id(1)
    q_i = load(q_ptr, q_strides, head, heads, query, n_q, D)
    m, l = tl.full([BLOCK_Q], -1.0e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    full, end = n_k // BLOCK_K, tl.cdiv(n_k, BLOCK_K)
    if IS_CAUSAL:
        first = tl.maximum(tl.program_id(0) * BLOCK_Q + n_k - n_q, 0)
        full = tl.minimum(full, first // BLOCK_K)
        end = tl.minimum(end, tl.cdiv(first + BLOCK_Q, BLOCK_K))
    for j in range(0, full):
        m, l, o = step(m, l, o, q_i, k_ptr, v_ptr, k_strides, v_strides, head, heads, group, j, query, n_q, n_k,
                       log2_scale, D, BLOCK_K, IS_CAUSAL, False)  # fmt: skip
    for j in range(full, end):
        m, l, o = step(m, l, o, q_i, k_ptr, v_ptr, k_strides, v_strides, head, heads, group, j, query, n_q, n_k,
                       log2_scale, D, BLOCK_K, IS_CAUSAL, True)  # fmt: skip
    o = o / tl.where(l == 0, 1, l)[:, None]
    d = tl.arange(0, D)
    offsets = (head // heads).to(tl.int64) * o_strides[0] + (head % heads) * o_strides[1]
    offsets += query[:, None] * o_strides[2] + d[None, :] * o_strides[3]
    tl.store(o_ptr + offsets, o.to(o_ptr.dtype.element_ty), mask=(query < n_q)[:, None])


def attention(q, k, v, is_causal=False):
    o, (batch, heads, n_q, head_dim) = torch.empty_like(q), q.shape
    strides = (x.stride() for x in (q, k, v, o))
    sizes = heads, heads // k.shape[1], n_q, k.shape[2], math.log2(math.e) / math.sqrt(head_dim)
    one_pass[triton.cdiv(n_q, BLOCK_Q), batch * heads](
        q, k, v, o, *strides, *sizes, D=head_dim, BLOCK_Q=BLOCK_Q, IS_CAUSAL=is_causal, BLOCK_K=BLOCK_K
    )
    return o
