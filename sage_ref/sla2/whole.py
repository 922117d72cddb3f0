"""SLA2's Algorithms 2 and 3 on whole matrices, and as one differentiable operation.

These are the numbers of `algorithm.py` for any leading dimensions, and what `backend="reference"` computes. Instead of
adding up h_j for every block of queries, H_i is one product, complement mask times h (`branches.weighted_sums`).

Quantisation-aware training: with `quantize` the forward pass of the sparse branch runs in INT8 as SageBwd's does (K
smoothed; psi per block of Q, K and V, per row of a tile of P); the backward pass works on the unquantised Q, K, V with
the O_s and L that the forward pass left, but takes P from the forward's INT8 scores. As printed (backward="printed") P
comes from 16-bit scores, which don't fit that L where they are large: rows of P don't sum to 1 (erratum).
"""

import math
from functools import partial

import torch
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.derivatives import gradients_once
from sage_ref.quantization import fake_quantize
from sage_ref.shapes import in_dtype, working_dtype
from sage_ref.sla2.algorithm import Sla2Backward, Sla2Forward
from sage_ref.sla2.blocks import (
    BlockSettings,
    by_parts,
    from_blocks,
    into_blocks,
    per_query,
    query_parts,
    spread_blocks,
)
from sage_ref.sla2.branches import (
    divisor,
    feature_map,
    feature_map_backward,
    key_block_sums,
    linear_branch,
    mix,
    sparse_branch,
    weighted_sums,
)
from sage_ref.smoothing import key_mean_scores, smooth_key


