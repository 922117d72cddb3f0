"""Calls of another library's attention: their arguments, and what happens where SageBwd can't compute them."""

from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from sage_ref.backend import warn_once
from sage_ref.checks import cast_for_autocast, check_choice, check_scale, checked_attention
from sage_ref.integrations.padding import Parts, by_parts, can_be_read, parts_of
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sagebwd.settings import Options

OTHERWISE = ("error", "exact")
UNREADABLE = "mask: expected None under torch.compile and torch.func, where no mask can be read"


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
        """Compute O by PyTorch."""
        options = {"attn_mask": self.attn_mask, "dropout_p": self.dropout_p, "is_causal": self.is_causal}
        options |= {"scale": self.scale, "enable_gqa": self.enable_gqa}
        return F.scaled_dot_product_attention(self.query, self.key, self.value, **options)

    def parts(self) -> Parts | None:
        """Return what the mask leaves of each sequence, if it is padding; see `parts_of`."""
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


def obstacle(call: Call) -> str | None:
    """Say why SageBwd can't compute this call, as an error would, or return None if it can."""
    if call.dropout_p:
        return f"dropout: expected 0, since SageBwd drops no probabilities, got {call.dropout_p}"
    try:
        checked_attention(call.query, call.key, call.value, call.enable_gqa)
        check_scale(call.scale)
    except (TypeError, ValueError) as error:
        return str(error)
    return None if call.attn_mask is None else obstacle_of_mask(call)


def obstacle_of_mask(call: Call) -> str | None:
    """Return the `obstacle` of a call with a mask."""
    got = f"got one of {call.attn_mask.dtype}"
    if not can_be_read(call.attn_mask):
        return f"{UNREADABLE}, {got}"
    if call.is_causal:
        return f"mask: expected None beside is_causal, {got}"
    if call.parts() is None:
        return f"mask: expected None or padding, since SageBwd has no mask but the causal one, {got}"
    return None


def by_sagebwd(call: Call, options: Options) -> Tensor:
    """Compute O [B, H, Nq, D] of a call without an obstacle. A query that sees no key gets zeros."""
    attention = partial(sagebwd_attention, scale=call.scale, enable_gqa=call.enable_gqa, **options._asdict())
    tensors = call.query, call.key, call.value
    if call.attn_mask is None:
        return attention(*tensors, is_causal=call.is_causal)
    return by_parts(attention, *cast_for_autocast(*tensors), call.parts())


def refuse(reason: str, otherwise: str, depth: int) -> None:
    """Raise, or warn once that attention stays exact, `depth` calls above this one."""
    if otherwise == "error":
        raise ValueError(reason)
    kind, _, _ = reason.partition(", got ")  # the rest may differ from call to call
    warn_once(f"attention stays exact where SageBwd can't compute it: {reason}.", depth, kind)


def not_installed(package: str, error: ImportError) -> ImportError:
    """Return the error for an optional package that is also the name of its extra."""
    return ImportError(f"{package}: expected it to be installed (pip install 'sage-ref[{package}]'), got: {error}")
