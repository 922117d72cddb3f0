"""SLA2 over several processes, each of which computes some of the heads."""

import torch
import torch.distributed as dist
from torch import Tensor

from sage_ref.checks import check_entries, check_heads, check_reverse_mode
from sage_ref.parallel.exchange import Ranks, check_alike, gathered, largest_up_to, ranks_of
from sage_ref.parallel.ulysses import check_heads_divide, exchanged, whole_sequences
from sage_ref.sla2 import SLA2, block_count
from sage_ref.sla2.api import dispatch


class ParallelSLA2(SLA2):
    """`sage_ref.SLA2` of sequences whose tokens are spread over the P processes of `group`, by Ulysses.

    forward(query [B, H, Nq/P, D], key, value [B, Hkv, Nk/P, D], protect=None) returns [B, H, Nq/P, D] in the dtype of
    query. Every process has the same shapes. protect is bool [Nk], of the whole sequence, the same in every process.

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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, protect: Tensor | None = None) -> Tensor:
        query, key, value = check_heads(query, key, value, self.num_heads, self.head_dim, self.alpha_logit)
        check_reverse_mode(query=query, key=key, value=value, alpha_logit=self.alpha_logit)
        ranks = self._ranks(query, key)

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            alpha = self.alpha(query.shape[0], block_count(query.shape[2], self.settings.block_q))
            alpha = alpha.chunk(ranks.count, 1)[ranks.rank]
            return dispatch(query, key, value, *self._choice(query, key, protect), alpha, self.backend)

        return exchanged(attention, query, key, value, ranks)

    @torch.no_grad()
    def initialize_alpha(self, query: Tensor, key: Tensor, protect: Tensor | None = None) -> None:
        """Set alpha as SLA2 does, from all processes' tokens: query [B, H, Nq/P, D], key [B, Hkv, Nk/P, D]."""
        query, key, _ = check_heads(query, key, key, self.num_heads, self.head_dim, self.alpha_logit)
        ranks = self._ranks(query, key)
        largest = {"query": query.abs().amax(), "key": key.abs().amax()}
        check_entries(**{name: largest_up_to(x, ranks, is_causal=False) for name, x in largest.items()})
        mass_here = self.selected_mass(*whole_sequences(ranks, query, key), protect)  # [H/P, Tm]
        self.set_alpha(gathered(mass_here, ranks).flatten(0, 1))

    def _ranks(self, query: Tensor, key: Tensor) -> Ranks:
        ranks = ranks_of(self.group)
        check_heads_divide(self.num_heads, ranks)
        check_alike(ranks, query, key)
        return ranks
