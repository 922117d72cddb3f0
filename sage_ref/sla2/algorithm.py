"""SLA2's Algorithms 2 and 3 (arXiv 2602.12675), block by block, for one head: to be read beside the paper.

Names are the paper's: Q_i -> q_i, S_ij -> s_ij, O^s -> o_s, O^l -> o_l, phi(K) = K^phi -> k_phi, D^s -> d_s. "Alg. 2,
step 3" counts the steps below, in the paper's order; they are not the printed line numbers, of which only Alg. 3, line
17 is cited, for its erratum. `whole.py` gives the same numbers on whole matrices, and a test keeps the two equal.

The block mask M comes from the router (`router.py`), which Algorithm 2 runs first.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.quantization import integer_matmul, quantize
from sage_ref.shapes import tiles
from sage_ref.sla2.blocks import BlockSettings, per_query
from sage_ref.sla2.branches import divisor, feature_map, feature_map_backward, mix
from sage_ref.smoothing import key_mean_scores, smooth_key


class Sla2Forward(NamedTuple):
    """The result and its parts. L, natural log of the unsmoothed scores, is -inf where no block is selected."""

    output: Tensor  # O        [..., Nq, D]
    sparse_output: Tensor  # O_s [..., Nq, D]
    linear_output: Tensor  # O_l [..., Nq, D]
    log_sum_exp: Tensor  # L   [..., Nq, 1]


class Sla2Backward(NamedTuple):
    """The result of Algorithm 3, and dalpha."""

    grad_query: Tensor  # dQ     [..., Nq, D]
    grad_key: Tensor  # dK       [..., Nk, D]
    grad_value: Tensor  # dV     [..., Nk, D]
    grad_alpha: Tensor  # dalpha [..., Tm]


def psi(x: Tensor, settings: BlockSettings, rows: int | None = None) -> tuple[Tensor | float, Tensor]:
    """Return (s, X^) with X ~ s X^: INT8 with one scale per `rows` rows (None: all), or (1, X) without quantisation."""
    if not settings.quantize:
        return 1.0, x
    found = quantize(x, (rows, None))
    return found.scale, found.values


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute A B: MM, exact in int32, where A and B are INT8."""
    return integer_matmul(a, b) if a.dtype == torch.int8 else a @ b


