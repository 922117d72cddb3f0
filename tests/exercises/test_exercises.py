"""The exercises are sound, and their framework keeps its promises: stubs, grading, Gradescope's files."""

import contextlib
import dataclasses
import doctest
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
import torch
from torch import Tensor

from exercises import ROOT, checking, exercise_names, gradescope, grading, stubs, wire
from exercises import __main__ as command_line
from exercises.grading import Buffer, Draw, Grader, Guarded, close, expect, rounding_distance, unlike
from exercises.worker import load

SEEDS = (grading.VISIBLE_SEED, "hidden")
HINTED = pytest.raises(grading.Failed, match="^hint$")


@pytest.fixture(scope="module")
def report(sandbox):
    exercises = [checking.check_exercise(name, sandbox) for name in exercise_names()]
    return checking.report_of(exercises)


@pytest.mark.parametrize("name", exercise_names())
def test_exercise_is_sound(report, name):
    """The master passes, the stub earns nothing and says so, each mutant meets the hint meant for it."""
    (exercise,) = (exercise for exercise in report["exercises"] if exercise["exercise"] == name)
    assert exercise["problems"] == []
    assert exercise["seconds"] < 20


def test_counts(report):
    counts = report["counts"]
    assert counts["exercises"] >= 12
    assert counts["mutants_rejected_by_their_hint"] == counts["mutants"] >= 3 * counts["exercises"]
    assert report["sound"]
    difficulties = {stubs.header_of(stubs.read_master(name), name).difficulty for name in exercise_names()}
    assert difficulties == set(stubs.DIFFICULTIES)


@pytest.mark.parametrize("name", exercise_names())
def test_worked_values_in_the_docstrings(name):
    module = load(f"master_{name}", ROOT / name / "master.py")
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in finder.find(module, name, globs=vars(module)):
        runner.run(example)
    assert runner.tries > 0
    assert runner.failures == 0


def test_generated_files_are_up_to_date():
    assert stubs.out_of_date() == []


MASTER = '''"""Title.

Difficulty: easy
Importance: low
Minutes: 5
Afterwards you know it.
"""


def outer(x):
    """Double x."""
    y = x + x

    def inner(z):
        ### BEGIN SOLUTION: say "no"
        answer = z - z
        return answer
        ### END SOLUTION

    ### BEGIN SOLUTION
    doubled = y
    return doubled
    ### END SOLUTION
'''


@pytest.fixture
def exercise(tmp_path, monkeypatch):
    """A copy of the first exercise, and nothing else, to spoil."""
    copy = tmp_path / "01_block_quantizer"
    shutil.copytree(ROOT / copy.name, copy)
    for module in (stubs, grading, checking, command_line):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (stubs, grading):
        monkeypatch.setattr(module, "exercise_names", lambda: [copy.name])
    return copy


def spoil(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


SPOILED = [  # what is spoiled at once: file, old text, new text, and what is found then
    [
        ("master.py", "/ INT8_MAX", "/ 128", "the master doesn't pass"),
        ("master.py", "# [block_size or fewer, D]\n", "\n        scales.append(scale)\n", "a line of the solution"),
        ("master.py", "        ### END SOLUTION\n", "        ### END SOLUTION\n        #\n", "exercise.py is out"),
        ("README.md", "20 minutes", "25 minutes", "expected '20 minutes'"),
    ],
    [
        ("grader.py", "def dequantized(student, draw):\n", "def dequantized(student, draw):\n    return\n",
         "the stub should earn 0", "a submission that returns None should earn 0"),
        ("grader.py", 'off == 0, "rounding"', 'off == 0, "zeros"', "no_rounding should be rejected by"),
        ("grader.py", 'Grader("01_block_quantizer"', 'Grader("02"', "Grader('01_block_quantizer', ...), got '02'"),
        ("mutants.toml", '"range"', '"axis"', "scale_128 should be rejected by 'axis'"),
        ("mutants.toml", "block.abs().amax()", "max(block)", "scale_per_tensor is out of date: expected"),
        ("mutants.toml", "torch.empty_like(x, dtype=torch.int8)", "scale", "keeps_float32 is out of date"),
    ],
    [
        ("grader.py", 'hint("rounding"', 'hint("another key"', "no hint has the key 'rounding'"),
        ("grader.py", '{"quantize_block": (Tensor, Tensor), ', '{"quantize_block": None, ', "that returns one number"),
    ],
]  # fmt: skip


@pytest.mark.parametrize("edits", SPOILED, ids=["master", "grader and mutants", "a grader that breaks"])
def test_check_finds(exercise, sandbox, edits):
    for file, old, new, *_ in edits:
        spoil(exercise / file, old, new)
    problems = checking.check_exercise(exercise.name, sandbox)["problems"]
    for problem in (problem for _, _, _, *expected in edits for problem in expected):
        assert any(problem in found for found in problems), (problem, problems)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("# 01 ", "# 02 ", "expected a first line '# 01 Title', got '# 02 Block quantiser'"),
        ("Easy", "Simple", "expected the master's difficulty, 'easy'"),
        ("exercises grade 01_", "exercises grade 02_", "expected 'python -m exercises grade 01_block"),
        ("<details>", "", "expected at least 2 hints, each in <details> ... </details>, found 0"),
        ("</details>", "", "expected at least 2 hints"),
    ],
)
def test_check_reads_the_page(exercise, old, new, problem):
    header = stubs.header_of(stubs.read_master(exercise.name), exercise.name)
    assert checking.page_problems(exercise.name, header) == []
    spoil(exercise / "README.md", old, new)
    (found,) = checking.page_problems(exercise.name, header)
    assert problem in found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('hint = "dtype"', 'key = "dtype"', "expected a hint and edits of keeps_float32"),
        ('[["torch.empty_like(x, dtype=torch.int8)", "torch.empty_like(x)"]]', '["torch.empty_like(x)"]',
         "expected edits = .* of keeps_float32"),
    ],
)  # fmt: skip
def test_mutants_have_a_hint_and_edits(exercise, old, new, message):
    spoil(exercise / "mutants.toml", old, new)
    with pytest.raises(ValueError, match=message):
        checking.mutants_of(exercise.name, stubs.read_master(exercise.name))
    (exercise / "mutants.toml").unlink()
    assert checking.mutants_of(exercise.name, "") == []


