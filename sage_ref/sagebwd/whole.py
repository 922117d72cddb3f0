"""SageBwd: attention for training with six of its seven matmuls in INT8; dP stays in 16 bit.

Every algorithm stands here twice. `tiled_forward` and `tiled_backward` are the paper's Algorithms 1 and 2, tile by
tile and with real integers, as a GPU kernel computes them. `sagebwd_forward` and `sagebwd_backward` give the same
numbers on whole matrices: rounding each operand to its INT8 grid and multiplying in float is the integer matmul
with its scales, and a few large operations are faster than thousands of small ones.

Where the printed algorithms can't be run as they stand, this is what is meant (README, "Errata"): the running
maximum starts at -inf, the running sum keeps its old value, O is rescaled by e^(m_old - m_new), and c = 1/sqrt(D)
multiplies S, dQ and dK.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.attention import AttentionBackward, AttentionForward, causal_mask, softmax_scale
from sage_ref.checks import refuse_second_derivative
from sage_ref.quantization import ROUNDINGS, BlockShape, QuantizedTensor, fake_quantize, quantize, quantized_matmul
from sage_ref.shapes import tiles, working_dtype
from sage_ref.smoothing import key_mean_scores, query_mean_grad_key, smooth_key, smooth_query

MATMULS = ("S", "O", "S_backward", "dV", "dP", "dQ", "dK")
GRANULARITIES = ("block", "row")


@dataclass(frozen=True)
class SageBwdSettings:
    """What the paper fixes and what this project varies.

    granularity: which entries of a tile of P and of dS share a scale in the backward pass.
        "block": the whole tile, as in the paper.
        "row": one row of the matmul's result: per key for dV and dK, which contract over queries, per query for dQ.
    ds_rounding: "nearest", or "stochastic" with draws from `generator` (None: torch's global one).
    exact_matmuls: the matmuls of `MATMULS` that are not quantised. The tiled form takes the paper's choice only.
    """

    is_causal: bool = False
    scale: float | None = None
    smooth_k: bool = True
    smooth_q: bool = False
    block_q: int = 64
    block_kv: int = 64
    granularity: str = "block"
    ds_rounding: str = "nearest"
    generator: torch.Generator | None = None
    exact_matmuls: tuple[str, ...] = ("dP",)

    def __post_init__(self):
        for name, value, allowed in (
            ("granularity", self.granularity, GRANULARITIES),
            ("ds_rounding", self.ds_rounding, ROUNDINGS),
            *(("exact_matmuls", matmul, MATMULS) for matmul in self.exact_matmuls),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")
        for name, value in (("block_q", self.block_q), ("block_kv", self.block_kv)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def per_query(self) -> BlockShape:
        """The part of a [block_q, block_kv] tile that shares a scale when the matmul contracts over keys."""
        return (1, self.block_kv) if self.granularity == "row" else (self.block_q, self.block_kv)

    @property
    def per_key(self) -> BlockShape:
        """The part of a [block_q, block_kv] tile that shares a scale when the matmul contracts over queries."""
        return (self.block_q, 1) if self.granularity == "row" else (self.block_q, self.block_kv)


class SmoothedInputs(NamedTuple):
    q: Tensor  # [..., Nq, D]: Q - mu_Q, or Q
    k: Tensor  # [..., Nk, D]: K - mu_K, or K
    q_mean: Tensor | None  # [..., Nq, D]: mu_Q in every row of its block
    key_mean_scores: Tensor | float  # [..., Nq, 1]: c Q mu_K^T, or 0


def smooth(query: Tensor, key: Tensor, settings: SageBwdSettings) -> SmoothedInputs:
    """The first step of every pass: Q and K in the working dtype, smoothed as `settings` say."""
    q, k = query.to(working_dtype(query)), key.to(working_dtype(key))
    offset, q_mean = 0.0, None
    if settings.smooth_k:
        k, k_mean = smooth_key(k)
        offset = key_mean_scores(q, k_mean, softmax_scale(settings.scale, q.shape[-1]))
    if settings.smooth_q:
        q, q_mean = smooth_query(q, settings.block_q)
    return SmoothedInputs(q, k, q_mean, offset)


def tiled_forward(query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings) -> tuple[Tensor, Tensor]:
    """Algorithm 1. query [..., Nq, D], key, value [..., Nk, D] -> O [..., Nq, D], L [..., Nq] of the unsmoothed S."""
    require_paper_matmuls(settings)
    q, k, q_mean, offset = smooth(query, key, settings)
    v = value.to(q.dtype)
    o, log_sum_exp = torch.empty_like(q), q.new_empty((*q.shape[:-1], 1))
    for rows in tiles(q.shape[-2], settings.block_q):
        q_hat_i = quantize(q[..., rows, :])  # {s_Q, Q^_i}
        m = torch.full_like(q[..., rows, :1], -math.inf)
        l = torch.zeros_like(m)
        o_i = torch.zeros_like(q[..., rows, :])
        for columns in tiles(k.shape[-2], settings.block_kv):
            if is_skipped(rows, columns, settings):
                continue
            k_hat_j, v_hat_j = quantize(k[..., columns, :]), quantize(v[..., columns, :])
            # [Bq, Bkv]
            s_ij = tile_scores(q_hat_i, k_hat_j, q_mean, k, rows, columns, settings)
            m_new = torch.maximum(m, s_ij.amax(-1, keepdim=True))
            p_ij = torch.exp(s_ij - m_new)
            rescale = torch.exp(m - m_new)
            l = rescale * l + p_ij.sum(-1, keepdim=True)
            # One scale per token: s_P = exp(rowmax(S_ij) - m_new) / 127, which is rowmax(P~_ij) / 127.
            p_hat_ij = quantize(p_ij, (1, None))
            o_i = rescale * o_i + quantized_matmul(p_hat_ij, v_hat_j)
            m = m_new
        o[..., rows, :] = o_i / l
        log_sum_exp[..., rows, :] = m + torch.log(l)
    return o.to(query.dtype), (log_sum_exp + offset).squeeze(-1)


def tiled_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    settings: SageBwdSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: dQ, dK, dV from dO [..., Nq, D] and the forward's O and L."""
    require_paper_matmuls(settings)
    c = softmax_scale(settings.scale, query.shape[-1])
    q, k, q_mean, offset = smooth(query, key, settings)
    v, do, o = (x.to(q.dtype) for x in (value, grad_output, output))
    log_sum_exp = log_sum_exp[..., None] - offset
    delta = (do * o).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for columns in tiles(k.shape[-2], settings.block_kv):
        k_hat_j = quantize(k[..., columns, :])
        for rows in tiles(q.shape[-2], settings.block_q):
            if is_skipped(rows, columns, settings):
                continue
            q_hat_i, do_hat_i = quantize(q[..., rows, :]), quantize(do[..., rows, :])
            # [Bq, Bkv]
            s_ij = tile_scores(q_hat_i, k_hat_j, q_mean, k, rows, columns, settings)
            p_ij = torch.exp(s_ij - log_sum_exp[..., rows, :])
            p_hat_ij = quantize(p_ij, settings.per_key)
            dv[..., columns, :] += quantized_matmul(p_hat_ij.mT, do_hat_i)
            # The one matmul in 16 bit: dO and V as they came.
            dp_ij = do[..., rows, :] @ v[..., columns, :].mT
            ds_ij = p_ij * (dp_ij - delta[..., rows, :])
            # With granularity "block" and rounding to nearest these are one and the same dS^_ij.
            ds_hat_ij = quantize(ds_ij, settings.per_query, settings.ds_rounding, settings.generator)
            ds_hat_ij_per_key = quantize(ds_ij, settings.per_key, settings.ds_rounding, settings.generator)
            dq[..., rows, :] += quantized_matmul(ds_hat_ij, k_hat_j) * c
            dk[..., columns, :] += quantized_matmul(ds_hat_ij_per_key.mT, q_hat_i) * c
            if settings.smooth_q:
                dk[..., columns, :] += query_mean_grad_key(ds_ij, q_mean[..., rows, :], c)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def sagebwd_forward(query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings) -> AttentionForward:
    """Algorithm 1 on whole matrices: the numbers of `tiled_forward`, and the smoothed scores S as well."""
    q, k, q_mean, offset = smooth(query, key, settings)
    v = value.to(q.dtype)
    s = whole_scores("S", q, k, q_mean, settings)
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    p = on_grid("O", p, (1, settings.block_kv), settings)
    o = visited_matmul(p, on_grid("O", v, (settings.block_kv, None), settings), visited(p, settings)) / l
    return AttentionForward(o.to(query.dtype), (m + torch.log(l) + offset).squeeze(-1), s)


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
    q, k, q_mean, offset = smooth(query, key, settings)
    v, do, o = (x.to(q.dtype) for x in (value, grad_output, output))
    q_rows, kv_rows = (settings.block_q, None), (settings.block_kv, None)
    s = whole_scores("S_backward", q, k, q_mean, settings)
    seen = visited(s, settings)
    p = unvisited_to_zero(torch.exp(s - (log_sum_exp[..., None] - offset)), seen)
    delta = (do * o).sum(-1, keepdim=True)
    p_hat = on_grid("dV", p, settings.per_key, settings)
    dv = visited_matmul(p_hat.mT, on_grid("dV", do, q_rows, settings), seen.mT)
    dp = on_grid("dP", do, q_rows, settings) @ on_grid("dP", v, kv_rows, settings).mT
    ds = unvisited_to_zero(p * (dp - delta), seen)
    ds_hat = on_grid("dQ", ds, settings.per_query, settings, settings.ds_rounding)
    dq = visited_matmul(ds_hat, on_grid("dQ", k, kv_rows, settings), seen) * c
    ds_hat_per_key = on_grid("dK", ds, settings.per_key, settings, settings.ds_rounding)
    dk = visited_matmul(ds_hat_per_key.mT, on_grid("dK", q, q_rows, settings), seen.mT) * c
    if settings.smooth_q:
        dk = dk + query_mean_grad_key(ds, q_mean, c)
    return AttentionBackward(dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), delta, p, dp, ds)


