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
    """`sage_ref.sagebwd_attention` of sequences whose tokens lie in the P processes of `group`.

    query: [B, H, Nq/P, D]; key, value: [B, Hkv, Nk/P, D], this process's tokens (`local_tokens`), in every process of
        the same shapes; dtypes and all options but the following as in `sagebwd_attention`, and the same in every
        process. is_causal goes by positions in the whole sequence. There is no prologue: apply QK-norm and rotary
        positions to this process's tokens before.
    group: None means all processes.
    method: "ulysses", each process computes H/P heads of whole sequences, so P must divide H; "ring", each computes all
        heads of its queries while keys and values go round; "auto": "ulysses" where P divides H, else "ring".
    unbiased: with "ulysses" only: the ring rounds P to nearest.

    Returns O, [B, H, Nq/P, D] in the dtype of query, differentiable once in query, key and value.

    Against one process, "ulysses" computes of every head the same numbers, bit for bit in the kernels; on CPU PyTorch's
    matmuls may add up in another order. Where P doesn't divide Hkv, several processes need the same keys, whose
    gradients are rounded once more.
    "ring" smooths keys by the mean of all Nk. A shard of a multiple of 128 tokens has the blocks of 128 that share a
    scale in one process; other shards end blocks of their own, which are quantised as well but not to the same numbers.
    Parts from the shards, in 16 bit from the kernels, are added up in an order of their own. With the kernels INT8
    copies of keys and values travel in the forward pass; in the backward pass K^ in INT8, V in 16 bit, and the sums of
    dK and dV in float32. With is_causal Nq is Nk, and processes are not equally busy: the last one visits all keys.

    torch.compile breaks its graph at what is sent. TypeError or ValueError name the argument as in `sagebwd_attention`;
    also: no process group, a P that doesn't divide H, an unbiased ring, shapes that differ between processes. Processes
    compare shapes when one comes for the first time. Shapes that each has seen before, but not the same ones now, are
    not noticed: the call waits for ever or computes nonsense. So let all processes cut or pad alike.
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
