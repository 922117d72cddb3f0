"""How far a model's gradient is from the exact one: with each kind of attention, by layer, on one batch.

A run with SageBwd has gradients that are off, and even exact attention has, in 16 bit. So the same weights and the same
batch are asked again with every kind of attention, whatever the run itself trains with. The reference is the whole
model in float32; exact attention in 16 bit is the control.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_lab.models.llama import Llama
from sage_lab.records import Row
from sage_lab.repairs import UNBIASED
from sage_lab.training.capture import attention_tensors, next_token_loss
from sage_ref.attention import softmax_scale
from sage_ref.sagebwd.api import reference_attention

# The arms of a comparison, each with all in which it differs from another: a model that is probed may be any of them.
# "printed": one scale a tile, as the paper prints it. "unbiased": V smoothed and P rounded by ordered dither in O.
SAGEBWD = {"attention": "sagebwd", "smooth_k": True, "granularity": "row", "remedy": "none"}
ARMS = {
    "exact": SAGEBWD | {"attention": "exact"},
    "sagebwd": SAGEBWD,
    "unsmoothed": SAGEBWD | {"smooth_k": False},
    "printed": SAGEBWD | {"granularity": "block"},
    "unbiased": SAGEBWD | {"remedy": UNBIASED},
}
GRADIENTS = ("dQ", "dK", "dV")
Autocast = Callable[[], AbstractContextManager]
Batch = tuple[Tensor, Tensor]


def probe(model: Llama, batch: Batch, autocast: Autocast) -> Row:
    """Measure a model on a batch of (inputs, targets), each [B, N].

    Returns:
        gradient_norm: of the exact gradient of all parameters.
        errors: arm -> |g - exact| / |exact| of that gradient.
        largest_score: of each layer, of c Q K^T without its sign.
        attention: arm -> gradient -> relative error of each layer, where all layers before and after it are exact.
            "reference" is SageBwd in PyTorch, and "between" the distance of the kernels' result from that one.
    """
    with torch.enable_grad(), in_any_order():
        with attention_as(model, **ARMS["exact"]):
            with sdpa_kernel(SDPBackend.MATH):
                exact = gradients(model, batch)
            with autocast():
                _, captured = attention_tensors(model, *batch, range(model.config.layers))
        errors = {}
        for name, changes in ARMS.items():
            with attention_as(model, **changes), autocast():
                found = gradients(model, batch)
            errors[name] = relative_error(found, exact)
        scores = [largest_score(x["query"], x["key"]) for x in captured.values()]
        attention = attention_gradient_errors(model, list(captured.values()))
    return {
        "gradient_norm": rounded(norm_of(exact)),
        "errors": errors,
        "largest_score": scores,
        "attention": attention,
    }


@contextmanager
def in_any_order() -> Iterator[None]:
    """Let PyTorch take any kernel for a while: nothing that is measured here comes back into a training."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic)


@contextmanager
def attention_as(model: Llama, **changes: Any) -> Iterator[None]:
    """Change the configuration of every layer's attention for a while."""
    cores = [block.attention.core for block in model.blocks]
    before = [core.config for core in cores]
    for core in cores:
        core.config = replace(model.config, **changes)
    try:
        yield
    finally:
        for core, config in zip(cores, before, strict=True):
            core.config = config


def gradients(model: Llama, batch: Batch) -> tuple[Tensor, ...]:
    """Return the gradients of all parameters."""
    return torch.autograd.grad(next_token_loss(model, *batch), list(model.parameters()))


def attention_gradient_errors(model: Llama, captured: Sequence[dict[str, Tensor]]) -> dict[str, dict[str, list[float]]]:
    """Return arm -> "dQ", "dK" or "dV" -> relative error in each layer, each on its own exact inputs and dO."""
    core = model.blocks[0].attention.core
    settings = replace(model.config, **ARMS["sagebwd"]).reference_settings
    reference = partial(reference_attention, settings=settings)
    names = [*ARMS, "reference", "between"]
    rows = {name: {gradient: [] for gradient in GRADIENTS} for name in names}
    for tensors in captured:
        inputs, do = [tensors[name] for name in ("query", "key", "value")], tensors["grad_output"]
        found = {}
        with attention_as(model, **ARMS["exact"]), sdpa_kernel(SDPBackend.MATH):
            exact = differentiated(core, [x.float() for x in inputs], do.float())
        for name, changes in ARMS.items():
            with attention_as(model, **changes):
                found[name] = differentiated(core, inputs, do)
        found["reference"] = differentiated(reference, inputs, do)
        for name, tensors_found in found.items():
            for gradient, x, y in zip(GRADIENTS, tensors_found, exact, strict=True):
                rows[name][gradient].append(relative_error([x], [y]))
        for gradient, x, y in zip(GRADIENTS, found["sagebwd"], found["reference"], strict=True):
            rows["between"][gradient].append(relative_error([x], [y]))
    return rows


def differentiated(attention: Callable[..., Tensor], inputs: Sequence[Tensor], do: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*leaves), leaves, do)


def largest_score(query: Tensor, key: Tensor) -> float:
    """Return the largest c |q . k| of a query and a key that it sees; [B, H, N, D] each."""
    scores = query.float() @ key.float().mT * softmax_scale(None, query.shape[-1])
    return rounded(scores.tril().abs().max().item())


def norm_of(tensors: Sequence[Tensor]) -> float:
    return torch.stack([x.double().norm() for x in tensors]).norm().item()


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return |found - exact| / |exact| over all tensors."""
    differences = [x.double() - y.double() for x, y in zip(found, exact, strict=True)]
    return rounded(norm_of(differences) / norm_of(exact))


def rounded(x: float) -> float:
    return float(f"{x:.4g}")
