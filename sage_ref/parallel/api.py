"""`parallel_sagebwd_attention`: check the arguments, choose how processes share the work."""

from functools import partial

import torch.distributed as dist
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.backend import chosen_kernels, ring_kernels, sagebwd_kernels
from sage_ref.checks import check_choice, checked_attention
from sage_ref.parallel import ring_reference
from sage_ref.parallel.exchange import check_alike, ranks_of
from sage_ref.parallel.ring import ring_attention
from sage_ref.parallel.shards import RingOptions
from sage_ref.parallel.ulysses import check_heads_divide, exchanged
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sagebwd.settings import Options

METHODS = ("auto", "ulysses", "ring")


def parallel_sagebwd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    method: str = "auto",
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    smooth_k: bool = True,
    smooth_q: bool = False,
    granularity: str = "row",
    unbiased: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute `sage_ref.sagebwd_attention` of sequences whose tokens are spread over the P processes of `group`.

    Compared with one process, "ulysses" computes the same numbers for every head, bit for bit in the kernels; on a CPU
    PyTorch's matmuls may add up in a different order. Where P doesn't divide Hkv, several processes need the same keys,
    whose gradients are rounded once more.

    "ring" smooths keys by the mean of all Nk. A shard of a multiple of 128 tokens has the blocks of 128 that share a
    scale in one process; other shards end in blocks of their own, which are quantised to different numbers. Parts from
    the shards, in 16 bit from the kernels, are added up in an order of their own. With the kernels INT8 copies of keys
    and values travel in the forward pass; in the backward pass K^ in INT8, V in 16 bit, and the sums of dK and dV in
    float32. With is_causal processes are not equally busy: the last one visits all keys.

    torch.compile breaks its graph at the exchange. Processes compare shapes when one is new. Shapes that each has seen
    before, but that differ now, are not noticed: the call waits for ever or computes nonsense. All ranks must therefore
    truncate or pad identically.

    Args:
        query: This process's tokens (`local_tokens`), [B, H, Nq/P, D], of the same shape in every process.
        key, value: This process's tokens, [B, Hkv, Nk/P, D].
        group: None means all processes.
        method: "ulysses": each process computes H/P heads of whole sequences, so P must divide H. "ring": each computes
            all heads of its queries while keys and values go round. "auto": "ulysses" where P divides H, else "ring".
        is_causal: By positions in the whole sequence; in a ring Nq is then Nk.
        scale, enable_gqa, smooth_k, smooth_q, granularity, backend: As in `sagebwd_attention`, and the same in every
            process. There is no prologue: apply QK-norm and rotary positions to this process's tokens beforehand.
        unbiased: With "ulysses" only: the ring rounds P to nearest.

    Returns:
        O, [B, H, Nq/P, D] in the dtype of query, differentiable once in query, key and value.

    Raises:
        TypeError, ValueError: As in `sagebwd_attention`; also without a process group, if P doesn't divide H, for an
            unbiased ring, and if shapes differ between processes.
    """
    query, key, value = checked_attention(query, key, value, enable_gqa)
    options = Options(smooth_k, smooth_q, granularity, unbiased, backend)
    options.check(scale, is_causal=is_causal, enable_gqa=enable_gqa)
    check_choice("method", method, METHODS)
    ranks = ranks_of(group)
    if method == "auto":
        method = "ring" if query.shape[1] % ranks.count else "ulysses"
    if method == "ulysses":
        check_heads_divide(query.shape[1], ranks)
    elif unbiased:
        raise ValueError("unbiased: expected False in a ring, which rounds P to nearest, got True")
    elif is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key: expected as many keys as queries for a causal ring, {query.shape[2]}, got {key.shape[2]}"
        )
    kernels = chosen_kernels(backend, sagebwd_kernels, query, smooth_q)
    check_alike(ranks, query, key)
    if method == "ring":
        ring_options = RingOptions(is_causal, softmax_scale(scale, query.shape[3]), smooth_k, smooth_q, granularity)
        parts = ring_reference if kernels is None else ring_kernels()
        return ring_attention(query, key, value, ranks, ring_options, parts)
    chosen = options._replace(backend="reference" if kernels is None else "triton")._asdict()
    attention = partial(sagebwd_attention, is_causal=is_causal, scale=scale, enable_gqa=True, **chosen)
    return exchanged(attention, query, key, value, ranks)
