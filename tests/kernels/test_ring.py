"""The kernels' part of the ring: one process does the work of all, on a GPU, whose levels no CPU test reaches.

tests/parallel runs the ring itself, in several processes.
"""

import pytest
import torch
from kernel_cases import DEVICE
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.sagebwd import ring
from sage_kernels.sagebwd.forward.key_mean import key_mean
from sage_kernels.sagebwd.prologue import NO_PROLOGUE

from sage_ref import sagebwd_attention
from sage_ref.attention import softmax_scale
from sage_ref.parallel.exchange import Ranks
from sage_ref.parallel.shards import RingOptions
from sage_ref.tracing import relative_l2

pytestmark = pytest.mark.gpu


def one_after_the_other(tensors, count, is_causal, monkeypatch):
    """Return O, dQ, dK, dV of `count` shards; what processes would ask each other is computed beforehand."""
    shards = [x.chunk(count, 2) for x in tensors]
    mean = key_mean(tensors[1], NO_PROLOGUE, start_with_triton)
    monkeypatch.setattr(ring, "mean_over", lambda x, ranks: mean)
    largest = [v.abs().amax((2, 3)).float()[..., None] / 127 for v in shards[2]]
    seen = {rank: torch.stack(largest[: rank + 1 if is_causal else None]).amax(0) for rank in range(count)}
    monkeypatch.setattr(ring, "largest_up_to", lambda x, ranks, is_causal: seen[ranks.rank])
    options = RingOptions(is_causal, softmax_scale(None, tensors[0].shape[3]), True, False, "row")
    ranks = [Ranks(None, rank, count) for rank in range(count)]
    prepared = [ring.prepare(*(x[r.rank] for x in shards[:3]), r, options) for r in ranks]
    outputs, sums = [], [torch.zeros_like(x, dtype=torch.float32) for x in tensors[:3]]
    dq, dk, dv = (x.chunk(count, 2) for x in sums)
    for here, (for_forward, for_backward) in enumerate(prepared):
        visible = range(here + 1 if is_causal else count)
        parts = [
            ring.attend(for_forward.here, prepared[j][0].visiting, options, is_diagonal=j == here) for j in visible
        ]
        log_sum_exp = torch.stack([l for _, l in parts]).mul(torch.log(torch.tensor(2.0))).logsumexp(0)
        log_sum_exp /= torch.log(torch.tensor(2.0))
        weights = [(l - log_sum_exp).exp2()[..., : shards[0][0].shape[2], None] for _, l in parts]
        outputs.append(sum(w * o for w, (o, _) in zip(weights, parts, strict=True)).to(tensors[0].dtype))
        saved = shards[3][here], outputs[-1], log_sum_exp, for_backward.here
        for j in visible:
            found = ring.gradients(*saved, prepared[j][1].visiting, options, is_diagonal=j == here)
            for total, x in zip((dq[here], dk[j], dv[j]), found, strict=True):
                total += x
    return torch.cat(outputs, 2), *sums


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shards_give_what_one_sequence_does_even_if_one_has_far_larger_values(
    monkeypatch, head_dim, is_causal, kv_heads
):
    """The first shard's values are 1000 times larger, so delta in the second exceeds what its own values allow."""
    n, count, draw = 1024, 4, torch.Generator(DEVICE).manual_seed(0)
    shapes = [(1, heads, n, head_dim) for heads in (2, kv_heads, kv_heads, 2)]
    tensors = [torch.randn(x, generator=draw, device=DEVICE, dtype=torch.float16) for x in shapes]
    tensors[1] += 4
    tensors[2][:, :, : n // count] *= 1000
    inputs = [x.clone().requires_grad_() for x in tensors[:3]]
    output = sagebwd_attention(*inputs, is_causal=is_causal, enable_gqa=True, backend="triton")
    output.backward(tensors[3])
    expected = [output, *(x.grad for x in inputs)]
    for x, y in zip(one_after_the_other(tensors, count, is_causal, monkeypatch), expected, strict=True):
        for mine, one in zip(x.chunk(count, 2), y.chunk(count, 2), strict=True):
            assert relative_l2(mine, one) < 5e-3
