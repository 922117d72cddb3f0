"""Repairs of dS: changes to SageBwd on whole matrices that the paper does not have, and names for them.

Without quantisation a repair changes nothing. Each rests on one identity:

    matching_delta  sum_j P_ij dP_ij = dO_i . O_i, so delta may come from the very P and dP that dS is made of. Their
                    errors then cancel in dP - delta, and rows of dS sum to zero.
    output_dtype    the same product with O before it was rounded to 16 bit ("wide O").
    rounded_sum     O = P~ V / rowsum(P~). INT8 loses small entries of P~, always downwards: rowsum(P^) is what is left.
    smooth_v        V = V_sm + 1 mu_V^T moves all of row i of dP by dO_i . mu_V, and delta_i by as much: dP - delta
                    stays. Rows of P sum to one, so O = P V_sm + 1 mu_V^T.
    token_scales    dP = dO V^T sums over features: each token of dO and of V may have a scale of its own.
    key_mean        dS K = dS K_sm + rowsum(dS) mu_K^T. The second term is zero, but that of dS^ is not.
    two_terms       dS = dS^ + R, and the remainder R has a grid of its own, 254 times finer: dS K ~ dS^ K^ + R^ K^.
    rotate          dS K = (dS H)(H K) for a Hadamard matrix H = H^T = H^-1, which spreads an outlier over its tile.
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_ref.checks import check_choice
from sage_ref.quantization import block_max, fake_quantize, spread
from sage_ref.sagebwd.settings import UNBIASED_SETTINGS, SageBwdSettings
from sage_ref.sagebwd.whole import unvisited_to_zero, visited


@dataclass(frozen=True)
class RepairedSettings(SageBwdSettings):
    """SageBwd's settings and the repairs of this module, none of them by default.

    matching_delta: delta is rowsum(P * dP) / rowsum(P), not rowsum(dO * O).
    rounded_sum: O is divided by the sum of the weights that are multiplied, rowsum(P^), not by rowsum(P~).
    token_scales: dO and V have one scale per token where dP is quantised, not one per block.
    key_mean: dQ + c rowsum(dS^) mu_K^T, where K is smoothed.
    two_terms: share of the tiles of dS, those with the largest entries first, that get a second term.
    rotate: dS times a Hadamard matrix, along the keys of each tile for dQ, along its queries for dK. block_q and
        block_kv must then be powers of two.
    """

    matching_delta: bool = False
    rounded_sum: bool = False
    token_scales: bool = False
    key_mean: bool = False
    two_terms: float = 0.0
    rotate: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("block_q", "block_kv"):
            block = getattr(self, name)
            if self.rotate and block & (block - 1):
                raise ValueError(f"{name}: expected a power of two to rotate dS, got {block}")

    def operands(self, matmul: str, a: Tensor, b: Tensor, k_mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Round a and b as SageBwd does, or as the repairs of this matmul do."""
        rounded = partial(super().operands, matmul)
        if matmul == "O" and self.rounded_sum:
            p_hat, v_hat = rounded(a, b)
            return p_hat * (a.sum(-1, keepdim=True) / p_hat.sum(-1, keepdim=True)), v_hat
        if matmul == "dP" and self.token_scales and matmul not in self.exact_matmuls:
            return fake_quantize(a, (1, None)), fake_quantize(b, (1, None))
        if matmul not in ("dQ", "dK"):
            return rounded(a, b)
        tile = (self.block_q, self.block_kv) if matmul == "dQ" else (self.block_kv, self.block_q)
        turned = partial(rotate_tokens, block=tile[1]) if self.rotate else lambda x: x
        ds, x = turned(a.mT).mT, turned(b)
        ds_hat, x_hat = rounded(ds, x)
        if self.two_terms:
            remainder, _ = rounded(ds - ds_hat, x)
            ds_hat = ds_hat + remainder.masked_fill(~largest_tiles(ds, tile, self.two_terms), 0)
        ds_hat, x_hat = turned(ds_hat.mT).mT, turned(x_hat)
        return ds_hat, x_hat + k_mean if self.key_mean and k_mean is not None else x_hat

    def delta(self, do: Tensor, o: Tensor, p: Tensor, dp: Tensor) -> Tensor:
        """Return delta [..., Nq, 1], of O or of P and dP."""
        if self.matching_delta:
            return weighted_mean(p, unvisited_to_zero(p * dp, visited(p, self)))
        return super().delta(do, o, p, dp)


