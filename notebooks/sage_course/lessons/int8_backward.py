"""Notebook 09: the backward pass in Triton, in 16 bit and in INT8: dQ by rows of the scores, dK and dV by columns.

One head, [N, D] in memory, N a multiple of BLOCK. L is the natural logarithm.
"""

import math

import torch
import triton
import triton.language as tl
from sage_kernels.common.tiles import round_to_int8

from sage_course.gaps import Gap
from sage_course.lessons import with_mistakes
from sage_ref.attention import attention_forward
from sage_ref.sagebwd.algorithm import psi

N, HEAD_DIM, BLOCK = 96, 32, 32


def delta_of(grad_output, output):
    return (grad_output.float() * output.float()).sum(-1)


@triton.jit
def dq_16bit(q_ptr, k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr, n, c, D: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    query, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    rows = query[:, None] * D + d[None, :]
    q_i, do_i = tl.load(q_ptr + rows), tl.load(do_ptr + rows)  # [BLOCK, D]
    l_i, delta_i = tl.load(l_ptr + query), tl.load(delta_ptr + query)  # [BLOCK]
    dq_i = tl.zeros([BLOCK, D], tl.float32)
    for j in range(0, n // BLOCK):
        keys = (j * BLOCK + tl.arange(0, BLOCK))[:, None] * D + d[None, :]
        k_j, v_j = tl.load(k_ptr + keys), tl.load(v_ptr + keys)
        s_ij = tl.dot(q_i, tl.trans(k_j)) * c
        p_ij = tl.exp(s_ij - l_i[:, None])
        dp_ij = tl.dot(do_i, tl.trans(v_j))
        ds_ij = p_ij * (dp_ij - delta_i[:, None])
        dq_i += tl.dot(ds_ij.to(k_j.dtype), k_j)
    tl.store(dq_ptr + rows, dq_i * c)


@triton.jit
def psi_of_rows(x):
    s = tl.maximum(tl.max(tl.abs(x), 1), 1e-30) / 127
    return s, round_to_int8(x / s[:, None])


@triton.jit
def dq_int8(
    q_ptr, s_q_ptr, k_ptr, s_k_ptr, v_ptr, do_ptr, l_ptr, delta_ptr, dq_ptr, n, c, D: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    query, d = i * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    rows = query[:, None] * D + d[None, :]
    q_i, do_i = tl.load(q_ptr + rows), tl.load(do_ptr + rows)  # int8, float16
    s_q = tl.load(s_q_ptr + i)
    l_i, delta_i = tl.load(l_ptr + query), tl.load(delta_ptr + query)
    dq_i = tl.zeros([BLOCK, D], tl.float32)
    for j in range(0, n // BLOCK):
        keys = (j * BLOCK + tl.arange(0, BLOCK))[:, None] * D + d[None, :]
        k_j, v_j = tl.load(k_ptr + keys), tl.load(v_ptr + keys)  # int8, float16
        s_k = tl.load(s_k_ptr + j)
        s_ij = tl.dot(q_i, tl.trans(k_j), out_dtype=tl.int32).to(tl.float32) * (s_q * s_k * c)
        p_ij = tl.exp(s_ij - l_i[:, None])
        dp_ij = tl.dot(do_i, tl.trans(v_j))
        ds_ij = p_ij * (dp_ij - delta_i[:, None])
        s_ds, ds_hat_ij = psi_of_rows(ds_ij)
        dq_i += tl.dot(ds_hat_ij, k_j, out_dtype=tl.int32).to(tl.float32) * (s_ds * s_k)[:, None]
    tl.store(dq_ptr + rows, dq_i * c)


@triton.jit
def dk_dv_int8(
    q_ptr, s_q_ptr, k_ptr, s_k_ptr, v_ptr, do_ptr, do_hat_ptr, s_do_ptr, l_ptr, delta_ptr, dk_ptr, dv_ptr,
    n, c, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)
    d = tl.arange(0, D)
    keys = (j * BLOCK + tl.arange(0, BLOCK))[:, None] * D + d[None, :]
    k_j, v_j = tl.load(k_ptr + keys), tl.load(v_ptr + keys)  # int8, float16
    s_k = tl.load(s_k_ptr + j)
    dk_j, dv_j = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    for i in range(0, n // BLOCK):
        query = i * BLOCK + tl.arange(0, BLOCK)
        rows = query[:, None] * D + d[None, :]
        q_i, do_hat_i, do_i = tl.load(q_ptr + rows), tl.load(do_hat_ptr + rows), tl.load(do_ptr + rows)
        s_q, s_do = tl.load(s_q_ptr + i), tl.load(s_do_ptr + i)
        l_i, delta_i = tl.load(l_ptr + query), tl.load(delta_ptr + query)
        # [keys, queries]: everything is transposed
        st_ij = tl.dot(k_j, tl.trans(q_i), out_dtype=tl.int32).to(tl.float32) * (s_q * s_k * c)
        pt_ij = tl.exp(st_ij - l_i[None, :])
        s_p, pt_hat_ij = psi_of_rows(pt_ij)
        dv_j += tl.dot(pt_hat_ij, do_hat_i, out_dtype=tl.int32).to(tl.float32) * (s_p * s_do)[:, None]
        dpt_ij = tl.dot(v_j, tl.trans(do_i))
        dst_ij = pt_ij * (dpt_ij - delta_i[None, :])
        s_ds, dst_hat_ij = psi_of_rows(dst_ij)
        dk_j += tl.dot(dst_hat_ij, q_i, out_dtype=tl.int32).to(tl.float32) * (s_ds * s_q)[:, None]
    tl.store(dk_ptr + keys, dk_j * c)
    tl.store(dv_ptr + keys, dv_j)


@triton.jit
def store_psi(x_ptr, s_ptr, hat_ptr, PSI: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Call PSI on a tile: Python can't call a Triton function, but it can launch this program."""
    row = tl.arange(0, ROWS)
    places = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    s, hat = PSI(tl.load(x_ptr + places))
    tl.store(s_ptr + row, s)
    tl.store(hat_ptr + places, hat)


def run_psi(function, x):
    """Return s [rows] and X^ of float32 x. For a row of zeros s is 1, or 0 if it is not above 0."""
    s, hat = torch.empty_like(x[:, 0]), torch.empty_like(x, dtype=torch.int8)
    store_psi[(1,)](x, s, hat, function, *x.shape)
    return torch.where(x.any(1), s, (s > 0).float()), hat


def run_dq_16bit(program, q, k, v, do, log_sum_exp, delta):
    """Return dQ, float32 [N, D]."""
    dq = torch.empty(q.shape, device=q.device)
    program[(len(q) // BLOCK,)](q, k, v, do, log_sum_exp, delta, dq, *sizes(q))
    return dq


def run_dq_int8(program, q, k, v, do, log_sum_exp, delta):
    """Quantise Q and K in blocks of BLOCK tokens; return dQ, float32 [N, D]."""
    dq = torch.empty(q.shape, device=q.device)
    (q_hat, s_q), (k_hat, s_k) = quantized_blocks(q), quantized_blocks(k)
    program[(len(q) // BLOCK,)](q_hat, s_q, k_hat, s_k, v, do, log_sum_exp, delta, dq, *sizes(q))
    return dq


def run_dk_dv_int8(program, q, k, v, do, log_sum_exp, delta):
    """Quantise Q, K and dO; return dK and dV, float32 [N, D]."""
    dk, dv = torch.empty(k.shape, device=k.device), torch.empty(v.shape, device=v.device)
    hats = [x for tensor in (q, k) for x in quantized_blocks(tensor)]
    program[(len(k) // BLOCK,)](*hats, v, do, *quantized_blocks(do), log_sum_exp, delta, dk, dv, *sizes(q))
    return dk, dv


def sizes(q) -> tuple[int, float, int, int]:
    """Return the arguments n, c, D and BLOCK of a program."""
    return len(q), 1 / math.sqrt(q.shape[1]), q.shape[1], BLOCK


def quantized_blocks(x):
    """Apply psi to each block of tokens; return X^ [N, D] and s [N / BLOCK]."""
    scales, hats = zip(*(psi(block.float()) for block in x.split(BLOCK)), strict=True)
    return torch.cat(hats), torch.cat([s.flatten() for s in scales])


def _heads() -> list[tuple]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(N, HEAD_DIM, generator=generator).half() for _ in range(4))
    o, log_sum_exp, *_ = attention_forward(q.float(), k.float(), v.float())
    tensors = (q, k, v, do * torch.linspace(0.1, 3, N)[:, None].half(), log_sum_exp, delta_of(do, o))
    return [tensors]


def _tiles_with_zeros_and_tiny_rows() -> list[tuple]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 3, 16)[:, None]
    x[5] = 0
    return [(x,), (torch.zeros(16, 32),)]


GAPS = with_mistakes(
    __file__,
    {
        "delta_of": Gap(
            delta_of, lambda: [tuple(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2)).half())]
        ),
        "dq_16bit": Gap(dq_16bit, _heads, run=run_dq_16bit),
        "psi_of_rows": Gap(psi_of_rows, _tiles_with_zeros_and_tiny_rows, run=run_psi),
        "dq_int8": Gap(dq_int8, _heads, run=run_dq_int8),
        "dk_dv_int8": Gap(dk_dv_int8, _heads, run=run_dk_dv_int8),
    },
)
