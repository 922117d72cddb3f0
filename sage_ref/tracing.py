"""Errors of every intermediate of SageBwd against full precision, as in the papers' tables.

cosine = <x, y> / (|x| |y|), relative L2 = |x - y| / |y|, RMS(y) = |y| / sqrt(numel), over all entries, in float64.
"""

import math
from typing import NamedTuple

from torch import Tensor

from sage_ref.attention import AttentionBackward, attention_backward, attention_forward
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.sagebwd.whole import sagebwd_backward, sagebwd_forward

INTERMEDIATES = ("delta", "P", "dP", "dS", "O", "dQ", "dK", "dV")


class TensorError(NamedTuple):
    """Error of one tensor against full precision; rms is the full-precision tensor's own size."""

    cosine: float
    rel_l2: float
    rms: float


def rms(x: Tensor) -> float:
    """Compute sqrt(mean(x^2))."""
    return x.double().square().mean().sqrt().item()


def relative_l2(approximation: Tensor, exact: Tensor) -> float:
    """Compute |approximation - exact| / |exact|."""
    exact = exact.double()
    return ((approximation.double() - exact).norm() / exact.norm()).item()


def cosine(approximation: Tensor, exact: Tensor) -> float:
    """Compute <approximation, exact> / (|approximation| |exact|)."""
    approximation, exact = approximation.double(), exact.double()
    return ((approximation * exact).sum() / (approximation.norm() * exact.norm())).item()


def exact_intermediates(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, settings: SageBwdSettings
) -> dict[str, Tensor]:
    """Return every tensor of `INTERMEDIATES` in float64, with all seven matmuls exact."""
    q, k, v, do = (x.double() for x in (query, key, value, grad_output))
    options = {"is_causal": settings.is_causal, "scale": settings.scale}
    forward = attention_forward(q, k, v, **options)
    backward = attention_backward(do, q, k, v, forward.output, forward.log_sum_exp, **options)
    return _named(forward.output, backward)


def sagebwd_intermediates(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, settings: SageBwdSettings
) -> dict[str, Tensor]:
    """Return every tensor of `INTERMEDIATES` as SageBwd computes it. O has the dtype that `settings` give it."""
    forward = sagebwd_forward(query, key, value, settings)
    backward = sagebwd_backward(grad_output, query, key, value, forward.output, forward.log_sum_exp, settings)
    return _named(forward.output, backward)


def trace(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, settings: SageBwdSettings
) -> dict[str, TensorError]:
    """Return the error of every intermediate by the paper's name. All inputs are [..., N, D]."""
    exact = exact_intermediates(query, key, value, grad_output, settings)
    quantized = sagebwd_intermediates(query, key, value, grad_output, settings)
    return {
        name: TensorError(cosine(quantized[name], exact[name]), relative_l2(quantized[name], exact[name]), rms(y))
        for name, y in exact.items()
    }


def grad_scores_bound(grad_probabilities: Tensor, delta: Tensor) -> float:
    """Compute the paper's bound on RMS(dS): max_i ||dP_i - delta_i 1||_inf / sqrt(N).

    It holds because the rows of P sum to one, so RMS(P_i) <= 1/sqrt(N). grad_probabilities [..., Nq, Nk].
    """
    largest = (grad_probabilities - delta).abs().max().item()
    return largest / math.sqrt(grad_probabilities.shape[-1])


def _named(output: Tensor, backward: AttentionBackward) -> dict[str, Tensor]:
    return {
        "delta": backward.delta,
        "P": backward.probabilities,
        "dP": backward.grad_probabilities,
        "dS": backward.grad_scores,
        "O": output,
        "dQ": backward.grad_query,
        "dK": backward.grad_key,
        "dV": backward.grad_value,
    }
