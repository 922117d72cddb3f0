"""SLA2 over several processes, each of which computes some of the heads."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor

from sage_ref.checks import check_entries, check_heads
from sage_ref.parallel.ulysses import checked_group, gather_heads, gathered, whole_sequences
from sage_ref.sla2 import SLA2, block_count


class ParallelSLA2(SLA2):
    """`sage_ref.SLA2` of sequences whose tokens are spread over the P processes of `group`, by Ulysses.

    forward(query [B, H, Nq/P, D], key, value [B, Hkv, Nk/P, D]) returns [B, H, Nq/P, D] in the dtype of query. Every
    process has the same shapes.

    Parameters, their names and stages are SLA2's, so a state_dict fits both. Process r computes heads
    [r H/P, (r + 1) H/P), and gives alpha's other heads a gradient of zero; after DDP or FSDP2 over the same processes,
    gradients are those of one process for the mean of the losses.

    Each head is computed as by one process, but PyTorch's matmuls (router scores, the linear branch's sums) may add up
    in a different order for fewer heads at once. Where two blocks score nearly the same, the other one may be chosen.
    Where P doesn't divide Hkv, gradients of key and value are rounded once more.

    Args:
        head_dim, num_heads: D and H, a multiple of P.
        group: None means all processes that exist at the first call.
        options: As in SLA2.

    Raises:
        TypeError, ValueError: As in SLA2; and in the first call if P doesn't divide H, or if there is no group.
    """

    def __init__(self, head_dim: int, num_heads: int, *, group: dist.ProcessGroup | None = None, **options):
        super().__init__(head_dim, num_heads, **options)
        self.group = group

    @classmethod
    def of(cls, module: SLA2, group: dist.ProcessGroup | None) -> "ParallelSLA2":
        """Return a module of `group` whose parameters and router are those of an SLA2, not copies."""
        shared = copy.copy(module)
        shared.__class__, shared.group = cls, group
        return shared

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self._checked(query, key, value)
        group = checked_group(self.group, query, key)
        query, key, value = whole_sequences(group, query, key, value)
        alpha = self.alpha(query.shape[0], block_count(query.shape[2], self.settings.block_q))
        alpha = alpha.chunk(group.size(), 1)[group.rank()]
        return gather_heads(self._attention(query, key, value, alpha), group)

    def selected_mass(self, query: Tensor, key: Tensor) -> Tensor:
        """Return SLA2's, from all processes' tokens: query [B, H, Nq/P, D], key [B, Hkv, Nk/P, D]."""
        query, key, _ = check_heads(query, key, key, self.num_heads, self.head_dim, self.alpha_logit)
        group = checked_group(self.group, query, key)
        largest = gathered(torch.stack([query.abs().amax(), key.abs().amax()]), group).amax(0)
        check_entries(query=largest[0], key=largest[1])  # in all processes, lest some wait for ever
        mass_here = self.mass_of_heads(*whole_sequences(group, query, key))  # [H/P, Tm]
        return gathered(mass_here, group).flatten(0, 1)