def test_check_command(exercise, commands_use_it, tmp_path, capsys):
    assert command_line.main(["check", "01", "--json", str(tmp_path / "report.json")]) == 0
    assert "1 exercises, 4 tests, 8 mutants (8 rejected by their own hint)" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["counts"]["mutants"] == 8
    mutants = exercise / "mutants.toml"
    mutants.write_text(mutants.read_text().partition("[no_rounding]")[0].replace('"scale"', '"axis"'))
    assert command_line.main(["check", "01"]) == 1
    shown = capsys.readouterr().out
    assert "NOT AS MEANT drops_the_scale" in shown
    assert "2 mutants (1 rejected by their own hint)" in shown
    assert "PROBLEM: mutants.toml: expected at least 3 mutants, found 2" in shown


def test_stub_keeps_the_scaffold_and_says_what_to_do():
    stub, solution = stubs.stub_of(MASTER)
    assert "        raise NotImplementedError('inner: say \"no\"')\n\n" in stub
    assert '    raise NotImplementedError("outer: Double x.")\n' in stub
    assert "y = x + x" in stub
    assert "SOLUTION" not in stub
    assert [line.strip() for line in solution] == ["answer = z - z", "return answer", "doubled = y", "return doubled"]
    assert stubs.leaked(stub, solution) == []
    assert stubs.leaked(stub + "    doubled = y\n", solution) == ["    doubled = y"]


def test_long_task_is_broken_as_the_formatter_does():
    task = "word " * 30
    stub, _ = stubs.stub_of(MASTER.replace('say "no"', task.strip()))
    assert max(map(len, stub.splitlines())) <= 120
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "-"]
    assert subprocess.run(ruff, input=stub, capture_output=True, text=True, check=True).stdout == stub
    assert f"inner: {task.strip()}" in "".join(line.strip().strip('"') for line in stub.splitlines())


END = "    ### END SOLUTION\n"
MALFORMED = [  # what to replace in MASTER, and by what; the error
    (MASTER, "x = 1\n", "there is no solution"),
    ("answer = z - z", "### BEGIN SOLUTION: again", "line 16: a solution begins inside another"),
    (f"    return doubled\n{END}", "", "a solution isn't closed"),
    ("    ### BEGIN SOLUTION\n", "", "a solution ends that didn't begin"),
    (f"    doubled = y\n    return doubled\n{END}", f"\n{END}    return y\n", "the solution is empty"),
    ("### BEGIN SOLUTION\n", "### BEGIN SOLUTIONS\n", "alone on its line"),
    ("    doubled = y\n", "    doubled = y  ### END SOLUTION\n", "alone on its line"),
    ('    """Double x."""\n', "", "or a docstring of outer"),
    ("def outer(x):", "### BEGIN SOLUTION: all\nx = 1\n### END SOLUTION\ndef outer(x):", "outside of a function"),
]
MALFORMED_HEADER = [
    ("easy", "simple", "'Difficulty: ' with one of"),
    ("Importance: low", "", "'Importance: ' with one of"),
    ("Minutes: 5", "Minutes: few", "'Minutes: ' and a number"),
    ("Afterwards you know", "You know", "'Afterwards you know'"),
]


@pytest.mark.parametrize(("old", "new", "message"), MALFORMED + MALFORMED_HEADER)
def test_malformed_master_is_an_error(old, new, message):
    assert stubs.header_of(MASTER, "name") == ("Title", "easy", "low", 5)
    assert old in MASTER
    source = MASTER.replace(old, new, 1)
    with pytest.raises(stubs.StubError, match=message):
        stubs.header_of(source, "name") if message[0] == "'" else stubs.stub_of(source)


