"""Level 1: six matmuls in INT8 with a scale per row of each result; dP stays in 16 bit.

Idea: an INT8 matmul takes any scale that is constant along its contraction. dQ contracts over keys, so dS may have one
scale per query; dV and dK contract over queries, so P^T and dS^T may have one per key. In a split backward these are
the rows of a program's own tile: the maximum stays inside four neighbouring threads, and it is finer than the paper's
scale per block.

Level 2 is the same loop with PER_BLOCK, the paper's choice.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import integer_dot, is_visible, load_padded, load_tokens, round_to_int8, row_scale


@triton.jit
def query_rows(
    dq_i, q_hat_i, s_q, do_i, log_sum_exp_i, delta_i, j, query, n_k, n_k_padded, k_ptr, k_stride_n, k_scale_ptr,
    kt_ptr, v_ptr, v_stride_n,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_KV: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_hat_j = load_padded(k_ptr, key, k_stride_n, DP)
    s_k = tl.load(k_scale_ptr + j * BLOCK_KV // SCALE_KV)
    # [Bq, Bkv]
    s_ij = integer_dot(q_hat_i, tl.trans(k_hat_j)) * (s_q * s_k)[:, None]
    p_ij = tl.math.exp2(s_ij - log_sum_exp_i[:, None])
    if IS_MASKED:
        p_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, IS_CAUSAL), p_ij, 0.0)
    v_j = load_tokens(v_ptr, key, v_stride_n, n_k, D, DP, IS_MASKED)
    dp_ij = tl.dot(do_i, tl.trans(v_j))
    ds_ij = p_ij * (dp_ij - delta_i[:, None])
    s_ds, inverse = row_scale(ds_ij, PER_BLOCK)
    ds_hat_ij = round_to_int8(ds_ij * inverse[:, None])
    kt_hat_j = load_padded(kt_ptr + j * BLOCK_KV, tl.arange(0, DP), n_k_padded, BLOCK_KV)
    return dq_i + integer_dot(ds_hat_ij, tl.trans(kt_hat_j)) * (s_ds * s_k)[:, None]


@triton.jit
def key_rows(
    dk_j, dv_j, k_hat_j, s_k, v_j, i, key, n_q, n_k, n_q_padded, q_ptr, q_stride_n, q_scale_ptr, qt_ptr,
    do_ptr, do_stride_n, dot_ptr, do_scale_ptr, log_sum_exp_ptr, delta_ptr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_Q: tl.constexpr,
    IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    query = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_hat_i = load_padded(q_ptr, query, q_stride_n, DP)
    s_q = tl.load(q_scale_ptr + i * BLOCK_Q // SCALE_Q)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + query)
    # [Bkv, Bq]
    st_ij = integer_dot(k_hat_j, tl.trans(q_hat_i)) * (s_q * s_k)[:, None]
    pt_ij = tl.math.exp2(st_ij - log_sum_exp_i[None, :])
    if IS_MASKED:
        pt_ij = tl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    if PER_BLOCK:  # a key past the end must not widen the block's scale
        pt_ij = tl.where(key[:, None] < n_k, pt_ij, 0.0)
    s_p, inverse = row_scale(pt_ij, PER_BLOCK)
    pt_hat_ij = round_to_int8(pt_ij * inverse[:, None])
    dot_hat_i = load_padded(dot_ptr + i * BLOCK_Q, tl.arange(0, DP), n_q_padded, BLOCK_Q)
    s_do = tl.load(do_scale_ptr + i * BLOCK_Q // SCALE_Q)
    dv_j += integer_dot(pt_hat_ij, tl.trans(dot_hat_i)) * (s_p * s_do)[:, None]
    do_i = load_tokens(do_ptr, query, do_stride_n, n_q, D, DP, True)
    dpt_ij = tl.dot(v_j, tl.trans(do_i))
    dst_ij = pt_ij * (dpt_ij - tl.load(delta_ptr + query)[None, :])
    s_ds, inverse = row_scale(dst_ij, PER_BLOCK)
    dst_hat_ij = round_to_int8(dst_ij * inverse[:, None])
    qt_hat_i = load_padded(qt_ptr + i * BLOCK_Q, tl.arange(0, DP), n_q_padded, BLOCK_Q)
    dk_j += integer_dot(dst_hat_ij, tl.trans(qt_hat_i)) * (s_ds * s_q)[:, None]
    return dk_j, dv_j
