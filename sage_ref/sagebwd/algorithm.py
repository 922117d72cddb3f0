"""SageBwd as printed: Algorithm 1 (forward) and Algorithm 2 (backward), tile by tile, with real integers.

psi(X) = (s, X^) with s = max|X| / 127 and X^ = round(X / s) in INT8; MM is the exact integer matmul
(`integer_matmul`).

Each line cites the step it computes, "Alg. 1, step 4". The steps are counted here, in the paper's order: they are not
the line numbers of the printed page. "Erratum" marks where the printed line can't be run as it stands.

    Algorithm 1, forward                              Algorithm 2, backward
    step 1  K <- K - mean of K over all tokens        step 1  K smoothed, Q^, K^ as in Algorithm 1
    step 2  psi of every Q_i, K_j, V_j, once          step 2  psi of every dO_i, once
    step 3  m, l and O_i start                        step 3  delta = rowsum(dO * O)
    step 4  S_ij = MM(Q^_i, K^_j) s_Q s_K c           step 4  S_ij as in Algorithm 1; P_ij = exp(S_ij - L_i)
    step 5  m_new = max(m, rowmax S_ij)               step 5  psi(P_ij);  dV_j += MM(P^_ij^T, dO^_i) s_P s_dO
    step 6  P~_ij = exp(S_ij - m_new)                 step 6  dP_ij = dO_i V_j^T in 16 bit
    step 7  l = e^(m - m_new) l + rowsum P~_ij        step 7  dS_ij = P_ij * (dP_ij - delta_i)
    step 8  psi of P~_ij, one scale per token         step 8  psi(dS_ij)
    step 9  O_i = e^(m - m_new) O_i                   step 9  dQ_i += MM(dS^_ij, K^_j) s_dS s_K c
              + MM(P^_ij, V^_j) s_P s_V               step 10 dK_j += MM(dS^_ij^T, Q^_i) s_dS s_Q c
    step 10 O_i / l,  L_i = m + log l

There are no options here: K is smoothed, dP is exact, all else is rounded to nearest, and P and dS have one scale per
tile in the backward pass. The library's default has one per row. `sagebwd_attention(..., granularity="block")` is
the printed choice, in the kernels' tiles of 128 x 128; `SageBwdSettings.printed()` is what stands here, on whole
matrices (`sage_ref.sagebwd.whole`), where every option lives.
"""

import math

import torch
from torch import Tensor

from sage_ref.attention import causal_mask, softmax_scale
from sage_ref.quantization import BlockShape, integer_matmul, quantize
from sage_ref.shapes import tiles, working_dtype
from sage_ref.smoothing import key_mean_scores, smooth_key