def tiled_forward(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, alpha: Tensor, settings: BlockSettings
) -> Sla2Forward:
    """Run Algorithm 2 for one head: query [Nq, D], key, value [Nk, D], block_mask bool [Tm, Tn], alpha [Tm], one dtype.

    settings.quantize: the sparse branch in INT8, as quantisation-aware training runs it.
    """
    c = softmax_scale(settings.scale, query.shape[-1])
    query_blocks, key_blocks = tiles(len(query), settings.block_q), tiles(len(key), settings.block_kv)
    # Alg. 2, step 1: smooth K, which pays where K is quantised.
    k_sm, k_mean = smooth_key(key) if settings.quantize else (key, torch.zeros_like(key[:1]))
    # Alg. 2, step 2: one scale per block, s_Q, s_K, s_V [1, 1] each, and Q^_i, K^_j, V^_j in INT8.
    s_q, q_hat = zip(*(psi(query[queries], settings) for queries in query_blocks), strict=True)
    s_k, k_hat = zip(*(psi(k_sm[keys], settings) for keys in key_blocks), strict=True)
    s_v, v_hat = zip(*(psi(value[keys], settings) for keys in key_blocks), strict=True)
    # Alg. 2, step 3: Q^phi and K^phi.
    q_phi, k_phi = (feature_map(x, settings.feature_map) for x in (query, key))
    # Alg. 2, step 4: h_j = (K^phi_j)^T V_j [D, D] and z_j, the sum of the rows of K^phi_j [D].
    h = [k_phi[keys].mT @ value[keys] for keys in key_blocks]
    z = [k_phi[keys].sum(0) for keys in key_blocks]
    o, o_s, o_l, log_sum_exp = (torch.empty_like(x) for x in (query, query, query, query[:, :1]))
    for i, queries in enumerate(query_blocks):
        # Alg. 2, step 5: m, l [Bq, 1], O^s_i [Bq, D], H_i [D, D], Z_i [D].
        m, l = torch.full_like(query[queries, :1], -math.inf), torch.zeros_like(query[queries, :1])
        o_s_i, h_i, z_i = torch.zeros_like(query[queries]), torch.zeros_like(h[0]), torch.zeros_like(z[0])
        for j in range(len(key_blocks)):
            # Erratum: printed is softmax(S * M), where a masked score is 0 and has weight e^0. Meant is -inf: a block
            # with M_ij = 0 has no part in the softmax.
            if block_mask[i, j]:
                # Alg. 2, step 6: S_ij [Bq, Bkv].
                s_ij = matmul(q_hat[i], k_hat[j].mT) * s_q[i] * s_k[j] * c
                # Alg. 2, step 7: online softmax, P~_ij [Bq, Bkv].
                m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
                p_tilde_ij, rescale = torch.exp(s_ij - m_new), torch.exp(m - m_new)
                l = rescale * l + p_tilde_ij.sum(-1, keepdim=True)
                # Alg. 2, step 8: O^s_i, with one scale s_P per row of P~ [Bq, 1].
                s_p, p_hat_ij = psi(p_tilde_ij, settings, rows=1)
                o_s_i = rescale * o_s_i + matmul(p_hat_ij, v_hat[j]) * s_p * s_v[j]
                m = m_new
            else:  # Alg. 2, step 9: H_i and Z_i over the unselected blocks; one product for all i in `whole.py`.
                h_i, z_i = h_i + h[j], z_i + z[j]
        # Alg. 2, step 10: O^s_i, and L_i of the scores before smoothing. O^l_i = Q^phi_i H_i / (Q^phi_i Z_i).
        o_s[queries] = o_s_i / divisor(l)
        log_sum_exp[queries] = m + l.log() + key_mean_scores(query[queries], k_mean, c)
        o_l[queries] = q_phi[queries] @ h_i / divisor(q_phi[queries] @ z_i[:, None])
        # Alg. 2, step 11: O_i. Erratum: alpha is per block of queries here, per row in Eq. 13; meant is per block.
        o[queries] = mix(o_s[queries], o_l[queries], alpha[i])
    return Sla2Forward(o, o_s, o_l, log_sum_exp)


