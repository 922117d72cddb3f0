"""The public functions: check the arguments, choose a backend, call it."""

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache

from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.checks import autocast, check_alpha, check_block_mask, check_each, check_options, check_together
from sage_ref.sagebwd.whole import SageBwdFunction, SageBwdSettings, working_dtype
from sage_ref.sla2.branches import BlockSettings, block_count
from sage_ref.sla2.whole import SparseLinearFunction


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # blocked: by an import hook, or by None in sys.modules
        return False


# What the Triton backend lacks on this machine, if anything. Looked up here, since torch.compile can't.
MISSING_PACKAGE = next((package for package in ("triton", "sage_kernels") if not _is_installed(package)), None)


def sagebwd_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    smooth_k: bool = True,
    smooth_q: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention for training with six of its seven matmuls in INT8 (SageBwd, Algorithms 1 and 2).

    O = softmax(c Q K^T) V with Q, K, P, V quantised in the forward pass and P, dO, dS, Q, K in the backward pass;
    dP = dO V^T stays in 16 bit. Called like `torch.nn.functional.scaled_dot_product_attention`.

    query: [B, H, Nq, D]; key, value: [B, Hkv, Nk, D]; float16, bfloat16, float32 or float64, all alike.
    is_causal: query i sees keys 0..i, also when Nq != Nk.
    scale: c; None means 1/sqrt(D).
    enable_gqa: allow Hkv < H; H must be a multiple of Hkv, and heads in groups of H/Hkv share keys and values.
    smooth_k, smooth_q: subtract the mean key of the sequence, the mean query of each block, before quantising.
    backend: "reference" (PyTorch, any device), "triton", or "auto": triton where it can run, else reference,
        with one warning that says why.

    Returns O, [B, H, Nq, D] in the dtype of query. Differentiable once in query, key and value. Under autocast,
    inputs are cast as SDPA's are: all but float64, to the autocast dtype.

    NaN and infinity: a scale is shared by a block, so a NaN in a query gives NaN in that query's block, and a NaN in
    a value NaN in every query block that reads it. With smooth_k a NaN in a key reaches every query of its
    (batch, key head), since the mean does; without, every query that sees a key of its block. Other heads and
    batches never notice.

    Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    check_each(query=query, key=key, value=value)
    query, key, value = autocast(query, key, value)
    check_together(query, key, value, enable_gqa)
    check_options(scale, backend, is_causal=is_causal, enable_gqa=enable_gqa, smooth_k=smooth_k, smooth_q=smooth_q)
    if chosen_backend(backend, lambda: triton_obstacle(query, smooth_q)) == "triton":
        from sage_kernels.sagebwd.ops import sagebwd_attention as triton_attention

        scale = softmax_scale(scale, query.shape[3])
        return triton_attention(query, key, value, is_causal=is_causal, scale=scale, smooth_k=smooth_k)
    settings = SageBwdSettings(is_causal=is_causal, scale=scale, smooth_k=smooth_k, smooth_q=smooth_q)
    return reference_attention(query, key, value, settings)


def sparse_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    alpha: Tensor | float,
    *,
    quantize: bool = False,
    scale: float | None = None,
    block_q: int = 128,
    block_kv: int = 64,
    backend: str = "auto",
) -> Tensor:
    """SLA2's attention for a given block mask: O = alpha O_s + (1 - alpha) O_l (Algorithms 2 and 3 of SLA2).

    O_s = softmax(c Q K^T over the selected blocks) V; O_l = phi(Q) H / (phi(Q) Z), linear attention with phi = softmax
    over the features, over the others.

    query: [B, H, Nq, D]; key, value: [B, Hkv, Nk, D], Hkv a divisor of H; float16, bfloat16, float32 or float64, all
        alike; any lengths, also Nq != Nk.
    block_mask: bool, broadcastable to [B, H, ceil(Nq / block_q), ceil(Nk / block_kv)]; True selects a block. Partial
        last blocks count the tokens they have. A query without a selected block has O_s = 0, one without an unselected
        block O_l = 0.
    alpha: weight of the softmax branch in [0, 1], a number or a floating tensor broadcastable to
        [B, H, ceil(Nq / block_q)]. Not checked; with a negative alpha the kernels' dK and dV are NaN.
    quantize: O_s in INT8 (Q, K, P and V; K smoothed). The backward pass stays in 16 bit.
    scale: c; None means 1/sqrt(D).
    backend: "reference", "triton" (blocks of 128 x 64 only), or "auto": triton where it can run, else reference, with
        one warning that says why.

    Returns O, [B, H, Nq, D] in the dtype of query. Differentiable once in query, key, value and alpha. Under autocast
    query, key and value are cast as SDPA's are.

    NaN and infinity: every key and value is in one of the two branches, so a NaN in one of them reaches every query of
    its (batch, key head); a NaN in a query reaches at most that query's block. Other heads and batches never notice.

    Raises TypeError or ValueError naming the argument, what was expected and what came.
    """
    check_each(query=query, key=key, value=value)
    query, key, value = autocast(query, key, value)
    check_together(query, key, value, enable_gqa=True)
    check_options(scale, backend, quantize=quantize)
    settings = BlockSettings(block_q, block_kv, scale=scale, quantize=quantize)
    blocks = (*query.shape[:2], block_count(query.shape[2], block_q), block_count(key.shape[2], block_kv))
    block_mask = check_block_mask(block_mask, query, blocks)
    alpha = check_alpha(alpha, query, blocks[:3])
    if chosen_backend(backend, lambda: sparse_linear_obstacle(query, settings)) == "triton":
        from sage_kernels.sla2.ops import sparse_linear_attention as triton_attention

        scale = softmax_scale(scale, query.shape[3])
        return triton_attention(query, key, value, block_mask, alpha, quantize=quantize, scale=scale)
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    return SparseLinearFunction.apply(query, key, value, block_mask, alpha, settings)


def reference_attention(query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings) -> Tensor:
    """`sagebwd_attention` on the reference backend with every setting open; the arguments are not checked."""
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    return SageBwdFunction.apply(query, key, value, settings)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values [B, Hkv, Nk, D] for each of `heads` query heads: [B, H, Nk, D]."""
    if x.shape[1] == heads:
        return x
    # Widened first, so that the gradients of a group's heads are summed before they are rounded to 16 bit.
    return x.to(working_dtype(x)).repeat_interleave(heads // x.shape[1], dim=1)


def chosen_backend(backend: str, find_obstacle: Callable[[], str | None]) -> str:
    """ "triton" or "reference", given what the user asked for and why the kernels can't run, if they can't."""
    if backend == "reference":
        return backend
    obstacle = find_obstacle()
    if obstacle is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend: expected 'triton' to be usable, but {obstacle}")
    _warn_once(obstacle)
    return "reference"


def triton_obstacle(query: Tensor, smooth_q: bool = False) -> str | None:
    """Why the SageBwd kernels can't take this call, or None if they can."""
    if MISSING_PACKAGE:
        return f"the package {MISSING_PACKAGE} is not installed"
    from sage_kernels.sagebwd.ops import obstacle

    return obstacle(query, smooth_q)


def sparse_linear_obstacle(query: Tensor, settings: BlockSettings) -> str | None:
    """Why the SLA2 kernels can't take this call, or None if they can."""
    if MISSING_PACKAGE:
        return f"the package {MISSING_PACKAGE} is not installed"
    from sage_kernels.sla2.ops import obstacle

    return obstacle(query, settings)


@cache
def _warn_once(obstacle: str) -> None:
    warnings.warn(f"sage_ref: backend='auto' uses the reference, because {obstacle}.", stacklevel=4)