def tiled_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    block_q: int = 64,
    block_kv: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: query [..., Nq, D], key, value [..., Nk, D] -> O [..., Nq, D], L [..., Nq] of unsmoothed S."""
    c = softmax_scale(scale, query.shape[-1])  # Erratum: the printed S lacks c
    query_tiles, key_tiles = tiles(query.shape[-2], block_q), tiles(key.shape[-2], block_kv)
    visible = visible_keys(query, key, is_causal)
    q, k, v = (x.to(working_dtype(x)) for x in (query, key, value))
    k, k_mean = smooth_key(k)  # Alg. 1, step 1
    psi_q = [psi(q[..., queries, :]) for queries in query_tiles]  # Alg. 1, step 2: (s_Q, Q^_i) of every i
    psi_k = [psi(k[..., keys, :]) for keys in key_tiles]
    psi_v = [psi(v[..., keys, :]) for keys in key_tiles]
    o, log_sum_exp = torch.empty_like(q), torch.empty_like(q[..., :1])
    for queries, (s_q, q_hat_i) in zip(query_tiles, psi_q, strict=True):
        # [..., Bq, 1], [..., Bq, 1], [..., Bq, D]
        m = torch.full_like(q[..., queries, :1], -math.inf)  # Alg. 1, step 3. Erratum: printed as 0
        l = torch.zeros_like(m)
        o_i = torch.zeros_like(q[..., queries, :])
        for keys, (s_k, k_hat_j), (s_v, v_hat_j) in zip(key_tiles, psi_k, psi_v, strict=True):
            if not visible[queries, keys].any():  # above the diagonal of causal attention
                continue
            # [..., Bq, Bkv]
            s_ij = integer_matmul(q_hat_i, k_hat_j.mT) * s_q * s_k * c  # Alg. 1, step 4
            s_ij = s_ij.masked_fill(~visible[queries, keys], -math.inf)
            m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))  # Alg. 1, step 5
            p_tilde_ij = torch.exp(s_ij - m_new)  # Alg. 1, step 6
            rescale = torch.exp(m - m_new)
            l = rescale * l + p_tilde_ij.sum(-1, keepdim=True)  # Alg. 1, step 7. Erratum: printed without the old l
            # Alg. 1, step 8: s_P = exp(rowmax(S_ij) - m_new) / 127, which is rowmax(P~_ij) / 127
            s_p, p_hat_ij = psi(p_tilde_ij, (1, None))
            # Alg. 1, step 9. Erratum: printed with the inverse of e^(m - m_new)
            o_i = rescale * o_i + integer_matmul(p_hat_ij, v_hat_j) * s_p * s_v
            m = m_new
        o[..., queries, :] = o_i / l  # Alg. 1, step 10
        log_sum_exp[..., queries, :] = m + torch.log(l)
    # The scores of the smoothed K lack c Q mu_K^T.
    log_sum_exp = log_sum_exp + key_mean_scores(q, k_mean, c)
    return o.to(query.dtype), log_sum_exp.squeeze(-1)


def tiled_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    block_q: int = 64,
    block_kv: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 2: dQ, dK, dV from dO [..., Nq, D] and the forward's O and L."""
    c = softmax_scale(scale, query.shape[-1])  # Erratum: the printed S, dQ and dK lack c
    query_tiles, key_tiles = tiles(query.shape[-2], block_q), tiles(key.shape[-2], block_kv)
    visible = visible_keys(query, key, is_causal)
    q, k, v, o, do = (x.to(working_dtype(x)) for x in (query, key, value, output, grad_output))
    k, k_mean = smooth_key(k)  # Alg. 2, step 1
    log_sum_exp = log_sum_exp[..., None] - key_mean_scores(q, k_mean, c)  # of the smoothed scores again
    psi_q = [psi(q[..., queries, :]) for queries in query_tiles]
    psi_k = [psi(k[..., keys, :]) for keys in key_tiles]
    psi_do = [psi(do[..., queries, :]) for queries in query_tiles]  # Alg. 2, step 2
    delta = (do * o).sum(-1, keepdim=True)  # Alg. 2, step 3
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keys, (s_k, k_hat_j) in zip(key_tiles, psi_k, strict=True):
        for queries, (s_q, q_hat_i), (s_do, do_hat_i) in zip(query_tiles, psi_q, psi_do, strict=True):
            if not visible[queries, keys].any():
                continue
            # [..., Bq, Bkv]
            s_ij = integer_matmul(q_hat_i, k_hat_j.mT) * s_q * s_k * c  # Alg. 2, step 4
            s_ij = s_ij.masked_fill(~visible[queries, keys], -math.inf)
            p_ij = torch.exp(s_ij - log_sum_exp[..., queries, :])
            s_p, p_hat_ij = psi(p_ij)  # Alg. 2, step 5
            dv[..., keys, :] += integer_matmul(p_hat_ij.mT, do_hat_i) * s_p * s_do
            dp_ij = do[..., queries, :] @ v[..., keys, :].mT  # Alg. 2, step 6: dO and V as they came
            ds_ij = p_ij * (dp_ij - delta[..., queries, :])  # Alg. 2, step 7
            s_ds, ds_hat_ij = psi(ds_ij)  # Alg. 2, step 8
            dq[..., queries, :] += integer_matmul(ds_hat_ij, k_hat_j) * s_ds * s_k * c  # Alg. 2, step 9
            dk[..., keys, :] += integer_matmul(ds_hat_ij.mT, q_hat_i) * s_ds * s_q * c  # Alg. 2, step 10
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def psi(x: Tensor, block_shape: BlockShape = (None, None)) -> tuple[Tensor, Tensor]:
    """Return (s, X^) of a tile, with one scale, s [..., 1, 1]; with block_shape (1, None) one a row, s [..., Bq, 1]."""
    quantized = quantize(x, block_shape)
    return quantized.scale, quantized.values


def visible_keys(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    """Return bool [Nq, Nk], True where query i may see key j."""
    n_q, n_k = query.shape[-2], key.shape[-2]
    if is_causal:
        return causal_mask(n_q, n_k, query.device)
    return torch.ones(n_q, n_k, dtype=torch.bool, device=query.device)
