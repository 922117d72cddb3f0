"""Exact attention: its forward pass is SDPA's, its hand-written gradients are autograd's."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_ref.attention import attention_backward, attention_forward

SHAPES = [(1, 1), (64, 1), (1, 9), (21, 34)]
same = {"atol": 1e-10, "rtol": 0}


def both_passes(query, key, value, grad_output, **options):
    forward = attention_forward(query, key, value, **options)
    backward = attention_backward(grad_output, query, key, value, forward.output, forward.log_sum_exp, **options)
    return forward, backward


@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), SHAPES)
def test_output_and_gradients_are_those_of_sdpa(inputs, n_q, n_k, is_causal, scale):
    *qkv, do = inputs(n_q, n_k, 16)
    forward, backward = both_passes(*qkv, do, is_causal=is_causal, scale=scale)
    leaves = [x.requires_grad_() for x in qkv]
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(forward.output, output.detach(), **same)
    for ours, autograd in zip(backward[:3], torch.autograd.grad(output, leaves, do), strict=True):
        torch.testing.assert_close(ours, autograd, **same)


def test_dtype_of_the_inputs_is_kept(inputs):
    forward, backward = both_passes(*inputs(4, 6, 8, dtype=torch.bfloat16))
    assert {x.dtype for x in (*forward, *backward)} == {torch.bfloat16}