def test_stale_stub_is_noticed_and_mended(exercise, tmp_path, capsys):
    (tmp_path / "README.md").write_text("before\n<!-- exercises -->\nold\n<!-- /exercises -->\nafter\n")
    stub = exercise / "exercise.py"
    stub.write_text("old")
    assert command_line.main(["stubs", "--check"]) == 1
    assert "01_block_quantizer/exercise.py is out of date" in capsys.readouterr().err
    assert stub.read_text() == "old"
    assert command_line.main(["stubs"]) == 0
    assert command_line.main(["stubs", "--check"]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "| [01_block_quantizer](01_block_quantizer/README.md) | Block quantiser" in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(stubs.StubError, match="markers"):
        stubs.generated()


def small_grader(test=lambda student, draw: student.f(draw.normal(1)), functions=("f",), **options):
    grader = Grader("00_small", functions, **options)
    grader.hint("hint", "THE HINT")
    grader.test("the test", points=2)(test)
    return grader


def grade(grader, source, sandbox, seeds=SEEDS):
    return grading.grade(grader, source.encode(), seeds, sandbox)


def test_points_need_every_seed(sandbox):
    """An answer that knows the visible inputs by heart fails on hidden ones, which differ in shape too."""
    grader = small_grader(lambda student, draw: expect(student.f(draw.normal(draw.integers(3, 99))).sum() == 0, "hint"))
    shapes = {tuple(Draw(seed, "00_small", "the test").normal(3).tolist()) for seed in SEEDS}
    assert len(shapes) == 2
    visible = Draw(0, "00_small", "the test").integers(3, 99)
    by_heart = f"import torch\ndef f(x): return torch.tensor(0.0 if len(x) == {visible} else 1.0)\n"
    result = grade(grader, by_heart, sandbox)
    assert (result.score, result.max_score) == (0, 2)
    assert result.tests[0].feedback == "THE HINT (on hidden inputs)"
    assert grade(grader, by_heart, sandbox, seeds=[0]).score == 2
    assert grade(grader, "def f(x): return 0 * x", sandbox).score == 2


def test_hidden_seeds(tmp_path, monkeypatch):
    first, second = grading.seeds_of_grading(), grading.seeds_of_grading()
    assert first[0] == second[0] == grading.VISIBLE_SEED
    assert len(set(first[1:] + second[1:])) == 2 * grading.HIDDEN_SEEDS
    assert grading.seeds_of_grading(3) == grading.seeds_of_grading(3) != grading.seeds_of_grading(4)
    monkeypatch.setattr(grading, "ROOT", tmp_path)
    (tmp_path / "hidden_seeds.json").write_text('["a", "b"]')
    assert grading.seeds_of_grading() == [0, "a", "b"]


def test_error_of_the_grader_is_not_the_students(sandbox):
    errors = (
        lambda student, draw: 1 / 0,
        lambda student, draw: expect(False, "no such hint"),
        lambda student, draw: close(student.f(torch.ones(1)), torch.tensor([float("nan")]), "hint", relative_l2=1),
        lambda student, draw: student.no_such_function(1),
        lambda student, draw: student.f(object()),
        lambda student, draw: __import__("no_such_module"),
    )
    grader = small_grader(errors[0])
    for number, error in enumerate(errors[1:]):
        grader.test(f"test {number}")(error)
    result = grade(grader, "def f(x): return x", sandbox)
    assert {(test.status, test.feedback) for test in result.tests} == {("broken", "the grader broke")}
    assert result.score is None
    assert all(test.name in result.error for test in result.tests)
    assert "no score: the grader broke" in grading.table(result)


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (ImportError, "broken")])
def test_arithmetic_on_an_answer_that_failed_before(sandbox, error, status):
    """After a failed shape test, the next test's arithmetic may stop; an import error never is the submission's."""

    def later(student, draw):
        raise error

    grader = small_grader(lambda student, draw: expect(False, "hint"))
    grader.test("later")(later)
    result = grade(grader, "def f(x): return x", sandbox)
    assert [test.status for test in result.tests] == ["failed", status]
    passing = small_grader(lambda student, draw: None)
    passing.test("later")(later)
    assert grade(passing, "def f(x): return x", sandbox).broken


def test_arithmetic_on_an_answer_of_another_shape(sandbox):
    """The submission's failure, although no earlier test looked: its shape is right for visible inputs only."""

    def test(student, draw):
        x = draw.normal(3, 4)
        values, facts = student.f(x)
        assert isinstance(values * facts["scale"] + x, Tensor)

    source = """
calls = []
def f(x):
    calls.append(0)
    return x, {"scale": x if len(calls) == 1 else x[:, :3]}
"""
    result = grade(small_grader(test, {"f": (Tensor, dict)}), source, sandbox)
    assert result.tests[0].status == "failed"
    assert result.tests[0].feedback == "returned tensors whose shapes or dtypes don't fit together (on hidden inputs)"


def test_submission_that_never_started_is_the_sandboxes_fault(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox, "limits", sandbox.limits._replace(cpu_seconds="many"))
    result = grade(small_grader(), "def f(x): return x", sandbox)
    assert result.broken
    assert "SandboxError" in result.error
    assert "TypeError" in result.error


def test_exercise_that_needs_triton_is_skipped_without(sandbox, monkeypatch):
    grader = small_grader(triton=True)
    assert grade(grader, "def f(x): return x", sandbox).score == 2
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda name: None)
    result = grade(grader, "def f(x): return x", sandbox)
    assert (result.tests[0].status, result.max_score) == ("skipped", 0)
    with pytest.raises(ValueError, match="work here"):
        gradescope.results_json([result], {"00_small": 2})


def test_close():
    ones, zeros = torch.ones(2, 2), torch.zeros(2)
    for same, expected, allowed in ((ones + 1e-4, ones, 1e-3), (ones.half(), ones, 0), (zeros, zeros, 1e-3)):
        close(same, expected, "hint", relative_l2=allowed)
    wrong = [(x, ones) for x in (ones + 1e-2, ones[0], ones * math.nan, ones / 0, ones[None], 1.0, None, ones * 0)]
    for answer, expected in (*wrong, (zeros + 1e-9, zeros)):
        with HINTED:
            close(answer, expected, "hint", relative_l2=1e-3)


@pytest.mark.parametrize(
    ("spoil", "distance"),
    [
        (lambda x: x, 0),
        (lambda x: x * (1 + 5e-5), 0.5),
        (lambda x: torch.cat((x[:16] * (1 + 1e-2), x[16:])), 0.83),  # flipped roundings: 16 rows
        (lambda x: x * (1 + 2e-4), 2),  # every row a little
        (lambda x: torch.cat((x[:24], x[24:] * (1 + 2e-4))), 2),  # more than half of them
        (lambda x: torch.cat((x[:63], x[63:] * 1.1)), 2),  # one row, but by 1e-2 of the whole
        (lambda x: torch.cat((x[:63], x[63:] * math.nan)), math.nan),
        (lambda x: x * math.nan, math.nan),
    ],
)
def test_rounding_distance_allows_a_few_flipped_roundings_only(spoil, distance):
    x = Draw("rounding").normal(64, 32)
    assert rounding_distance(spoil(x), x) == pytest.approx(distance, rel=0.1, nan_ok=True)
    flipped = torch.cat((x[:16] * (1 + 1e-2), x[16:]))
    assert rounding_distance(flipped.half(), x.double()) < 20  # of any dtype; float16 itself is too coarse
    x[3] = 0
    assert rounding_distance(x, x) == 0


