"""Checks of the public functions' arguments: errors name the argument, what was expected and what came."""

import math

import torch
from torch import Tensor

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_each(**tensors: Tensor) -> None:
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


def check_together(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
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


def check_options(scale: float | None, backend: str, **switches: bool) -> None:
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name}: expected a bool, got {type(switch).__name__}")
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
        if not math.isfinite(scale):
            raise ValueError(f"scale: expected a finite number, got {scale}")
    check_choice("backend", backend, BACKENDS)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected a share of the key blocks in [0, 1), got {value}")


def check_block_mask(block_mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """block_mask expanded to `shape`, [B, H, Tm, Tn]."""
    if not isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask: expected a torch.Tensor, got {type(block_mask).__name__}")
    if block_mask.dtype != torch.bool:
        raise TypeError(f"block_mask: expected dtype torch.bool, got {block_mask.dtype}")
    if block_mask.device != query.device:
        raise ValueError(f"block_mask: expected the device of query, {query.device}, got {block_mask.device}")
    return _expanded("block_mask", block_mask, shape)


def check_alpha(alpha: Tensor | float, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """alpha as a tensor expanded to `shape`, [B, H, Tm]."""
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        alpha = query.new_tensor(alpha, dtype=torch.promote_types(query.dtype, torch.float32))
    if not isinstance(alpha, Tensor):
        raise TypeError(f"alpha: expected a torch.Tensor or a float, got {type(alpha).__name__}")
    if not alpha.is_floating_point():
        raise TypeError(f"alpha: expected a floating dtype, got {alpha.dtype}")
    if alpha.device != query.device:
        raise ValueError(f"alpha: expected the device of query, {query.device}, got {alpha.device}")
    return _expanded("alpha", alpha, shape)


def _expanded(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(x.shape)}") from None


def check_heads(query: Tensor, key: Tensor, value: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    """The inputs of a module for `num_heads` heads of size `head_dim`, as autocast casts them; GQA is fine."""
    check_each(query=query, key=key, value=value)
    query, key, value = autocast(query, key, value)
    check_together(query, key, value, enable_gqa=True)
    if query.shape[1] != num_heads:
        raise ValueError(f"query: expected {num_heads} heads, as the module has, got {query.shape[1]}")
    if query.shape[3] != head_dim:
        raise ValueError(f"query: expected head size {head_dim}, as the module has, got {query.shape[3]}")
    return query, key, value


def refuse_second_derivative(of: str) -> None:
    """For a backward pass that has no derivative of its own: with create_graph=True the result would lack terms."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"create_graph: expected False, as {of} gradients have no derivative; got True")
