"""SLA2: sparse-linear attention whose router and whose mix of the two branches are learned (arXiv 2602.12675).

The router chooses the key blocks that get softmax attention, linear attention takes the others, and alpha, one number
per head and block of queries, is the weight of the first: O = alpha O_s + (1 - alpha) O_l.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sage_ref.backend import chosen_kernels, sla2_kernels
from sage_ref.checks import (
    check_count,
    check_entries,
    check_heads,
    check_options,
    check_reverse_mode,
    check_share,
    is_number,
    shown,
)
from sage_ref.shapes import in_working_dtype
from sage_ref.sla2.api import reference_attention, selected_mass
from sage_ref.sla2.blocks import BlockSettings, block_count, selected_count
from sage_ref.sla2.router import Relaxation, Router, Routing


def write(parameter: Tensor, value: Tensor) -> None:
    """Write a value into a parameter, of which this process may hold a shard, as with FSDP2."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
        parameter = parameter.to_local()
    parameter.copy_(value)


def check_averaged() -> None:
    """Check that a DistributedDataParallel around this forward pass averages the gradients of every SLA2 in it.

    It averages those of what trained when it was made, and says nothing of others.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()
    averaged = {id(x) for bucket in buckets for x in bucket.parameters()}
    modules = (module for module in wrapper.module.modules() if isinstance(module, SLA2))
    if any(x.requires_grad and id(x) not in averaged for module in modules for x in module.parameters()):
        raise ValueError(
            "stage: expected it before DistributedDataParallel, which averages the gradients of what trained when it "
            "was made, got it after: make it anew"
        )


# torch.compile can't trace it, but calls it while it compiles, as it does `warn_once`.
check_averaged._dynamo_marked_constant = True


class SLA2(nn.Module):
    """Sparse-linear attention with a learnable router; a drop-in for attention between any two sequences.

    forward(query [B, H, Nq, D], key, value [B, Hkv, Nk, D]) returns [B, H, Nq, D] in the dtype of query. Hkv < H is
    grouped-query attention; Hkv must divide H. Magnitudes and derivatives are as in `sage_ref.sparse_linear_attention`.

    stage(1) trains router and alpha through `relaxation`, with all blocks computed. stage(2), the initial state, is the
    real thing: hard Top-k, with alpha trained and the router frozen.

    Args:
        head_dim, num_heads: D and H.
        sparsity: Share of the key blocks that a query block leaves to the linear branch; see `selected_count`.
        block_q, block_kv: Queries and keys of a block.
        quantize: Run the sparse branch of stage 2 in INT8, in the forward pass.
        backward: As in `sage_ref.sparse_linear_attention`.
        query_blocks: How many alphas a head has, one per query block, for inputs of exactly that many blocks; 1 is
            broadcast to any length.
        relaxation: Stands in for the hard mask in stage 1. `EQUATIONS_16_17` and `PRINTED` of `sage_ref.sla2.router`
            are the paper's two forms, of which the second can cheat; the default departs from both, as it explains.
        backend: As in `sage_ref.sparse_linear_attention`. Stage 1 runs in 16 bit.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        sparsity: float = 0.97,
        block_q: int = 128,
        block_kv: int = 64,
        quantize: bool = True,
        backward: str = "matched",
        query_blocks: int = 1,
        relaxation: Relaxation = Relaxation(),  # noqa: B008 (frozen)
        backend: str = "auto",
    ):
        super().__init__()
        check_count("head_dim", head_dim)
        check_count("num_heads", num_heads)
        check_count("query_blocks", query_blocks)
        check_share("sparsity", sparsity)
        check_options(None, backend, quantize=quantize)
        if not isinstance(relaxation, Relaxation):
            raise TypeError(f"relaxation: expected a Relaxation of sage_ref.sla2, got {type(relaxation).__name__}")
        self.head_dim, self.num_heads, self.sparsity = head_dim, num_heads, sparsity
        self.relaxation, self.backend = relaxation, backend
        self.settings = BlockSettings(block_q, block_kv, quantize=quantize, backward=backward)
        self.router = Router(head_dim, self.settings)
        self.alpha_logit = nn.Parameter(torch.empty(num_heads, query_blocks))
        self.reset_parameters()
        self.stage(2)

    def reset_parameters(self) -> None:
        """Set alpha to 0.95, as in a new module; the router's layers are reset by themselves."""
        nn.init.constant_(self.alpha_logit, 3.0)

    def stage(self, number: int) -> "SLA2":
        """Choose what is computed and what trains: 1, the soft mask, router and alpha; 2, the hard mask and alpha.

        What trains is set here, also if it was frozen before, as by LoRA. DistributedDataParallel averages gradients of
        what trains when it is made, so make it after this.
        """
        if not is_number(number) or number not in (1, 2):
            raise ValueError(f"number: expected stage 1 or 2, got {shown(number)}")
        self.current_stage = number
        self.router.requires_grad_(number == 1)
        self.alpha_logit.requires_grad_(True)
        self._averaging_checked = False  # not known yet
        return self

    def alpha(self, batch: int, query_blocks: int) -> Tensor:
        """Return sigmoid(alpha_logit), [B, H, Tm] as a view."""
        self._check_length(query_blocks)
        return torch.sigmoid(self.alpha_logit).expand(batch, -1, query_blocks)

    def _check_length(self, query_blocks: int) -> None:
        stored = self.alpha_logit.shape[1]
        if stored not in (1, query_blocks):
            raise ValueError(f"query: expected {stored} blocks of queries, one per alpha of a head, got {query_blocks}")

    @torch.no_grad()
    def initialize_alpha(self, query: Tensor, key: Tensor) -> None:
        """Set alpha to the mass rowsum(P1) that the selected blocks hold on these inputs, averaged where shared.

        Alpha is kept in [1e-4, 1 - 1e-4], where its logit is finite and can still learn. This is for one process: in a
        model under DistributedDataParallel or FSDP2 call `sage_ref.integrations.diffusers.initialize_alpha`, which
        takes any module.

        Raises:
            ValueError: query or key holds a NaN, an infinity or an entry above 1e15. Alpha stays as it was.
        """
        self.set_alpha([self.selected_mass(query, key)])

    def selected_mass(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the mean softmax mass of the selected blocks over the batch, [H, Tm]: per head and query block."""
        query, key, _ = check_heads(query, key, key, self.num_heads, self.head_dim, self.alpha_logit)
        check_entries(query=query, key=key)
        return self.mass_of_heads(query, key)

    def mass_of_heads(self, query: Tensor, key: Tensor) -> Tensor:
        """Compute `selected_mass` of checked arguments, for as many heads as query has."""
        return selected_mass(query, key, self.routing(query, key), self.settings, self.backend).mean(0)

    def set_alpha(self, masses: list[Tensor]) -> None:
        """Set alpha to the mean of the masses [H, Tm] of several calls, and of the query blocks if they share it."""
        for mass in masses:
            self._check_length(mass.shape[1])
        if self.alpha_logit.shape[1] == 1:
            masses = [mass.mean(-1, keepdim=True) for mass in masses]
        write(self.alpha_logit, torch.stack(masses).mean(0).logit(eps=1e-4))

    def block_mask(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the hard choice, bool [B, H, Tm, Tn], for query and key with equally many heads."""
        return self.routing(query, key).block_mask(query, key, self.settings)

    @torch.no_grad()
    def routing(self, query: Tensor, key: Tensor) -> Routing:
        """Return the router's hard choice for queries and keys, still to be made."""
        return Routing(*self.router.matrices(query), self._count(key))

    def soft_block_mask(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the weights of `relaxation`, [B, H, Tm, Tn] in [0, 1], differentiable in the router's projections."""
        check_reverse_mode(query=query, key=key)
        return self.router.soft_choice(query, key, self._count(key), self.relaxation)[0]

    def _count(self, key: Tensor) -> int:
        """Return how many key blocks each query block selects."""
        return selected_count(self.sparsity, block_count(key.shape[-2], self.settings.block_kv))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self._checked(query, key, value)
        alpha = self.alpha(query.shape[0], block_count(query.shape[2], self.settings.block_q))
        return self._attention(query, key, value, alpha)

    def _checked(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Check the inputs of a forward pass, and that DistributedDataParallel knows of all that trains."""
        query, key, value = check_heads(query, key, value, self.num_heads, self.head_dim, self.alpha_logit)
        check_reverse_mode(query=query, key=key, value=value, alpha_logit=self.alpha_logit)
        if not self._averaging_checked and torch.is_grad_enabled():
            check_averaged()
            self._averaging_checked = not torch.compiler.is_compiling()
        return query, key, value

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
        """Compute O of checked arguments, for as many heads as query has, on the kernels or on the reference."""
        chooser, settings = self._choice(query, key)
        kernels = chosen_kernels(self.backend, sla2_kernels, query, settings, depth=2)  # called from forward
        attention = reference_attention if kernels is None else kernels.attention
        return attention(query, key, value, chooser, alpha, settings)

    def _choice(self, query: Tensor, key: Tensor) -> tuple[Tensor | Routing, BlockSettings]:
        """Return what chooses the blocks, in stage 1 the weights of `relaxation`, and the settings of this stage."""
        if self.current_stage == 2:
            return self.routing(query, key), self.settings
        weights, _ = self.router.soft_choice(*in_working_dtype(query, key), self._count(key), self.relaxation)
        return weights, replace(self.settings, quantize=False)
