"""Which backend computes a call: the Triton kernels where they can, the PyTorch reference elsewhere."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable

import torch


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # blocked: by an import hook, or by None in sys.modules
        return False


def why_not_importable(package: str, module: str) -> str | None:
    """Why `module` of an optional package can't be imported here, in one line; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # not installed, or a part of it is not, or not for this GPU: any error is the answer
        return f"{package}: {type(error).__name__}: {error}".partition("\n")[0]
    return None


# What the Triton backend lacks on this machine, if anything. Looked up here, since torch.compile can't.
MISSING_PACKAGE = next((package for package in ("triton", "sage_kernels") if not _is_installed(package)), None)


def why_not_triton(find_obstacle: Callable[[], str | None]) -> str | None:
    """Why the kernels can't run, or None if they can. find_obstacle: what they say themselves, if they are there."""
    if MISSING_PACKAGE:
        return f"the package {MISSING_PACKAGE} is not installed"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():  # as torch.autograd asks
        return "the kernels don't run under torch.func and torch.vmap"
    return find_obstacle()


def chosen_backend(backend: str, find_obstacle: Callable[[], str | None], depth: int = 1) -> str:
    """ "triton" or "reference", given what the user asked for and why the kernels can't run, if they can't.

    depth: calls between the user's code and this one, so that the warning of "auto" points there.
    """
    if backend == "reference":
        return backend
    obstacle = why_not_triton(find_obstacle)
    if obstacle is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend: expected 'triton' to be usable, but {obstacle}")
    warn_once(f"backend='auto' uses the reference, because {obstacle}.", depth + 1)
    return "reference"


_said: set[str] = set()  # kinds of warnings


def warn_once(message: str, depth: int, kind: str = "") -> None:
    """Warn, unless the same was said before. depth: calls between this one and the code that the warning points at.

    kind: what counts as the same; without it, the message.
    """
    kind = kind or message
    if kind not in _said:
        _said.add(kind)
        warnings.warn(f"sage_ref: {message}", stacklevel=2 + depth)


# torch.compile can't trace a warning. It calls what is marked so (torch.compiler.assume_constant_result, whose import
# takes seconds) while it compiles: that says it once, too.
warn_once._dynamo_marked_constant = True
