"""Ulysses (arXiv 2309.14509): processes exchange tokens for heads before the attention, and back after it.

Between the two all-to-alls a process has whole sequences of some heads. Nothing that an attention does along a sequence
knows of the processes: the mean of K, blocks that share a scale, tiles, block masks. Every head gets the same numbers
as in one process.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sage_ref.checks import check_dense, check_each, check_together

_alike: set[tuple] = set()  # (group, shapes): what all its processes were found to have


def ulysses(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute attention(query, key, value) of sequences whose tokens are spread over the P processes of `group`.

    The bits are those of one process if `attention` gives a head the same bits whatever the other heads, as the kernels
    do; on a CPU PyTorch's matmuls may add up in a different order. Where keys are sent to several processes, their
    gradients are added up, which rounds once more. It is as often differentiable as `attention`. torch.compile breaks
    its graph at the exchange.

    Processes compare shapes when one is new. Shapes that each has seen before, but that differ now, are not noticed:
    the call waits for ever or computes nonsense. All processes must therefore truncate or pad identically.

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
        TypeError, ValueError: An argument does not fit, there is no process group, or shapes differ between processes.
    """
    check_each(query=query, key=key, value=value)
    check_together(query, key, value, enable_gqa=True)
    group = checked_group(group, query, key)
    return gather_heads(attention(*whole_sequences(group, query, key, value)), group)


def local_tokens(x: Tensor, dim: int = -2, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this process's N / P tokens of x, which has all N of them along `dim`: a view.

    Raises:
        ValueError: The P processes of `group` don't divide N, or there is no group.
    """
    check_dense("x", x)
    group = group_of(group)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of x, of shape {tuple(x.shape)}, got {dim}")
    if x.shape[dim] % group.size():
        raise ValueError(
            f"x: expected a number of tokens that {group.size()} processes divide, got {x.shape[dim]} along dimension "
            f"{dim}"
        )
    return x.chunk(group.size(), dim)[group.rank()]


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group, that of all processes for None; ValueError without a group or outside of it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group: expected processes that share the sequence (start them with torchrun, and call "
            "torch.distributed.init_process_group), got none"
        )
    if group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # new_group's answer to a process outside the group
        raise ValueError(f"group: expected one with this process, got one without process {dist.get_rank()}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    return group


@torch.compiler.disable
def checked_group(group: dist.ProcessGroup | None, query: Tensor, key: Tensor) -> dist.ProcessGroup:
    """Return the group that exchanges query and key; ValueError in all its processes if they can't be exchanged.

    A process compares a shape when it is new, which costs a small all-gather. All must therefore meet a new shape in
    the same call: if it is new in some of them alone, these wait for the others.
    """
    group = group_of(group)
    if query.shape[1] % group.size():
        raise ValueError(
            f"query: expected a number of heads that {group.size()} processes divide, got {query.shape[1]}"
        )
    known = group.group_name, query.shape, key.shape
    if known in _alike:
        return group
    first, *others = gathered(torch.tensor((*query.shape, *key.shape), device=query.device), group).tolist()
    for rank, found in enumerate(others, start=1):
        if found != first:
            raise ValueError(
                f"query, key: expected the same shapes in every process, got {first[:4]}, {first[4:]} in process 0 and "
                f"{found[:4]}, {found[4:]} in process {rank} of the group"
            )
    _alike.add(known)
    return group


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every process's x, of one shape, as [P, ...]. Not differentiable."""
    everywhere = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(everywhere, x.contiguous(), group=group)
    return torch.stack(everywhere)


def whole_sequences(group: dist.ProcessGroup, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return all tokens of this process's query heads, and of the keys or values that they share."""
    copies = math.lcm(others[0].shape[1], group.size()) // others[0].shape[1]
    repeated = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in others)
    return tuple(gather_tokens(x, group) for x in (query, *repeated))


@torch.compiler.disable
def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [B, H, n, D], this process's tokens of all heads, for [B, H / P, N, D], all tokens of its own heads.

    Heads [r H / P, (r + 1) H / P) belong to process r. The result has its heads last in memory. Differentiable.
    """
    # [P, B, n, H/P, D]: heads by the process that gets them, then tokens by the process they come from
    received = AllToAll.apply(x.unflatten(1, (group.size(), -1)).permute(1, 0, 3, 2, 4), group)
    return received.transpose(0, 1).flatten(1, 2).transpose(1, 2)


@torch.compiler.disable
def gather_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reverse `gather_tokens`: [B, H / P, N, D] -> [B, H, n, D]."""
    # [P, B, n, H/P, D]: tokens by the process that gets them, then heads by the process they come from
    received = AllToAll.apply(x.transpose(1, 2).unflatten(1, (group.size(), -1)).transpose(0, 1), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


class AllToAll(torch.autograd.Function):
    """Send parts[r] to process r, and return what each process sent here; so do the gradients on their way back."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None
