"""Our levels 0 to 4, called as a reader's function is: attention(q, k, v, is_causal=False)."""

import math

import torch
from sage_kernels.common.candidates import Launch
from sage_kernels.common.quantize import padded_head_dim
from sage_kernels.sagebwd.ladder import prepare_forward, run_forward
from torch import Tensor

from sage_lab.bench.compile import Case, launch_of
from sage_lab.climb.launches import Attention

LEVELS = tuple(f"level{number}" for number in range(5))  # level 5 is Hopper's alone, and not written in Triton


def level_launch(name: str, target: int, head_dim: int, is_causal: bool) -> Launch:
    """Return the launch that a level takes on a GPU of this compute capability."""
    return launch_of(Case("forward", int(name[-1]), target, padded_head_dim(head_dim), is_causal))


def level_attention(name: str, target: int | None = None) -> Attention:
    """Return a level's forward pass. target: the compute capability whose launch it takes; None: the tensors' GPU."""
    level = int(name[-1])

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        dtype, skipped = q.dtype, q.shape[2] - k.shape[2] if is_causal else 0
        if skipped < 0:  # our mask starts at the first query and key, a reader's ends at the last
            q = torch.cat((q.new_zeros(*q.shape[:2], -skipped, q.shape[3]), q), 2)
        q, k, v = (x if x.dtype == torch.bfloat16 else x.half() for x in (q[:, :, max(skipped, 0) :], k, v))
        scale = 1 / math.sqrt(q.shape[3])
        launch = target and level_launch(name, target, q.shape[3], is_causal)
        inputs = prepare_forward(q, k, v, level, scale=scale, smooth_k=True)
        output = run_forward(inputs, level, is_causal=is_causal, scale=scale, launch=launch)[0]
        if skipped > 0:
            output = torch.cat((output.new_zeros(*q.shape[:2], skipped, q.shape[3]), output), 2)
        return output[:, :, max(-skipped, 0) :].to(dtype)

    return attention
