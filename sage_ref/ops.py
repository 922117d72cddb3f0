"""The public functions: check the arguments, choose a backend, call it."""

import importlib.util
import math
import warnings
from functools import cache

import torch
from torch import Tensor

from sage_ref.attention import softmax_scale
from sage_ref.sagebwd import SageBwdFunction, SageBwdSettings, working_dtype

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    _check_each(query=query, key=key, value=value)
    query, key, value = _autocast(query, key, value)
    _check_together(query, key, value, enable_gqa)
    _check_options(scale, backend, is_causal=is_causal, enable_gqa=enable_gqa, smooth_k=smooth_k, smooth_q=smooth_q)
    if _chosen_backend(backend, query, smooth_q) == "triton":
        from sage_kernels.ops import sagebwd_attention as triton_attention

        scale = softmax_scale(scale, query.shape[3])
        return triton_attention(query, key, value, is_causal=is_causal, scale=scale, smooth_k=smooth_k)
    settings = SageBwdSettings(is_causal=is_causal, scale=scale, smooth_k=smooth_k, smooth_q=smooth_q)
    return reference_attention(query, key, value, settings)


def reference_attention(query: Tensor, key: Tensor, value: Tensor, settings: SageBwdSettings) -> Tensor:
    """`sagebwd_attention` on the reference backend with every setting open; the arguments are not checked."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # Widened first, so that the gradients of a group's heads are summed before they are rounded to 16 bit.
        key, value = (x.to(working_dtype(x)).repeat_interleave(groups, dim=1) for x in (key, value))
    return SageBwdFunction.apply(query, key, value, settings)


def _check_each(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected dtype float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.device.type == "meta":
            raise ValueError(f"{name}: expected a device that holds data, got {x.device}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, N, D), got shape {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"{name}: expected no dimension of size zero, got shape {tuple(x.shape)}")


def _check_together(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"{name}: expected the device of query, {query.device}, got {x.device}")
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: expected the batch size of query, {query.shape[0]}, got {x.shape[0]}")
        if x.shape[3] != query.shape[3]:
            raise ValueError(f"{name}: expected the head size of query, {query.shape[3]}, got {x.shape[3]}")
    if value.shape != key.shape:
        raise ValueError(f"value: expected the shape of key, {tuple(key.shape)}, got {tuple(value.shape)}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"key: expected {heads} heads as query has (or enable_gqa=True), got {kv_heads}")
    if heads % kv_heads:
        raise ValueError(f"key: expected a number of heads that divides query's {heads}, got {kv_heads}")


def _check_options(scale: float | None, backend: str, **switches: bool) -> None:
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name}: expected a bool, got {type(switch).__name__}")
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
        if not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _chosen_backend(backend: str, query: Tensor, smooth_q: bool) -> str:
    if backend == "reference":
        return backend
    obstacle = triton_obstacle(query, smooth_q)
    if obstacle is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend: expected 'triton' to be usable, but {obstacle}")
    _warn_once(obstacle)
    return "reference"


def triton_obstacle(query: Tensor, smooth_q: bool = False) -> str | None:
    """Why the Triton kernels can't take this call, or None if they can."""
    if MISSING_PACKAGE:
        return f"the package {MISSING_PACKAGE} is not installed"
    from sage_kernels.ops import obstacle

    return obstacle(query, smooth_q)


@cache
def _warn_once(obstacle: str) -> None:
    warnings.warn(f"sage_ref: backend='auto' uses the reference, because {obstacle}.", stacklevel=4)