class SageBwdFunction(torch.autograd.Function):
    """`sagebwd_forward` and `sagebwd_backward` as one differentiable operation."""

    @staticmethod
    def forward(ctx, query, key, value, settings):
        with torch.autocast(query.device.type, enabled=False):
            output, log_sum_exp, _ = sagebwd_forward(query, key, value, settings)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx, grad_output):
        refuse_second_derivative("SageBwd's")
        with torch.autocast(grad_output.device.type, enabled=False):
            gradients = sagebwd_backward(grad_output, *ctx.saved_tensors, ctx.settings)
        return gradients.grad_query, gradients.grad_key, gradients.grad_value, None


def require_paper_matmuls(settings: SageBwdSettings) -> None:
    if settings.exact_matmuls != ("dP",):
        raise ValueError(f"exact_matmuls: the tiled form takes ('dP',) alone, got {settings.exact_matmuls}")


def is_skipped(rows: slice, columns: slice, settings: SageBwdSettings) -> bool:
    """True for a tile above the diagonal of causal attention: none of its queries sees any of its keys."""
    return settings.is_causal and columns.start >= rows.stop


def tile_scores(
    q_hat_i: QuantizedTensor,
    k_hat_j: QuantizedTensor,
    q_mean: Tensor | None,
    k: Tensor,
    rows: slice,
    columns: slice,
    settings: SageBwdSettings,
) -> Tensor:
    """S_ij = c MM(Q^_i, K^_j) s_Q s_K [+ c mu_Q K_j^T], masked: [..., Bq, Bkv]."""
    c = softmax_scale(settings.scale, k.shape[-1])
    s_ij = quantized_matmul(q_hat_i, k_hat_j.mT) * c
    if settings.smooth_q:
        s_ij = s_ij + q_mean[..., rows, :] @ k[..., columns, :].mT * c
    if settings.is_causal:
        mask = causal_mask(rows.stop, columns.stop, k.device)[rows, columns]
        s_ij = s_ij.masked_fill(~mask, -math.inf)
    return s_ij


