"""Checks of the public functions' arguments. Errors read "name: expected ..., got ..."."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_COUNT = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
# The largest entry of query and key where squares are summed over features, queries and keys, in float32.
LARGEST_ENTRY = 1e15
LEAST_TEMPERATURE = 1e-6
PLAIN_TENSORS = (Tensor, nn.Parameter)  # of no library's own kind
PLAIN_OPTIONS = {bool, int, float, str, type(None)}


def shown(value: object) -> str:
    """Return value as an error shows it, shortened even if it is an integer of 10,000 digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def kind_of(tensors: Sequence[Tensor], options: tuple) -> tuple | None:
    """Return all that the checks of a call look at: a call of the same kind as an earlier one needs none.

    The first three tensors are query, key and value; a float may stand for one of the others. None: more must be looked
    at, or autocast would cast one of the three.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    types = tuple(map(type, options))  # True is equal to 1
    if not PLAIN_OPTIONS.issuperset(types):
        return None
    found = [*options, types]
    for number, x in enumerate(tensors):
        if type(x) in PLAIN_TENSORS and not (x.is_nested or x.is_inference()):
            found += x.shape, x.device, x.dtype, x.layout
        elif type(x) is float and number > 2:
            found.append(x)
        else:
            return None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device := tensors[0].device.type):
        dtype = torch.get_autocast_dtype(device)
        if any(x.dtype != dtype for x in tensors[:3]):
            return None
    return tuple(found)


class Fitting:
    """Kinds of calls whose arguments were checked and fit, and what is known of each."""

    MOST = 1024

    def __init__(self):
        self.known = {}

    def get(self, kind: tuple | None) -> object | None:
        return None if kind is None else self.known.get(kind)  # torch.compile must not look at `known`

    def add(self, kind: tuple | None, known: object) -> None:
        if kind is not None:
            if len(self.known) == self.MOST:
                self.known.clear()
            self.known[kind] = known


def plain(value: object) -> object:
    """Return a NumPy scalar as the Python number that it is, and everything else as it is."""
    numpy = None if torch.compiler.is_compiling() else sys.modules.get("numpy")  # compiled code has tensors for them
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def check_dense(name: str, x: Tensor) -> None:
    """Check that x is a tensor with every entry in memory: not nested, sparse or of another library's layout."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if torch.compiler.is_compiling():  # it can't query a layout, and traces dense tensors alone
        return
    if hasattr(x, "device_mesh"):
        raise TypeError(f"{name}: expected one device's tensor (to_local(), or sage_ref.parallel), got a DTensor")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def check_has_data(name: str, x: Tensor) -> None:
    if x.is_meta:
        raise ValueError(f"{name}: expected a device that holds data, got {x.device}")


