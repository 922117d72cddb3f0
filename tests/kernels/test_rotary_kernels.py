"""QK-norm and rotation within the kernels' reads of Q and K, as far as test_ops.py does not test it."""

import math

import pytest
import torch
from kernel_cases import (
    EVERY_DTYPE,
    MARKS,
    Case,
    all_equal,
    draw,
    guarded_allocations,
    heads_last,
    prologue_for,
)
from sage_kernels.common.launcher import start_with_triton
from sage_kernels.common.quantize import SCALE_BLOCK, padded_head_dim
from sage_kernels.sagebwd.forward.key_mean import LEAST_STEPS, PARTS, STEP, key_mean
from sage_kernels.sagebwd.ladder import prepare_forward
from sage_kernels.sagebwd.prologue import NO_PROLOGUE, run_rotate_back

from sage_ref import Prologue
from sage_ref.quantization import quantize
from sage_ref.tracing import relative_l2

pytestmark = MARKS
WITH_NORM = pytest.mark.parametrize("with_norm", [False, True])
GROUPED, EVEN, OFFSET = Case(20, 30, 48, 2, 1, batch=2), Case(1, 3, 80, 1, 1), Case(20, 140, 128, 1, 1, key_offset=3.0)


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("case", "smooth_k", "with_norm"),
    [
        (GROUPED, False, True), (EVEN, True, True), (EVEN, False, False), (OFFSET, True, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_quantised_is_not_rounded_before(case, smooth_k, with_norm, dtype):
    """Q^ and K^ against psi of the reference's float32 tensors: single numbers next to a tie may differ, by one."""
    case = case._replace(dtype=dtype)
    query, key, value, _ = draw(case)
    prologue = prologue_for(case, with_norm)
    with guarded_allocations():
        found = prepare_forward(query, key, value, 4, scale=0.25, smooth_k=smooth_k, prologue=prologue)
    q, k = prologue.applied(query, key)
    k = k - k.mean(-2, keepdim=True) if smooth_k else k
    for hat, x, factor in ((found.q_hat, q, 0.25 * math.log2(math.e)), (found.k_hat, k, 1.0)):
        expected = quantize(x.cpu(), (SCALE_BLOCK, None))
        blocks = expected.scale.shape[-2]
        assert hat.values.shape[2:] == (
            SCALE_BLOCK * hat.scale.shape[2],
            padded_head_dim(case.head_dim),
        )
        torch.testing.assert_close(
            hat.scale[..., :blocks].cpu(), expected.scale.squeeze(-1) * factor, rtol=1e-5, atol=0
        )
        difference = hat.values[..., : x.shape[2], : case.head_dim].cpu().int() - expected.values.int()
        assert difference.abs().max() <= 1
        assert difference.bool().sum() <= 1e-3 * difference.numel() + 1
        assert not hat.values[..., x.shape[2] :, :].any()
        assert not hat.values[..., case.head_dim :].any()


@EVERY_DTYPE
@WITH_NORM
@pytest.mark.parametrize("case", [Case(70, 90, 64, 1, 1), GROUPED], ids=str)
def test_gradients_go_back_through_rotation_and_norm(case, with_norm, dtype):
    """Given gradients of the rotated tensors, compare with autograd in float64; those of gains are float32 sums."""
    case = case._replace(dtype=dtype)
    query, key, _, grad_query = draw(case)
    grad_key = draw(case._replace(n_q=case.n_k + 1, heads=case.kv_heads))[3][:, :, : case.n_k]
    prologue = prologue_for(case, with_norm)
    raw = (query, key) if with_norm else (None, None)
    with guarded_allocations():
        found = run_rotate_back(grad_query, heads_last(grad_key), *raw, prologue, start_with_triton)
    again = run_rotate_back(grad_query, heads_last(grad_key), *raw, prologue, start_with_triton)
    assert all_equal(found, again)
    leaves = [x.double().requires_grad_() for x in (query, key, *(prologue[2:4] if with_norm else ()))]
    angles = prologue.cos.double(), prologue.sin.double()
    rotated = Prologue(*angles, *leaves[2:], eps=prologue.eps).applied(*leaves[:2])
    expected = torch.autograd.grad(rotated, leaves, (grad_query.double(), grad_key.double()))
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert x.dtype == dtype
        assert relative_l2(x, y) < torch.finfo(dtype).eps / 2
    for x, y in zip(found[2:], expected[2:], strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, STEP + 1, LEAST_STEPS * STEP + 1, LEAST_STEPS * PARTS * STEP + 1])
def test_the_mean_key(n):
    """Lengths of one part, of several and of parts longer than usual; keys as they are and rotated."""
    case = Case(1, n, 34, heads=1, kv_heads=1)
    key = draw(case)[1]
    for prologue in (NO_PROLOGUE, prologue_for(case, with_norm=True)):
        with guarded_allocations():
            mean = key_mean(key, prologue, start_with_triton)
        rotated = key.float() if prologue is NO_PROLOGUE else prologue.applied(key, key)[1]
        torch.testing.assert_close(mean.double(), rotated.double().mean(-2), rtol=1e-5, atol=1e-6)


def test_a_level_in_16_bit_takes_no_prologue():
    query, key, value, _ = draw(EVEN)
    with pytest.raises(ValueError, match="prologue: expected none for forward level 0"):
        prepare_forward(query, key, value, 0, scale=1.0, smooth_k=True, prologue=prologue_for(EVEN, with_norm=False))
