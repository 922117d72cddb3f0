"""Ulysses (arXiv 2309.14509): processes exchange tokens for heads before the attention, and back after it.

Between the two all-to-alls a process has whole sequences of some heads. Nothing that an attention does along a sequence
knows of the processes: the mean of K, blocks that share a scale, tiles, block masks. Every head gets the same numbers
as in one process.
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
    """Compute attention(query, key, value) of sequences whose tokens are spread over the P processes of `group`.

    The bits are those of one process if `attention` gives a head the same bits whatever the other heads; where keys are
    sent to several processes, their gradients are added up, which rounds once more. It is as often differentiable as
    `attention`. torch.compile breaks its graph at the exchange.

    Args:
        attention: A function of query [B, H/P, Nq, D] and key and value [B, H', Nk, D], with all tokens and heads
            [r H/P, (r + 1) H/P) of process r, heads last in memory, that returns [B, H/P, Nq, D]. H' is Hkv/P, or more
            where P doesn't divide Hkv: then keys and values are sent to all processes that need them; H' divides H/P.
        query: This process's tokens [B, H, Nq/P, D]. All processes have the same shapes; P must divide H.
        key, value: This process's tokens [B, Hkv, Nk/P, D], of query's dtype and device; Hkv must divide H.
        group: None means all processes.

    Returns:
        O, [B, H, Nq/P, D].

    Raises:
        TypeError, ValueError: An argument does not fit, there is no process group, or shapes differ between processes,
            which is checked when a shape is new.
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
    """Compute `ulysses` of checked arguments."""
    return gather_heads(attention(*whole_sequences(ranks, query, key, value)), ranks)


def whole_sequences(ranks: Ranks, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return all tokens of this process's query heads, and of the keys or values that they share."""
    copies = math.lcm(others[0].shape[1], ranks.count) // others[0].shape[1]
    repeated = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in others)
    return tuple(gather_tokens(x, ranks) for x in (query, *repeated))
