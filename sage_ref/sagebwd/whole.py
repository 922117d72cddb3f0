"""SageBwd on whole matrices, with every option: the numbers of `sage_ref.sagebwd.algorithm`, vectorised.

Rounding each operand to its INT8 grid and multiplying in float is the integer matmul with its scales, and a few large
operations are faster than thousands of small ones. The options that Algorithms 1 and 2 leave out are here: smoothing Q
and V, other ways to round P and dS, one scale per row of P and dS, and keeping any of the seven matmuls exact. Steps
are counted as in `algorithm`.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.attention import AttentionBackward, AttentionForward, causal_mask, softmax_scale
from sage_ref.derivatives import gradients_once
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.shapes import in_dtype, working_dtype
from sage_ref.smoothing import key_mean_scores, query_mean_grad_key, smooth_key, smooth_query, smooth_value

LARGEST_LOG_P = 8  # far beyond what rounding does to P


class SmoothedInputs(NamedTuple):
    """Q and K in the working dtype, their means, and the scores that smoothing K took away."""

    q: Tensor  # [..., Nq, D]: Q - mu_Q, or Q
    k: Tensor  # [..., Nk, D]: K - mu_K, or K
    q_mean: Tensor | None  # [..., Nq, D]: mu_Q in every row of its block
    k_mean: Tensor | None  # [..., 1, D]: mu_K
    key_mean_scores: Tensor | float  # [..., Nq, 1]: c Q mu_K^T, or 0


def smooth(query: Tensor, key: Tensor, settings: SageBwdSettings) -> SmoothedInputs:
    """Convert Q and K to the working dtype and smooth them as `settings` say: the first step of every pass."""
    q, k = query.to(working_dtype(query)), key.to(working_dtype(key))
    offset, q_mean, k_mean = 0.0, None, None
    if settings.smooth_k:
        k, k_mean = smooth_key(k)
        offset = key_mean_scores(q, k_mean, softmax_scale(settings.scale, q.shape[-1]))
    if settings.smooth_q:
        q, q_mean = smooth_query(q, settings.block_q)
    return SmoothedInputs(q, k, q_mean, k_mean, offset)


def smoothed_v(value: Tensor, dtype: torch.dtype, settings: SageBwdSettings) -> tuple[Tensor, Tensor | None]:
    """Return V in the working dtype and the mean [..., 1, D] that was subtracted from it, None if none was."""
    v = value.to(dtype)
    return smooth_value(v) if settings.smooth_v else (v, None)


def sagebwd_forward(query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings) -> AttentionForward:
    """Compute Algorithm 1 on whole matrices: the numbers of `tiled_forward`, and the smoothed scores S as well."""
    q, k, q_mean, _, offset = smooth(query, key, settings)  # Alg. 1, step 1
    v, v_mean = smoothed_v(value, q.dtype, settings)
    s = whole_scores("S", q, k, q_mean, settings)  # Alg. 1, step 4
    m = s.amax(-1, keepdim=True)  # Alg. 1, step 5
    p = torch.exp(s - m)  # Alg. 1, step 6
    l = p.sum(-1, keepdim=True)  # Alg. 1, step 7
    p_hat, v_hat = settings.operands("O", p, v)  # Alg. 1, step 8
    o = visited_matmul(p_hat, v_hat, visited(p, settings)) / l  # Alg. 1, steps 9 and 10
    if v_mean is not None:
        o = o + v_mean
    return AttentionForward(
        in_dtype(o, settings.output_dtype or query.dtype), (m + torch.log(l) + offset).squeeze(-1), s
    )


def sagebwd_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    settings: SageBwdSettings,
) -> AttentionBackward:
    """Compute Algorithm 2 on whole matrices: the numbers of `tiled_backward`, and P, dP, delta and dS as well."""
    c = softmax_scale(settings.scale, query.shape[-1])
    q, k, q_mean, k_mean, offset = smooth(query, key, settings)  # Alg. 2, step 1
    v, v_mean = smoothed_v(value, q.dtype, settings)
    do, o = (x.to(q.dtype) for x in (grad_output, output))
    # The kernels take V and O themselves here: where dP isn't quantised, dP - delta is the same.
    o = o if v_mean is None else o - v_mean
    s = whole_scores("S_backward", q, k, q_mean, settings)  # Alg. 2, step 4
    seen = visited(s, settings)
    seen_by_key = None if seen is None else seen.mT
    # P is at most 1, or a little more if S was rounded differently in the forward pass. But where the offset is huge,
    # L minus the offset has lost its digits: then exp must not overflow.
    p = unvisited_to_zero((s - (log_sum_exp[..., None] - offset)).clamp(max=LARGEST_LOG_P).exp_(), seen)
    p_hat, do_hat = settings.operands("dV", p, do)  # Alg. 2, steps 2 and 5
    dv = visited_matmul(p_hat.mT, do_hat, seen_by_key)
    do_hat, v_hat = settings.operands("dP", do, v)  # Alg. 2, step 6: exact, unless settings say otherwise
    dp = do_hat @ v_hat.mT
    delta = settings.delta(do, o, p, dp)  # Alg. 2, step 3
    ds = unvisited_to_zero(p * (dp - delta), seen)  # Alg. 2, step 7
    ds_hat, k_hat = settings.operands("dQ", ds, k, k_mean)  # Alg. 2, step 8
    dq = visited_matmul(ds_hat, k_hat, seen) * c  # Alg. 2, step 9
    ds_hat_t, q_hat = settings.operands("dK", ds.mT, q)
    dk = visited_matmul(ds_hat_t, q_hat, seen_by_key) * c  # Alg. 2, step 10
    if settings.smooth_q:
        dk = dk + query_mean_grad_key(ds, q_mean, c)
    if v_mean is not None:  # delta and dP of V itself
        shift = do @ v_mean.mT
        delta, dp = delta + shift, dp + shift
    return AttentionBackward(dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), delta, p, dp, ds)


class SageBwdFunction(torch.autograd.Function):
    """`sagebwd_forward` and `sagebwd_backward` as one differentiable operation: (O, L), of which L has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, settings):
        with torch.autocast(query.device.type, enabled=False):
            output, log_sum_exp, _ = sagebwd_forward(query, key, value, settings)
        return output, log_sum_exp

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, ctx.settings = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad_output, _):
        compute = partial(_three_gradients, ctx.settings)
        return *gradients_once("sagebwd_attention", compute, grad_output, *ctx.saved_tensors), None


