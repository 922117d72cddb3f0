"""SLA2 as a registered PyTorch operation: autograd, torch.compile, CUDA graphs, autocast.

On Hopper, if the head size allows it, level 4 and backward level 1; else level 3 and backward level 0. With the softmax
branch in 16 bit the forward level is 2. All are deterministic.
Portable levels alone compute stage 1, where blocks have weights.
The forward pass keeps for the backward, besides Q, K, V: O_s in 16 bit, L, the block mask, its complement and lists,
and H_i and Z_i of every query block, which are as large as O_s; in INT8 Q^ and K^, too, unless backward="printed".
O and dQ have Q's layout, dK has K's, dV has V's.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sage_kernels import hopper
from sage_kernels.common.launcher import Start
from sage_kernels.common.memory import empty_in_layout_of
from sage_kernels.common.operations import register
from sage_kernels.common.quantize import Quantized, empty_copies, padded_head_dim, padded_length
from sage_kernels.common.recording import recorded
from sage_kernels.sagebwd import ops
from sage_kernels.sla2.backward.program import BackwardInputs
from sage_kernels.sla2.ladder import prepare, run_backward, run_forward
from sage_kernels.sla2.lists import BlockLists, Choice, empty_complement
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_kernels.sla2.sums import sums_dtype
from sage_ref.attention import softmax_scale
from sage_ref.derivatives import gradients_once
from sage_ref.sla2.blocks import BlockSettings, block_count, block_mean
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
    count: int,
    quantize: bool,
    matched: bool,
    scale: float,
    save: bool,
) -> list[Tensor]:
    """Compute O, and with save what the backward pass needs.

    That is O_s, L, H and Z, lists, complement; the block mask, if it is not given; the mean key or, matched, Q^, its
    scales, K^ and its scales. Either block_mask, bool or weights, is given, or proj_q, proj_k and count, the number of
    blocks to select.
    """
    chooser = Routing(proj_q, proj_k, count) if block_mask is None else block_mask

    def compute(start: Start) -> list[Tensor]:
        level = forward_level(query.device, query.shape[3], quantize)
        prepared = prepare(query, key, value, chooser, alpha, level, start, scale=scale)
        result = run_forward(prepared, level, start, scale=scale, save=save)
        if not save:
            return [result.output]
        choice = prepared.choice
        given = block_mask is not None and block_mask.dtype == torch.bool
        chosen = [] if given else [choice.block_mask]
        smoothed = [prepared.k_mean] if quantize else []
        if matched:
            q_hat, k_hat = prepared.inputs.q_hat, prepared.inputs.k_hat
            smoothed = [q_hat.values, q_hat.scale, k_hat.values, k_hat.scale]
        return [*result, prepared.inputs.sums, *choice.lists, choice.complement, *chosen, *smoothed]

    inputs = query, key, value, alpha, block_mask, proj_q, proj_k
    with without_autocast(query):
        return list(recorded(("sla2_forward", count, quantize, matched, scale, save), inputs, compute))


def fake_forward(query, key, value, alpha, block_mask, proj_q, proj_k, count, quantize, matched, scale, save):
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
    given = block_mask is not None and block_mask.dtype == torch.bool
    mask = block_mask if given else query.new_empty(batch, heads, rows, columns, dtype=torch.bool)
    chosen = [] if given else [mask]
    smoothed = [query.new_empty(batch, key.shape[1], head_dim, dtype=torch.float32)] if quantize else []
    if matched:
        q_hat, k_hat = empty_copies(query, MASK_BLOCK_Q), empty_copies(key, MASK_BLOCK_KV)
        smoothed = [q_hat.values, q_hat.scale, k_hat.values, k_hat.scale]
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
    weights: Tensor | None,
    k_mean: Tensor | None,
    q_hat: Tensor | None,
    q_scale: Tensor | None,
    k_hat: Tensor | None,
    k_scale: Tensor | None,
    scale: float,
) -> list[Tensor]:
    """Compute dQ, dK, dV, dalpha and, with weights [B, H, Tm, Tn], their gradient.

    Shapes are as in `BackwardInputs`, entries and counts as in `BlockLists`.
    """

    def compute(start: Start) -> list[Tensor]:
        level = 0 if weights is not None else backward_level(query.device, query.shape[3])
        inputs = BackwardInputs(grad_output, query, key, value, alpha, sums, sparse_output, log_sum_exp, k_mean)
        if q_hat is not None:
            copies = {"q_hat": Quantized(q_hat, None, q_scale), "k_hat": Quantized(k_hat, None, k_scale)}
            inputs = inputs._replace(**copies)
        if weights is not None:
            inputs = inputs._replace(log2_weights=weights.log2())
        choice = Choice(block_mask, complement, BlockLists(entries, counts))
        return run_backward(inputs, choice, start, scale=scale, level=level)

    inputs = (
        grad_output, query, key, value, alpha, block_mask, sparse_output, log_sum_exp, sums, entries, counts,
        complement, weights, k_mean, q_hat, q_scale, k_hat, k_scale,
    )  # fmt: skip
    with without_autocast(query):
        return list(recorded(("sla2_backward", scale), inputs, compute))


def fake_backward(grad_output, query, key, value, alpha, *rest):
    """Return tensors like those of `backward`, without their values."""
    weights = rest[7]
    of_weights = [] if weights is None else [weights.new_empty(weights.shape)]
    return [*(empty_in_layout_of(x) for x in (query, key, value)), alpha.new_empty(alpha.shape), *of_weights]


call_forward = register("sla2_forward", forward, fake_forward)
call_backward = register("sla2_backward", backward, fake_backward)


class Sla2Operation(torch.autograd.Function):
    """O, whose gradients are `backward`'s. block_mask may be weights, which then have a gradient."""

    @staticmethod
    def forward(ctx, query, key, value, alpha, block_mask, *options):
        *_, quantize, matched, scale, save = options
        output, *rest = call_forward(query, key, value, alpha, block_mask, *options)
        if save:
            smoothed = [None] * 5  # the mean key; Q^, its scales, K^, its scales
            if quantize:
                smoothed[slice(1, 5) if matched else slice(0, 1)] = rest[-4:] if matched else rest[-1:]
                rest = rest[: -4 if matched else -1]
            weights = None
            if block_mask is None or block_mask.dtype != torch.bool:
                weights, block_mask, rest = block_mask, rest[-1], rest[:-1]
            ctx.save_for_backward(query, key, value, alpha, block_mask, *rest, weights, *smoothed)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:  # what follows O is a constant
            return (None,) * len(ctx.needs_input_grad)

        if not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad_output):
            raise RuntimeError(
                "is_grads_batched: expected one gradient of O at a time, which the kernels take, got many"
            )

        def compute(*tensors):
            return tuple(call_backward(*tensors, ctx.scale))

        found = gradients_once("sparse_linear_attention", compute, grad_output, *ctx.saved_tensors)  # of weights, too
        return *found, *[None] * (len(ctx.needs_input_grad) - len(found))  # nothing for the router and the options


