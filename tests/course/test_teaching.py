"""Predictions beside measurements, and the grader called from a cell."""

import numpy as np
import pytest
import torch
from sage_course.teaching import compare, grade, predict


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [
        (2.0, 1.0, "predicted 2, measured 1.000 (a factor of 2.0 apart)"),
        ("400%", torch.tensor(1.0), "predicted 4, measured 1.000 (a factor of 4.0 apart)"),
        (" 1.02", np.float32(1.0), "predicted 1.02, measured 1.000 (spot on)"),
        (-1.0, -3.0, "predicted -1, measured -3.000 (a factor of 3.0 apart)"),
        (-1.0, 1.0, "predicted -1, measured 1.000 (the sign differs)"),
        (1.0, 0.0, "predicted 1, measured 0.000 (1.000 apart)"),
        (0, 0.25, "predicted 0, measured 0.250 (0.250 apart)"),
        (0, 0.0001, "predicted 0, measured 0.000 (spot on)"),
        (..., 0.5, "measured 0.500"),
    ],
)
def test_the_last_prediction_is_put_beside_the_measurement(capsys, guess, measured, verdict):
    predict("error", 99)
    predict("error", guess)
    compare("error", measured)
    assert capsys.readouterr().out.splitlines()[-1] == f"error: {verdict}"


@pytest.mark.parametrize("guess", ["b", "B", "(b)", " b) ", "It shrinks", "it shrinks."])
def test_a_choice_may_be_named_in_many_ways(capsys, guess):
    predict("old sum", guess, ("it is kept", "it shrinks"))
    compare("old sum", "b")
    said = ["your prediction is (b) it shrinks", "predicted (b) it shrinks, it is (b) it shrinks"]
    assert capsys.readouterr().out.splitlines() == [f"old sum: {line}" for line in said]


def test_without_a_guess_nothing_is_printed_and_without_its_cell_nothing_fails(capsys):
    predict("error", ...)
    predict("old sum", ..., ("it is kept", "it shrinks"))
    assert capsys.readouterr().out == ""
    compare("old sum", "b")
    compare("never asked", "b")
    compare("never asked", 1)
    said = ["old sum: it is (b) it shrinks", "never asked: it is (b)", "never asked: measured 1.000"]
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(
    ("guess", "choices", "wanted"),
    [
        ("c", ("kept", "lost"), "(a) kept, (b) lost"),
        (1, ("kept", "lost"), "(a) kept, (b) lost"),
        ("nan", (), "a number, as in 0.05 or 5%"),
        ("it grows", (), "a number, as in 0.05 or 5%"),
    ],
)
def test_what_cannot_be_understood_gets_a_line_and_counts_as_no_guess(capsys, guess, choices, wanted):
    predict("q", guess, choices)
    compare("q", "b" if choices else 1.0)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"q: expected {wanted}; got {guess!r}"
    assert "predicted" not in said[1]


def test_a_wrong_choice_gets_its_reason(capsys):
    predict("a new largest score", "c", ("kept", "shrunk", "thrown away"))
    compare("a new largest score", "b")
    assert capsys.readouterr().out.splitlines()[-1].startswith("The earlier keys still count.")


def test_a_cell_can_call_the_grader_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"expected the grader of '99' to run, .* 2: (.|\n)*01_block_quantizer"):
        grade("99")
