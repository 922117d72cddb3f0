"""SageBwd on whole matrices, with every option: the numbers of `sage_ref.sagebwd.algorithm`, vectorised.

Rounding each operand to its INT8 grid and multiplying in float is the integer matmul with its scales, and a few large
operations are faster than thousands of small ones. What Algorithms 1 and 2 leave out stands here: smoothing Q,
other ways to round P and dS, keeping any of the seven matmuls exact, one scale per row of P and dS, and what
`sage_ref.sagebwd.repair` does for dS.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.attention import AttentionBackward, AttentionForward, causal_mask, softmax_scale
from sage_ref.derivatives import gradients_once
from sage_ref.quantization import BlockShape, fake_quantize
from sage_ref.sagebwd.repair import in_two_terms, matching_delta, rotate_tokens
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.shapes import in_dtype, working_dtype
from sage_ref.smoothing import key_mean_scores, query_mean_grad_key, smooth_key, smooth_query, smooth_value

LARGEST_LOG_P = 8  # far beyond what rounding does to P


class SmoothedInputs(NamedTuple):
    q: Tensor  # [..., Nq, D]: Q - mu_Q, or Q
    k: Tensor  # [..., Nk, D]: K - mu_K, or K
    q_mean: Tensor | None  # [..., Nq, D]: mu_Q in every row of its block
    k_mean: Tensor | None  # [..., 1, D]: mu_K
    key_mean_scores: Tensor | float  # [..., Nq, 1]: c Q mu_K^T, or 0


def smooth(query: Tensor, key: Tensor, settings: SageBwdSettings) -> SmoothedInputs:
    """The first step of every pass: Q and K in the working dtype, smoothed as `settings` say."""
    q, k = query.to(working_dtype(query)), key.to(working_dtype(key))
    offset, q_mean, k_mean = 0.0, None, None
    if settings.smooth_k:
        k, k_mean = smooth_key(k)
        offset = key_mean_scores(q, k_mean, softmax_scale(settings.scale, q.shape[-1]))
    if settings.smooth_q:
        q, q_mean = smooth_query(q, settings.block_q)
    return SmoothedInputs(q, k, q_mean, k_mean, offset)


def smoothed_v(value: Tensor, dtype: torch.dtype, settings: SageBwdSettings) -> tuple[Tensor, Tensor | None]:
    """V in the working dtype, less its mean [..., 1, D] if `settings` say so; else None is the mean."""
    v = value.to(dtype)
    return smooth_value(v) if settings.repair.smooth_v else (v, None)


def sagebwd_forward(
    query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings, dtype: torch.dtype | None = None
) -> AttentionForward:
    """Algorithm 1 on whole matrices: the numbers of `tiled_forward`, and the smoothed scores S as well.

    dtype: of O; None: query's. A wide O (`Repair.wide_output`) has the working dtype.
    """
    q, k, q_mean, _, offset = smooth(query, key, settings)
    v, v_mean = smoothed_v(value, q.dtype, settings)
    s = whole_scores("S", q, k, q_mean, settings)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    p_hat = on_grid("O", p, (1, settings.block_kv), settings, settings.p_rounding)
    o = visited_matmul(p_hat, on_grid("O", v, (settings.block_kv, None), settings), visited(p, settings))
    o = o / (p_hat.sum(-1, keepdim=True) if settings.repair.rounded_sum else l)
    if v_mean is not None:
        o = o + v_mean
    dtype = o.dtype if settings.repair.wide_output else dtype or query.dtype
    return AttentionForward(in_dtype(o, dtype), (m + torch.log(l) + offset).squeeze(-1), s)


def sagebwd_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    settings: SageBwdSettings,
) -> AttentionBackward:
    """Algorithm 2 on whole matrices: the numbers of `tiled_backward`, and the intermediates P, dP, delta, dS."""
    c = softmax_scale(settings.scale, query.shape[-1])
    q, k, q_mean, k_mean, offset = smooth(query, key, settings)
    v, v_mean = smoothed_v(value, q.dtype, settings)
    do, o = (x.to(q.dtype) for x in (grad_output, output))
    # The kernels take V and O themselves here: where dP isn't quantised, dP - delta is the same.
    o = o if v_mean is None else o - v_mean
    s = whole_scores("S_backward", q, k, q_mean, settings)
    seen = visited(s, settings)
    seen_by_key = None if seen is None else seen.mT
    # P is 1 at most, a little more if S was rounded otherwise in the forward pass. But where the offset is huge, L less
    # the offset has lost its digits: then exp must not overflow.
    p = unvisited_to_zero((s - (log_sum_exp[..., None] - offset)).clamp(max=LARGEST_LOG_P).exp_(), seen)
    p_hat = on_grid("dV", p, settings.per_key, settings)
    dv = visited_matmul(p_hat.mT, on_grid("dV", do, (settings.block_q, None), settings), seen_by_key)
    per_token_do, per_token_v = settings.per_token
    dp = on_grid("dP", do, per_token_do, settings) @ on_grid("dP", v, per_token_v, settings).mT
    if settings.repair.delta == "probabilities":
        delta = matching_delta(p, unvisited_to_zero(p * dp, seen))
    else:
        delta = (do * o).sum(-1, keepdim=True)
    ds = unvisited_to_zero(p * (dp - delta), seen)
    ds_hat, k_hat = grad_scores_operands("dQ", ds, k, settings.per_query, settings)
    dq = visited_matmul(ds_hat, k_hat, seen) * c
    if settings.repair.key_mean and k_mean is not None:
        dq = dq + ds_hat.sum(-1, keepdim=True) * k_mean * c
    ds_hat_by_key, q_hat = grad_scores_operands("dK", ds.mT, q, settings.per_key[::-1], settings)
    dk = visited_matmul(ds_hat_by_key, q_hat, seen_by_key) * c
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
    def forward(query, key, value, settings, dtype=None):
        with torch.autocast(query.device.type, enabled=False):
            output, log_sum_exp, _ = sagebwd_forward(query, key, value, settings, dtype)
        return output, log_sum_exp

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, ctx.settings, *_ = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad_output, _):
        compute = partial(_three_gradients, ctx.settings)
        return *gradients_once("sagebwd_attention", compute, grad_output, *ctx.saved_tensors), None, None


def _three_gradients(settings, grad_output, *saved):
    """dQ, dK, dV."""
    with torch.autocast(grad_output.device.type, enabled=False):
        return tuple(sagebwd_backward(grad_output, *saved, settings)[:3])


def on_grid(
    matmul: str, x: Tensor, block_shape: BlockShape, settings: SageBwdSettings, rounding: str = "nearest"
) -> Tensor:
    """The operand x of a matmul: rounded to its INT8 grid, or as it is if that matmul stays exact."""
    if matmul in settings.exact_matmuls:
        return x
    return fake_quantize(x, block_shape, rounding, settings.generator)


def grad_scores_operands(
    matmul: str, ds: Tensor, x: Tensor, block_shape: BlockShape, settings: SageBwdSettings
) -> tuple[Tensor, Tensor]:
    """dS^ and X^ of the matmul dS X: X is K for dQ. For dK it is Q, and ds is dS transposed.

    block_shape: what shares a scale in ds; its columns are the tokens of X that do.
    """
    block, tile = block_shape[1], (settings.block_q, settings.block_kv)
    tile = tile if matmul == "dQ" else tile[::-1]
    turned = partial(rotate_tokens, block=block) if settings.repair.rotate else lambda y: y
    rounded = partial(on_grid, matmul, block_shape=block_shape, settings=settings, rounding=settings.ds_rounding)
    ds_hat = in_two_terms(turned(ds.mT).mT, tile, settings.repair.two_terms, rounded)
    x_hat = on_grid(matmul, turned(x), (block, None), settings)
    return turned(ds_hat.mT).mT, turned(x_hat)


def whole_scores(matmul: str, q: Tensor, k: Tensor, q_mean: Tensor | None, settings: SageBwdSettings) -> Tensor:
    """S = c Q^ K^^T [+ c mu_Q K^T], masked: [..., Nq, Nk].

    matmul: "S" in the forward pass, "S_backward" in the other.
    """
    c = softmax_scale(settings.scale, q.shape[-1])
    q_hat = on_grid(matmul, q, (settings.block_q, None), settings)
    k_hat = on_grid(matmul, k, (settings.block_kv, None), settings)
    s = q_hat @ (k_hat * c).mT
    if settings.smooth_q:
        s = s + q_mean @ (k * c).mT
    if settings.is_causal:
        s = s.masked_fill_(~causal_mask(*s.shape[-2:], s.device), -math.inf)
    return s


def visited(s: Tensor, settings: SageBwdSettings) -> Tensor | None:
    """bool [Nq, Nk]: True for the entries of every tile that the tile loops visit. None: they visit all."""
    if not settings.is_causal:
        return None
    n_q, n_k = s.shape[-2:]
    query, key = torch.arange(n_q, device=s.device), torch.arange(n_k, device=s.device)
    last_query = (query // settings.block_q + 1) * settings.block_q - 1
    first_key = key // settings.block_kv * settings.block_kv
    return first_key[None, :] <= last_query[:, None].clamp(max=n_q - 1)


def unvisited_to_zero(x: Tensor, seen: Tensor | None) -> Tensor:
    """x with zeros where no tile is computed, whatever stood there."""
    return x if seen is None else x.masked_fill_(~seen, 0)


def visited_matmul(weights: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
    """weights @ x, where a row of x that is not seen adds nothing: a skipped tile is not 0 * NaN."""
    if seen is None:
        return weights @ x
    bad = ~x.isfinite().all(-1)
    touched = bad.to(x.dtype) @ seen.mT.to(x.dtype) > 0
    return (weights @ x.masked_fill(bad[..., None], 0)).masked_fill_(touched[..., None], torch.nan)
