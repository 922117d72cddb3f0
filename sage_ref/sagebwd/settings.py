"""What the SageBwd paper fixes and what this project varies."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from sage_ref.checks import check_choice, check_count, check_scale, check_switches, shown
from sage_ref.quantization import ROUNDINGS, BlockShape
from sage_ref.sagebwd.repair import Repair, check_repair

MATMULS = ("S", "O", "S_backward", "dV", "dP", "dQ", "dK")
GRANULARITIES = ("block", "row")


@dataclass(frozen=True)
class SageBwdSettings:
    """The defaults are those of the Triton kernels, so that the reference simulates them; `printed` are the paper's.

    scale: c of S = c Q K^T; None means 1/sqrt(D).
    smooth_k, smooth_q: subtract the mean key of the sequence, the mean query of each block, before quantising.
    block_q, block_kv: tokens of Q and dO, of K and V, that share a scale; also the tile of P and dS.
    granularity: which entries of a tile of P and of dS share a scale in the backward pass.
        "row": one row of the matmul's result: per key for dV and dK, which contract over queries, per query for dQ.
        "block": the whole tile, as printed.
    p_rounding: of P in O: "nearest", "ordered", or "stochastic" with draws from `generator` (None: torch's global one).
    ds_rounding: of dS, likewise.
    exact_matmuls: the matmuls of `MATMULS` that are not quantised.
    repair: what is done so that dS hurts less; nothing, as in the paper, unless said otherwise. To rotate, block_q and
        block_kv must be powers of two.

    Raises TypeError or ValueError naming the setting, what was expected and what came.
    """

    is_causal: bool = False
    scale: float | None = None
    smooth_k: bool = True
    smooth_q: bool = False
    block_q: int = 128
    block_kv: int = 128
    granularity: str = "row"
    p_rounding: str = "nearest"
    ds_rounding: str = "nearest"
    generator: torch.Generator | None = None
    exact_matmuls: tuple[str, ...] = ("dP",)
    repair: Repair = Repair()

    def __post_init__(self):
        check_switches(is_causal=self.is_causal, smooth_k=self.smooth_k, smooth_q=self.smooth_q)
        check_scale(self.scale)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("p_rounding", self.p_rounding, ROUNDINGS)
        check_choice("ds_rounding", self.ds_rounding, ROUNDINGS)
        if not isinstance(self.exact_matmuls, tuple):
            raise ValueError(f"exact_matmuls: expected a tuple of {MATMULS}, got {shown(self.exact_matmuls)}")
        for matmul in self.exact_matmuls:
            check_choice("exact_matmuls", matmul, MATMULS)
        check_repair(self.repair)
        for name in ("block_q", "block_kv"):
            block = getattr(self, name)
            check_count(name, block)
            if self.repair.rotate and block & (block - 1):
                raise ValueError(f"{name}: expected a power of two to rotate dS, got {block}")

    @classmethod
    def printed(cls, **changes) -> "SageBwdSettings":
        """The paper's Algorithms 1 and 2, with these changes: one scale per tile of P and dS.

        The paper gives no tile sizes. 64 x 64 come close to its Table 1, and the experiments and notebooks take them.
        """
        return cls(**{"block_q": 64, "block_kv": 64, "granularity": "block"} | changes)

    @property
    def in_a_record(self) -> dict[str, int | str]:
        """What a row of a record says of how its numbers were quantised."""
        return {"block_q": self.block_q, "block_kv": self.block_kv, "granularity": self.granularity}

    @property
    def per_query(self) -> BlockShape:
        """The part of a [block_q, block_kv] tile that shares a scale when the matmul contracts over keys."""
        return (1, self.block_kv) if self.granularity == "row" else (self.block_q, self.block_kv)

    @property
    def per_key(self) -> BlockShape:
        """The part of a [block_q, block_kv] tile that shares a scale when the matmul contracts over queries."""
        return (self.block_q, 1) if self.granularity == "row" else (self.block_q, self.block_kv)

    @property
    def per_token(self) -> tuple[BlockShape, BlockShape]:
        """What shares a scale in the operands of dP: a part of dO [Nq, D] and one of V [Nk, D]."""
        if self.repair.token_scales:
            return (1, None), (1, None)
        return (self.block_q, None), (self.block_kv, None)

    def with_remedy(self, name: str) -> "SageBwdSettings":
        """These settings with the changes that `REMEDIES` has under that name."""
        check_choice("remedy", name, tuple(REMEDIES))
        return replace(self, **REMEDIES[name])


MATCHING = Repair(delta="probabilities")
UNBIASED = "ordered P, V smoothed"  # the remedy that the kernels have
SEVEN = {"exact_matmuls": ()}
ORDERED = {"p_rounding": "ordered"}
# Changes to SageBwd: what notebook 14 tries, alone and together. "seven": dP in INT8, too.
REMEDIES: dict[str, dict[str, Any]] = {
    "none": {},
    "matching delta": {"repair": MATCHING},
    "V smoothed": {"repair": Repair(smooth_v=True)},
    "rounded sum": {"repair": Repair(rounded_sum=True)},
    "key mean added": {"repair": Repair(key_mean=True)},
    "stochastic": {"ds_rounding": "stochastic"},
    "two terms": {"repair": Repair(two_terms=1.0)},
    "two terms in 10% of tiles": {"repair": Repair(two_terms=0.1)},
    "rotated": {"repair": Repair(rotate=True)},
    "wide O": {"repair": Repair(wide_output=True)},
    "ordered P": ORDERED,
    UNBIASED: ORDERED | {"repair": Repair(smooth_v=True)},
    "O in 16 bit": {"exact_matmuls": ("O", "dP")},
    "matching delta, two terms": {"repair": MATCHING._replace(two_terms=1.0)},
    "seven": SEVEN,
    "seven, matching delta": SEVEN | {"repair": MATCHING},
    "seven, V smoothed": SEVEN | {"repair": Repair(smooth_v=True)},
    "seven, token scales": SEVEN | {"repair": Repair(token_scales=True)},
    "seven, V smoothed, token scales": SEVEN | {"repair": Repair(smooth_v=True, token_scales=True)},
    "seven, ordered P, V smoothed, token scales": SEVEN
    | ORDERED
    | {"repair": Repair(smooth_v=True, token_scales=True)},
    "seven, matching delta, V smoothed": SEVEN | {"repair": MATCHING._replace(smooth_v=True)},
    "seven, all of it": SEVEN | {"repair": MATCHING._replace(smooth_v=True, token_scales=True)},
    "O in 16 bit instead of dP": {"exact_matmuls": ("O",), "repair": Repair(smooth_v=True, token_scales=True)},
}
