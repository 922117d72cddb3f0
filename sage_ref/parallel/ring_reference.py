"""One shard of keys in the ring, on the reference: `sage_ref.sagebwd.whole` with keys smoothed beforehand.

L is the natural log-sum-exp of the smoothed scores.
"""

import torch
from torch import Tensor

from sage_ref.parallel.exchange import Ranks, mean_over
from sage_ref.parallel.shards import RingOptions, Shards
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.sagebwd.whole import sagebwd_backward, sagebwd_forward
from sage_ref.shapes import repeat_heads, working_dtype

exp, logaddexp = torch.exp, torch.logaddexp


def prepare(query: Tensor, key: Tensor, value: Tensor, ranks: Ranks, options: RingOptions) -> tuple[Shards, Shards]:
    """Return the shards of the forward and of the backward pass: Q stays; K_sm and V go round, in the working dtype."""
    k, v = (x.to(working_dtype(x)) for x in (key, value))
    if options.smooth_k:
        k = k - mean_over(k.mean(-2, keepdim=True), ranks)
    shards = Shards((query,), (k, v))
    return shards, shards


def attend(
    here: tuple[Tensor, ...], visiting: tuple[Tensor, ...], options: RingOptions, *, is_diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Compute O [B, H, n, D] in the working dtype and L [B, H, n] of one shard; is_diagonal: it is this process's."""
    (query,), (k, v) = here, (repeat_heads(x, here[0].shape[1]) for x in visiting)
    forward = sagebwd_forward(query, k, v, _settings(options, is_diagonal, k.dtype))
    return forward.output, forward.log_sum_exp


def gradients(
    grad_output: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    here: tuple[Tensor, ...],
    visiting: tuple[Tensor, ...],
    options: RingOptions,
    *,
    is_diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the parts of dQ [B, H, n, D], dK and dV [B, Hkv, m, D] that pass through one shard of keys."""
    (query,), kv_heads = here, visiting[0].shape[1]
    q = query.to(working_dtype(query))
    k, v = (repeat_heads(x, q.shape[1]) for x in visiting)
    settings = _settings(options, is_diagonal, q.dtype)
    dq, *of_keys = sagebwd_backward(grad_output, q, k, v, output, log_sum_exp, settings)[:3]
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in of_keys)


def _settings(options: RingOptions, is_diagonal: bool, dtype: torch.dtype) -> SageBwdSettings:
    return SageBwdSettings(
        is_causal=options.is_causal and is_diagonal,
        scale=options.scale,
        smooth_k=False,
        smooth_q=options.smooth_q,
        granularity=options.granularity,
        output_dtype=dtype,
    )
