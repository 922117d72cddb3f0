"""The device on which this machine runs Triton.

It imports no triton, so that it can set TRITON_INTERPRET before that is imported.
"""

import os
import sys
from importlib import util

import torch


def triton_device() -> str | None:
    """Return "cuda", "cpu" (Triton's interpreter), or None where triton isn't installed.

    This is the only place that sets TRITON_INTERPRET; call it before triton is imported.

    Raises:
        RuntimeError: triton is imported already, without its interpreter.
    """
    if util.find_spec("triton") is None:
        return None
    if torch.cuda.is_available():
        return "cuda"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton_device: expected to run before triton is imported; restart the kernel")
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"