def on_grid(
    matmul: str, x: Tensor, block_shape: BlockShape, settings: SageBwdSettings, rounding: str = "nearest"
) -> Tensor:
    """The operand x of a matmul: rounded to its INT8 grid, or as it is if that matmul stays exact."""
    if matmul in settings.exact_matmuls:
        return x
    return fake_quantize(x, block_shape, rounding, settings.generator)


def whole_scores(matmul: str, q: Tensor, k: Tensor, q_mean: Tensor | None, settings: SageBwdSettings) -> Tensor:
    """`tile_scores` of all tiles at once: [..., Nq, Nk]. matmul: "S" in the forward pass, "S_backward" in the other."""
    c = softmax_scale(settings.scale, q.shape[-1])
    q_hat = on_grid(matmul, q, (settings.block_q, None), settings)
    k_hat = on_grid(matmul, k, (settings.block_kv, None), settings)
    s = q_hat @ (k_hat * c).mT
    if settings.smooth_q:
        s = s + q_mean @ (k * c).mT
    if settings.is_causal:
        s = s.masked_fill_(~causal_mask(*s.shape[-2:], s.device), -math.inf)
    return s


def visited(s: Tensor, settings: SageBwdSettings) -> Tensor:
    """bool [Nq, Nk]: True for the entries of every tile that the tile loops visit."""
    n_q, n_k = s.shape[-2:]
    if not settings.is_causal:
        return torch.ones(n_q, n_k, dtype=torch.bool, device=s.device)
    query, key = torch.arange(n_q, device=s.device), torch.arange(n_k, device=s.device)
    last_query = (query // settings.block_q + 1) * settings.block_q - 1
    first_key = key // settings.block_kv * settings.block_kv
    return first_key[None, :] <= last_query[:, None].clamp(max=n_q - 1)


def unvisited_to_zero(x: Tensor, seen: Tensor) -> Tensor:
    """x with zeros where no tile is computed, whatever stood there."""
    return x if seen.all() else x.masked_fill_(~seen, 0)


def visited_matmul(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """weights @ x, where a row of x that is not seen adds nothing: a skipped tile is not 0 * NaN."""
    finite = x.isfinite()
    if finite.all():
        return weights @ x
    touched = seen.to(x.dtype) @ (~finite).to(x.dtype) > 0
    return (weights @ x.masked_fill(~finite, 0)).masked_fill(touched, torch.nan)
