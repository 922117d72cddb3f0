"""Level 0: the split backward in 16 bit, the ladder's starting point.

Idea: P is recomputed tile by tile from the saved log-sum-exp, P = 2^(S - L), so that nothing of size N x N was ever
stored. Five matmuls for the gradients and two more that the split computes twice: seven in all.
"""

import triton
import triton.language as tl

from sage_kernels.common.tiles import is_visible, load_tokens


@triton.jit
def query_rows(
    dq_i, q_i, s_q, do_i, log_sum_exp_i, delta_i, j, query, n_k, n_k_padded, k_ptr, k_stride_n, k_scale_ptr,
    kt_ptr, v_ptr, v_stride_n,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_KV: tl.constexpr,
    IS_CAUSAL: tl.constexpr, IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    key = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_j = load_tokens(k_ptr, key, k_stride_n, n_k, D, DP, IS_MASKED)
    # [Bq, Bkv]
    s_ij = tl.dot(q_i, tl.trans(k_j)) * s_q[:, None]
    p_ij = tl.math.exp2(s_ij - log_sum_exp_i[:, None])
    if IS_MASKED:
        p_ij = tl.where(is_visible(query[:, None], key[None, :], n_k, IS_CAUSAL), p_ij, 0.0)
    v_j = load_tokens(v_ptr, key, v_stride_n, n_k, D, DP, IS_MASKED)
    dp_ij = tl.dot(do_i, tl.trans(v_j))
    ds_ij = p_ij * (dp_ij - delta_i[:, None])
    return tl.dot(ds_ij.to(k_j.dtype), k_j, dq_i)


@triton.jit
def key_rows(
    dk_j, dv_j, k_j, s_k, v_j, i, key, n_q, n_k, n_q_padded, q_ptr, q_stride_n, q_scale_ptr, qt_ptr,
    do_ptr, do_stride_n, dot_ptr, do_scale_ptr, log_sum_exp_ptr, delta_ptr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SCALE_Q: tl.constexpr,
    IS_MASKED: tl.constexpr, PER_BLOCK: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    query = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_i = load_tokens(q_ptr, query, q_stride_n, n_q, D, DP, True)
    log_sum_exp_i = tl.load(log_sum_exp_ptr + query)
    # [Bkv, Bq]
    st_ij = tl.dot(k_j, tl.trans(q_i)) * s_k[:, None]
    pt_ij = tl.math.exp2(st_ij - log_sum_exp_i[None, :])
    if IS_MASKED:
        pt_ij = tl.where(query[None, :] >= key[:, None], pt_ij, 0.0)
    do_i = load_tokens(do_ptr, query, do_stride_n, n_q, D, DP, True)
    dv_j = tl.dot(pt_ij.to(do_i.dtype), do_i, dv_j)
    dpt_ij = tl.dot(v_j, tl.trans(do_i))
    dst_ij = pt_ij * (dpt_ij - tl.load(delta_ptr + query)[None, :])
    dk_j = tl.dot(dst_ij.to(q_i.dtype), q_i, dk_j)
    return dk_j, dv_j
