"""Capstone: sparse INT8 attention from a blank page."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

### BLANK PAGE
LOG2_E = math.log2(math.e)


@triton.jit
def psi(x):
    """Return the integers of a tile in int8, and its scale."""
    scale = tl.max(tl.abs(x)) / 127
    x = x / tl.where(scale == 0, 1.0, scale)  # a tile of zeros
    return tl.where(x >= 0, x + 0.5, x - 0.5).to(tl.int8), scale  # to nearest


@triton.jit
def load_tile(ptr, strides, batch, head, token, tokens, D: tl.constexpr):
    """Load the rows `token` of X[batch, head], [rows, D], and 0 for those that don't exist."""
    stride_b, stride_h, stride_n, stride_d = strides
    ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    pointers = ptr + token[:, None] * stride_n + tl.arange(0, D)[None, :] * stride_d
    return tl.load(pointers, mask=token[:, None] < tokens, other=0.0).to(tl.float32)


@triton.jit
def sparse_kernel(
    q_ptr, q_strides, k_ptr, k_strides, v_ptr, v_strides, table_ptr, table_strides, o_ptr, o_strides,
    heads, group, n_q, n_k, width, c,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program (i, b * heads + h): O_i [BLOCK_Q, D] over the key blocks that row (b, h, i) of the table lists."""
    i = tl.program_id(0)
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q, s_q = psi(load_tile(q_ptr, q_strides, b, h, query, n_q, D))
    row_ptr = table_ptr + b * table_strides[0] + h * table_strides[1] + i * table_strides[2]
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    for step in range(0, width):
        j = tl.load(row_ptr + step * table_strides[3])
        if j >= 0:
            key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
            k, s_k = psi(load_tile(k_ptr, k_strides, b, h // group, key, n_k, D))  # [BLOCK_KV, D]
            v = load_tile(v_ptr, v_strides, b, h // group, key, n_k, D).to(tl.float16)
            s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * (s_q * s_k * c)  # [BLOCK_Q, BLOCK_KV]
            visible = key[None, :] < n_k
            if IS_CAUSAL:  # query i sees the keys up to i + n_k - n_q
                visible = visible & (key[None, :] <= query[:, None] + n_k - n_q)
            s = tl.where(visible, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # no key yet: -inf minus -inf is NaN
            rescale = tl.exp2(m - safe)
            p = tl.exp2(s - safe[:, None])
            l = l * rescale + tl.sum(p, 1)
            o = o * rescale[:, None] + tl.dot(p.to(tl.float16), v)
            m = m_new
    o = o / tl.where(l == 0, 1.0, l)[:, None]  # a query without a key: O = 0
    o_ptr += b.to(tl.int64) * o_strides[0] + h.to(tl.int64) * o_strides[1]
    pointers = o_ptr + query[:, None] * o_strides[2] + tl.arange(0, D)[None, :] * o_strides[3]
    tl.store(pointers, o.to(o_ptr.dtype.element_ty), mask=query[:, None] < n_q)


### END
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, block_q: int, block_kv: int, is_causal: bool = False
) -> Tensor:
    """Return O = softmax(c Q K^T) V over the listed keys, by a Triton kernel, with Q K^T in INT8. c = 1 / sqrt(D).

    q: [B, H, Nq, D], k, v: [B, H, Nk, D], all float16 or all float32 -> O [B, H, Nq, D] in q's dtype.
    table: int32 [B, H, Tm, width] with Tm = ceil(Nq / block_q). Its row (b, h, i) lists the blocks of keys that block i
        of the queries of head h reads: j stands for the keys from j * block_kv on, block_kv of them, or fewer in the
        last block. A row lists each block once at most, in any order. From its first -1 on, all of a row is -1.
    block_q, block_kv: 16, 32 or 64.

    Blocks that no row lists may hold anything, even NaN. Kernels read no key and no value of them, not even to round
        it: round K in the loop, not in a kernel of its own, and don't smooth it.
    Sizes: B, H, Nq, Nk are any numbers from 1 on; D is 32, 64 or 128.
    Strides: each tensor has its own, the table too, on all four axes; there may be gaps between elements. Kernels touch
        nothing but elements of tensors. All arguments are left as they are.
    is_causal: query i sees listed key j if j <= i + Nk - Nq. A query that sees no key has O = 0.
    INT8: Q and K are rounded, psi(X) = (s, X^) with s = max|X| / 127 and X^ = round(X / s), for each block of tokens or
        each token. Zeros have s = 0. P~ and V are rounded, too (1 / 127 will do as the scale of P~), or are in float16.
        Sums are in 32 bit. No operand of `tl.dot` is in 32 bit. A row of O may be off by 8% of its size.
    PyTorch may allocate. All else is the kernel's work: it gets all tensors as they came, without `contiguous()` or
        another dtype.

    >>> q, k = torch.zeros(1, 1, 20, 32).half(), torch.zeros(1, 1, 33, 32).half()
    >>> v = torch.arange(33).half()[:, None].expand(1, 1, 33, 32)
    >>> table = torch.tensor([[[[2, -1], [-1, -1]]]]).int()
    >>> sparse_attention(q, k, v, table, 16, 16)[0, 0, :, 0].unique()  # block 2 holds one key, of value 32
    tensor([ 0., 32.], dtype=torch.float16)
    """
    ### SOLUTION: write kernels above, and launch them here
    batch, heads, n_q, head_dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sparse_kernel[(triton.cdiv(n_q, block_q), batch * heads)](
        q, q.stride(), k, k.stride(), v, v.stride(), table, table.stride(), o, o.stride(),
        heads, heads // k.shape[1], n_q, k.shape[2], table.shape[3], LOG2_E / math.sqrt(head_dim),
        D=head_dim, BLOCK_Q=block_q, BLOCK_KV=block_kv, IS_CAUSAL=is_causal,
    )  # fmt: skip
    return o
