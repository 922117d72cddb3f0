"""Predictions, versions, and where Triton runs."""

import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch
from sage_course import teaching
from sage_course.teaching import compare, grade, predict, triton_device


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [
        (2.0, 1.0, " (a factor of 2.0 apart)"),
        (1, 4.0, " (a factor of 4.0 apart)"),
        (1.02, 1.0, " (spot on)"),
        (-1.0, -3.0, " (a factor of 3.0 apart)"),
        (-1.0, 1.0, ""),  # the right size with the wrong sign is not spot on
        (0, 1.0, ""),
        (1.0, 0.0, ""),
        ("it grows", 1.0, ""),
    ],
)
def test_a_prediction_is_put_beside_the_measurement(capsys, monkeypatch, guess, measured, verdict):
    monkeypatch.setattr(teaching, "_guesses", {})
    predict("q1", guess)
    compare("q1", measured)
    said = f"q1: your prediction is {guess}\nq1: predicted {guess}, measured {measured:.3f}{verdict}\n"
    assert capsys.readouterr().out == said


def test_the_last_prediction_counts_and_one_that_was_not_made_is_named(capsys, monkeypatch):
    monkeypatch.setattr(teaching, "_guesses", {})
    for guess in (1, 2):
        predict("q1", guess)
    compare("q1", 2.0, digits=1)
    assert capsys.readouterr().out.splitlines()[-1] == "q1: predicted 2, measured 2.0 (spot on)"
    with pytest.raises(ValueError, match=r"question: expected one of \['q1'\], got 'q2'"):
        compare("q2", 1.0)


def test_without_a_guess_there_is_only_the_answer(capsys, monkeypatch):
    monkeypatch.setattr(teaching, "_guesses", {})
    predict("error")
    compare("error", 0.5)
    assert capsys.readouterr().out == "error: put your guess in the place of ...\nerror: measured 0.500\n"


def test_a_choice_is_a_letter(capsys, monkeypatch):
    monkeypatch.setattr(teaching, "_guesses", {})
    choices = ("it is kept", "it shrinks")
    with pytest.raises(ValueError, match=r"guess: expected one of \['a', 'b'\], got 'c'"):
        predict("old sum", "c", choices)
    for guess, said in ((..., "old sum: it is (b) it shrinks"), ("a", "old sum: predicted a, it is (b) it shrinks")):
        predict("old sum", guess, choices)
        compare("old sum", "b")
        assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.fixture
def machine(monkeypatch):
    """machine(triton=..., cuda=..., imported=...) makes this one look like another."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")

    def pretend(*, triton, cuda=False, imported=False):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if triton else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        if imported:
            monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))

    return pretend


def test_triton_runs_through_the_interpreter_without_a_gpu(machine):
    machine(triton=True, imported=True)
    with pytest.raises(RuntimeError, match="triton_device: expected to run before triton is imported"):
        triton_device()
    machine(triton=True)
    assert triton_device() == "cpu"
    assert os.environ["TRITON_INTERPRET"] == "1"
    machine(triton=True, imported=True)  # a second call, after triton was imported with the interpreter on
    assert triton_device() == "cpu"


@pytest.mark.parametrize(
    ("triton", "cuda", "expected"), [(True, True, "cuda"), (False, True, None), (False, False, None)]
)
def test_the_interpreter_is_left_off_elsewhere(machine, triton, cuda, expected):
    machine(triton=triton, cuda=cuda)
    assert triton_device() == expected
    assert os.environ["TRITON_INTERPRET"] == "0"


def test_a_cell_can_call_the_grader_from_any_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"expected the grader of '99' to run, .* 2: (.|\n)*01_block_quantizer"):
        grade("99")
    done = subprocess.CompletedProcess([], 0, stdout="8 of 8 points", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    grade("01_block_quantizer")
    assert capsys.readouterr().out == "8 of 8 points"
