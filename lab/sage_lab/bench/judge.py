"""The judge: before a result is timed, it is compared with exact attention on fresh random inputs.

Only the first head of the first sample is compared; with grouped queries, all query heads of the first key head. If the
scores of a head don't fit into memory, its first queries are compared.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sla2 import BlockSettings, sla2_backward, sla2_forward

# Errors of INT8 attention on standard normal inputs are 2 to 4 per cent; ten is a broken kernel.
LARGEST_ERROR = 0.1
RESULTS = ("O", "dQ", "dK", "dV")
FLOAT64_SCORES = 8192**2  # of a head; more would not fit in float64

Results = tuple[Tensor, Tensor, Tensor, Tensor]  # O, dQ, dK, dV of the first head, [1, 1, N, D] each


def exact_head(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool, scale: float
) -> Results:
    """Compute the first head's results in float64 where memory allows, else in float32.

    query, grad_output: [B, H, Nq, D]; key, value: [B, Hkv, Nk, D].
    """
    dtype = torch.float64 if query.shape[2] * key.shape[2] <= FLOAT64_SCORES else torch.float32
    options = {"is_causal": is_causal, "scale": scale}
    grad_key = grad_value = 0
    for head in reversed(range(query.shape[1] // key.shape[1])):
        q, do = (x[:1, head : head + 1].to(dtype) for x in (query, grad_output))
        k, v = (x[:1, :1].to(dtype) for x in (key, value))
        output, log_sum_exp, _ = attention_forward(q, k, v, **options)
        backward = attention_backward(do, q, k, v, output, log_sum_exp, **options)
        grad_key, grad_value = grad_key + backward.grad_key, grad_value + backward.grad_value
    return output, backward.grad_query, grad_key, grad_value  # the last head is the first


def peer_head(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool, scale: float
) -> Results:
    """Compute the first head's results by FlashAttention-2, in 16 bit, where matrices of scores don't fit.

    query, key, value, grad_output: [B, H, N, D].
    """
    leaves = [x[:1, :1].detach().requires_grad_() for x in (query, key, value)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
    return tuple(x.float() for x in (output.detach(), *torch.autograd.grad(output, leaves, grad_output[:1, :1])))


def sparse_head(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, block_mask: Tensor, alpha: Tensor
) -> Results:
    """Compute the first head's results of SLA2 without quantisation; with alpha = 1, of the softmax branch alone.

    query, grad_output: [B, H, Nq, D]; key, value: [B, H, Nk, D]; block_mask: [B, H, Tm, Tn]; alpha: [B, H, Tm].
    """
    q, k, v, do = (x[:1, :1].float() for x in (query, key, value, grad_output))
    mask, alpha, settings = block_mask[:1, :1], alpha[:1, :1], BlockSettings()
    forward = sla2_forward(q, k, v, mask, alpha, settings)
    results = forward.sparse_output, forward.log_sum_exp
    return forward.output, *sla2_backward(do, q, k, v, mask, alpha, *results, settings)[:3]


def require_close(found: Tensor, exact: Tensor, largest_error: float = LARGEST_ERROR, name: str = "result") -> float:
    """Return the relative L2 error of what `exact` has of `found`: its first sample, head and queries.

    Raises:
        RuntimeError: the error is too large or not finite, so the result must not be timed.
    """
    found = found[:1, :1, : exact.shape[2]].to(exact.dtype)
    error = ((found - exact).norm() / exact.norm()).item()
    if not error < largest_error:
        raise RuntimeError(f"{name}: expected a relative L2 error below {largest_error}, got {error}")
    return error


def worst_error(
    found: Sequence[Tensor], exact: Sequence[Tensor], largest_error: float = LARGEST_ERROR, names: Sequence = RESULTS
) -> float:
    """Return the largest error of several results, by `require_close`."""
    results = zip(names, found, exact, strict=True)
    return max(require_close(x, right, largest_error, name) for name, x, right in results)
