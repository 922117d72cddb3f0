"""Capstone: INT8 attention from a blank page."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

### BLANK PAGE
BLOCK_Q, BLOCK_KV = 64, 32
LOG2_E = math.log2(math.e)


@triton.jit
def quantize_kernel(
    x_ptr, mean_ptr, x_hat_ptr, scale_ptr, stride_b, stride_h, stride_n, stride_d, heads, tokens,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, b * heads + h): psi of block i of X[b, h]. x_hat [B, H, N, D] and scale [B, H, blocks] are dense.

    mean_ptr: None, or to float32 [B, H, D], which is subtracted from every token.
    """
    i, head = tl.program_id(0), tl.program_id(1)
    token, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    exists = token[:, None] < tokens
    x_ptr += (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    x = tl.load(x_ptr + token[:, None] * stride_n + d[None, :] * stride_d, mask=exists, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        x = tl.where(exists, x - tl.load(mean_ptr + head * D + d)[None, :], 0.0)
    scale = tl.max(tl.abs(x)) / 127
    x = x / tl.where(scale == 0, 1.0, scale)  # a block of zeros
    x_hat = tl.where(x >= 0, x + 0.5, x - 0.5).to(tl.int8)  # to nearest
    place = (head.to(tl.int64) * tokens + token[:, None]) * D + d[None, :]
    tl.store(x_hat_ptr + place, x_hat, mask=exists)
    tl.store(scale_ptr + head * tl.num_programs(0) + i, scale)


@triton.jit
def attention_kernel(
    q_ptr, s_q_ptr, k_ptr, s_k_ptr, v_ptr, s_v_ptr, o_ptr, stride_b, stride_h, stride_n, stride_d,
    heads, group, n_q, n_k, c, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program (i, b * heads + h): O_i [BLOCK_Q, D]. c: what integer scores are multiplied by besides s_Q and s_K."""
    i, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // group
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    inside = query[:, None] < n_q
    q = tl.load(q_ptr + (head.to(tl.int64) * n_q + query[:, None]) * D + d[None, :], mask=inside, other=0)
    s_q = tl.load(s_q_ptr + head * tl.num_programs(0) + i)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    end = n_k
    if IS_CAUSAL:  # query i sees the keys up to i + n_k - n_q
        end = tl.maximum(0, tl.minimum(n_k, (i + 1) * BLOCK_Q + n_k - n_q))
    for j in range(0, tl.cdiv(end, BLOCK_KV)):
        key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        exists = key[:, None] < n_k
        place = (kv_head.to(tl.int64) * n_k + key[:, None]) * D + d[None, :]
        k = tl.load(k_ptr + place, mask=exists, other=0)  # [BLOCK_KV, D]
        v = tl.load(v_ptr + place, mask=exists, other=0)
        s_k = tl.load(s_k_ptr + kv_head * tl.cdiv(n_k, BLOCK_KV) + j)
        s_v = tl.load(s_v_ptr + kv_head * tl.cdiv(n_k, BLOCK_KV) + j)
        s = tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32) * (s_q * s_k * c)  # [BLOCK_Q, BLOCK_KV]
        visible = key[None, :] < n_k
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None] + n_k - n_q)
        s = tl.where(visible, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # no key yet: -inf minus -inf is NaN
        rescale = tl.exp2(m - safe)
        p = tl.exp2(s - safe[:, None])
        l = l * rescale + tl.sum(p, 1)
        s_p = tl.max(p, 1) / 127  # one scale per query
        p_hat = (p / tl.where(s_p == 0, 1.0, s_p)[:, None] + 0.5).to(tl.int8)
        product = tl.dot(p_hat, v, out_dtype=tl.int32).to(tl.float32)
        o = o * rescale[:, None] + product * (s_p * s_v)[:, None]
        m = m_new
    o = o / tl.where(l == 0, 1.0, l)[:, None]  # a query without a key: O = 0
    o_ptr += (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    pointers = o_ptr + query[:, None] * stride_n + d[None, :] * stride_d
    tl.store(pointers, o.to(o_ptr.dtype.element_ty), mask=inside)


def quantized(x: Tensor, block: int, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return psi of x [B, H, N, D] with any strides: int8 [B, H, N, D] and one float32 scale per block of tokens.

    mean: float32 [B, H, D], dense, which is subtracted first.
    """
    batch, heads, tokens, head_dim = x.shape
    x_hat = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(batch, heads, triton.cdiv(tokens, block), dtype=torch.float32, device=x.device)
    grid = (scale.shape[2], batch * heads)
    quantize_kernel[grid](x, mean, x_hat, scale, *x.stride(), heads, tokens, D=head_dim, BLOCK=block)
    return x_hat, scale


### END
def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Return O = softmax(c Q K^T) V, computed by Triton kernels, with Q K^T in INT8. c = 1 / sqrt(D).

    q: [B, H, Nq, D], k, v: [B, Hkv, Nk, D], all float16 or all float32 -> O [B, H, Nq, D] in q's dtype.

    Sizes: B, H, Nq, Nk are any numbers from 1 on; D is 32, 64 or 128. Hkv divides H: head h of q reads head
        h // (H // Hkv) of k and v.
    Strides: each tensor has its own, on all four axes; they may be 0, and there may be gaps between elements. Kernels
        touch nothing but elements of tensors. q, k and v are left as they are.
    is_causal: query i sees key j if j <= i + Nk - Nq, so that the last query sees all keys. A query that sees no key
        has O = 0.
    INT8: Q and K are rounded, psi(X) = (s, X^) with s = max|X| / 127 and X^ = round(X / s), for each block of tokens or
        each token. Zeros have s = 0. K may be smoothed first. P~ and V are rounded, too (1 / 127 will do as the scale
        of P~), or are in float16. Sums are in 32 bit. No operand of `tl.dot` is in 32 bit. A row of O may be off by 8%
        of its size.
    PyTorch may allocate, and take K's mean over tokens. All else is the kernels' work: they get q, k and v as they
        came, without `contiguous()`, copies per head or another dtype.

    >>> q = k = torch.zeros(1, 1, 3, 32).half()
    >>> v = torch.tensor([0, 127, -127]).half()[:, None].expand(1, 1, 3, 32)
    >>> attention(q, k, v, is_causal=True)[0, 0, :, 0]  # equal scores: means of one, two and three values
    tensor([ 0.0000, 63.5000,  0.0000], dtype=torch.float16)
    """
    ### SOLUTION: write kernels above, and launch them here
    batch, heads, n_q, head_dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    mean = k.mean(2, dtype=torch.float32).contiguous()  # K-smoothing
    q_hat, s_q = quantized(q, BLOCK_Q)
    (k_hat, s_k), (v_hat, s_v) = quantized(k, BLOCK_KV, mean), quantized(v, BLOCK_KV)
    attention_kernel[(s_q.shape[2], batch * heads)](
        q_hat, s_q, k_hat, s_k, v_hat, s_v, o, *o.stride(), heads, heads // k.shape[1], n_q, k.shape[2],
        LOG2_E / math.sqrt(head_dim), D=head_dim, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV, IS_CAUSAL=is_causal,
    )  # fmt: skip
    return o
