"""Repairs of dS: changes to SageBwd on whole matrices that the paper does not have, and names for them.

Without quantisation a repair changes nothing. Each rests on one identity:

    matching_delta  sum_j P_ij dP_ij = dO_i . O_i, so delta may come from the very P and dP that dS is made of. Their
                    errors then cancel in dP - delta, and rows of dS sum to zero.
    output_dtype    the same product with O before it was rounded to 16 bit.
    smooth_v        V = V_sm + 1 mu_V^T moves all of row i of dP by dO_i . mu_V, and delta_i by as much: dP - delta
                    stays. Rows of P sum to one, so O = P V_sm + 1 mu_V^T.
    token_scales    dP = dO V^T sums over features: each token of dO and of V may have a scale of its own.
    two_terms       dS = dS^ + R, and the remainder R has a grid of its own, 254 times finer: dS K ~ dS^ K^ + R^ K^.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor

from sage_ref.checks import check_choice
from sage_ref.quantization import fake_quantize
from sage_ref.sagebwd.settings import UNBIASED_SETTINGS, SageBwdSettings
from sage_ref.sagebwd.whole import unvisited_to_zero, visited


@dataclass(frozen=True)
class RepairedSettings(SageBwdSettings):
    """SageBwd's settings and the repairs of this module, none of them by default.

    matching_delta: delta is rowsum(P * dP) / rowsum(P), not rowsum(dO * O).
    token_scales: dO and V have one scale per token where dP is quantised, not one per block.
    two_terms: dS gets a second term.
    """

    matching_delta: bool = False
    token_scales: bool = False
    two_terms: bool = False

    def operands(self, matmul: str, a: Tensor, b: Tensor, k_mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Round a and b as SageBwd does, or as the repairs of this matmul do."""
        rounded = partial(super().operands, matmul)
        if matmul == "dP" and self.token_scales and matmul not in self.exact_matmuls:
            return fake_quantize(a, (1, None)), fake_quantize(b, (1, None))
        first, x_hat = rounded(a, b)
        if self.two_terms and matmul in ("dQ", "dK"):
            remainder, _ = rounded(a - first, b)
            first = first + remainder
        return first, x_hat

    def delta(self, do: Tensor, o: Tensor, p: Tensor, dp: Tensor) -> Tensor:
        """Return delta [..., Nq, 1], of O or of P and dP."""
        if self.matching_delta:
            return weighted_mean(p, unvisited_to_zero(p * dp, visited(p, self)))
        return super().delta(do, o, p, dp)


UNBIASED = "ordered P, V smoothed"  # the remedy that the kernels have
# Changes to SageBwd that notebook 14 tries. "seven": dP in INT8, too.
REMEDIES: dict[str, dict[str, Any]] = {
    "none": {},
    "matching delta": {"matching_delta": True},
    "V smoothed": {"smooth_v": True},
    "stochastic": {"ds_rounding": "stochastic"},
    "two terms": {"two_terms": True},
    "ordered P": {"p_rounding": "ordered"},
    UNBIASED: UNBIASED_SETTINGS,
    "O in 16 bit": {"exact_matmuls": ("O", "dP")},
    "seven": {"exact_matmuls": ()},
    "seven, V smoothed": {"exact_matmuls": (), "smooth_v": True},
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
