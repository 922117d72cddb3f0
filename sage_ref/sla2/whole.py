"""The attention of SLA2 for a given block mask: O = alpha O_s + (1 - alpha) O_l, forward and backward.

alpha, one number per head and block of queries, is the share of the softmax mass that the selected blocks hold:
P1 V = rowsum(P1) O_s, so with the right alpha nothing is left for SLA's Proj to repair.

Every algorithm stands here twice. `tiled_forward` and `tiled_backward` are the paper's Algorithms 2 and 3, block by
block; `sla2_forward` and `sla2_backward` give the same numbers on whole matrices. Where the printed algorithms can't be
run as they stand, this is what is meant (README, "Errata"): scores that are masked out are -inf, dV_j = K^phi_j dH is
added to the sparse branch's, alpha is one number per block of queries.

Quantisation-aware training: with `quantize` the forward pass of the sparse branch runs in INT8 as SageBwd's does (K
smoothed; psi per block of Q, K and V, per row of a tile of P); the backward pass works on the unquantised Q, K, V with
the O_s and L that the forward pass left.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.checks import refuse_second_derivative
from sage_ref.quantization import fake_quantize, quantize, quantized_matmul
from sage_ref.shapes import tiles, working_dtype
from sage_ref.sla2.branches import (
    BlockSettings,
    divisor,
    feature_map,
    into_blocks,
    key_block_sums,
    linear_branch,
    sparse_branch,
    spread_blocks,
    weighted_sums,
)
from sage_ref.smoothing import key_mean_scores, smooth_key


class Sla2Forward(NamedTuple):
    """The result and its parts. L, natural log of the unsmoothed scores, is -inf where no block is selected."""

    output: Tensor  # O        [..., Nq, D]
    sparse_output: Tensor  # O_s [..., Nq, D]
    linear_output: Tensor  # O_l [..., Nq, D]
    log_sum_exp: Tensor  # L   [..., Nq, 1]


class Sla2Backward(NamedTuple):
    grad_query: Tensor  # dQ     [..., Nq, D]
    grad_key: Tensor  # dK       [..., Nk, D]
    grad_value: Tensor  # dV     [..., Nk, D]
    grad_alpha: Tensor  # dalpha [..., Tm]


def soft_sparse_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """O = alpha O_s + (1 - alpha) O_l with weights in [0, 1] for M, differentiable in every tensor: for stage 1.

    The softmax weighs e^S by M, which is S + log M where M > 0; the linear branch weighs key blocks by 1 - M.
    block_weights [..., Tm, Tn], alpha [..., Tm]. At weights 0 and 1 this is `sla2_forward` without quantisation.
    """
    o_s, _ = sparse_branch(query, key, value, block_weights, settings)
    o_l = linear_branch(query, key, value, 1 - block_weights.to(query.dtype), settings)
    return mix(o_s, o_l, per_query(alpha, query.shape[-2], settings))


def per_query(alpha: Tensor, n_q: int, settings: BlockSettings) -> Tensor:
    """alpha of each query's block: [..., Tm] -> [..., Nq, 1]."""
    return alpha.repeat_interleave(settings.block_q, -1)[..., :n_q, None]


def mix(o_s: Tensor, o_l: Tensor, alpha: Tensor) -> Tensor:
    return alpha * o_s + (1 - alpha) * o_l


def tiled_forward(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, alpha: Tensor, settings: BlockSettings
) -> Sla2Forward:
    """Algorithm 2 for one head. query [Nq, D], key, value [Nk, D], block_mask bool [Tm, Tn], alpha [Tm]."""
    c = softmax_scale(settings.scale, query.shape[-1])
    k_sm, k_mean = smooth_key(key) if settings.quantize else (key, torch.zeros_like(key[:1]))
    q_phi, k_phi = feature_map(query, settings.feature_map), feature_map(key, settings.feature_map)
    columns = tiles(key.shape[0], settings.block_kv)
    h = [k_phi[block].mT @ value[block] for block in columns]
    z = [k_phi[block].sum(0) for block in columns]
    forward = Sla2Forward(*(torch.empty_like(query) for _ in range(3)), torch.empty_like(query[:, :1]))
    for i, rows in enumerate(tiles(query.shape[0], settings.block_q)):
        m = torch.full_like(query[rows, :1], -math.inf)
        l = torch.zeros_like(m)
        o_i = torch.zeros_like(query[rows])
        h_i, z_i = torch.zeros_like(h[0]), torch.zeros_like(z[0])
        for j, block in enumerate(columns):
            if not block_mask[i, j]:
                h_i, z_i = h_i + h[j], z_i + z[j]
                continue
            # [Bq, Bkv]
            s_ij = tile_matmul(query[rows], k_sm[block].mT, settings) * c
            m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
            p_ij = torch.exp(s_ij - m_new)
            rescale = torch.exp(m - m_new)
            l = rescale * l + p_ij.sum(-1, keepdim=True)
            o_i = rescale * o_i + tile_matmul(p_ij, value[block], settings, rows_of_a=1)
            m = m_new
        forward.sparse_output[rows] = o_i / divisor(l)
        forward.log_sum_exp[rows] = m + l.log() + key_mean_scores(query[rows], k_mean, c)
        forward.linear_output[rows] = q_phi[rows] @ h_i / divisor(q_phi[rows] @ z_i[:, None])
        forward.output[rows] = mix(forward.sparse_output[rows], forward.linear_output[rows], alpha[i])
    return forward


