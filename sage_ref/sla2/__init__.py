"""SLA2 (arXiv 2602.12675): sparse-linear attention with a learnable router, and SLA, which it builds on.

blocks      blocks of tokens, block masks, scores of blocks
branches    the sparse and the linear branch for any block weights, differentiable
algorithm   Algorithms 2 and 3, block by block, to be read next to the paper
whole       the same on whole matrices, and as one differentiable operation
router      which blocks to select: Top-k, the learnable router, SoftTop-k
sla, module the modules SLA and SLA2
api         `sparse_linear_attention`, and the reference backend
"""

from sage_ref.sla2.algorithm import Sla2Backward, Sla2Forward, tiled_backward, tiled_forward
from sage_ref.sla2.api import sparse_linear_attention
from sage_ref.sla2.blocks import (
    FEATURE_MAPS,
    BlockSettings,
    block_count,
    block_mass,
    block_mean,
    from_blocks,
    heuristic_scores,
    into_blocks,
    per_query,
    selected_count,
    spread_blocks,
)
from sage_ref.sla2.branches import (
    divisor,
    feature_map,
    key_block_sums,
    linear_branch,
    mix,
    soft_sparse_linear_attention,
    sparse_branch,
    weighted_sums,
)
from sage_ref.sla2.module import SLA2
from sage_ref.sla2.router import EQUATIONS_16_17, PRINTED, Relaxation, Router, soft_top_k, top_blocks
from sage_ref.sla2.sla import SLA
from sage_ref.sla2.whole import SparseLinearFunction, sla2_backward, sla2_forward

__all__ = [
    "EQUATIONS_16_17",
    "FEATURE_MAPS",
    "PRINTED",
    "SLA",
    "SLA2",
    "BlockSettings",
    "Relaxation",
    "Router",
    "Sla2Backward",
    "Sla2Forward",
    "SparseLinearFunction",
    "block_count",
    "block_mass",
    "block_mean",
    "divisor",
    "feature_map",
    "from_blocks",
    "heuristic_scores",
    "into_blocks",
    "key_block_sums",
    "linear_branch",
    "mix",
    "per_query",
    "selected_count",
    "sla2_backward",
    "sla2_forward",
    "soft_sparse_linear_attention",
    "soft_top_k",
    "sparse_branch",
    "sparse_linear_attention",
    "spread_blocks",
    "tiled_backward",
    "tiled_forward",
    "top_blocks",
    "weighted_sums",
]
