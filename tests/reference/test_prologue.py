"""QK-norm and rotary positions as part of SageBwd's first step: what they compute, what rounding they leave out."""

import pytest
import torch
from sage_lab.models.rotary import Rotation
from torch.testing import assert_close

from sage_ref import Prologue, QKNorm, sagebwd_attention
from sage_ref.tracing import relative_l2

TOKENS = 40


def modules(head_dim=16, dtype=torch.float64, with_norm=True):
    """A rotation of TOKENS tokens, and QK-norm with gains that differ; None for no norm."""
    generator = torch.Generator().manual_seed(1)
    rotation = Rotation(torch.rand(TOKENS, head_dim // 2, generator=generator, dtype=torch.float64) * 6).to(dtype)
    norm = QKNorm(head_dim).to(dtype)
    for gain in norm.parameters():
        torch.nn.init.uniform_(gain, 0.5, 2.0, generator=generator)
    return rotation, norm if with_norm else None


def prologue_of(rotation, norm):
    gains = () if norm is None else (norm.query_norm.weight, norm.key_norm.weight)
    return Prologue(rotation.cos, rotation.sin, *gains)


def with_gradients(call, tensors, grad_output, parameters=()):
    """O, and the gradients of all tensors and parameters."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = call(*leaves)
    return output, *torch.autograd.grad(output, [*leaves, *parameters], grad_output)


def reference(prologue=None, **options):
    return lambda q, k, v: sagebwd_attention(
        q, k, v, prologue=prologue, enable_gqa=True, backend="reference", **options
    )


def composed(rotation, norm, **options):
    """Norm, rotation and attention one after the other, each result in the dtype of Q."""

    def call(query, key, value):
        q, k = (query, key) if norm is None else norm(query, key)
        return reference(**options)(rotation(q).to(query.dtype), rotation(k).to(query.dtype), value)

    return call


OPTIONS = [{}, {"is_causal": True, "smooth_k": False}, {"smooth_q": True, "granularity": "block", "scale": -0.3}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("with_norm", "kv_heads"), [(False, 4), (True, 1)])
def test_it_is_the_norm_and_the_rotation_before_the_attention(inputs, with_norm, kv_heads, options):
    """In float64, which nothing rounds: O, dQ, dK, dV and the gradients of the gains."""
    *tensors, grad_output = inputs(30, TOKENS, 16, heads=4, kv_heads=kv_heads)
    rotation, norm = modules(with_norm=with_norm)
    gains = list(norm.parameters()) if with_norm else []
    calls = reference(prologue_of(rotation, norm), **options), composed(rotation, norm, **options)
    for found, expected in zip(*(with_gradients(x, tensors, grad_output, gains) for x in calls), strict=True):
        assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_it_is_its_equations(inputs):
    q, k, *_ = inputs(TOKENS, 7, 16)
    rotation, norm = modules()
    prologue = prologue_of(rotation, norm)._replace(eps=0.01)
    for x, gain, found in zip((q, k), prologue[2:4], prologue.applied(q, k), strict=True):
        y = x * gain / (x.square().mean(-1, keepdim=True) + 0.01).sqrt()
        turns = torch.complex(prologue.cos, prologue.sin)[: x.shape[2]]
        z = torch.complex(y[..., :8], y[..., 8:]) * turns
        assert_close(found, torch.cat((z.real, z.imag), -1))


def test_in_16_bit_nothing_is_rounded_between_the_norm_and_the_scales(inputs):
    """O is that of the composition in float32, rounded once. In 16 bit the composition rounds z too, and is far off.

    Both round O and dZ to 16 bit before the gradients go on.
    """
    *tensors, grad_output = inputs(30, TOKENS, 16, heads=4, kv_heads=2, dtype=torch.bfloat16)
    rotation, norm = modules(dtype=torch.float32)
    gains = list(norm.parameters())
    found = with_gradients(reference(prologue_of(rotation, norm)), tensors, grad_output, gains)
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32] * 2
    wide = [x.float() for x in (*tensors, grad_output)]
    unrounded = with_gradients(composed(rotation, norm), wide[:3], wide[3], gains)
    rounded = with_gradients(composed(rotation, norm), tensors, grad_output, gains)
    step = torch.finfo(torch.bfloat16).eps
    assert relative_l2(found[0], unrounded[0]) < step / 2
    for x, of_wide, of_16_bit in zip(found, unrounded, rounded, strict=True):
        assert relative_l2(of_16_bit, of_wide) > 4 * relative_l2(x, of_wide)


GOOD = Prologue(torch.ones(9, 4), torch.zeros(9, 4), torch.ones(8), torch.ones(8))
REFUSED = [
    (GOOD._replace(cos=torch.ones(8, 4)), ValueError, r"prologue.cos: expected shape \(at least 9, 4\).*got \(8, 4\)"),
    (GOOD._replace(sin=torch.ones(9, 8)), ValueError, r"prologue.sin: expected shape \(at least 9, 4\).*got \(9, 8\)"),
    (GOOD._replace(sin=[0.0]), TypeError, "prologue.sin: expected a torch.Tensor, got list"),
    (GOOD._replace(sin=torch.ones(9, 4, requires_grad=True)), ValueError, "prologue.sin: .* without a gradient"),
    (GOOD._replace(key_gain=torch.ones(1, 8)), ValueError, r"prologue.key_gain: expected shape \(8,\).*got \(1, 8\)"),
    (GOOD._replace(query_gain=None), ValueError, "prologue.query_gain: expected a gain, as the other"),
    (GOOD._replace(eps=0.0), ValueError, "prologue.eps: expected a number from 1e-30 to 1, got 0.0"),
    (tuple(GOOD), TypeError, "prologue: expected a sage_ref.Prologue or None, got tuple"),
]


@pytest.mark.parametrize(("prologue", "error", "message"), REFUSED)
def test_what_does_not_fit_is_named(prologue, error, message):
    q, k = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 9, 8)
    assert reference(GOOD)(q, k, k).shape == q.shape
    with pytest.raises(error, match=f"^{message}"):
        reference(prologue)(q, k, k)


def test_an_odd_head_size_has_no_halves():
    x = torch.ones(1, 2, 5, 9)
    with pytest.raises(ValueError, match="^query: expected an even head size, whose halves a prologue rotates, got 9"):
        reference(GOOD)(x, x, x)
