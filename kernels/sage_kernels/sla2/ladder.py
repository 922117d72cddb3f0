"""The SLA2 ladder by level: prepare a level's inputs, run its forward kernels; one backward for all.

Every level takes the same tensors, and a block mask or a router, and gives the same result up to quantisation.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sage_kernels import hopper
from sage_kernels.common.launch import Launch, choose_launch
from sage_kernels.common.launcher import Start, start_with_triton
from sage_kernels.common.quantize import padded_head_dim, quantize
from sage_kernels.sagebwd.forward import level0_flash_attention, level4_grouped
from sage_kernels.sla2.backward import keys_hopper, linear_queries_hopper, queries_hopper
from sage_kernels.sla2.backward.program import BackwardInputs, run_key, run_linear_query, run_query
from sage_kernels.sla2.forward import level0_as_printed, level1_lists, level4_hopper
from sage_kernels.sla2.forward.program import Forward, ForwardInputs, run_sparse_forward
from sage_kernels.sla2.lists import Choice, block_lists, given
from sage_kernels.sla2.prepare import read_blocks
from sage_kernels.sla2.routing import MASK_BLOCK_KV, route, sequence_mean
from sage_kernels.sla2.sums import unselected_sums, unselected_sums_by_key
from sage_ref.sla2.router import Routing

LOG2_E = math.log2(math.e)


class Level(NamedTuple):
    name: str
    key_tile: object  # as in the SageBwd ladder; None for a level with a program of its own
    int8: str = ""  # which tensors are read in INT8
    kernel: str = "sla2_forward_16bit"  # its sparse program, by its name in DEFAULTS or in LAUNCHES of `hopper`
    fused: bool = True  # the linear branch and the mix in the sparse program
    hopper: ModuleType | None = None  # of a level that is Hopper's alone: LAUNCHES and run_hopper_forward

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return its programs after the preparation, by their names in `DEFAULTS` or `LAUNCHES`."""
        return (self.kernel,) if self.fused else (self.kernel, "sla2_mix")


LEVELS = {
    0: Level("as printed: every block walked", level0_flash_attention.key_tile, kernel="sla2_as_printed"),
    1: Level("lists, and one product for H", level0_flash_attention.key_tile, fused=False),
    2: Level("linear branch in the sparse kernel", level0_flash_attention.key_tile),
    3: Level("INT8", level4_grouped.key_tile, int8="QKV", kernel="sla2_forward"),
    4: Level("Hopper: one block after another", None, int8="QKV", kernel="sla2_forward_hopper", hopper=level4_hopper),
}
BACKWARD_KERNELS = ("sla2_linear_query", "sla2_query", "sla2_key")  # of backward level 0, after all forward levels
HOPPER_BACKWARD = {  # of backward level 1
    "sla2_linear_query_hopper": linear_queries_hopper,
    "sla2_query_hopper": queries_hopper,
    "sla2_key_hopper": keys_hopper,
}


def obstacle(level: Level, device: torch.device, head_dim: int) -> str | None:
    """Return why a level cannot run there, or None if it can."""
    return None if level.hopper is None else hopper.obstacle(device, head_dim)


class Prepared(NamedTuple):
    inputs: ForwardInputs
    choice: Choice
    key_sums: Tensor  # [B, Hkv, Tn padded, Dp (Dp + 1)]: h_j, then z_j
    k_mean: Tensor | None  # float32 [B, Hkv, D], where K was smoothed


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chooser: Tensor | Routing,
    alpha: Tensor,
    level: int,
    start: Start = start_with_triton,
    *,
    scale: float,
) -> Prepared:
    """Prepare all that level `level` needs before its sparse program: routing, lists, INT8 copies, H_i and Z_i.

    chooser: a block mask, bool [B, H, Tm, Tn], its weights (float32, 0 where the mask is False), or the router's
    choice. alpha: float32 [B, H, Tm]. All contiguous.
    """
    int8, routed = bool(LEVELS[level].int8), isinstance(chooser, Routing)
    blocks = read_blocks(query, key, value, start, int8=int8, means=routed, factor=scale * LOG2_E)
    log2_weights = None
    if routed:
        choice = route(blocks.q_bar, blocks.k_bar, *chooser, start)
    elif chooser.dtype == torch.bool:
        choice = given(chooser, start)
    else:
        choice, log2_weights = given(chooser > 0, start), chooser.log2()
        choice.complement[..., : chooser.shape[3]] = 1 - chooser
    k_hat = k_mean = None
    if int8:
        k_mean = sequence_mean(blocks.k_bar, key.shape[2], MASK_BLOCK_KV, start)
        k_hat = quantize(key, MASK_BLOCK_KV, start, mean=k_mean)
    sums = unselected_sums(choice.complement, blocks.sums)
    inputs = ForwardInputs(
        query, key, value, alpha, choice.lists, sums, blocks.q_hat, k_hat, blocks.v_hat, log2_weights
    )
    return Prepared(inputs, choice, blocks.sums, k_mean)


