"""Errors of the intermediates, and the bound on dS."""

import math

import pytest
import torch

from sage_ref.tracing import cosine, grad_scores_bound, relative_l2, rms


def test_measures_on_vectors_worked_out_by_hand_are_taken_in_float64():
    y = torch.tensor([3.0, 4.0])
    assert rms(y) == pytest.approx(5 / math.sqrt(2))
    assert relative_l2(torch.tensor([3.0, 3.0]), y) == pytest.approx(1 / 5)
    assert relative_l2(2 * y, y) == pytest.approx(1)
    assert cosine(torch.tensor([4.0, 3.0]), y) == pytest.approx(24 / 25)
    assert cosine(-0.5 * y, y) == pytest.approx(-1)
    y = torch.full((10**6,), 300.0, dtype=torch.float16)  # its squares overflow, its sum too
    assert (rms(y), relative_l2(y, y)) == (300, 0)
    assert cosine(y, y) == pytest.approx(1, abs=1e-12)


def test_the_bound_is_reached_when_every_query_looks_at_the_key_of_largest_gradient():
    dp, delta = torch.tensor([[[2.0, -6.0, 0.0, 0.0]]]), torch.tensor([[[1.0]]])
    assert grad_scores_bound(dp, delta) == pytest.approx(7 / 2)  # N = 4
    p = torch.tensor([[[0.0, 1.0, 0.0, 0.0]]])
    assert rms(p * (dp - delta)) == pytest.approx(7 / 2)
