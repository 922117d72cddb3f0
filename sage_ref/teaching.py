"""What the notebooks share besides figures: versions, predictions, and where Triton runs."""

import os
import platform
import sys
from importlib import metadata, util

import torch

_guesses: dict[str, object] = {}


def versions() -> str:
    """One line that names what a notebook ran with."""
    names = ("torch", "triton", "numpy", "matplotlib")
    installed = [f"{name} {metadata.version(name)}" for name in names if util.find_spec(name)]
    return f"Python {platform.python_version()}, " + ", ".join(installed)


def predict(question: str, guess: object) -> None:
    """Store the reader's guess before the answer is computed."""
    _guesses[question] = guess
    print(f"{question}: your prediction is {guess}")


def compare(question: str, measured: float, digits: int = 3) -> None:
    """Put the stored guess beside the measured value."""
    if question not in _guesses:
        raise ValueError(f"question: expected one of {sorted(_guesses)}, got {question!r}")
    guess = _guesses[question]
    line = f"{question}: predicted {guess}, measured {measured:.{digits}f}"
    if isinstance(guess, int | float) and guess and measured:
        ratio = max(abs(guess / measured), abs(measured / guess))
        line += f" (a factor of {ratio:.1f} apart)" if ratio >= 1.05 else " (spot on)"
    print(line)


def triton_device() -> str | None:
    """Where this machine runs Triton: "cuda", "cpu" through the interpreter, or None where triton isn't installed.

    The one place that sets TRITON_INTERPRET; call it before triton is imported.
    """
    if util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "cuda"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton_device: expected to run before triton is imported; restart the kernel")
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"