RIGHT = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("answer", "wrong", "condemned"),
    [
        (RIGHT, RIGHT * 1.01, False),
        (RIGHT + 5e-2, RIGHT * 1.01, False),  # near neither: for another check to find
        (RIGHT, RIGHT + 4e-4, False),  # a draw for which right and wrong are almost the same
        (RIGHT, RIGHT, False),
        (RIGHT * 1.01, RIGHT * 1.01, True),
        (RIGHT + 3e-4, RIGHT + 4e-4, True),
        (RIGHT * math.nan, RIGHT * 1.01, True),
    ],
)
def test_unlike_condemns_what_is_nearer_to_the_wrong_answer(answer, wrong, condemned):
    with HINTED if condemned else contextlib.nullcontext():
        unlike(answer, wrong, RIGHT, "hint", within=1e-3)


def test_unlike_by_another_distance():
    tiny, half = RIGHT * (1 + 5e-5), {"distance": rounding_distance}  # half a unit from RIGHT
    unlike(tiny, RIGHT, tiny, "hint", within=1, **half)
    unlike(RIGHT, tiny, RIGHT * 2, "hint", within=0.4, **half)
    for answer, wrong, right in ((tiny, tiny, RIGHT), (RIGHT, tiny, RIGHT * 2)):
        with HINTED:
            unlike(answer, wrong, right, "hint", within=1, **half)


def graded_on(name, source, test, seeds, sandbox):
    """The result of one test on these seeds."""
    grader = grading.load_grader(name)
    grader.tests = [found for found in grader.tests if found.name == test]
    (result,) = grading.grade(grader, source.encode(), seeds, sandbox).tests
    return result


DIVISION = "torch.round(x / torch.where(scale > 0, scale, 1))"
IN_FLOAT64 = "torch.round(x.double() / torch.where(scale > 0, scale, 1).double()).float()"
MEAN, MEAN_IN_FLOAT64 = "key.mean(-2, keepdim=True)", "key.double().mean(-2, keepdim=True).float()"
RECIPROCAL = ("block / divisor", "block * (1 / divisor)")
FORWARD = "11_triton_int8_forward"
UNLUCKY = [  # Draws where a rounding flips with the order of float operations, or a wrong answer is near the right one
    (FORWARD, "one tile of keys", "a107 a238", None),
    (FORWARD, "tiles that raise the maximum", "a3 a239", None),
    (FORWARD, "scores far below zero", "a42 a91 a225", None),
    (FORWARD, "each tile of V with its own scale", "a18", None),
    (FORWARD, "causal", "a119 a150 a261", None),
    ("08_row_or_block_scales", "tiled_matmul: a tile at a time", "a227", None),
    # The same formulas, computed otherwise, are as good.
    ("01_block_quantizer", "values and scales", "q263", RECIPROCAL),
    ("01_block_quantizer", "a smaller last block, and zeros", "q627", RECIPROCAL),
    ("03_key_smoothing", "attention: INT8 scores from smoothed keys", "w2540", (DIVISION, IN_FLOAT64)),
    ("03_key_smoothing", "grad_query: rounded dS, smoothed keys, no correction", "w2393", (MEAN, MEAN_IN_FLOAT64)),
    ("05_online_softmax", "online_step: O from integers", "v306", ("p / divisor", "p.double() / divisor.double()")),
    # A mutant meets its hint.
    ("06_ds_and_delta", "grad_scores_tile: psi(dS), however small", "u17", "clamped_scale"),
    ("07_backward_tile", "backward_tile: dQ and dK from dP in 16 bit", "u5 u19", "int8_dp"),
    ("08_row_or_block_scales", "relative_errors: row scales against block scales", "u15 u48", "largest_error"),
]


@pytest.mark.parametrize(("name", "test", "seeds", "change"), UNLUCKY)
def test_unlucky_draws(sandbox, name, test, seeds, change):
    source, hint, fine = stubs.read_master(name), None, ("passed", "skipped") if name == FORWARD else ("passed",)
    if isinstance(change, tuple):
        assert change[0] in source
        source = source.replace(*change)
    elif change:
        (mutant,) = (found for found in checking.mutants_of(name, source) if found.name == change)
        source, hint, fine = mutant.source, mutant.hint, ("failed",)
    for seed in seeds.split():
        result = graded_on(name, source, test, [seed], sandbox)
        assert result.status in fine, result
        assert result.hint == hint


SPOILS_THE_FIRST = """

own_function = {first}


def {first}(*arguments):
    def spoiled(x):
        if isinstance(x, tuple):
            return tuple(map(spoiled, x))
        return ~x if x.dtype == torch.bool else 1.5 * x if x.is_floating_point() else x + 1

    return spoiled(own_function(*arguments))
"""
SEVERAL = [name for name in exercise_names() if len(grading.load_grader(name).returns) > 1]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_wrong_function_costs_its_own_points_only(sandbox, name):
    """What uses it is graded with a correct one in its place."""
    grader, master = grading.load_grader(name), stubs.read_master(name)
    first = next(iter(grader.returns))
    result = grade(grader, master + SPOILS_THE_FIRST.format(first=first), sandbox)
    assert not result.broken, result.error
    failed = [test for test in result.tests if test.status == "failed"]
    assert failed
    assert all(first in test.called for test in failed), grading.table(result)