def sla2_forward(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Tensor, alpha: Tensor, settings: BlockSettings
) -> Sla2Forward:
    """Compute Algorithm 2 on whole matrices.

    query [..., Nq, D], key, value [..., Nk, D], block_mask bool [..., Tm, Tn], alpha [..., Tm].
    It is computed and returned in float32, for float64 in float64.
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
    """Compute `sparse_branch` for a bool mask with Q, K, P, V in INT8; not differentiable."""
    q_hat, k_hat, mean_scores = int8_operands(query, key, settings)
    v_hat, c = fake_quantize(value, (settings.block_kv, None)), softmax_scale(settings.scale, query.shape[-1])

    def rows(q_hat: Tensor, block_mask: Tensor) -> tuple[Tensor, Tensor]:
        s = q_hat @ k_hat.mT * c
        # Erratum: printed is softmax(S * M), which would give masked scores the weight e^0.
        s = s.masked_fill(~spread_blocks(block_mask, *s.shape[-2:], settings), -math.inf)
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m.masked_fill(m == -math.inf, 0))
        l = p.sum(-1, keepdim=True)
        return fake_quantize(p, (1, settings.block_kv)) @ v_hat / divisor(l), m + l.log()

    o_s, log_sum_exp = by_parts(rows, query_parts(query, key, settings), (q_hat,), (block_mask,))
    return o_s, log_sum_exp + mean_scores


def int8_operands(query: Tensor, key: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and smoothed K on INT8's grid, and what smoothing took from every score of a row, [..., Nq, 1]."""
    k_sm, k_mean = smooth_key(key)
    q_hat, k_hat = fake_quantize(query, (settings.block_q, None)), fake_quantize(k_sm, (settings.block_kv, None))
    return q_hat, k_hat, key_mean_scores(query, k_mean, softmax_scale(settings.scale, query.shape[-1]))


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
    """Compute Algorithm 3 on whole matrices, and dalpha, from dO and the forward's O_s and L, in float32 or float64.

    grad_output, sparse_output [..., Nq, D], log_sum_exp [..., Nq, 1]; other shapes as in `sla2_forward`.
    """
    q, k, v, do, o_s = (x.to(working_dtype(query)) for x in (query, key, value, grad_output, sparse_output))
    c = softmax_scale(settings.scale, q.shape[-1])
    share = per_query(alpha.to(q.dtype), q.shape[-2], settings)
    do_s, do_l = share * do, (1 - share) * do
    d_s = (do_s * o_s).sum(-1, keepdim=True)
    # The linear branch from here on block by block of queries (_i) and of keys (_j).
    q_phi, k_phi = feature_map(q, settings.feature_map), feature_map(k, settings.feature_map)
    complement = (~block_mask).to(q.dtype)
    h_i, z_i = weighted_sums(complement, *key_block_sums(k_phi, v, settings))
    q_phi_i, do_l_i = into_blocks(q_phi, settings.block_q), into_blocks(do_l, settings.block_q)
    q_phi_z_i = divisor(q_phi_i @ z_i[..., None])
    o_l_i = q_phi_i @ h_i / q_phi_z_i
    d_l_i = (do_l_i * o_l_i).sum(-1, keepdim=True)
    dh_i = (q_phi_i / q_phi_z_i).mT @ do_l_i
    dz_i = -((q_phi_i / q_phi_z_i).mT @ d_l_i).squeeze(-1)
    dq_phi_i = (do_l_i @ h_i.mT - d_l_i * z_i[..., None, :]) / q_phi_z_i
    # The sparse branch: attention's backward over the selected blocks. S is the product of left and right.
    left, right = q, k
    if settings.matched:
        left, right, mean_scores = int8_operands(q, k, settings)
        log_sum_exp = log_sum_exp - mean_scores
    dk = dv = 0.0

    def rows(left_i: Tensor, q_i: Tensor, do_i: Tensor, d_i: Tensor, l_i: Tensor, mask_i: Tensor) -> tuple[Tensor]:
        nonlocal dk, dv
        seen = spread_blocks(mask_i, q_i.shape[-2], k.shape[-2], settings)
        p = torch.exp((left_i @ right.mT * c - l_i).masked_fill(~seen, -math.inf))
        dv = p.mT @ do_i + dv
        ds = p * (do_i @ v.mT - d_i)
        dk = ds.mT @ q_i * c + dk
        return (ds @ k * c,)

    (dq,) = by_parts(rows, query_parts(q, k, settings), (left, q, do_s, d_s, log_sum_exp), (block_mask,))
    # Back to the linear branch, by block of keys.
    dh_j, dz_j = weighted_sums(complement.mT, dh_i, dz_i)
    dk_phi_j = into_blocks(v, settings.block_kv) @ dh_j.mT + dz_j[..., None, :]
    # Erratum: Alg. 3, line 17 assigns this to dV.
    dv = dv + from_blocks(into_blocks(k_phi, settings.block_kv) @ dh_j, k.shape[-2])
    dq = dq + feature_map_backward(q, q_phi, from_blocks(dq_phi_i, q.shape[-2]), settings.feature_map)
    dk = dk + feature_map_backward(k, k_phi, from_blocks(dk_phi_j, k.shape[-2]), settings.feature_map)
    o_l = from_blocks(o_l_i, q.shape[-2])
    dalpha = into_blocks(do * (o_s - o_l), settings.block_q).sum((-2, -1))
    return Sla2Backward(dq, dk, dv, dalpha)


class SparseLinearFunction(torch.autograd.Function):
    """`sla2_forward` and `sla2_backward` as one operation, differentiable once in query, key, value and alpha.

    It returns (O, O_s, L), of which O alone has a gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, block_mask, alpha, settings):
        with torch.autocast(query.device.type, enabled=False):
            forward = sla2_forward(query, key, value, block_mask, alpha, settings)
        return in_dtype(forward.output, query.dtype), forward.sparse_output, forward.log_sum_exp

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.settings = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, grad_output, *_):
        compute = partial(_four_gradients, ctx.settings)
        dq, dk, dv, dalpha = gradients_once("sparse_linear_attention", compute, grad_output, *ctx.saved_tensors)
        return dq, dk, dv, None, dalpha, None


def _four_gradients(settings, grad_output, query, key, value, block_mask, alpha, *saved):
    """Return dQ, dK, dV and dalpha in the dtypes of query, key, value and alpha."""
    with torch.autocast(grad_output.device.type, enabled=False):
        gradients = sla2_backward(grad_output, query, key, value, block_mask, alpha, *saved, settings)
    return tuple(dx.to(x.dtype) for dx, x in zip(gradients, (query, key, value, alpha), strict=True))
