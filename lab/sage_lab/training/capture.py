"""Captures of a trained language model's attention on disk: Q, K, V and dO.

INT8 errors depend on the data. A trained model's activations have what Gaussian numbers lack: channels with an offset,
a few keys that many queries agree on, and rows of dS that are nearly zero.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sage_lab.models.llama import Llama
from sage_lab.records import Row
from sage_lab.repairs import scales_in_a_record
from sage_ref.prologue import before_attention
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import cosine, exact_intermediates, relative_l2, rms, sagebwd_intermediates

TENSORS = ("query", "key", "value", "grad_output")


class Capture(NamedTuple):
    """layers: layer number (from 0) -> {"query", "key", "value"}, and "grad_output" if kept; bfloat16 [B, H, N, D]."""

    provenance: dict[str, Any]
    layers: dict[int, dict[str, Tensor]]


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, mean over all tokens of the batch; dO therefore shrinks as 1/(B N)."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@contextmanager
def watched_attention(
    model: nn.Module, layers: Sequence[int]
) -> Iterator[tuple[dict[int, tuple[Tensor, ...]], dict[int, Tensor]]]:
    """Yield ({layer: (Q, K, V)}, {layer: O}) of the attention cores of model.blocks, filled by each pass of the model.

    Where a core applies a prologue itself, Q and K are those after it, in the dtype of V.
    """
    inputs, outputs = {}, {}

    def keep(layer):
        def hook(core, arguments, output):
            q, k, v, *prologue = arguments
            if prologue:
                q, k = before_attention(q, k, *prologue, v.dtype)
            inputs[layer], outputs[layer] = (q, k, v), output

        return hook

    hooks = [model.blocks[layer].attention.core.register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield inputs, outputs
    finally:
        for hook in hooks:
            hook.remove()


def attention_tensors(
    model: Llama, inputs: Tensor, targets: Tensor, layers: Sequence[int]
) -> tuple[float, dict[int, dict[str, Tensor]]]:
    """Return the loss of one batch, and Q, K, V, dO of each layer's attention, all [B, H, N, D] in the model's dtype.

    Q and K are taken after QK-norm and rotation, as they are multiplied. dO is the gradient of `next_token_loss`.
    """
    with watched_attention(model, layers) as (inputs_of, outputs):
        loss = next_token_loss(model, inputs, targets)
    grad_outputs = torch.autograd.grad(loss, [outputs[layer] for layer in layers])
    qkv = ([x.detach() for x in inputs_of[layer]] for layer in layers)
    tensors = [dict(zip(TENSORS, (*x, do), strict=True)) for x, do in zip(qkv, grad_outputs, strict=True)]
    return loss.item(), dict(zip(layers, tensors, strict=True))


def attention_errors(captures: dict[int, dict[str, Tensor]], settings: SageBwdSettings) -> list[Row]:
    """Return a row per layer and intermediate: cosine, relative L2, RMS and the scales.

    captures: layer -> {"query", "key", "value", "grad_output"}, each [B, H, N, D].
    """
    rows = []
    for layer, tensors in captures.items():
        inputs = [tensors[name] for name in TENSORS]
        exact, quantized = exact_intermediates(*inputs, settings), sagebwd_intermediates(*inputs, settings)
        for name, y in exact.items():
            rows.append(
                {
                    "layer": layer,
                    "tensor": name,
                    "cosine": round(cosine(quantized[name], y), 6),
                    "rel_l2": round(relative_l2(quantized[name], y), 6),
                    "rms": float(f"{rms(y):.4g}"),
                }
                | scales_in_a_record(settings)
            )
    return rows


def read_capture(path: Path) -> Capture:
    """Read safetensors with tensors "layer2.query" and so on in bfloat16, and JSON with their provenance.

    Raises FileNotFoundError or ValueError if it is no capture.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"path: expected a capture at {path}, found none")
    layers: dict[int, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            provenance = json.loads(file.metadata()["provenance"])
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                layer, tensor = name.removeprefix("layer").split(".")
                layers.setdefault(int(layer), {})[tensor] = file.get_tensor(name)
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise ValueError(f"path: expected a capture, with provenance in its metadata, got {path}") from None
    return Capture(provenance, dict(sorted(layers.items())))
