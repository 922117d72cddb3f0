"""The two branches of SLA and SLA2 for any block weights M in [0, 1], differentiable in every tensor.

P = P1 + P2 with P1 = P * M: P1 holds few blocks but most of the mass, P2 is close to low rank.

sparse branch   O_s = softmax(c Q K^T, over the keys with M = 1) V
linear branch   O_l = phi(Q_i) H_i / (phi(Q_i) Z_i)        H_i = sum_j (1 - M_ij) h_j,   h_j = phi(K_j)^T V_j
                                                           Z_i = sum_j (1 - M_ij) z_j,   z_j = phi(K_j)^T 1
SLA             O = O_s + Proj(O_l)                        (arXiv 2509.24006, `sage_ref.sla2.sla`)
SLA2            O = alpha O_s + (1 - alpha) O_l            (arXiv 2602.12675, `sage_ref.sla2.module`)

alpha, one number per head and block of queries, is the share of the softmax mass that the selected blocks hold:
P1 V = rowsum(P1) O_s, so with the right alpha nothing is left for SLA's Proj to repair.

Weights between 0 and 1 are what SLA2's router trains through; at 0 and 1 both branches are exact. A row without a
selected block has O_s = 0, a row without an unselected one O_l = 0.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.sla2.blocks import (
    BlockSettings,
    by_parts_again,
    from_blocks,
    into_blocks,
    per_query,
    query_parts,
    spread_blocks,
)


def sparse_branch(
    query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, settings: BlockSettings
) -> tuple[Tensor, Tensor]:
    """Compute O_s = P V with P_ij proportional to M e^{S_ij}, and L = log(sum_j M e^{S_ij}); all four get gradients.

    SLA2 prints softmax(S * M); a score that is masked out is -inf, not 0, and a weight M in between is read as
    M e^S, that is S + log M (erratum).
    block_weights: M in [0, 1], bool or float [..., Tm, Tn]. Returns [..., Nq, D] and [..., Nq, 1].
    A query whose weights are all 0 has O_s = 0, L = -inf and no gradient. Where some are not, a weight of 0 has the
    gradient dO . (V_j - O_s) e^{S - L} that any weight has, with e^{S - L} bounded where it would overflow.
    Long sequences are computed in parts, and once more in the backward pass: no [Nq, Nk] is kept.
    """
    compute = partial(_sparse_rows, key=key, value=value, settings=settings)
    return tuple(by_parts_again(compute, query_parts(query, key, settings), (query,), (block_weights,)))


def _sparse_rows(
    query: Tensor, block_weights: Tensor, *, key: Tensor, value: Tensor, settings: BlockSettings
) -> tuple[Tensor, Tensor]:
    """Compute `sparse_branch` for some blocks of queries."""
    s = query @ key.mT * softmax_scale(settings.scale, query.shape[-1])
    weight = spread_blocks(block_weights.to(s.dtype), *s.shape[-2:], settings)
    # M e^{S - m} with m = max(S + log M), and log M bounded below: then neither e^{S - m} nor a gradient can overflow.
    smallest = math.sqrt(torch.finfo(s.dtype).tiny)
    log_m_e_s = (s + weight.clamp_min(smallest).log()).masked_fill(weight == 0, -math.inf)
    m = log_m_e_s.amax(-1, keepdim=True).detach()
    p = weight * torch.exp((s - m.masked_fill(m == -math.inf, math.inf)).clamp(max=-math.log(smallest)))
    l = p.sum(-1, keepdim=True)
    l = l.masked_fill(l == 0, 1)  # no key, and m is -inf
    return p @ value / l, m + l.log()


def feature_map(x: Tensor, kind: str) -> Tensor:
    """Return phi(x) >= 0, [..., N, D] -> [..., N, D]: softmax over the features, elu(x) + 1, or relu(x)."""
    if kind == "softmax":
        return x.softmax(-1)
    return F.elu(x) + 1 if kind == "elu+1" else F.relu(x)


def feature_map_backward(x: Tensor, phi: Tensor, grad_phi: Tensor, kind: str) -> Tensor:
    """Return dx from dphi, where phi = feature_map(x, kind)."""
    if kind == "softmax":
        return phi * (grad_phi - (phi * grad_phi).sum(-1, keepdim=True))
    slope = phi.clamp(max=1) if kind == "elu+1" else (x > 0).to(x.dtype)  # elu' is e^x = phi below 0, 1 above
    return grad_phi * slope


def key_block_sums(key_features: Tensor, value: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor]:
    """Return the linear branch's sums of key blocks: h_j = phi(K_j)^T V_j [..., Tn, D, D] and z_j = phi(K_j)^T 1."""
    k_j, v_j = into_blocks(key_features, settings.block_kv), into_blocks(value, settings.block_kv)
    return k_j.mT @ v_j, k_j.sum(-2)


def weighted_sums(weights: Tensor, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute H_i = sum_j w_ij h_j and Z_i = sum_j w_ij z_j by one matmul of [Tm, Tn] with [Tn, D (D + 1)].

    Adding up the unselected blocks of each query block, as Algorithm 2 is printed, would read nearly every h_j Tm
    times; the matmul reads it once.
    """
    width = h.shape[-1]
    sums = weights @ torch.cat((h.reshape(*h.shape[:-2], width * width), z), -1)
    return sums[..., : width * width].reshape(*sums.shape[:-1], width, width), sums[..., width * width :]


def linear_branch(query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, settings: BlockSettings) -> Tensor:
    """Compute O_l [..., Nq, D] over key blocks with weights [..., Tm, Tn], 1 - M in SLA; differentiable."""
    h, z = key_block_sums(feature_map(key, settings.feature_map), value, settings)
    h_i, z_i = weighted_sums(block_weights.to(query.dtype), h, z)
    q_i = into_blocks(feature_map(query, settings.feature_map), settings.block_q)
    return from_blocks(q_i @ h_i / divisor(q_i @ z_i[..., None]), query.shape[-2])


def divisor(weight_sum: Tensor) -> Tensor:
    """Return the divisor of a weighted sum: its weights' sum, or infinity where that is 0 and nothing is averaged.

    For the linear branch, 0 means that no key has a feature in common with the query. A sum so close to 0 that the
    gradients would overflow counts as 0.
    """
    limits = torch.finfo(weight_sum.dtype)
    return weight_sum.masked_fill(weight_sum < limits.tiny / limits.eps, math.inf)


def mix(o_s: Tensor, o_l: Tensor, alpha: Tensor) -> Tensor:
    """Compute O = alpha O_s + (1 - alpha) O_l. o_s, o_l [..., Nq, D]; alpha broadcasts, for example [..., Nq, 1]."""
    return alpha * o_s + (1 - alpha) * o_l


def soft_sparse_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """Compute O = alpha O_s + (1 - alpha) O_l with weights in [0, 1] for M, differentiable in every tensor (stage 1).

    The softmax weighs e^S by M, the linear branch weighs key blocks by 1 - M.
    block_weights [..., Tm, Tn], alpha [..., Tm]. At weights 0 and 1 this is `sla2_forward` without quantisation.
    """
    o_s, _ = sparse_branch(query, key, value, block_weights, settings)
    o_l = linear_branch(query, key, value, 1 - block_weights.to(query.dtype), settings)
    return mix(o_s, o_l, per_query(alpha, query.shape[-2], settings))
