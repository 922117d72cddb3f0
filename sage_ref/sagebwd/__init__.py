"""SageBwd (arXiv 2603.02170): attention for training with six of its seven matmuls in INT8.

`algorithm` is the paper's Algorithms 1 and 2, tile by tile; `whole` computes the same numbers on whole matrices, with
every option of `settings`; `api` is the public function.
"""

from sage_ref.sagebwd.algorithm import tiled_backward, tiled_forward
from sage_ref.sagebwd.settings import GRANULARITIES, MATMULS, SageBwdSettings
from sage_ref.sagebwd.whole import SageBwdFunction, sagebwd_backward, sagebwd_forward, smooth, whole_scores
from sage_ref.shapes import tiles

__all__ = [
    "GRANULARITIES",
    "MATMULS",
    "SageBwdFunction",
    "SageBwdSettings",
    "sagebwd_backward",
    "sagebwd_forward",
    "smooth",
    "tiled_backward",
    "tiled_forward",
    "tiles",
    "whole_scores",
]