def tile_matmul(a: Tensor, b: Tensor, settings: BlockSettings, rows_of_a: int | None = None) -> Tensor:
    """A B of two tiles, in INT8 with one scale per tile of B and per `rows_of_a` rows of A (None: all of them)."""
    return quantized_matmul(quantize(a, (rows_of_a, None)), quantize(b)) if settings.quantize else a @ b


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
    """Algorithm 3 for one head, and dalpha. dO [Nq, D]; other shapes as in `tiled_forward`."""
    c = softmax_scale(settings.scale, query.shape[-1])
    q_phi, k_phi = feature_map(query, settings.feature_map), feature_map(key, settings.feature_map)
    rows, columns = tiles(query.shape[0], settings.block_q), tiles(key.shape[0], settings.block_kv)
    h = [k_phi[block].mT @ value[block] for block in columns]
    z = [k_phi[block].sum(0) for block in columns]
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    dq_phi, dk_phi, dalpha = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(alpha)
    dh, dz = [], []  # of H_i and Z_i, by block of queries
    for i, block in enumerate(rows):
        do_i, unselected = grad_output[block], [j for j in range(len(columns)) if not block_mask[i, j]]
        dalpha[i] = (do_i * (forward.sparse_output[block] - forward.linear_output[block])).sum()
        do_l = (1 - alpha[i]) * do_i
        h_i = sum((h[j] for j in unselected), torch.zeros_like(h[0]))
        z_i = sum((z[j] for j in unselected), torch.zeros_like(z[0]))
        weight_sum = divisor(q_phi[block] @ z_i[:, None])
        d_l = (do_l * forward.linear_output[block]).sum(-1, keepdim=True)
        dh.append((q_phi[block] / weight_sum).mT @ do_l)
        dz.append(-(q_phi[block] / weight_sum).mT @ d_l)
        dq_phi[block] = (do_l @ h_i.mT - d_l * z_i) / weight_sum
    for j, keys in enumerate(columns):
        dh_j, dz_j = torch.zeros_like(h[0]), torch.zeros_like(dz[0])
        for i, block in enumerate(rows):
            if not block_mask[i, j]:
                dh_j, dz_j = dh_j + dh[i], dz_j + dz[i]
                continue
            do_s = alpha[i] * grad_output[block]
            # [Bq, Bkv]
            p_ij = torch.exp(query[block] @ key[keys].mT * c - forward.log_sum_exp[block])
            dv[keys] += p_ij.mT @ do_s
            dp_ij = do_s @ value[keys].mT
            delta_i = (do_s * forward.sparse_output[block]).sum(-1, keepdim=True)
            ds_ij = p_ij * (dp_ij - delta_i)
            dq[block] += ds_ij @ key[keys] * c
            dk[keys] += ds_ij.mT @ query[block] * c
        dk_phi[keys] = value[keys] @ dh_j.mT + dz_j.mT
        dv[keys] += k_phi[keys] @ dh_j
    dq += feature_map_backward(query, q_phi, dq_phi, settings.feature_map)
    dk += feature_map_backward(key, k_phi, dk_phi, settings.feature_map)
    return Sla2Backward(dq, dk, dv, dalpha)


def sla2_forward(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, alpha: Tensor, settings: BlockSettings
) -> Sla2Forward:
    """Algorithm 2 on whole matrices.

    query [..., Nq, D], key, value [..., Nk, D], block_mask bool [..., Tm, Tn], alpha [..., Tm].
    Computed, and returned, in float32 (float64 for float64).
    """
    q, k, v = (x.to(working_dtype(x)) for x in (query, key, value))
    sparse = int8_sparse_branch if settings.quantize else sparse_branch
    o_s, log_sum_exp = sparse(q, k, v, block_mask, settings)
    o_l = linear_branch(q, k, v, ~block_mask, settings)
    o = mix(o_s, o_l, per_query(alpha.to(q.dtype), q.shape[-2], settings))
    return Sla2Forward(o, o_s, o_l, log_sum_exp)


def int8_sparse_branch(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, settings: BlockSettings
) -> tuple[Tensor, Tensor]:
    """`sparse_branch` for a bool mask with Q, K, P, V in INT8; not differentiable."""
    c = softmax_scale(settings.scale, query.shape[-1])
    k_sm, k_mean = smooth_key(key)
    k_hat, v_hat = (fake_quantize(x, (settings.block_kv, None)) for x in (k_sm, value))
    s = fake_quantize(query, (settings.block_q, None)) @ k_hat.mT * c
    s = s.masked_fill(~spread_blocks(block_mask, *s.shape[-2:], settings), -math.inf)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m.masked_fill(m == -math.inf, 0))
    l = p.sum(-1, keepdim=True)
    o_s = fake_quantize(p, (1, settings.block_kv)) @ v_hat / divisor(l)
    return o_s, m + l.log() + key_mean_scores(query, k_mean, c)