MATCHING = {"matching_delta": True}
V_SMOOTHED = {"smooth_v": True}
TOKEN_SCALES = {"token_scales": True}
SEVEN = {"exact_matmuls": ()}  # dP in INT8, too
ORDERED = {"p_rounding": "ordered"}
UNBIASED = "ordered P, V smoothed"  # the remedy that the kernels have
# Changes to SageBwd: what notebook 14 tries, alone and together.
REMEDIES: dict[str, dict[str, Any]] = {
    "none": {},
    "matching delta": MATCHING,
    "V smoothed": V_SMOOTHED,
    "rounded sum": {"rounded_sum": True},
    "key mean added": {"key_mean": True},
    "stochastic": {"ds_rounding": "stochastic"},
    "two terms": {"two_terms": 1.0},
    "two terms in 10% of tiles": {"two_terms": 0.1},
    "rotated": {"rotate": True},
    "wide O": {"output_dtype": torch.float64},
    "ordered P": ORDERED,
    UNBIASED: UNBIASED_SETTINGS,
    "O in 16 bit": {"exact_matmuls": ("O", "dP")},
    "matching delta, two terms": MATCHING | {"two_terms": 1.0},
    "seven": SEVEN,
    "seven, matching delta": SEVEN | MATCHING,
    "seven, V smoothed": SEVEN | V_SMOOTHED,
    "seven, token scales": SEVEN | TOKEN_SCALES,
    "seven, V smoothed, token scales": SEVEN | V_SMOOTHED | TOKEN_SCALES,
    "seven, ordered P, V smoothed, token scales": SEVEN | ORDERED | V_SMOOTHED | TOKEN_SCALES,
    "seven, matching delta, V smoothed": SEVEN | MATCHING | V_SMOOTHED,
    "seven, all of it": SEVEN | MATCHING | V_SMOOTHED | TOKEN_SCALES,
    "O in 16 bit instead of dP": {"exact_matmuls": ("O",)} | V_SMOOTHED | TOKEN_SCALES,
}


def with_repairs(settings: SageBwdSettings, **changes) -> RepairedSettings:
    """Return these settings with changes to fields of `RepairedSettings`."""
    return RepairedSettings(**{field.name: getattr(settings, field.name) for field in fields(settings)} | changes)


def with_remedy(settings: SageBwdSettings, name: str) -> RepairedSettings:
    """Return these settings with the changes that `REMEDIES` has under that name."""
    check_choice("remedy", name, tuple(REMEDIES))
    return with_repairs(settings, **REMEDIES[name])


def scales_in_a_record(settings: SageBwdSettings) -> dict[str, int | str]:
    """Return the columns of a record that say how its numbers were quantised."""
    return {"block_q": settings.block_q, "block_kv": settings.block_kv, "granularity": settings.granularity}


def weighted_mean(p: Tensor, weighted_dp: Tensor) -> Tensor:
    """Compute rowsum(P * dP) / rowsum(P), [..., Nq, 1]: the delta for which rows of P * (dP - delta) sum to zero.

    weighted_dp: P * dP.
    """
    return weighted_dp.sum(-1, keepdim=True) / p.sum(-1, keepdim=True)


def largest_tiles(ds: Tensor, tile: tuple[int, int], share: float) -> Tensor:
    """Return bool like dS [..., N, M]: True in a share of each head's nonzero tiles, those with the largest max|dS|.

    A kernel would compare with the threshold of the step before.
    """
    rows, columns = (min(block, size) for block, size in zip(tile, ds.shape[-2:], strict=True))
    largest = torch.nan_to_num(block_max(ds, rows, columns), nan=0.0)
    ranked = largest.flatten(-2).sort(-1, descending=True).values  # [..., tiles]
    count = torch.ceil(share * (ranked > 0).sum(-1, keepdim=True)).long()
    threshold = ranked.gather(-1, (count - 1).clamp_min(0))[..., None]  # [..., 1, 1]
    return spread((largest >= threshold) & (largest > 0), (rows, columns), *ds.shape[-2:])


def rotate_tokens(x: Tensor, block: int) -> Tensor:
    """Compute H x_j for each block x_j of `block` tokens of x [..., N, C]; a partial last block stays. Twice gives x.

    block: a power of two.
    """
    whole = x.shape[-2] // block * block
    blocks = x[..., :whole, :].unflatten(-2, (whole // block, block))
    return torch.cat([(hadamard(block, x) @ blocks).flatten(-3, -2), x[..., whole:, :]], -2)


def hadamard(size: int, like: Tensor) -> Tensor:
    """Return Sylvester's matrix over sqrt(size), symmetric and its own inverse, with the dtype and device of `like`."""
    matrix = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
