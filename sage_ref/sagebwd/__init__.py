"""SageBwd (arXiv 2603.02170): attention for training with six of its seven matmuls in INT8."""

from sage_ref.sagebwd.whole import (
    GRANULARITIES,
    MATMULS,
    SageBwdFunction,
    SageBwdSettings,
    sagebwd_backward,
    sagebwd_forward,
    smooth,
    tiled_backward,
    tiled_forward,
)
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
]
