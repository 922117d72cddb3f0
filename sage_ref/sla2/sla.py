"""SLA, the baseline of SLA2: O = O_s + Proj(O_l), blocks chosen by a heuristic (arXiv 2509.24006).

`branches.py` has the two branches, and `blocks.heuristic_scores` chooses the blocks. Proj must repair the linear branch
and also supply what P1 V lacks of O_s, (alpha - 1) O_s, which is why SLA2 learns alpha instead.

SLA has no kernels of its own: on a GPU O_s is SLA2's attention with alpha = 1, and O_l is the one with alpha = 0. Each
computes both branches, so SLA takes twice the time that it should; its numbers are right.
"""

import torch
from torch import Tensor, nn

from sage_ref.checks import check_count, check_heads, check_options, check_share
from sage_ref.shapes import called, in_working_dtype
from sage_ref.sla2.api import sparse_linear_attention
from sage_ref.sla2.blocks import BlockSettings, heuristic_scores, selected_count
from sage_ref.sla2.branches import linear_branch, sparse_branch
from sage_ref.sla2.router import top_blocks


class ZeroAtFirst(nn.Linear):
    """A layer that starts at zero, as `IdentityAtFirst` of `sage_ref.sla2.router` does at the identity."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class SLA(nn.Module):
    """O = O_s + Proj(O_l): SLA with its block mask from mean-pooled queries and keys.

    forward(query, key, value [B, H, N, D], GQA as in SLA2) returns [B, H, Nq, D], differentiable. Proj starts at zero:
    at first SLA is sparse attention. Magnitudes are as in `sparse_linear_attention`.

    Args:
        head_dim, num_heads: D and H.
        sparsity: Share of the key blocks that a query block leaves to the linear branch.
        block_q, block_kv: Queries and keys of a block.
        backend: As in `sage_ref.sparse_linear_attention`.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        sparsity: float = 0.9,
        block_q: int = 128,
        block_kv: int = 64,
        backend: str = "reference",
    ):
        super().__init__()
        check_count("head_dim", head_dim)
        check_count("num_heads", num_heads)
        check_share("sparsity", sparsity)
        check_options(None, backend)
        self.head_dim, self.num_heads, self.sparsity, self.backend = head_dim, num_heads, sparsity, backend
        self.settings = BlockSettings(block_q, block_kv)
        self.proj = ZeroAtFirst(head_dim, head_dim)

    def block_mask(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the blocks of the sparse branch, bool [B, H, Tm, Tn], for query and key with equally many heads."""
        scores = heuristic_scores(query, key, self.settings).detach()
        return top_blocks(scores, selected_count(self.sparsity, scores.shape[-1]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = check_heads(query, key, value, self.num_heads, self.head_dim, query)
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = in_working_dtype(query, key, value)
            mask = self.block_mask(q, k)
            if self.backend == "reference":
                o_s, _ = sparse_branch(q, k, v, mask, self.settings)
                o_l = linear_branch(q, k, v, ~mask, self.settings)
            else:
                o_s, o_l = (self.one_branch(query, key, value, mask, alpha) for alpha in (1.0, 0.0))
            repair = called(self.proj, o_l)
        return (o_s + repair).to(query.dtype)

    def one_branch(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, alpha: float) -> Tensor:
        """Return O_s with alpha = 1, O_l with alpha = 0: [B, H, Nq, D]."""
        blocks = {"block_q": self.settings.block_q, "block_kv": self.settings.block_kv}
        return sparse_linear_attention(query, key, value, mask, alpha, backend=self.backend, **blocks)