def _three_gradients(settings, grad_output, *saved):
    """Return dQ, dK and dV."""
    with torch.autocast(grad_output.device.type, enabled=False):
        return tuple(sagebwd_backward(grad_output, *saved, settings)[:3])


def whole_scores(matmul: str, q: Tensor, k: Tensor, q_mean: Tensor | None, settings: SageBwdSettings) -> Tensor:
    """Compute S = c Q^ K^^T [+ c mu_Q K^T], masked: [..., Nq, Nk].

    Args:
        matmul: "S" in the forward pass, "S_backward" in the backward pass.
        q: Smoothed queries [..., Nq, D].
        k: Smoothed keys [..., Nk, D].
        q_mean: mu_Q if `settings.smooth_q`.
        settings: Blocks, scale and mask.
    """
    c = softmax_scale(settings.scale, q.shape[-1])
    q_hat, k_hat = settings.operands(matmul, q, k)
    s = q_hat @ (k_hat * c).mT
    if settings.smooth_q:
        s = s + q_mean @ (k * c).mT
    if settings.is_causal:
        s = s.masked_fill(~causal_mask(*s.shape[-2:], s.device), -math.inf)
    return s


def visited(s: Tensor, settings: SageBwdSettings) -> Tensor | None:
    """Return bool [Nq, Nk], True for the entries of every tile that the tile loops visit; None if they visit all."""
    if not settings.is_causal:
        return None
    n_q, n_k = s.shape[-2:]
    query, key = torch.arange(n_q, device=s.device), torch.arange(n_k, device=s.device)
    last_query = (query // settings.block_q + 1) * settings.block_q - 1
    first_key = key // settings.block_kv * settings.block_kv
    return first_key[None, :] <= last_query[:, None].clamp(max=n_q - 1)


def unvisited_to_zero(x: Tensor, seen: Tensor | None) -> Tensor:
    """Replace the entries of tiles that are not computed by zeros, whatever they were."""
    return x if seen is None else x.masked_fill_(~seen, 0)


def visited_matmul(weights: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
    """Compute weights @ x, where a row of x that is not seen adds nothing: a skipped tile is not 0 * NaN."""
    if seen is None:
        return weights @ x
    bad = ~x.isfinite().all(-1)
    touched = bad.to(x.dtype) @ seen.mT.to(x.dtype) > 0
    return (weights @ x.masked_fill(bad[..., None], 0)).masked_fill(touched[..., None], torch.nan)
