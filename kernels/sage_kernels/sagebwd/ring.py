"""One shard of keys in the ring of `sage_ref.parallel`, by the same programs as one process's attention.

K and V are quantised once, where they are, and go round in INT8. L is log2(sum 2^x), x = S log2(e), K smoothed.
"""

import torch
from torch import Tensor

from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.memory import last_axis_contiguous
from sage_kernels.common.quantize import Quantized
from sage_kernels.sagebwd.forward.key_mean import key_mean
from sage_kernels.sagebwd.forward.prepare import quantize_inputs
from sage_kernels.sagebwd.forward.program import ForwardInputs
from sage_kernels.sagebwd.ladder import FORWARD_LEVELS, LOG2_E, run_forward
from sage_kernels.sagebwd.ops import forward_level
from sage_kernels.sagebwd.prologue import NO_PROLOGUE
from sage_ref.parallel.exchange import Ranks, largest_up_to, mean_over
from sage_ref.parallel.shards import RingOptions, Shards

exp, logaddexp = torch.exp2, torch.logaddexp2


def prepare(query: Tensor, key: Tensor, value: Tensor, ranks: Ranks, options: RingOptions) -> tuple[Shards, Shards]:
    """Prepare what stays and what goes round, for each pass.

    In the forward pass Q, K, V (their shapes) and Q^ stay, K^ and V^ go round. In the backward pass Q^ and the scales
    that bound V stay, K^ and V go round.
    """
    query, key, value = (last_axis_contiguous(x) for x in (query, key, value))
    with torch.cuda.device_of(query):
        k_mean = mean_over(key_mean(key, NO_PROLOGUE, start_with_triton), ranks) if options.smooth_k else None
        grouped = FORWARD_LEVELS[forward_level(query.device, query.shape[3])].grouped
        q_hat, k_hat, v_hat, v_range = quantize_inputs(
            query, key, value, NO_PROLOGUE, start_with_triton,
            k_mean=k_mean, v_mean=None, factor=options.scale * LOG2_E, with_values=True, grouped=grouped,
        )  # fmt: skip
    of_q, of_k = (q_hat.values, q_hat.scale), (k_hat.values, k_hat.scale)
    # The backward's units need a bound of dP - delta, in which delta has met the values of all shards.
    largest = v_range.nan_to_num(0, 0).amax(-1, keepdim=True)
    bound = largest_up_to(largest, ranks, is_causal=options.is_causal).expand(v_hat.scale.shape).contiguous()
    for_forward = Shards((query, key, value, *of_q), (*of_k, v_hat.transposed, v_hat.scale))
    return for_forward, Shards((*of_q, bound), (*of_k, value))


def attend(
    here: tuple[Tensor, ...], visiting: tuple[Tensor, ...], options: RingOptions, *, is_diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Compute O [B, H, n, D] in 16 bit and L [B, H, n padded] of one shard of keys. is_diagonal: this process's."""
    query, key, value, q_values, q_scale = here
    k_values, k_scale, v_transposed, v_scale = visiting
    hats = (
        Quantized(q_values, None, q_scale), Quantized(k_values, None, k_scale), Quantized(None, v_transposed, v_scale),
    )  # fmt: skip
    level = forward_level(query.device, query.shape[3])
    with torch.cuda.device_of(query):
        return run_forward(
            ForwardInputs(query, key, value, *hats), level,
            is_causal=options.is_causal and is_diagonal, scale=options.scale,
        )  # fmt: skip


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
    """Compute the parts of dQ [B, H, n, D], dK and dV [B, Hkv, m, D] that pass through one shard of keys, in 16 bit."""
    (q_values, q_scale, v_bound), (k_values, k_scale, value) = here, visiting
    is_causal = options.is_causal and is_diagonal
    return torch.ops.sage_kernels.backward.default(
        grad_output, value, output, log_sum_exp, q_values, q_scale, k_values, k_scale, v_bound,
        is_causal, options.scale, options.granularity,
    )  # fmt: skip
