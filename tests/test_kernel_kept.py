"""Backward level 5, which keeps dS: room for it, the order in which it lies there, and what goes to level 3."""

import pytest
import torch
from kernel_cases import (
    BACKWARD,
    MARKS,
    Case,
    backward_level,
    draw,
    exact,
    feeding,
    guarded_allocations,
    run_backward_level,
    run_forward_level,
)

pytest.importorskip("triton")
from sage_kernels import tuning
from sage_kernels.backward import kept, level5_kept
from sage_kernels.ladder import BACKWARD_LEVELS, FOLDED
from sage_kernels.launch import DEFAULTS

pytestmark = MARKS
LEVEL = 5


def equal(results, expected):
    return all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_few_heads_at_a_time(monkeypatch, head_dim):
    """As many rounds as it takes, the same numbers, and no store outside; a head that doesn't fit is level 3's."""
    case = Case(3, 130, head_dim, 2, 1, batch=3)
    whole, level3 = backward_level(case, LEVEL), backward_level(case, FOLDED)
    assert not equal(whole, level3)
    calls, run_dq = [], level5_kept.run_dq
    monkeypatch.setattr(level5_kept, "run_dq", lambda *given, **options: calls.append(run_dq(*given, **options)))
    head = 2 * (2 * 128 * 256)  # bytes of two query heads
    for workspace, rounds in ((3 * head, 1), (3 * head - 1, 2), (head, 3), (head - 1, 0)):
        monkeypatch.setattr(kept, "WORKSPACE", workspace)
        with guarded_allocations():
            found = run_backward_level(case, LEVEL)
        assert len(calls) == rounds
        assert equal(found, whole if rounds else level3)
        calls.clear()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [20, 40])
def test_keys_past_the_end_do_not_decide_a_scale(size, is_causal):
    """Their S is 0, and P = 2^-L large if the scores are far below 0, or no float32."""
    case = Case(150, 140, 64, smooth_k=False, is_causal=is_causal)
    query, key, value, grad_output = draw(case)
    query, key = query.clone(), key.clone()
    query[..., 0], key[..., 0] = size, -size
    tensors = (query, key, value, grad_output)
    forward = run_forward_level(case, feeding(LEVEL, case), tensors)
    assert (forward.log_sum_exp[..., : case.n_q] < {20: -50, 40: -128}[size]).all()
    gradients = (run_backward_level(case, level, tensors, forward) for level in (LEVEL, FOLDED))
    for x, y in zip(*gradients, strict=True):
        found, expected = x[..., 1:], y[..., 1:]  # of the first dimension, sums of differences are left
        assert (found - expected).norm() <= 4e-3 * expected.norm()


def test_its_programs():
    level = BACKWARD_LEVELS[LEVEL]
    assert level.kernels(64) == ("dkdv_kept", "dq_kept")
    assert level.kernels(128) == ("dv", "dk_kept", "dq_kept")
    assert LEVEL in BACKWARD


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_program_can_be_timed_alone(head_dim, causal):
    """What the tuner runs gives its gradients, and no other."""
    case = Case(140, 150, head_dim, 2, 2, causal)
    prepared = tuning.Prepared(draw(case), tuple(x[:1, :1] for x in exact(case)), case.c)
    expected = {"dq": [1], "dk": [2], "dv": [3], "dkdv": [2, 3]}
    for name in BACKWARD_LEVELS[LEVEL].kernels(head_dim):
        run = tuning.runner(tuning.Kernel(name, LEVEL, head_dim, causal), prepared)
        pairs = run(DEFAULTS[name])
        found = [i for _, y in pairs for i, x in enumerate(prepared.exact) if x is y]
        assert found == expected[name.partition("_")[0]]
        for found, exactly in pairs:
            assert (found[:1, :1] - exactly).norm() <= 0.1 * exactly.norm()