def attention(
    query: Tensor, key: Tensor, value: Tensor, chooser: Tensor | Routing, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """Compute O of valid arguments, in the signature of the reference; `sage_ref.sla2` is the way in.

    chooser: a block mask, bool [B, H, Tm, Tn], or what chooses the blocks, which gets no gradient; or the blocks'
    weights in [0, 1], floating, which get one, but for those below 2^-126.
    """
    if isinstance(chooser, Routing):
        operands = (None, chooser.proj_q, chooser.proj_k, chooser.count)
    else:
        weights = chooser if chooser.dtype == torch.bool else chooser.to(torch.float32)
        operands = (weights.contiguous(), None, None, 0)
    alpha = alpha.to(torch.float32).contiguous()
    tensors = query, key, value, alpha, operands[0]
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    options = settings.quantize, settings.matched, softmax_scale(settings.scale, query.shape[3]), needs_gradient
    return Sla2Operation.apply(query, key, value, alpha, *operands, *options)


def selected_mass(query: Tensor, key: Tensor, routing: Routing, settings: BlockSettings) -> Tensor:
    """Return the softmax mass of the blocks that a router selects, mean over a block's queries, float32 [B, H, Tm].

    It is 2^(L_selected - L_all), where both L, in log2, come from the forward pass in 16 bit: over the selected blocks,
    then over all.
    """
    blocks = *query.shape[:2], block_count(query.shape[2], MASK_BLOCK_Q), block_count(key.shape[2], MASK_BLOCK_KV)
    everything = torch.ones(blocks, dtype=torch.bool, device=query.device)
    tensors = query, key, key, everything[..., 0].float()
    options = False, False, softmax_scale(settings.scale, query.shape[3]), True
    chosen = None, routing.proj_q, routing.proj_k, routing.count
    selected, of_all = (forward(*tensors, *chooser, *options)[2] for chooser in (chosen, (everything, None, None, 0)))
    mass = (selected - of_all)[..., : query.shape[2], None].clamp(max=0).exp2()
    return block_mean(mass, MASK_BLOCK_Q).squeeze(-1)
