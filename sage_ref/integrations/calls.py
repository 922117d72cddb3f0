"""Calls of another library's attention: their arguments, and what happens where SageBwd can't compute them."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda

from sage_ref.attention import softmax_scale
from sage_ref.backend import WAYS_OUT, is_accelerator, sagebwd_kernels, warn_once, why_not_triton
from sage_ref.checks import cast_for_autocast, check_choice, check_scale, checked_attention
from sage_ref.integrations.parts import HIDDEN, Parts, by_parts, can_be_read, is_captured, parts_of
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sagebwd.settings import Options

OTHERWISE = ("error", "exact")
# PyTorch's own function, whatever F.scaled_dot_product_attention has been replaced by.
SDPA = torch._C._nn.scaled_dot_product_attention
UNREADABLE = (
    "mask: expected None under torch.compile and torch.func, traced or in a CUDA graph, where no mask can be read"
)


class Call(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, in its order and with its defaults.

    query [B, H, Nq, D]; key, value [B, Hkv, Nk, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def exactly(self) -> Tensor:
        """Compute O by PyTorch.

        A call with a mask in a CUDA graph is kept from cuDNN, if other ways are open: before the capture SageBwd could
        read the mask and compute the call, so it may be cuDNN's first, which allocates what no capture allows.
        """
        attention = partial(SDPA, *self[:6], scale=self.scale, enable_gqa=self.enable_gqa)
        if torch.compiler.is_compiling() or self.attn_mask is None or not is_captured(self.query):
            return attention()
        enabled = cuda.cudnn_sdp_enabled()
        cuda.enable_cudnn_sdp(enabled and not cuda.math_sdp_enabled())
        try:
            return attention()
        finally:
            cuda.enable_cudnn_sdp(enabled)

    def parts(self) -> Parts | None:
        """Return the parts that the mask leaves of each sequence, or None; see `parts_of`."""
        return parts_of(self.attn_mask, (*self.query.shape[:3], self.key.shape[2]))


class Policy(NamedTuple):
    """The options of SageBwd, and what is done with a call that it can't compute.

    otherwise: "error" raises ValueError; "exact" computes exact attention, with one warning for each reason.
    """

    options: Options
    otherwise: str

    def checked(self) -> "Policy":
        """Return this policy; TypeError or ValueError name the option that doesn't fit."""
        self.options.check()
        check_choice("otherwise", self.otherwise, OTHERWISE)
        return self


def obstacle(call: Call, options: Options) -> str | None:
    """Say why SageBwd can't compute this call, in the words of an error, or return None if it can.

    On a GPU the kernels can, or nobody: the reference, which builds N x N scores, runs there if it is asked for.
    """
    if call.dropout_p:
        return f"dropout: expected 0, since SageBwd drops no probabilities, got {call.dropout_p}"
    try:
        checked_attention(call.query, call.key, call.value, call.enable_gqa)
        check_scale(call.scale)
    except (TypeError, ValueError) as error:
        return str(error)
    if options.backend == "auto" and is_accelerator(call.query.device):
        query, *_ = cast_for_autocast(call.query)
        if reason := why_not_triton(sagebwd_kernels, query, options.smooth_q):
            return f"backend: expected a call for the kernels, but {reason}; {WAYS_OUT}"
    return None if call.attn_mask is None else obstacle_of_mask(call)


def obstacle_of_mask(call: Call) -> str | None:
    """Return the `obstacle` of a call with a mask."""
    if not isinstance(call.attn_mask, Tensor):
        return f"mask: expected a torch.Tensor or None, got {type(call.attn_mask).__name__}"
    got = f"got one of {call.attn_mask.dtype}"
    if not can_be_read(call.attn_mask):
        return f"{UNREADABLE}, {got}"
    if call.is_causal:
        return f"mask: expected None beside is_causal, {got}"
    if call.parts() is None:
        expected = f"None or padding, packed documents or a prefix (one that is added hides by {HIDDEN:g} or less)"
        return f"mask: expected {expected}, since SageBwd has no mask but the causal one, {got}"
    return None


def by_sagebwd(call: Call, options: Options, parts: Parts | None = None) -> Tensor:
    """Compute O [B, H, Nq, D] of a call without an obstacle, in the memory order of query as SDPA does.

    parts: What each sequence attends to, in place of a mask and is_causal. A query that sees no key gets zeros.
    """
    attention = partial(sagebwd_attention, scale=call.scale, enable_gqa=call.enable_gqa, **options._asdict())
    tensors = call.query, call.key, call.value
    if parts is None and call.attn_mask is None:
        output = attention(*tensors, is_causal=call.is_causal)
    else:
        tensors = cast_for_autocast(*tensors)
        output = by_parts(attention, *tensors, parts or call.parts(), padded_attention(tensors[0], call.scale, options))
    return in_order_of(call.query, output)


def padded_attention(query: Tensor, scale: float | None, options: Options) -> Callable[..., Tensor] | None:
    """Return attention of (query, key, value, is_causal, lengths) for `by_parts`, or None where no kernels run."""
    if options.backend == "reference" or torch.compiler.is_compiling():
        return None
    if why_not_triton(sagebwd_kernels, query, options.smooth_q) is not None:
        return None
    kernels, _ = sagebwd_kernels(query, options.smooth_q)
    choice = {name: getattr(options, name) for name in ("smooth_k", "granularity", "unbiased")}
    c = softmax_scale(scale, query.shape[3])
    return partial(kernels.sagebwd_attention, scale=c, prologue=None, **choice)


def in_order_of(query: Tensor, output: Tensor) -> Tensor:
    """Return output with the strides that SDPA's fused kernels give it, which follow the strides of query."""
    if query.stride(3) != 1:
        return output.contiguous()
    if not torch.compiler.is_compiling() and output.stride() == dense_strides(query.shape, query.stride()):
        return output
    strides = torch.empty_like(query, device="meta").stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    return output.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


@lru_cache(maxsize=1024)
def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of torch.empty_like(a tensor with these)."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def refuse(reason: str, otherwise: str, depth: int) -> None:
    """Raise, or warn once that attention stays exact, `depth` calls above this one."""
    if otherwise == "error":
        raise ValueError(reason)
    # What was got may differ from call to call.
    warn_once(f"attention stays exact where SageBwd can't compute it: {reason}.", depth, reason.partition(", got ")[0])


def not_installed(package: str, error: Exception) -> ImportError:
    """Return the error for an optional package, also the name of its extra, that is missing or can't be imported."""
    causes = [error]
    while causes[-1].__cause__ or causes[-1].__context__:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    if any(isinstance(x, ModuleNotFoundError) and f"{x.name}.".startswith(f"{package}.") for x in causes):
        return ImportError(f"{package}: expected it to be installed (pip install 'sage-ref[{package}]'), got: {error}")
    got = f"{type(causes[-1]).__name__}: {causes[-1]}"
    if "torchvision" in "".join(map(str, causes)):
        got += ". This torchvision was built for a different PyTorch: install its matching version, or uninstall it"
    return ImportError(f"{package}: expected it to be importable, got {got}")