def check_floating(name: str, x: Tensor) -> None:
    check_dense(name, x)
    check_has_data(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype float16, bfloat16, float32 or float64, got {x.dtype}")


def check_each(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        check_floating(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, N, D), got shape {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"{name}: expected no dimension of size zero, got shape {tuple(x.shape)}")


def check_together(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
        check_device(name, x, query)
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


def checked_attention(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, ...]:
    """Check the tensors of one attention and return them as autocast would cast them."""
    check_each(query=query, key=key, value=value)
    check_reverse_mode(query=query, key=key, value=value)
    query, key, value = cast_for_autocast(query, key, value)
    check_together(query, key, value, enable_gqa)
    return query, key, value


def check_options(scale: float | None, backend: str, **switches: bool) -> None:
    check_switches(**switches)
    check_scale(scale)
    check_choice("backend", backend, BACKENDS)


def check_switches(**switches: bool) -> None:
    for name, switch in switches.items():
        if not isinstance(plain(switch), bool):
            raise TypeError(f"{name}: expected a bool, got {type(switch).__name__}")


def check_scale(scale: float | None) -> None:
    if scale is not None:
        if not is_number(scale):
            raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
        if not abs(scale) <= FLOAT32_MAX:
            raise ValueError(f"scale: expected a finite number that float32 holds, got {shown(scale)}")


def is_number(value: object) -> bool:
    value = plain(value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {shown(value)}")


def check_temperature(temperature: float) -> None:
    if not is_number(temperature):
        raise TypeError(f"temperature: expected a float, got {type(temperature).__name__}")
    if not LEAST_TEMPERATURE <= temperature <= FLOAT32_MAX:
        limits = f"from {LEAST_TEMPERATURE:g} to {FLOAT32_MAX:.2g}"
        raise ValueError(f"temperature: expected a number {limits}, got {shown(temperature)}")


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast would for SDPA; clone inference tensors, which autograd can't save."""
    tensors = savable(*tensors)
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def savable(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors, with copies of those made in inference mode, which autograd can't save."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tensors
    return tuple(x.clone() if x is not None and x.is_inference() else x for x in tensors)


def check_count(name: str, value: int, least: int = 1) -> None:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not least <= value <= LARGEST_COUNT:
        raise ValueError(f"{name}: expected a number from {least} to {LARGEST_COUNT}, got {shown(value)}")


def check_least(name: str, value: int | None) -> None:
    """Check a number from which on something is done: None, 0 or more."""
    if value is not None:
        check_count(name, value, 0)


def check_share(name: str, value: float) -> None:
    if not is_number(value):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected a share of the key blocks in [0, 1), got {shown(value)}")


def check_block_mask(block_mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Check block_mask and expand it to `shape`, [B, H, Tm, Tn]."""
    check_dense("block_mask", block_mask)
    if block_mask.dtype != torch.bool:
        raise TypeError(f"block_mask: expected dtype torch.bool, got {block_mask.dtype}")
    check_device("block_mask", block_mask, query)
    return _expanded("block_mask", block_mask, shape)


def check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(f"{name}: expected the device of query, {query.device}, got {x.device}")


def check_alpha(alpha: Tensor | float, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Check alpha and return it as a tensor expanded to `shape`, [B, H, Tm]."""
    if is_number(alpha):
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha: expected a number in [0, 1], got {shown(alpha)}")
        wide = torch.promote_types(query.dtype, torch.float32)
        return torch.full(shape, alpha, dtype=wide, device=query.device)
    if not isinstance(alpha, Tensor):
        raise TypeError(f"alpha: expected a torch.Tensor or a float, got {type(alpha).__name__}")
    check_dense("alpha", alpha)
    if not alpha.is_floating_point():
        raise TypeError(f"alpha: expected a floating dtype, got {alpha.dtype}")
    check_device("alpha", alpha, query)
    return _expanded("alpha", alpha, shape)


def _expanded(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected a shape that broadcasts to {shape}, got {tuple(x.shape)}") from None


def check_heads(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, head_dim: int, weight: Tensor
) -> tuple[Tensor, ...]:
    """Check the inputs of a module with `num_heads` heads of size `head_dim`; return them as autocast would cast them.

    Keys and values may have fewer heads. `weight` is one of the module's, for its device.
    """
    check_each(query=query, key=key, value=value)
    check_device_of_module("query", query, weight)
    query, key, value = cast_for_autocast(query, key, value)
    check_together(query, key, value, enable_gqa=True)
    if (query.shape[1], query.shape[3]) != (num_heads, head_dim):
        shape = tuple(query.shape)
        raise ValueError(f"query: expected shape (B, {num_heads}, N, {head_dim}), as the module takes it, got {shape}")
    return query, key, value


def check_module(name: str, x: nn.Module) -> None:
    if not isinstance(x, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(x).__name__}")


def check_device_of_module(name: str, x: Tensor, weight: Tensor) -> None:
    if x.device != weight.device:
        raise ValueError(f"{name}: expected the device of the module, {weight.device}, got {x.device}")


def check_reverse_mode(**tensors: Tensor) -> None:
    """Refuse forward mode, and torch.func in compiled code: gradients written by hand exist in reverse mode alone.

    In compiled code torch.func differentiates the forward pass as it is written, and rounding has no derivative.
    """
    for name, x in tensors.items():
        if torch.compiler.is_compiling():
            if torch._C._are_functorch_transforms_active():
                raise ValueError(
                    f"{name}: expected torch.func and torch.vmap outside of torch.compile, got them inside"
                )
        elif unpack_dual(x).tangent is not None:
            raise ValueError(f"{name}: expected reverse mode (backward, torch.func.vjp), got forward mode (jvp)")


def check_entries(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        largest = x.abs().amax().item()
        if not largest <= LARGEST_ENTRY:
            raise ValueError(f"{name}: expected finite numbers, at most {LARGEST_ENTRY:g}, got {largest:g}")


def check_matrix(name: str, x: Tensor) -> None:
    """Check that x is floating, [..., R, C]."""
    check_floating(name, x)
    if x.dim() < 2 or 0 in x.shape:
        raise ValueError(f"{name}: expected at least 2 dimensions, none of size zero, got shape {tuple(x.shape)}")


def check_block_shape(block_shape: Sequence[int | None]) -> None:
    if not isinstance(block_shape, tuple | list) or len(block_shape) != 2:
        raise ValueError(f"block_shape: expected (rows, columns), got {shown(block_shape)}")
    for size in block_shape:
        if size is not None:
            check_count("block_shape", size)