CHAIN = """
import torch
def first(x): return x + 1
def second(x): return first(x) * 2
def third(x): return second(x) - 3
"""


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A grader of three functions, each of which uses the one before, and its master."""
    (tmp_path / "00_small").mkdir()
    (tmp_path / "00_small" / "master.py").write_text(CHAIN)
    monkeypatch.setattr(grading, "ROOT", tmp_path)
    grader = Grader("00_small", ("first", "second", "third"))
    grader.hint("hint", "THE HINT")
    for function, result in (("first", 2), ("second", 4), ("third", 1)):
        right = torch.full((1,), result)
        grader.test(function)(
            lambda student, draw, function=function, right=right: close(
                getattr(student, function)(torch.ones(1)), right, "hint", relative_l2=0
            )
        )
    return grader


def test_correct_functions_are_those_that_one_uses(chain):
    correct = grading.correct_functions(chain)
    assert {name: x.names for name, x in correct.items()} == {"second": ("first",), "third": ("first", "second")}
    assert "def second" not in correct["second"].source
    assert "def third" not in correct["third"].source
    assert grading.correct_functions(Grader("01_elsewhere", ("f",))) is None


def test_a_submission_meets_no_solution_of_what_is_graded(sandbox, chain):
    """Only what failed is replaced, only while what uses it runs; and its code shows nowhere."""
    source = CHAIN.replace("x + 1", "x + 7").replace("* 2", "* globals().get('factor', 9)")
    result = grade(chain, source, sandbox)
    assert [test.status for test in result.tests] == ["failed", "failed", "passed"]
    assert result.tests[0].feedback == "THE HINT At [0]: expected 2, found 8; relative error of the whole 3."
    assert result.tests[1].feedback == "THE HINT (with a correct first in the place of yours)"
    assert result.tests[2].feedback == "(with a correct first and second in the place of yours)"
    thief = """
import inspect
def first(x): return x
def second(x): raise ValueError(first.__code__.co_consts, inspect.getsource(first))
def third(x): return x
"""
    shown = grade(chain, thief, sandbox).tests[1].feedback
    assert shown == "second raised an error (with a correct first in the place of yours)"
    chain.test("both")(
        lambda student, draw: expect(student.third(torch.ones(1)) * student.first(torch.ones(1)) == 2, "hint")
    )
    assert "first: expected a test of its own" in grade(chain, source, sandbox).error


def test_hints_after_a_failure_are_put_in_doubt(sandbox, chain, monkeypatch):
    """Where no master is at hand, of whatever stands before; else of tests of the same function."""
    chain.test("third again")(lambda student, draw: expect(student.third(torch.ones(1)) == 1, "hint"))
    own = grade(chain, CHAIN.replace("- 3", "- 4"), sandbox).tests
    assert own[3].feedback == "Perhaps for the same reason as 'third'. If not: THE HINT"
    monkeypatch.setattr(grading, "ROOT", grading.ROOT / "no_masters")
    feedback = [test.feedback for test in grade(chain, CHAIN.replace("+ 1", "+ 7"), sandbox).tests]
    assert feedback[0].startswith("THE HINT At [0]")
    assert all(text.startswith("Perhaps for the same reason as 'first'. If not: THE HINT") for text in feedback[1:])


FORMS = [  # found, expected, and what is shown
    (torch.ones(2, 3), torch.zeros(3), "Expected float32 [3], found float32 [2, 3]."),
    (torch.ones(3).double(), torch.empty(3, device="meta"), "Expected float32 [3], found float64 [3]."),
    (torch.full((3,), math.nan), torch.empty(3, device="meta"), "Found NaN or infinity."),
    (None, torch.ones(3), "Expected a tensor, found None."),
    (torch.tensor([[1.0, 2.0], [math.nan, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
     "At [1, 0]: expected 3, found nan; relative error of the whole nan."),
    (torch.tensor(2), torch.tensor(1), "At []: expected 1, found 2; relative error of the whole 1."),
    (torch.tensor([1 + 1e-6, 3.0]), torch.ones(2), "At [1]: expected 1, found 3; relative error of the whole 1.4."),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected", "shown"), FORMS)
def test_what_is_shown_of_a_wrong_tensor(found, expected, shown):
    assert grading.difference(found, expected) == shown


def test_numbers_are_shown_of_visible_inputs_only(sandbox):
    grader = small_grader(lambda student, draw: close(student.f(x := draw.normal(3)), x, "hint", relative_l2=0))
    shown = grade(grader, "def f(x): return 2 * x", sandbox).tests[0].feedback
    assert shown.startswith("THE HINT At [0]: expected ")
    assert (
        grade(grader, "def f(x): return 2 * x", sandbox, seeds=["a"]).tests[0].feedback == "THE HINT (on hidden inputs)"
    )


def test_exercise_13_leaves_the_gradient_to_the_student():
    folder = ROOT / "13_soft_top_k"
    for file in ("exercise.py", "README.md", "grader.py"):
        text = (folder / file).read_text()
        assert not any(word in text for word in ("sum(w)", "(w ds", "w_j", "s (1 - s)", "s(1-s)"))


def test_draw_is_seeded_and_stays_in_range():
    for seed in (0, "hidden"):
        first, second = Draw(seed, "test"), Draw(seed, "test")
        assert torch.equal(first.normal(3, 2), second.normal(3, 2))
        assert first.choice("abc") == second.choice("abc")
    draw = Draw(0)
    assert {draw.integers(2, 5) for _ in range(99)} == {2, 3, 4}
    assert {draw.choice((16, 32)) for _ in range(99)} == {16, 32}
    assert draw.integers(-3, 3, 5, dtype=torch.int8).dtype == torch.int8
    uniform = draw.uniform(999, low=-2, high=3)
    assert -2 <= uniform.min() < -1.9 < 2.9 < uniform.max() < 3
    assert sorted(draw.permutation(9).tolist()) == list(range(9))


def test_results_arguments_and_keywords(sandbox):
    source = """
import torch
def f(x, n, flag=False, pair=None):
    return x * n, {"flag": flag, "pair": pair, "nan": float("nan")}, [x.dtype == torch.int8, None, "text", 2.5]