def tiled_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    alpha: Tensor,
    forward: Sla2Forward,
    settings: BlockSettings,
) -> Sla2Backward:
    """Run Algorithm 3 for one head, and compute dalpha. dO [Nq, D]; other shapes as in `tiled_forward`.

    Q, K and V are not quantised; O^s and L come from the forward pass. If that was in INT8, S is computed from its Q^
    and K^, too, unless settings.backward is "printed".
    """
    c = softmax_scale(settings.scale, query.shape[-1])
    query_blocks, key_blocks = tiles(len(query), settings.block_q), tiles(len(key), settings.block_kv)
    # Alg. 3, step 1: the gradients that reach the two branches, dO^s = alpha dO and dO^l = (1 - alpha) dO.
    share = per_query(alpha, len(query), settings)
    do_s, do_l = share * grad_output, (1 - share) * grad_output
    # Alg. 3, step 2: D^s = rowsum(dO^s * O^s) and D^l = rowsum(dO^l * O^l), [Nq, 1].
    d_s = (do_s * forward.sparse_output).sum(-1, keepdim=True)
    d_l = (do_l * forward.linear_output).sum(-1, keepdim=True)
    # Alg. 3, step 3: Q^phi, K^phi, h_j and z_j again.
    q_phi, k_phi = (feature_map(x, settings.feature_map) for x in (query, key))
    h = [k_phi[keys].mT @ value[keys] for keys in key_blocks]
    z = [k_phi[keys].sum(0) for keys in key_blocks]
    dq, dk, dv, dq_phi, dk_phi = (torch.zeros_like(x) for x in (query, key, value, query, key))
    # Erratum: printed, S of step 7 is a product of the unquantised Q and K. L is that of the INT8 scores, so rows of
    # exp(S - L) don't sum to 1 where the two differ, by a factor of 10 at scores of some hundreds. Matched, S is L's.
    k_sm, k_mean = smooth_key(key) if settings.matched else (key, torch.zeros_like(key[:1]))
    l = forward.log_sum_exp - key_mean_scores(query, k_mean, c)
    int8 = replace(settings, quantize=settings.matched)
    dh, dz = [], []  # dH_i [D, D] and dZ_i [D, 1]
    for i, queries in enumerate(query_blocks):
        # Alg. 3, step 4: H_i and Z_i again, and the row's divisor Q^phi_i Z_i [Bq, 1].
        h_i = sum((h[j] for j in range(len(key_blocks)) if not block_mask[i, j]), torch.zeros_like(h[0]))
        z_i = sum((z[j] for j in range(len(key_blocks)) if not block_mask[i, j]), torch.zeros_like(z[0]))
        q_phi_z = divisor(q_phi[queries] @ z_i[:, None])
        # Alg. 3, step 5: dH_i = (Q^phi_i / (Q^phi_i Z_i))^T dO^l_i and dZ_i = -(Q^phi_i / (Q^phi_i Z_i))^T D^l_i.
        dh.append((q_phi[queries] / q_phi_z).mT @ do_l[queries])
        dz.append(-(q_phi[queries] / q_phi_z).mT @ d_l[queries])
        # Alg. 3, step 6: dQ^phi_i = (dO^l_i H_i^T - D^l_i Z_i^T) / (Q^phi_i Z_i).
        dq_phi[queries] = (do_l[queries] @ h_i.mT - d_l[queries] * z_i) / q_phi_z
    for j, keys in enumerate(key_blocks):
        dh_j, dz_j = torch.zeros_like(dh[0]), torch.zeros_like(dz[0])
        for i, queries in enumerate(query_blocks):
            if block_mask[i, j]:
                # Alg. 3, step 7: as in FlashAttention, [Bq, Bkv] each.
                (s_q, q_hat), (s_k, k_hat) = psi(query[queries], int8), psi(k_sm[keys], int8)
                p_ij = torch.exp(matmul(q_hat, k_hat.mT) * s_q * s_k * c - l[queries])
                dv[keys] += p_ij.mT @ do_s[queries]
                dp_ij = do_s[queries] @ value[keys].mT
                ds_ij = p_ij * (dp_ij - d_s[queries])
                dq[queries] += ds_ij @ key[keys] * c
                dk[keys] += ds_ij.mT @ query[queries] * c
            else:  # Alg. 3, step 8: dH and dZ over the blocks of queries that have not selected block j.
                dh_j, dz_j = dh_j + dh[i], dz_j + dz[i]
        # Alg. 3, step 9: dK^phi_j = V_j dH^T + 1 dZ^T.
        dk_phi[keys] = value[keys] @ dh_j.mT + dz_j.mT
        # Alg. 3, step 10, printed line 17. Erratum: printed dV_j = K^phi_j dH; it adds to the dV_j of step 7.
        dv[keys] += k_phi[keys] @ dh_j
    # Alg. 3, step 11, autograd's part in the paper: through phi to dQ and dK, and dalpha_i.
    dq += feature_map_backward(query, q_phi, dq_phi, settings.feature_map)
    dk += feature_map_backward(key, k_phi, dk_phi, settings.feature_map)
    by_query = (grad_output * (forward.sparse_output - forward.linear_output)).sum(-1)
    return Sla2Backward(dq, dk, dv, torch.stack([by_query[queries].sum() for queries in query_blocks]))
