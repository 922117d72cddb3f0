HINT = "m_start"

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def forward_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, o_ptr, log_sum_exp_ptr, n_q, n_k, scale,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    query, d = i * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    q_hat_i = tl.load(q_ptr + query[:, None] * D + d[None, :])
    s_q = tl.load(q_scale_ptr + i)
    m = tl.zeros([BLOCK_Q], tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o_i = tl.zeros([BLOCK_Q, D], tl.float32)
    for j in range(0, tl.cdiv(n_k, BLOCK_KV)):
        key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_hat_j = tl.load(k_ptr + key[:, None] * D + d[None, :])
        v_hat_j = tl.load(v_ptr + key[:, None] * D + d[None, :])
        s_k, s_v = tl.load(k_scale_ptr + j), tl.load(v_scale_ptr + j)
        s_ij = tl.dot(q_hat_i, tl.trans(k_hat_j), out_dtype=tl.int32).to(tl.float32) * (scale * s_q * s_k)
        visible = key[None, :] < n_k
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        s_ij = tl.where(visible, s_ij, -float("inf"))
        m_new = tl.maximum(m, tl.max(s_ij, 1))
        rescale = tl.math.exp2(m - m_new)
        p_ij = tl.math.exp2(s_ij - m_new[:, None])
        l = l * rescale + tl.sum(p_ij, 1)
        s_p = tl.max(p_ij, 1) / 127
        p_hat_ij = tl.floor(p_ij / tl.where(s_p == 0, 1.0, s_p)[:, None] + 0.5).to(tl.int8)
        product = tl.dot(p_hat_ij, v_hat_j, out_dtype=tl.int32).to(tl.float32)
        o_i = o_i * rescale[:, None] + product * (s_p * s_v)[:, None]
        m = m_new
    inside = query < n_q
    tl.store(o_ptr + query[:, None] * D + d[None, :], o_i / l[:, None], mask=inside[:, None])
    tl.store(log_sum_exp_ptr + query, (m + tl.math.log2(l)) * LN_2, mask=inside)


def int8_forward(q_hat, q_scale, k_hat, k_scale, v_hat, v_scale, n_k, is_causal, output, log_sum_exp):
    n_q, head_dim = output.shape
    block_q, block_kv = len(q_hat) // len(q_scale), len(k_hat) // len(k_scale)
    forward_kernel[(triton.cdiv(n_q, block_q),)](
        q_hat, q_scale, k_hat, k_scale, v_hat, v_scale, output, log_sum_exp, n_q, n_k, LOG2_E / math.sqrt(head_dim),
        D=head_dim, BLOCK_Q=block_q, BLOCK_KV=block_kv, IS_CAUSAL=is_causal,
    )  # fmt: skip