"""

    def test(student, draw):
        x = torch.arange(6, dtype=torch.int8).view(2, 3)
        doubled, facts, rest = student.f(x.t(), 2, flag=True, pair=(1, [2.0, None]))
        assert torch.equal(doubled, 2 * x.t())
        assert doubled.dtype == torch.int8
        assert facts["flag"] is True
        assert facts["pair"] == (1, (2.0, None))
        assert facts["nan"] != facts["nan"]
        assert rest == (True, None, "text", 2.5)

    result = grade(small_grader(test), source, sandbox)
    assert result.score == 2, result.error


PAIR = "expected a tuple of 2 (a tensor, a tensor)"
WRONG_KINDS = [
    ((Tensor, Tensor), "x", f"a tensor, {PAIR}"),
    ((Tensor, Tensor), "(x, x, x)", f"a tuple of 3, {PAIR}"),
    (Tensor, "2.0", "a float, expected a tensor"),
    (Tensor, "object()", "object, expected a tensor"),
    (float, "x", "a tensor, expected a number"),
    (float, "True", "a bool, expected a number"),
    (int, "1.0", "a float, expected an integer"),
]


@pytest.mark.parametrize(("returns", "body", "feedback"), WRONG_KINDS)
def test_answer_of_the_wrong_kind(sandbox, returns, body, feedback):
    grader = small_grader(functions={"f": returns})
    assert grade(grader, f"def f(x): return {body}", sandbox).tests[0].feedback == f"f returned {feedback}"


def test_missing_function_and_unwritten_function(sandbox):
    grader = small_grader()
    assert grade(grader, "def g(x): return x", sandbox).tests[0].feedback == "f has no function f"
    result = grade(grader, 'def f(x):\n    raise NotImplementedError("f: do it")', sandbox)
    assert result.tests[0].feedback == "f not written yet: do it"
    assert grading.grade(grader, None, SEEDS, sandbox).tests[0].feedback == "exercise.py wasn't handed in"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Triton's compiler speaks for itself")
def test_error_inside_a_kernel_names_its_line(sandbox):
    """Triton's interpreter wraps it in an error of its own, from the line of the launch."""
    source = """import torch, triton, triton.language as tl
@triton.jit
def kernel(x):
    tl.store(x, tl.load(x) +
             tl.no_such_thing)
def f(x): kernel[(1,)](x)
"""
    grader = small_grader(triton=True)
    feedback = grade(grader, source, sandbox).tests[0].feedback
    assert feedback.startswith("f raised an error: line 5: AttributeError: ")
    assert "no_such_thing" in feedback


def test_gradients(sandbox):
    """The chain rule runs in the submission's process; a detached result has no gradient."""

    def test(student, draw):
        x, y, n = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0]), torch.tensor([1, 2])
        (product, _), (dx, dy, dn) = student.f.gradients(x, y, n, upstream=(torch.tensor([1.0, 10.0]), None))
        expect(torch.equal(product, x * y), "hint")
        expect(dx is not None, "hint")
        assert torch.equal(dx, torch.tensor([5.0, 70.0]))
        assert dy is None or torch.equal(dy, torch.tensor([2.0, 30.0]))
        assert dn is None

    grader = small_grader(test)
    for body, score in (("x * y", 2), ("x * y.detach()", 2), ("x.detach() * y", 0), ("x.detach() * y.detach()", 0)):
        assert grade(grader, f"def f(x, y, n): return {body}, n", sandbox).score == score


def test_guarded_buffers_show_stray_stores_and_loads(sandbox):
    def test(student, draw):
        x, out = torch.arange(6.0).view(2, 3), torch.zeros(2, 3, dtype=torch.int8)
        _, (x_after, buffer, n) = student.f.in_place(Guarded(x), Guarded(out, margin=8), 6)
        assert isinstance(buffer, Buffer)
        assert buffer.tensor.shape == (2, 3)
        assert n == 6
        expect(x_after.intact and buffer.intact, "hint")
        close(buffer.tensor, x, "hint", relative_l2=0)

    source = """
import torch
def flat(x): return torch.as_strided(x, (10,), (1,), x.storage_offset() + {start})
def f(x, out, n): flat(out)[:n + {beyond}] = flat(x)[:n + {beyond}].clamp(max=100).to(torch.int8)
"""
    grader = small_grader(test)
    assert grade(grader, source.format(start=0, beyond=0), sandbox).score == 2
    assert grade(grader, source.format(start=0, beyond=1), sandbox).tests[0].hint == "hint"
    assert grade(grader, source.format(start=-1, beyond=0), sandbox).tests[0].hint == "hint"
    loads = "def f(x, out, n):\n    assert x.untyped_storage().size() == 4 * (6 + 512)\n    out.copy_(x)"
    assert grade(grader, loads, sandbox).score == 2


def test_process_ends_with_its_test_and_the_next_test_runs(sandbox):
    grader = small_grader(functions=("f", "g"))
    grader.test("next")(lambda student, draw: expect(student.g(torch.ones(1)) == 1, "hint"))
    result = grade(grader, "import os\ndef f(x): os._exit(1)\ndef g(x): return x", sandbox)
    assert [test.status for test in result.tests] == ["failed", "passed"]


