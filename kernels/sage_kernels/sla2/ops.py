"""SLA2 as a registered PyTorch operation: autograd, torch.compile, CUDA graphs, autocast.

On Hopper, if the head size allows it, level 4 and backward level 1; else level 3 and backward level 0. With the softmax
branch in 16 bit the forward level is 2. All are deterministic.
The forward pass keeps for the backward, besides Q, K, V: O_s in 16 bit, L, the block mask, its complement and lists,
and H_i and Z_i of every query block, which are as large as O_s. O and dQ have Q's layout, dK has K's, dV has V's.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sage_kernels import hopper
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of
from sage_kernels.common.operations import register
from sage_kernels.common.quantize import padded_head_dim, padded_length
from sage_kernels.common.recording import recorded
from sage_kernels.sagebwd import ops
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.ladder import prepare, run_backward, run_forward
from sage_kernels.sla2.lists import BlockLists, Choice, empty_complement
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_kernels.sla2.sums import sums_dtype
from sage_ref.attention import softmax_scale
from sage_ref.derivatives import gradients_once
from sage_ref.sla2.blocks import BlockSettings, block_count
from sage_ref.sla2.router import Routing

LEVEL_16BIT, LEVEL_INT8, LEVEL_HOPPER = 2, 3, 4


def forward_level(device: torch.device, head_dim: int, quantize: bool) -> int:
    """Return the forward level that runs there. quantize: with the softmax branch in INT8."""
    if not quantize:
        return LEVEL_16BIT
    return LEVEL_HOPPER if hopper.obstacle(device, head_dim) is None else LEVEL_INT8


def backward_level(device: torch.device, head_dim: int) -> int:
    """Return the backward level that runs there: 1 on Hopper if the head size allows it, else 0."""
    return int(hopper.obstacle(device, head_dim) is None)


def obstacle(query: Tensor, settings: BlockSettings) -> str | None:
    """Return why these kernels cannot take query [B, H, Nq, D] and blocks as in settings, or None if they can."""
    found = ops.obstacle(query, False)
    if found is None and (settings.block_q, settings.block_kv) != (MASK_BLOCK_Q, MASK_BLOCK_KV):
        needed, got = f"{MASK_BLOCK_Q} x {MASK_BLOCK_KV}", f"{settings.block_q} x {settings.block_kv}"
        return f"the kernels need blocks of {needed}, and got {got}"
    return found


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which sums and scores keep their type. Leaving autocast takes longer than asking for it."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    block_mask: Tensor | None,
    proj_q: Tensor | None,
    proj_k: Tensor | None,
    protected: Tensor | None,
    count: int,
    quantize: bool,
    scale: float,
    save: bool,
) -> list[Tensor]:
    """Compute O, and with save what the backward pass needs: O_s, L, H and Z, lists, complement, chosen mask, mean key.

    Either block_mask is given, or proj_q, proj_k, protected and count, the number of blocks to select.
    """
    chooser = Routing(proj_q, proj_k, count, protected) if block_mask is None else block_mask

    def compute(start: Start) -> list[Tensor]:
        level = forward_level(query.device, query.shape[3], quantize)
        prepared = prepare(query, key, value, chooser, alpha, level, start, scale=scale)
        result = run_forward(prepared, level, start, scale=scale, save=save)
        if not save:
            return [result.output]
        choice = prepared.choice
        chosen = [choice.block_mask] if block_mask is None else []
        smoothed = [prepared.k_mean] if quantize else []
        return [*result, prepared.inputs.sums, *choice.lists, choice.complement, *chosen, *smoothed]

    inputs = query, key, value, alpha, block_mask, proj_q, proj_k, protected
    with torch.cuda.device_of(query), without_autocast(query):  # Triton launches on the current device
        return list(recorded(("sla2_forward", count, quantize, scale, save), inputs, compute))


def fake_forward(query, key, value, alpha, block_mask, proj_q, proj_k, protected, count, quantize, scale, save):
    """Return tensors like those of `forward`, without their values: for torch.compile."""
    output = empty_in_layout_of(query)
    if not save:
        return [output]
    (batch, heads, n_q, head_dim), n_k = query.shape, key.shape[2]
    rows, columns, dp = block_count(n_q, MASK_BLOCK_Q), block_count(n_k, MASK_BLOCK_KV), padded_head_dim(head_dim)
    log_sum_exp = query.new_empty(batch, heads, padded_length(n_q), dtype=torch.float32)
    sums = query.new_empty(batch, heads, rows, dp * (dp + 1), dtype=sums_dtype(query))
    entries = query.new_empty(batch, heads, rows, count if block_mask is None else columns, dtype=torch.int32)
    counts = query.new_empty(batch, heads, rows, dtype=torch.int32)
    mask = query.new_empty(batch, heads, rows, columns, dtype=torch.bool) if block_mask is None else block_mask
    chosen = [mask] if block_mask is None else []
    smoothed = [query.new_empty(batch, key.shape[1], head_dim, dtype=torch.float32)] if quantize else []
    lists = entries, counts, empty_complement(mask)
    return [output, query.new_empty(query.shape), log_sum_exp, sums, *lists, *chosen, *smoothed]


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    block_mask: Tensor,
    sparse_output: Tensor,
    log_sum_exp: Tensor,
    sums: Tensor,
    entries: Tensor,
    counts: Tensor,
    complement: Tensor,
    k_mean: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dQ, dK, dV, dalpha; shapes as in `BackwardInputs`, entries and counts as in `BlockLists`."""

    def compute(start: Start) -> tuple[Tensor, ...]:
        level = backward_level(query.device, query.shape[3])
        inputs = BackwardInputs(grad_output, query, key, value, alpha, sums, sparse_output, log_sum_exp, k_mean)
        choice = Choice(block_mask, complement, BlockLists(entries, counts))
        return run_backward(inputs, choice, start, scale=scale, level=level)

    inputs = (
        grad_output, query, key, value, alpha, block_mask, sparse_output, log_sum_exp, sums, entries, counts,
        complement, k_mean,
    )  # fmt: skip
    with torch.cuda.device_of(query), without_autocast(query):
        return recorded(("sla2_backward", scale), inputs, compute)


