"""sage_ref: trainable low-bit attention (SageBwd) in plain PyTorch, to be read beside the paper."""

from sage_ref.ops import sagebwd_attention
from sage_ref.smoothing import QKNorm

__all__ = ["QKNorm", "sagebwd_attention"]
