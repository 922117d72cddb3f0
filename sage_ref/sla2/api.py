"""`sparse_linear_attention`, and what it shares with the module SLA2, which has a router instead of a block mask.

Both run `reference_attention` or `sage_kernels.sla2.ops.attention`, as `sage_ref.backend` chooses.
"""

import torch
from torch import Tensor

from sage_ref.backend import chosen_kernels, sla2_kernels, why_not_triton
from sage_ref.checks import (
    Fitting,
    check_alpha,
    check_block_mask,
    check_options,
    check_reverse_mode,
    checked_attention,
    kind_of,
)
from sage_ref.shapes import in_working_dtype, repeat_heads, working_dtype
from sage_ref.sla2.blocks import BlockSettings, block_count, block_mass
from sage_ref.sla2.branches import soft_sparse_linear_attention
from sage_ref.sla2.router import Routing
from sage_ref.sla2.whole import SparseLinearFunction

FITTING = Fitting()  # by kind of call: the kernels that compute it, its settings, its shape in blocks


def sparse_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    alpha: Tensor | float,
    *,
    quantize: bool = False,
    backward: str = "matched",
    scale: float | None = None,
    block_q: int = 128,
    block_kv: int = 64,
    backend: str = "auto",
) -> Tensor:
    """Compute SLA2's attention for a block mask: O = alpha O_s + (1 - alpha) O_l (arXiv 2602.12675, Alg. 2, 3).

    O_s = softmax(c Q K^T over the selected blocks) V. O_l = phi(Q) H / (phi(Q) Z) is linear attention over the others,
    with phi = softmax over the features. A query without a selected block has O_s = 0, one without an unselected block
    O_l = 0. Under autocast query, key and value are cast as SDPA's are.

    NaN and infinity: every key and value is in one of the two branches, so a NaN in one of them reaches every query of
    its (batch, key head); a NaN in a query reaches at most that query's block. Other heads and batches are never
    affected.

    Magnitudes, derivatives and kinds of tensors: as in `sagebwd_attention`, up to 1e15 in every dtype. With quantize
    and backward="printed" the backward pass compares its own scores with INT8's L: where they differ by more than 88,
    which takes scores of thousands, gradients are infinite or NaN. The default has no such difference, but L in
    float32 limits it to scores of about 1e6. From c max|q| max|k| = 30,000 on the kernels' O is NaN, too; on Hopper
    GPUs, with head sizes above 32, it is right up to 1e6. The kernels keep dS in 16 bit: float16's gradients overflow
    with a dS of 65504.

    Args:
        query: [B, H, Nq, D], float16, bfloat16, float32 or float64.
        key, value: [B, Hkv, Nk, D] in the dtype of query, Hkv a divisor of H; Nk may differ from Nq.
        block_mask: bool, broadcastable to [B, H, ceil(Nq / block_q), ceil(Nk / block_kv)]; True selects a block. A
            partial last block counts the tokens that it has.
        alpha: Weight of the softmax branch in [0, 1], a number or a floating tensor broadcastable to
            [B, H, ceil(Nq / block_q)]. A tensor's range is not checked; with a negative alpha the kernels' dK and dV
            are NaN.
        quantize: Compute O_s in INT8 (Q, K, P and V; K smoothed). The backward pass stays in 16 bit.
        backward: With quantize: "matched" recomputes P from the forward's INT8 scores, so that rows of P sum to 1;
            "printed" from 16-bit scores, as Algorithm 3 does, whose rows don't where scores are in the hundreds.
        scale: c; None means 1/sqrt(D).
        block_q, block_kv: Queries and keys of one entry of block_mask; more than there are is all of them.
        backend: "reference", "triton" (blocks of 128 x 64 only), or "auto": triton where it can run, else the
            reference, with one warning that says why.

    Returns:
        O, [B, H, Nq, D] in the dtype of query, differentiable once in query, key, value and alpha.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it, what was expected and what it got.
        RuntimeError: A second derivative is taken.
    """
    tensors = query, key, value, block_mask, alpha
    kind = kind_of(tensors, (quantize, backward, scale, block_q, block_kv, backend))
    known = FITTING.get(kind)
    if known is None:
        query, key, value = checked_attention(query, key, value, enable_gqa=True)
        check_options(scale, backend, quantize=quantize)
        settings = BlockSettings(block_q, block_kv, scale=scale, quantize=quantize, backward=backward)
        blocks = (*query.shape[:2], block_count(query.shape[2], block_q), block_count(key.shape[2], block_kv))
        block_mask = check_block_mask(block_mask, query, blocks)
        alpha = check_alpha(alpha, query, blocks[:3])
        check_reverse_mode(alpha=alpha)
        kernels = chosen_kernels(backend, sla2_kernels, query, settings)
        if kernels is None:
            return reference_attention(query, key, value, block_mask, alpha, settings)
        FITTING.add(kind, (kernels, settings, blocks))
    else:
        kernels, settings, blocks = known
        block_mask = block_mask.expand(blocks)
        alpha = alpha.expand(blocks[:3]) if isinstance(alpha, Tensor) else check_alpha(alpha, query, blocks[:3])
    return kernels.attention(query, key, value, block_mask, alpha, settings)


def selected_mass(query: Tensor, key: Tensor, routing: Routing, settings: BlockSettings, backend: str) -> Tensor:
    """Return the softmax mass of the blocks that a router selects, mean over a block's queries, [B, H, Tm].

    The kernels compute it where they can, whatever the backend but "reference", and without a word elsewhere.
    """
    if backend != "reference" and why_not_triton(sla2_kernels, query, settings) is None:
        return sla2_kernels(query, settings)[0].selected_mass(query, key, routing, settings)
    with torch.autocast(query.device.type, enabled=False):
        q, k = in_working_dtype(query, key)
        return (block_mass(q, k, settings) * routing.block_mask(q, k, settings)).sum(-1)


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, chooser: Tensor | Routing, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """Compute O of checked arguments in plain PyTorch: choose the blocks, run Algorithms 2 and 3 on whole matrices.

    query [B, H, Nq, D], key, value [B, Hkv, Nk, D]; alpha [B, H, Tm]. chooser: bool [B, H, Tm, Tn]; or what chooses
    the blocks; or weights in [0, 1], floating, without quantisation: `soft_sparse_linear_attention`. The kernels'
    `attention` has the same signature.
    """
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if torch.compiler.is_compiling():  # one tensor in two places is one input there, which autograd.Function refuses
        key, value = key.view_as(key), value.view_as(value)
    if not isinstance(chooser, Routing) and chooser.is_floating_point():
        with torch.autocast(query.device.type, enabled=False):
            tensors = [x.to(working_dtype(query)) for x in (query, key, value, chooser, alpha)]
            return soft_sparse_linear_attention(*tensors, settings).to(query.dtype)
    if isinstance(chooser, Routing):
        with torch.autocast(query.device.type, enabled=False):
            block_mask = chooser.block_mask(*in_working_dtype(query, key), settings)
    else:
        block_mask = chooser
    output, _, _ = SparseLinearFunction.apply(query, key, value, block_mask, alpha, settings)
    return output