def run_forward(
    prepared: Prepared,
    level: int,
    start: Start = start_with_triton,
    *,
    scale: float,
    save: bool = False,
) -> Forward:
    """Compute O by level `level`; save: O_s and L too, which level 0 does not have."""
    chosen, inputs = LEVELS[level], prepared.inputs
    if chosen.hopper is not None:
        return chosen.hopper.run_hopper_forward(inputs, start, save=save)
    launch = sla2_launch(chosen.kernel, level, inputs.query)
    if level == 0:
        tensors = inputs.query, inputs.key, inputs.value, prepared.choice.block_mask, inputs.alpha, prepared.key_sums
        return Forward(level0_as_printed.run_as_printed(*tensors, launch, start, scale=scale), None, None)
    save = save or not chosen.fused
    forward = run_sparse_forward(inputs, chosen.key_tile, launch, start, scale=scale, fused=chosen.fused, save=save)
    if chosen.fused:
        return forward
    mix = sla2_launch("sla2_mix", level, inputs.query)
    return forward._replace(output=level1_lists.run_mix(inputs, forward.sparse_output, mix, start))


def run_backward(
    inputs: BackwardInputs, choice: Choice, start: Start = start_with_triton, *, scale: float, level: int = 0
) -> list[Tensor]:
    """Compute dQ, dK and dV in 16 bit, dalpha and, of weighted blocks, dW. Deterministic: no atomic operations.

    level: 0, or 1 with programs for Hopper, which take no weights.
    """
    query, on_hopper = inputs.query, bool(level)
    if on_hopper:
        gradients = linear_queries_hopper.run_linear_query_hopper(inputs, start, scale=scale)
        ds = queries_hopper.run_query_hopper(inputs, gradients, choice.lists, start, scale=scale)
    else:
        gradients = run_linear_query(inputs, sla2_launch("sla2_linear_query", 0, query), start, scale=scale)
        ds = run_query(inputs, gradients, choice.lists, sla2_launch("sla2_query", 0, query), start, scale=scale)
    grad_sums = unselected_sums_by_key(choice.complement, gradients.grad_sums, inputs.key.shape[1])
    by_key = block_lists(choice.block_mask, start, by_key=True)
    arguments = inputs, gradients, grad_sums, by_key
    if on_hopper:
        dk, dv = keys_hopper.run_key_hopper(*arguments, start, scale=scale)
    else:
        dk, dv = run_key(*arguments, sla2_launch("sla2_key", 0, query), start, scale=scale)
    dw = [] if ds is None else [grad_weights(inputs, ds, gradients.grad_sums, start)]
    return [gradients.grad_query, dk, dv, gradients.grad_alpha, *dw]


def grad_weights(inputs: BackwardInputs, ds: Tensor, grad_sums: Tensor, start: Start) -> Tensor:
    """Return dW [B, H, Tm, Tn] of the blocks' weights W; 0 where W is 0, since such a block was not computed.

    It is 0, too, where W is no normal number of float32: 1 / W may overflow there. SoftTop-k's own slope is about W.
    The sparse branch has P = W 2^(S - L), so dW = sum of dS / W; the linear one H_i = sum_j (1 - W_ij) h_j, so
    dW = -dH_i . h_j. ds: sums of dS over blocks, for an alpha of 1. grad_sums: dH_i and dZ_i.
    """
    sums = read_blocks(inputs.query, inputs.key, inputs.value, start, int8=False, means=False).sums
    rows, columns = ds.shape[2:]
    linear = torch.bmm(grad_sums.view(sums.shape[0] * sums.shape[1], -1, sums.shape[3]), sums.flatten(0, 1).mT)
    dw = inputs.alpha[..., None] * ds * torch.exp2(-inputs.log2_weights)
    dw = dw - linear.view(*ds.shape[:2], rows, -1)[..., :columns]
    return dw.masked_fill(inputs.log2_weights < -126, 0)


def sla2_launch(kernel: str, level: int, query: Tensor) -> Launch:
    return choose_launch(kernel, level, padded_head_dim(query.shape[3]), False, query.device)
