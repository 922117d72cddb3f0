"""sage_ref: trainable low-bit attention (SageBwd, SLA2) in plain PyTorch, to be read next to the papers."""

from sage_ref.integrations.pytorch import sdpa
from sage_ref.prologue import Prologue
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sla2 import SLA, SLA2, sparse_linear_attention
from sage_ref.smoothing import QKNorm

__all__ = ["SLA", "SLA2", "Prologue", "QKNorm", "sagebwd_attention", "sdpa", "sparse_linear_attention"]
__version__ = "0.1.0"
