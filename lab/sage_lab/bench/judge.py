"""Nothing is timed before its result on fresh random inputs was compared with exact attention.

One head of one sample is the judge of all; with grouped queries, all query heads of one key head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_ref.attention import attention_backward, attention_forward

# Errors of INT8 attention on standard normal inputs are 2 to 4 per cent; ten is a broken kernel.
LARGEST_ERROR = 0.1
RESULTS = ("O", "dQ", "dK", "dV")
FLOAT64_TOKENS = 8192  # above, matrices of scores in float64 would not fit


def exact_head(query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool, scale: float):
    """O, dQ, dK, dV of the first head of the first sample, in float64 where memory allows, else float32.

    query, grad_output: [B, H, N, D]; key, value: [B, Hkv, N, D]. Returns four of [1, 1, N, D].
    """
    dtype = torch.float64 if query.shape[2] <= FLOAT64_TOKENS else torch.float32
    group = query.shape[1] // key.shape[1]
    grad_key = grad_value = 0
    for head in range(group):
        q, do = (x[:1, head : head + 1].to(dtype) for x in (query, grad_output))
        k, v = (x[:1, :1].to(dtype) for x in (key, value))
        forward = attention_forward(q, k, v, is_causal=is_causal, scale=scale)
        backward = attention_backward(
            do, q, k, v, forward.output, forward.log_sum_exp, is_causal=is_causal, scale=scale
        )  # fmt: skip
        if head == 0:
            output, grad_query = forward.output, backward.grad_query
        grad_key, grad_value = grad_key + backward.grad_key, grad_value + backward.grad_value
    return output, grad_query, grad_key, grad_value


def peer_head(query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool, scale: float):
    """`exact_head` in 16 bit by FlashAttention-2, for lengths whose matrices of scores don't fit. One query head each.

    query, key, value, grad_output: [B, H, N, D].
    """
    leaves = [x[:1, :1].detach().requires_grad_() for x in (query, key, value)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
    return tuple(x.float() for x in (output.detach(), *torch.autograd.grad(output, leaves, grad_output[:1, :1])))


def require_close(found: Tensor, exact: Tensor, largest_error: float = LARGEST_ERROR, name: str = "result") -> float:
    """Relative L2 error of the first head; RuntimeError if it is too large or not finite: that must not be timed."""
    found = found[:1, :1].to(exact.dtype)
    error = ((found - exact).norm() / exact.norm()).item()
    if not error < largest_error:
        raise RuntimeError(f"{name}: expected a relative L2 error below {largest_error}, got {error}")
    return error