def test_speed_test(sandbox, monkeypatch):
    def grader(slower):
        grader = small_grader(lambda student, draw: None)
        grader.speed_test(
            "speed", "f", lambda draw: (draw.normal(2),), lambda x: x.add(1), slower=slower, hint="hint", points=5
        )
        return grader

    if not torch.cuda.is_available():
        result = grade(grader(1), "def f(x): return x", sandbox)
        assert [test.status for test in result.tests] == ["passed", "skipped"]
        assert (result.score, result.max_score) == (2, 2)
    monkeypatch.setattr(grading, "SPEED_SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Tensor, "cuda", lambda x: x)
    assert grade(grader(10**6), "def f(x): return x", sandbox).score == 7
    slow = "import time\ndef f(x):\n    time.sleep(0.001)\n    return x"
    assert grade(grader(3), slow, sandbox).tests[1].feedback.startswith("THE HINT")
    wrong = grader(10**6)
    wrong.tests[0] = dataclasses.replace(wrong.tests[0], function=lambda student, draw: expect(False, "hint"))
    result = grade(wrong, "def f(x): return x", sandbox)
    assert (result.score, result.tests[1].feedback) == (0, grading.NOT_JUDGED)


@pytest.fixture
def pipe():
    """Both ends, the writing one as a file: writes of any length, closed at the end of the block that writes."""
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as writing:
        yield reader, writing
    os.close(reader)


def test_values_survive_the_wire(pipe):
    reader, writer = pipe
    tensors = [torch.ones(2, 0, 3), torch.tensor(1.5), torch.arange(12).view(3, 4).t()]
    tensors += [torch.ones(3, requires_grad=True), *(torch.zeros(2).to(dtype) for dtype in wire.DTYPES)]
    value = {"tensors": tuple(tensors), "rest": (1, -2.5, math.inf, -math.inf, None, True, "text", ())}
    sent = {}
    tree = wire.encode(value, sent)
    wire.write(writer.fileno(), wire.pack({"tree": tree}, sent))
    content, received = wire.read(reader)
    back = wire.decode(content["tree"], received)
    assert back["rest"] == value["rest"]
    for before, after in zip(tensors, back["tensors"], strict=True):
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
        assert after.is_contiguous()
        assert not after.requires_grad
    writer.close()
    with pytest.raises(EOFError):
        wire.read(reader)


BLOCK = wire.pack({}, {})[wire.LENGTHS.size + 2 :]


@pytest.mark.parametrize(
    "message",
    [
        wire.LENGTHS.pack(2**31, 0),
        wire.LENGTHS.pack(2, 2**40),
        wire.LENGTHS.pack(2, 3) + b"{}xxx",
        wire.LENGTHS.pack(2, len(BLOCK)) + b"[]" + BLOCK,
        wire.LENGTHS.pack(2, len(BLOCK)) + b"\xff\xff" + BLOCK,
        wire.LENGTHS.pack(10**5, len(BLOCK)) + b"[" * 10**5 + BLOCK,
        wire.LENGTHS.pack(10**4, len(BLOCK)) + b"9" * 10**4 + BLOCK,
    ],
)
def test_unreadable_message(pipe, message):
    reader, writer = pipe

    def send():  # beside the reader: a pipe holds 64 KiB
        with writer:
            writer.write(message)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(wire.WireError, match="returned"):
        wire.read(reader)
    thread.join()


def test_malformed_tree():
    trees = [None, [], {}, {"tensor": "t9"}, {"tensor": ["t0"]}, {"scalar": [1]}, {"tuple": [{"scalar": 1}] * 1000}]
    for tree in (*trees, {"tuple": [1]}, {"dict": {"a": 1}}):
        with pytest.raises(wire.WireError):
            wire.decode(tree, {"t0": torch.ones(1)})
    assert wire.decode({"scalar": None, "float": "__import__('os')"}, {}) is None  # no part of it is evaluated


def test_grade_command(commands_use_it, tmp_path, capsys):
    name = "01_block_quantizer"
    (tmp_path / "exercise.py").write_text((ROOT / name / "master.py").read_text())
    written = tmp_path / "result.json"
    assert command_line.main(["grade", "01", "--submission", str(tmp_path), "--json", str(written), "--seed", "7"]) == 0
    assert "8 of 8 points" in capsys.readouterr().out
    (result,) = json.loads(written.read_text())
    assert (result["exercise"], result["score"], result["max_score"]) == (name, 8, 8)
    (tmp_path / f"{name}.py").write_text("print('hello')\n")
    assert command_line.main(["grade", name, "--submission", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "0 of 8 points" in shown
    assert "what it printed:\n    hello" in shown
    for arguments in (["grade"], ["grade", "99"], ["grade", "01", "--all"]):
        with pytest.raises(SystemExit):
            command_line.main(arguments)


def test_where_a_submission_is_found(tmp_path):
    def found(alone):
        source = grading.read_submission(tmp_path, "01_block_quantizer", alone=alone)
        return source and source.decode()

    assert found(alone=True) is None
    (tmp_path / "exercise.py").write_text("alone")
    assert found(alone=True) == "alone"
    assert found(alone=False) is None
    (tmp_path / "01_block_quantizer.py").write_text("file")
    assert found(alone=False) == "file"
    (tmp_path / "01_block_quantizer").mkdir()
    (tmp_path / "01_block_quantizer" / "exercise.py").write_text("folder")
    assert found(alone=True) == "folder"


def results_json(*statuses, weight=12):
    """results.json of one exercise whose tests, worth 1, 2, ... points, ended like this."""
    tests = [grading.TestResult(f"test {i}", i + 1, status, None, "why") for i, status in enumerate(statuses)]
    result = grading.ExerciseResult("01_block_quantizer", tests, 1.5, printed="SECRET", error="SECRET")
    return gradescope.results_json([result], {"01_block_quantizer": weight})


def test_results_json_is_as_documented():
    """By the section "Output format" of Gradescope's autograder specification; the sum of the tests is the only total.

    Of fields with choices: a status is passed or failed, and visible, hidden and text are among theirs.
    """

    def row(part, score, worth, status):
        names = {"name": f"01_block_quantizer: test {part - 1}", "number": f"1.{part}"}
        return names | {"score": score, "max_score": worth, "status": status, "output": "why", "visibility": "visible"}

    assert results_json("passed", "failed", "passed", "skipped") == {
        "execution_time": 2,
        **dict.fromkeys(("output_format", "test_output_format", "test_name_format"), "text"),
        **{"visibility": "visible", "stdout_visibility": "hidden"},
        "tests": [row(1, 2, 2, "passed"), row(2, 0, 4, "failed"), row(3, 6, 6, "passed")],
    }


def test_weights_are_shared_out_to_the_last_point():
    even = results_json("passed", "passed", "passed", weight=10)
    assert [test["score"] for test in even["tests"]] == pytest.approx([1.67, 3.33, 5])
    uneven = results_json("skipped", "passed", "skipped", "passed", "passed", weight=10)  # 1.82, 3.64, 4.55: 0.01 more
    for results in (even, uneven):
        assert sum(test["score"] for test in results["tests"]) == pytest.approx(10, abs=1e-9)


def unpacked(archive, folder):
    """The files of a zip, which land in the folder."""
    with zipfile.ZipFile(archive) as archive:
        archive.extractall(folder)
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        return {entry.filename: entry for entry in archive.infolist()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    gradescope.package(folder, exercise_names(), ["seed a", "seed b"])
    return folder


def test_zips_hold_what_they_should_and_are_the_same_each_time(packages, tmp_path):
    student = unpacked(packages / "student.zip", tmp_path / "student")
    autograder = unpacked(packages / "autograder.zip", tmp_path / "autograder")
    for name in exercise_names():
        assert {f"exercises/{name}/{file}" for file in ("exercise.py", "README.md", "grader.py")} <= set(student)
        assert f"exercises/{name}/grader.py" in autograder
        assert f"exercises/{name}/exercise.py" not in autograder
    assert {"constraints.txt", "exercises/hidden_seeds.json"} <= set(autograder)
    secret = ("hidden", "stubs", "checking", "gradescope", "sage_ref", "master")
    assert not any(word in entry for entry in (*student, *autograder) for word in ("mutants", "test_exercis"))
    assert not any(word in entry for entry in student for word in secret)
    assert not any("SOLUTION" in (tmp_path / "student" / entry).read_text() for entry in student)
    for script in ("setup.sh", "run_autograder"):
        assert autograder[script].external_attr >> 16 & 0o111
        path = tmp_path / "autograder" / script
        subprocess.run(["bash", "-n", path], check=True)
        assert path.read_text().startswith("#!/usr/bin/env bash\n")
    gradescope.package(tmp_path, exercise_names(), ["seed a", "seed b"])
    for name in ("student.zip", "autograder.zip"):
        assert (tmp_path / name).read_bytes() == (packages / name).read_bytes()


def test_no_link_of_the_student_zip_is_dead(packages, tmp_path):
    """And only dead ones are gone: `files` may hold what a page links to."""
    student = unpacked(packages / "student.zip", tmp_path)
    pages = [entry for entry in student if entry.endswith(".md")]
    assert len(pages) == len(exercise_names()) + 1
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", (tmp_path / page).read_text()):
            assert "://" in target or (tmp_path / page).parent.joinpath(target).exists(), (page, target)
    text = "[a](../b/c.md), [d](e.md), [`f`](https://example.org), [g](#h)"
    kept = "[a](../b/c.md), d, [`f`](https://example.org), [g](#h)"
    assert gradescope.without_dead_links("exercises/a.md", text, {"b/c.md"}) == kept
    assert gradescope.without_dead_links("exercises/a.py", text, set()) == text


def run_module(folder, *arguments, path):
    environment = os.environ | {"PYTHONPATH": f"{path}:{path / 'kernels'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_student_zip_grades_itself(packages, tmp_path):
    """Outside of the repository: every grader loads, a stub earns 0 and says why, a master dropped in everything."""
    unpacked(packages / "student.zip", tmp_path)
    solved = {name for name in exercise_names() if name[:2] in ("01", "09")}
    for name in solved:
        shutil.copy(ROOT / name / "master.py", tmp_path / "exercises" / name / "exercise.py")
    done = run_module(tmp_path, "exercises", "grade", "--all", "--json", "results.json", path=ROOT.parent)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result["exercise"] for result in results] == exercise_names()
    for result in results:
        assert result["score"] == (result["max_score"] if result["exercise"] in solved else 0), result
        assert result["seconds"] < 20
        if not result["score"]:
            assert any("not written yet: " in test["feedback"] for test in result["tests"])


def test_autograder_zip_grades_a_submission(tmp_path):
    """As run_autograder does, with nothing of the repository at hand."""
    source, submission, results = tmp_path / "source", tmp_path / "submission", tmp_path / "results.json"
    gradescope.package(tmp_path, ["01_block_quantizer"], ["seed a", "seed b"])
    unpacked(tmp_path / "autograder.zip", source)
    (source / "exercises" / "weights.json").write_text(json.dumps({"01_block_quantizer": 40}))
    submission.mkdir()
    shutil.copy(ROOT / "01_block_quantizer" / "master.py", submission / "exercise.py")
    done = run_module(source, "exercises.gradescope", str(submission), str(results), path=source)
    assert done.returncode == 0, done.stderr
    written = json.loads(results.read_text())
    assert written.keys() == results_json("passed").keys()
    assert sum(test["score"] for test in written["tests"]) == sum(test["max_score"] for test in written["tests"]) == 40


def test_a_grader_that_breaks_leaves_no_results(exercise, commands_use_it, monkeypatch, tmp_path, capsys):
    """Not even an earlier one's."""
    (tmp_path / "weights.json").write_text(json.dumps({exercise.name: 40}))
    for name, value in (("ROOT", tmp_path), ("exercise_names", lambda: [exercise.name])):
        monkeypatch.setattr(gradescope, name, value)
    (exercise / "exercise.py").write_text(stubs.read_master(exercise.name))
    results = tmp_path / "results.json"
    assert gradescope.grade_submission(tmp_path, results) == 0
    assert results.exists()
    spoil(exercise / "grader.py", "oracle = quantize(", "oracle = quantise(")
    assert gradescope.grade_submission(tmp_path, results) == 1
    shown = capsys.readouterr().out
    assert "THE GRADER BROKE" in shown
    assert "quantise" in shown
    assert not results.exists()
