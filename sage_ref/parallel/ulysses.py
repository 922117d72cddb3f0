"""Ulysses (arXiv 2309.14509): heads for tokens before the attention, tokens for heads after it.

Between the two all-to-alls a process has whole sequences, of some heads. So nothing that an attention does along a
sequence knows of the processes: the mean of K, blocks that share a scale, tiles, block masks. Of every head the same
numbers are computed as by one process.
"""

import math
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from sage_ref.checks import check_each, check_together
from sage_ref.parallel.exchange import Ranks, check_alike, gather_heads, gather_tokens, ranks_of


def ulysses(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """attention(query, key, value) of sequences whose tokens lie in the P processes of `group`; None: all processes.

    query: [B, H, Nq/P, D]; key, value: [B, Hkv, Nk/P, D], this process's tokens, all of one dtype and on one device,
        in every process of the same shapes. P must divide H, and Hkv H.
    attention: gets query [B, H/P, Nq, D], key and value [B, H', Nk, D] with all tokens and heads [r H/P, (r + 1) H/P)
        of process r, heads last in memory, and returns [B, H/P, Nq, D]. H' is Hkv/P, or more where P doesn't divide
        Hkv: then keys and values are sent to all processes that need them, and H' divides H/P.

    Returns [B, H, Nq/P, D]. As often differentiable as `attention`. Bits are those of one process if `attention` gives
    a head the same bits whatever the others; where keys were sent to several processes, their gradients are added up,
    which rounds once more. torch.compile breaks its graph at the exchange.

    Raises TypeError or ValueError naming the argument: no process group, heads that P doesn't divide, shapes that
    differ between processes (compared when a shape comes for the first time).
    """
    check_each(query=query, key=key, value=value)
    check_together(query, key, value, enable_gqa=True)
    ranks = ranks_of(group)
    check_heads_divide(query.shape[1], ranks)
    check_alike(ranks, query, key)
    return exchanged(attention, query, key, value, ranks)


def check_heads_divide(heads: int, ranks: Ranks) -> None:
    if heads % ranks.count:
        raise ValueError(f"query: expected a number of heads that {ranks.count} processes divide, got {heads}")


def exchanged(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, ranks: Ranks
) -> Tensor:
    """`ulysses` of valid arguments."""
    return gather_heads(attention(*whole_sequences(ranks, query, key, value)), ranks)


def whole_sequences(ranks: Ranks, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """All tokens of this process's query heads, and of the keys or values that they share."""
    copies = math.lcm(others[0].shape[1], ranks.count) // others[0].shape[1]
    repeated = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in others)
    return tuple(gather_tokens(x, ranks) for x in (query, *repeated))
