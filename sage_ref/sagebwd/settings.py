"""The choices of SageBwd: what the paper fixes, and what this project varies."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.checks import DTYPES, check_choice, check_count, check_options, check_scale, check_switches, plain, shown
from sage_ref.quantization import ROUNDINGS, BlockShape, fake_quantize

MATMULS = ("S", "O", "S_backward", "dV", "dP", "dQ", "dK")
GRANULARITIES = ("block", "row")
# `sagebwd_attention(..., unbiased=True)`: errors of O even out over the keys.
UNBIASED_SETTINGS = {"p_rounding": "ordered", "smooth_v": True}


class Options(NamedTuple):
    """The options that every public function of SageBwd has; `sage_ref.sagebwd_attention` explains them."""

    smooth_k: bool = True
    smooth_q: bool = False
    granularity: str = "row"
    unbiased: bool = False
    backend: str = "auto"

    def check(self, scale: float | None = None, **switches: bool) -> None:
        """Raise TypeError or ValueError that names an option, the scale or a switch that doesn't fit."""
        own = {name: getattr(self, name) for name in ("smooth_k", "smooth_q", "unbiased")}
        check_options(scale, self.backend, **own, **switches)
        check_choice("granularity", self.granularity, GRANULARITIES)

    def settings(self, is_causal: bool, scale: float | None) -> "SageBwdSettings":
        """Return what the reference computes."""
        choice = {"smooth_k": self.smooth_k, "smooth_q": self.smooth_q, "granularity": self.granularity}
        choice |= UNBIASED_SETTINGS if self.unbiased else {}
        return SageBwdSettings(is_causal=is_causal, scale=scale, **choice)


@dataclass(frozen=True)
class SageBwdSettings:
    """Settings of SageBwd on whole matrices; the defaults are the Triton kernels', `printed` has the paper's.

    Args:
        is_causal: Whether query i sees keys 0..i alone.
        scale: c of S = c Q K^T; None means 1/sqrt(D).
        smooth_k, smooth_q: Subtract the mean key of the sequence, the mean query of each block, before quantising.
        smooth_v: Subtract the mean value of the sequence, in O and in dP. A NaN in V then reaches every query.
        block_q: Tokens of Q and of dO that share a scale; also the rows of a tile of P and dS.
        block_kv: Tokens of K and of V that share a scale; also the columns of a tile.
        granularity: Which entries of a tile of P and of dS share a scale in the backward pass. "row": one row of the
            matmul's result, a key for dV and dK, which contract over queries, and a query for dQ. "block": the whole
            tile, as printed.
        p_rounding, ds_rounding: Rounding of P in O and of dS: "nearest", "ordered" or "stochastic".
        generator: Source of stochastic rounding; None means torch's global one.
        exact_matmuls: The matmuls of `MATMULS` that are not quantised.
        output_dtype: The dtype in which O is returned and kept for delta; None means query's.

    Raises:
        TypeError, ValueError: A setting does not fit; the message names it.
    """

    is_causal: bool = False
    scale: float | None = None
    smooth_k: bool = True
    smooth_q: bool = False
    smooth_v: bool = False
    block_q: int = 128
    block_kv: int = 128
    granularity: str = "row"
    p_rounding: str = "nearest"
    ds_rounding: str = "nearest"
    generator: torch.Generator | None = None
    exact_matmuls: tuple[str, ...] = ("dP",)
    output_dtype: torch.dtype | None = None

    def __post_init__(self):
        check_switches(**{name: getattr(self, name) for name in ("is_causal", "smooth_k", "smooth_q", "smooth_v")})
        check_scale(self.scale)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("p_rounding", self.p_rounding, ROUNDINGS)
        check_choice("ds_rounding", self.ds_rounding, ROUNDINGS)
        if not isinstance(self.exact_matmuls, tuple):
            raise ValueError(f"exact_matmuls: expected a tuple of {MATMULS}, got {shown(self.exact_matmuls)}")
        for matmul in self.exact_matmuls:
            check_choice("exact_matmuls", matmul, MATMULS)
        check_count("block_q", self.block_q)
        check_count("block_kv", self.block_kv)
        for name in self.__dataclass_fields__:  # PyTorch 2.11 can't compile a loop over vars(self)
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.output_dtype not in (None, *DTYPES):
            raise TypeError(f"output_dtype: expected one of {DTYPES} or None, got {shown(self.output_dtype)}")

    @classmethod
    def printed(cls, **changes) -> "SageBwdSettings":
        """Return the paper's Algorithms 1 and 2 with these changes: one scale per tile of P and dS.

        The paper gives no tile sizes. Tiles of 64 x 64 come close to its Table 1; experiments and notebooks use them.
        """
        return cls(**{"block_q": 64, "block_kv": 64, "granularity": "block"} | changes)

    @property
    def per_query(self) -> BlockShape:
        """The part of a [block_q, block_kv] tile that shares a scale when the matmul contracts over keys."""
        return (1, self.block_kv) if self.granularity == "row" else (self.block_q, self.block_kv)

    @property
    def per_key(self) -> BlockShape:
        """The part of a [block_q, block_kv] tile that shares a scale when the matmul contracts over queries."""
        return (self.block_q, 1) if self.granularity == "row" else (self.block_q, self.block_kv)

    # The two steps that depend on settings. An experiment that changes them overrides them in a subclass.

    def operands(self, matmul: str, a: Tensor, b: Tensor, k_mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return A^ and B^ of a matmul of `MATMULS`: both rounded to their INT8 grids, or as they are if it is exact.

        Args:
            matmul: Its name.
            a: Q, P~, P, dO, dS or dS^T; P of dV is not transposed yet.
            b: K, V, dO, V, K or Q; K of S and V of dP are not transposed yet.
            k_mean: mu_K, which was subtracted from the K of dQ. Nothing is owed for it: rows of dS sum to zero.
        """
        if matmul in self.exact_matmuls:
            return a, b
        tokens_of_q, tokens_of_k = (self.block_q, None), (self.block_kv, None)
        a_block, b_block, rounding = {
            "S": (tokens_of_q, tokens_of_k, "nearest"),
            "O": ((1, self.block_kv), tokens_of_k, self.p_rounding),
            "S_backward": (tokens_of_q, tokens_of_k, "nearest"),
            "dV": (self.per_key, tokens_of_q, "nearest"),
            "dP": (tokens_of_q, tokens_of_k, "nearest"),
            "dQ": (self.per_query, tokens_of_k, self.ds_rounding),
            "dK": (self.per_key[::-1], tokens_of_q, self.ds_rounding),
        }[matmul]
        return fake_quantize(a, a_block, rounding, self.generator), fake_quantize(b, b_block)

    def delta(self, do: Tensor, o: Tensor, p: Tensor, dp: Tensor) -> Tensor:
        """Return rowsum(dO * O), [..., Nq, 1], which equals rowsum(P * dP) where nothing is rounded."""
        return (do * o).sum(-1, keepdim=True)
