"""The registry of backends: the Triton kernels compute a call where they can, the PyTorch reference elsewhere."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # blocked: by an import hook, or by None in sys.modules
        return False


def why_not_importable(package: str, module: str) -> str | None:
    """Say in one line why `module` of an optional package can't be imported here, or return None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # not installed, or a part of it is not, or not for this GPU: any error is the answer
        return f"{package}: {type(error).__name__}: {error}".partition("\n")[0]
    return None


# The package that the Triton backend lacks on this machine, if any. Looked up at import: torch.compile cannot trace it.
MISSING_PACKAGE = next((package for package in ("triton", "sage_kernels") if not _is_installed(package)), None)


# The library imports the kernels here alone, and only within a call, since they import the library. A family of kernels
# is found together with the reason why it can't compute the call at hand, or None.


def sagebwd_kernels(query: Tensor, smooth_q: bool) -> tuple[ModuleType, str | None]:
    from sage_kernels.sagebwd import ops

    return ops, ops.obstacle(query, smooth_q)


def sla2_kernels(query: Tensor, settings: object) -> tuple[ModuleType, str | None]:
    from sage_kernels.sla2 import ops

    return ops, ops.obstacle(query, settings)


def pays_from(device: torch.device, head_dim: int, is_causal: bool) -> int:
    """Return from how many tokens on SageBwd's kernels were measured to keep up with PyTorch's attention."""
    if MISSING_PACKAGE:
        return 0
    from sage_kernels.sagebwd import ops

    return ops.pays_from(device, head_dim, is_causal)


pays_from._dynamo_marked_constant = True  # as `warn_once`, below


def why_not_triton(find_kernels: Callable[..., tuple[ModuleType, str | None]], *call: object) -> str | None:
    """Say why the kernels can't compute a call, or return None if they can."""
    if MISSING_PACKAGE:
        return f"the package {MISSING_PACKAGE} is not installed"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():  # as torch.autograd asks
        return "the kernels don't run under torch.func and torch.vmap"
    return find_kernels(*call)[1]


# On a GPU a call is as long as people train with: there the reference, which builds N x N scores, runs if asked for.
WAYS_OUT = "take float16 or bfloat16, a head size from 32 to 128, or backend='reference', which needs memory for N x N"


def is_accelerator(device: torch.device) -> bool:
    """Return whether "auto" stays away from the reference on this device."""
    return device.type != "cpu"


def chosen_kernels(
    backend: str, find_kernels: Callable[..., tuple[ModuleType, str | None]], *call: object, depth: int = 1
) -> ModuleType | None:
    """Return the kernels that compute a call, or None if the reference does.

    Args:
        backend: "auto", "triton" or "reference", as the user asked.
        find_kernels: A family of this module.
        call: What it is asked about, query first.
        depth: The number of calls between the user's code and this one; the warning of "auto" points there.

    Raises:
        ValueError: The kernels can't compute this call, and the user asked for "triton", or for "auto" on a GPU.
    """
    if backend == "reference":
        return None
    obstacle = why_not_triton(find_kernels, *call)
    if obstacle is None:
        return find_kernels(*call)[0]
    if backend == "triton":
        raise ValueError(f"backend: expected 'triton' to be usable, but {obstacle}")
    if is_accelerator(call[0].device):
        raise ValueError(f"backend: expected a call for the kernels, but {obstacle}; {WAYS_OUT}")
    warn_once(f"backend='auto' uses the reference, because {obstacle}.", depth + 1)
    return None


_said: set[str] = set()  # kinds of warnings


def warn_once(message: str, depth: int, kind: str = "") -> None:
    """Warn, unless the same was said before.

    Args:
        message: The warning.
        depth: The number of calls between this one and the code that the warning points at.
        kind: Warnings of one kind count as the same; without it, equal messages do.
    """
    kind = kind or message
    if kind not in _said:
        _said.add(kind)
        warnings.warn(f"sage_ref: {message}", stacklevel=2 + depth)


# torch.compile can't trace a warning, but calls a function with this mark while it compiles: the warning appears once
# there, too. (The mark is torch.compiler.assume_constant_result's, whose import takes seconds.)
warn_once._dynamo_marked_constant = True
