"""Ring attention (arXiv 2310.01889) for SageBwd: keys and values go from process to process, queries stay.

In round t process r has the keys and values of process r - t. It attends to them alone, which gives O_t and the
log-sum-exp L_t of a row's scores, and merges: L = log(e^L + e^L_t), O = e^(L_old - L) O + e^(L_t - L) O_t. The
backward pass is a sum over shards once L and O belong to the whole row: P = exp(S - L), delta = rowsum(dO * O). dQ is
added up where the queries are; the sums of dK and dV travel with their keys, and are home after the last round.

K-smoothing goes across processes. A mean per shard would be exact in the forward pass, with a shift of L, but not in
the backward pass: dQ = c dS (K - mu) needs rows of dS that sum to zero, which holds over all keys only. All keys
therefore need the same mu, the mean over all tokens, as in one process.

Each backend has a module of `parts`: `prepare`, then `attend` and `gradients` for one shard of keys, and the `exp` and
`logaddexp` that fit its L.
"""

from types import ModuleType

import torch
from torch import Tensor

from sage_ref.derivatives import gradients_once
from sage_ref.parallel.exchange import Passing, Ranks
from sage_ref.parallel.shards import RingOptions, Shards
from sage_ref.shapes import in_dtype, working_dtype


@torch.compiler.disable
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, ranks: Ranks, options: RingOptions, parts: ModuleType
) -> Tensor:
    """Compute O [B, H, n, D] from this process's tokens: query [B, H, n, D], key and value [B, Hkv, m, D], checked."""
    return RingFunction.apply(query, key, value, ranks, options, parts)


class RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, ranks, options, parts):
        with torch.autocast(query.device.type, enabled=False):
            for_forward, for_backward = parts.prepare(query, key, value, ranks, options)
            output, log_sum_exp = ring_forward(for_forward, ranks, options, parts)
        output = in_dtype(output, query.dtype)
        ctx.save_for_backward(output, log_sum_exp, *for_backward.here, *for_backward.visiting)
        ctx.given = len(for_backward.here), query.dtype, ranks, options, parts
        return output

    @staticmethod
    def backward(ctx, grad_output):
        here, dtype, ranks, options, parts = ctx.given

        def compute(grad_output, output, log_sum_exp, *saved):
            shards = Shards(saved[:here], saved[here:])
            with torch.autocast(grad_output.device.type, enabled=False):
                gradients = ring_backward(grad_output, output, log_sum_exp, shards, ranks, options, parts)
            return tuple(x.to(dtype) for x in gradients)

        gradients = gradients_once("parallel_sagebwd_attention", compute, grad_output, *ctx.saved_tensors)
        return *gradients, None, None, None


def ring_forward(shards: Shards, ranks: Ranks, options: RingOptions, parts: ModuleType) -> tuple[Tensor, Tensor]:
    """Compute O [B, H, n, D] in the working dtype, and L in the convention of `parts`, [B, H, n or more]."""
    visiting = shards.visiting
    for step in range(ranks.count):
        passing = Passing(visiting, ranks) if step < ranks.count - 1 else None
        if _is_visible(step, ranks, options):
            o_t, l_t = parts.attend(shards.here, visiting, options, is_diagonal=step == 0)
            if step == 0:  # one's own keys, which every query sees
                o, l = o_t.to(working_dtype(o_t)), l_t
            else:
                merged = parts.logaddexp(l, l_t)
                weights = (parts.exp(x - merged)[..., : o.shape[2], None].to(o.dtype) for x in (l, l_t))
                o, l = sum(w * x for w, x in zip(weights, (o, o_t), strict=True)), merged
        visiting = passing and passing.wait()
    return o, l


def ring_backward(
    grad_output: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    shards: Shards,
    ranks: Ranks,
    options: RingOptions,
    parts: ModuleType,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ [B, H, n, D], dK and dV [B, Hkv, m, D] in the working dtype."""
    visiting, sums, dq = shards.visiting, None, 0
    for step in range(ranks.count):
        passing = Passing(visiting, ranks) if step < ranks.count - 1 else None
        found = None
        if _is_visible(step, ranks, options):
            saved = grad_output, output, log_sum_exp
            found = parts.gradients(*saved, shards.here, visiting, options, is_diagonal=step == 0)
            found = tuple(x.to(working_dtype(x)) for x in found)
            dq = dq + found[0]
        travelled = sums.wait() if sums else (0, 0)  # dK and dV of these keys so far
        of_keys = tuple(x + y for x, y in zip(travelled, found[1:], strict=True)) if found else travelled
        sums = Passing(of_keys, ranks) if ranks.count > 1 else None
        visiting = passing and passing.wait()
    return dq, *(sums.wait() if sums else of_keys)


def _is_visible(step: int, ranks: Ranks, options: RingOptions) -> bool:
    """Return whether this process's queries see the keys that are here in a round, those of process rank - step."""
    return not options.is_causal or step <= ranks.rank
