"""Predictions beside measurements, and the grader called from a cell."""

import subprocess

import pytest
from sage_course.teaching import compare, grade, predict


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [
        (2.0, 1.0, "predicted 2.0, measured 1.000 (a factor of 2.0 apart)"),
        (1, 4.0, "predicted 1, measured 4.000 (a factor of 4.0 apart)"),
        (1.02, 1.0, "predicted 1.02, measured 1.000 (spot on)"),
        (-1.0, -3.0, "predicted -1.0, measured -3.000 (a factor of 3.0 apart)"),
        (-1.0, 1.0, "predicted -1.0, measured 1.000 (the sign differs)"),
        (1.0, 0.0, "predicted 1.0, measured 0.000 (1.000 apart)"),
        (0, 0.25, "predicted 0, measured 0.250 (0.250 apart)"),
        (0, 0.0001, "predicted 0, measured 0.000 (spot on)"),
        ("it grows", 1.0, "predicted it grows, measured 1.000"),
        (..., 0.5, "measured 0.500"),
    ],
)
def test_the_last_prediction_is_put_beside_the_measurement(capsys, guess, measured, verdict):
    predict("error", 99)
    predict("error", guess)
    compare("error", measured)
    assert capsys.readouterr().out.splitlines()[-1] == f"error: {verdict}"


def test_a_choice_is_a_letter_and_a_question_must_have_been_asked(capsys):
    choices = ("it is kept", "it shrinks")
    with pytest.raises(ValueError, match=r"guess: expected one of \['a', 'b'\], got 'c'"):
        predict("old sum", "c", choices)
    for guess, said in ((..., "old sum: it is (b) it shrinks"), ("a", "old sum: predicted a, it is (b) it shrinks")):
        predict("old sum", guess, choices)
        compare("old sum", "b")
        assert capsys.readouterr().out.splitlines()[-1] == said
    with pytest.raises(ValueError, match="question: expected one of .*'old sum'.*, got 'never asked'"):
        compare("never asked", 1.0)


def test_a_cell_can_call_the_grader_from_any_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"expected the grader of '99' to run, .* 2: (.|\n)*01_block_quantizer"):
        grade("99")
    done = subprocess.CompletedProcess([], 0, stdout="8 of 8 points", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    grade("01_block_quantizer")
    assert capsys.readouterr().out == "8 of 8 points"
