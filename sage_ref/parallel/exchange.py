"""The processes that share a sequence, their tokens, and the all-to-all that exchanges heads for tokens.

Each of P processes holds n = N / P tokens. `gather_tokens` turns them into all N tokens of H / P heads, and
`gather_heads` is its reverse; each is the other's gradient, and neither changes a bit.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sage_ref.checks import check_dense

COMPARED = ("batch", "heads", "key heads", "queries", "keys", "head size")
_alike: set[tuple] = set()  # (group, shape): what all its processes were found to have


class Ranks(NamedTuple):
    """The processes that share a sequence, and this one's place among them."""

    group: dist.ProcessGroup
    rank: int
    count: int

    def device_rank(self, rank: int) -> int:
        """Return the number among all processes of the one that is `rank` in the group."""
        return dist.get_global_rank(self.group, rank)


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of a group, of all processes if None; ValueError without a group or outside of it."""
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
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def local_tokens(x: Tensor, dim: int = -2, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this process's N / P tokens of x, which has all N of them along `dim`: a view.

    Raises:
        ValueError: The P processes of `group` don't divide N, or there is no group.
    """
    check_dense("x", x)
    ranks = ranks_of(group)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of x, of shape {tuple(x.shape)}, got {dim}")
    if x.shape[dim] % ranks.count:
        raise ValueError(
            f"x: expected a number of tokens that {ranks.count} processes divide, got {x.shape[dim]} along dimension "
            f"{dim}"
        )
    return x.chunk(ranks.count, dim)[ranks.rank]


@torch.compiler.disable
def check_alike(ranks: Ranks, query: Tensor, key: Tensor) -> None:
    """Raise ValueError in all processes if shapes differ: the exchange would mix up tokens, or wait for ever.

    A process compares a shape when it is new, which costs a small all-gather. All must therefore meet a new shape in
    the same call: if it is new in some of them alone, these wait for the others.
    """
    shape = (*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3])
    known = (ranks.group.group_name, shape)
    if known in _alike:
        return
    first, *others = gathered(torch.tensor(shape, device=query.device), ranks).tolist()
    for rank, found in enumerate(others, start=1):
        for name, expected, got in zip(COMPARED, first, found, strict=True):
            if got != expected:
                raise ValueError(
                    f"query, key: expected as many {name} in every process, got {expected} in process 0 and {got} in "
                    f"process {rank} of the group"
                )
    _alike.add(known)


@torch.compiler.disable
def gather_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """Exchange [B, H, n, D], this process's tokens of all heads, for [B, H / P, N, D], all tokens of its own heads.

    Heads [r H / P, (r + 1) H / P) belong to process r. The result has its heads last in memory. Differentiable.
    """
    return GatherTokens.apply(x, ranks)


@torch.compiler.disable
def gather_heads(x: Tensor, ranks: Ranks) -> Tensor:
    """Reverse `gather_tokens`: [B, H / P, N, D] -> [B, H, n, D]."""
    return GatherHeads.apply(x, ranks)


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        # [P, B, n, H/P, D]: heads by the process that gets them, then tokens by the process they come from
        received = _all_to_all(x.unflatten(1, (ranks.count, -1)).permute(1, 0, 3, 2, 4), ranks)
        return received.transpose(0, 1).flatten(1, 2).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return GatherHeads.apply(grad, ctx.ranks), None


class GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        # [P, B, n, H/P, D]: tokens by the process that gets them, then heads by the process they come from
        received = _all_to_all(x.transpose(1, 2).unflatten(1, (ranks.count, -1)).transpose(0, 1), ranks)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return GatherTokens.apply(grad, ctx.ranks), None


def _all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """Send parts[r] to process r, and return what each process sent here."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received


class Passing:
    """Tensors on their way to the next process, while the previous process's tensors arrive."""

    def __init__(self, tensors: tuple[Tensor, ...], ranks: Ranks):
        self.sent = [x.contiguous() for x in tensors]
        self.received = [torch.empty_like(x) for x in self.sent]
        after = ranks.device_rank((ranks.rank + 1) % ranks.count)
        before = ranks.device_rank((ranks.rank - 1) % ranks.count)
        operations = [dist.P2POp(dist.isend, x, after, ranks.group) for x in self.sent]
        operations += [dist.P2POp(dist.irecv, x, before, ranks.group) for x in self.received]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the transfer and return the tensors that arrived."""
        for work in self.works:
            work.wait()
        return tuple(self.received)


def mean_over(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean of the processes' x, in its dtype; torch.distributed adds up in an order of its own."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks.group)
    return total / ranks.count


def largest_up_to(x: Tensor, ranks: Ranks, *, is_causal: bool) -> Tensor:
    """Return the largest of the processes' x, entry by entry; if causal, of the processes up to this one."""
    return gathered(x, ranks)[: ranks.rank + 1 if is_causal else None].amax(0)


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """Return every process's x, of one shape, as [P, ...]. Not differentiable."""
    everywhere = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.count)]
    dist.all_gather(everywhere, x.contiguous(), group=ranks.group)
    return torch.stack(everywhere)