def sla2_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    alpha: Tensor,
    sparse_output: Tensor,
    log_sum_exp: Tensor,
    settings: BlockSettings,
) -> Sla2Backward:
    """Algorithm 3 on whole matrices, and dalpha, from dO and the forward's O_s and L. In float32 or float64."""
    q, k, v, do, o_s = (x.to(working_dtype(query)) for x in (query, key, value, grad_output, sparse_output))
    c = softmax_scale(settings.scale, q.shape[-1])
    share = per_query(alpha.to(q.dtype), q.shape[-2], settings)
    do_s, do_l = share * do, (1 - share) * do
    # The sparse branch: attention's backward over the selected blocks.
    seen = spread_blocks(block_mask, q.shape[-2], k.shape[-2], settings)
    p = torch.exp((q @ k.mT * c - log_sum_exp).masked_fill(~seen, -math.inf))
    dv = p.mT @ do_s
    ds = p * (do_s @ v.mT - (do_s * o_s).sum(-1, keepdim=True))
    dq, dk = ds @ k * c, ds.mT @ q * c
    # The linear branch, block by block of queries (_i) and of keys (_j).
    q_phi, k_phi = feature_map(q, settings.feature_map), feature_map(k, settings.feature_map)
    complement = (~block_mask).to(q.dtype)
    h_i, z_i = weighted_sums(complement, *key_block_sums(k_phi, v, settings))
    q_i, do_l_i = into_blocks(q_phi, settings.block_q), into_blocks(do_l, settings.block_q)
    weight_sum = divisor(q_i @ z_i[..., None])
    o_l_i = q_i @ h_i / weight_sum
    d_l = (do_l_i * o_l_i).sum(-1, keepdim=True)
    dq_phi = (do_l_i @ h_i.mT - d_l * z_i[..., None, :]) / weight_sum
    dh_i = (q_i / weight_sum).mT @ do_l_i
    dz_i = -((q_i / weight_sum).mT @ d_l).squeeze(-1)
    dh_j, dz_j = weighted_sums(complement.mT, dh_i, dz_i)
    dk_phi = into_blocks(v, settings.block_kv) @ dh_j.mT + dz_j[..., None, :]
    dv = dv + from_blocks(into_blocks(k_phi, settings.block_kv) @ dh_j, k.shape[-2])
    dq = dq + feature_map_backward(q, q_phi, from_blocks(dq_phi, q.shape[-2]), settings.feature_map)
    dk = dk + feature_map_backward(k, k_phi, from_blocks(dk_phi, k.shape[-2]), settings.feature_map)
    o_l = from_blocks(o_l_i, q.shape[-2])
    dalpha = into_blocks(do * (o_s - o_l), settings.block_q).sum((-2, -1))
    return Sla2Backward(dq, dk, dv, dalpha)


def feature_map_backward(x: Tensor, phi: Tensor, grad_phi: Tensor, kind: str) -> Tensor:
    """dx from dphi, where phi = feature_map(x, kind)."""
    if kind == "softmax":
        return phi * (grad_phi - (phi * grad_phi).sum(-1, keepdim=True))
    slope = phi.clamp(max=1) if kind == "elu+1" else (x > 0).to(x.dtype)  # elu' is e^x = phi below 0, 1 above
    return grad_phi * slope


def from_blocks(blocks: Tensor, n: int) -> Tensor:
    """[..., ceil(N / block), block, D] -> [..., N, D]."""
    return blocks.flatten(-3, -2)[..., :n, :]


class SparseLinearFunction(torch.autograd.Function):
    """`sla2_forward` and `sla2_backward` as one operation, differentiable once in query, key, value and alpha."""

    @staticmethod
    def forward(ctx, query, key, value, block_mask, alpha, settings):
        with torch.autocast(query.device.type, enabled=False):
            forward = sla2_forward(query, key, value, block_mask, alpha, settings)
        ctx.save_for_backward(query, key, value, block_mask, alpha, forward.sparse_output, forward.log_sum_exp)
        ctx.settings = settings
        return forward.output.to(query.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("SLA2's")
        query, key, value, block_mask, alpha, *saved = ctx.saved_tensors
        with torch.autocast(grad_output.device.type, enabled=False):
            gradients = sla2_backward(grad_output, query, key, value, block_mask, alpha, *saved, ctx.settings)
        inputs = (query, key, value, alpha)
        dq, dk, dv, dalpha = (gradient.to(x.dtype) for gradient, x in zip(gradients, inputs, strict=True))
        return dq, dk, dv, None, dalpha, None