def fake_backward(grad_output, query, key, value, alpha, *_):
    """Return tensors like those of `backward`, without their values."""
    return *(empty_in_layout_of(x) for x in (query, key, value)), alpha.new_empty(alpha.shape)


register("sla2_forward", forward, fake_forward)
register("sla2_backward", backward, fake_backward)


class Sla2Operation(torch.autograd.Function):
    """O, whose gradients are `backward`'s."""

    @staticmethod
    def forward(ctx, query, key, value, alpha, block_mask, *options):
        *_, quantize, scale, save = options
        output, *rest = torch.ops.sage_kernels.sla2_forward.default(query, key, value, alpha, block_mask, *options)
        if save:
            rest, k_mean = (rest[:-1], rest[-1]) if quantize else (rest, None)
            rest, block_mask = (rest[:-1], rest[-1]) if block_mask is None else (rest, block_mask)
            ctx.save_for_backward(query, key, value, alpha, block_mask, *rest, k_mean)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:  # what follows O is a constant
            return (None,) * 12  # one for each argument of forward
        tensors = grad_output, *ctx.saved_tensors
        gradients = gradients_once(
            "sparse_linear_attention", lambda *x: torch.ops.sage_kernels.sla2_backward.default(*x, ctx.scale), *tensors
        )
        return *gradients, *([None] * 8)  # nothing for the mask, the router and the options


def attention(
    query: Tensor, key: Tensor, value: Tensor, chooser: Tensor | Routing, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """Compute O of valid arguments, in the signature of the reference; `sage_ref.sla2.api` is the way in.

    chooser: a block mask, bool [B, H, Tm, Tn], or what chooses the blocks, which gets no gradient.
    """
    if isinstance(chooser, Routing):
        operands = (None, chooser.proj_q, chooser.proj_k, chooser.protected, chooser.count)
    else:
        operands = (chooser.contiguous(), None, None, None, 0)
    alpha = alpha.to(torch.float32).contiguous()
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, alpha))
    scale = softmax_scale(settings.scale, query.shape[3])
    return Sla2Operation.apply(query, key, value, alpha, *operands, settings.quantize, scale, needs_gradient)
