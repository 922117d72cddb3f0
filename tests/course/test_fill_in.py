"""Cells to fill in: what is right passes, what is wrong meets the hint that was written for it."""

import importlib
import json
import math
import pkgutil
import re
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from sage_course import gaps as engine
from sage_course import hints
from sage_course import lessons as solutions
from sage_course.check import NotYetError, fill_in, lesson, yours
from sage_course.gaps import Gap, Mistake, difference, mistaken, plain, source
from sage_lab.records import REPOSITORY


def lessons():
    """The gaps of every lesson; without Triton, of those that don't need it."""
    found = {}
    for module in pkgutil.iter_modules(solutions.__path__):
        try:
            found[module.name] = importlib.import_module(f"{solutions.__name__}.{module.name}").GAPS
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
    return found


LESSONS = lessons()
EVERY_GAP = [pytest.param(gap, id=f"{lesson} {name}") for lesson, gaps in LESSONS.items() for name, gap in gaps.items()]


def notebooks():
    """The cells' texts of every notebook."""
    for path in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        yield ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


@pytest.mark.parametrize("gap", EVERY_GAP)
def test_every_mistake_meets_its_own_hint(gap):
    expected = [outcome.result for outcome in gap.expected]
    for mistake in gap.mistakes:
        known = partial(engine.results_with, gap)  # each program runs once: what it gives is kept
        possible = engine.possible_mistakes(gap, engine.edited(gap.text, [mistake]))
        report = engine.compare(known(mistake), expected, possible, known, difference)
        assert hints.hint(gap, report, by_line=False) == f"Hint: {mistake.hint}", mistake


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_reader_who_writes_the_solution_is_right(lesson, capsys):
    for name, gap in LESSONS[lesson].items():
        assert len(gap.mistakes) >= 3, name
        again = mistaken(gap, Mistake(source(gap.solution), source(gap.solution), ""))
        assert plain(fill_in(name, again, gaps=LESSONS[lesson])) is plain(again)
        assert capsys.readouterr().out == f"{name}: right.\n"


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_notebook_has_every_gap_and_folds_its_solution(lesson):
    """A cell with the function, `...` in it; after it the solution's text, folded."""
    (cells,) = (cells for cells in notebooks() if any(f'lesson("{lesson}")' in text for text in cells))
    for name, gap in LESSONS[lesson].items():
        (place,) = (number for number, text in enumerate(cells) if f'fill_in("{name}", ' in text)
        head = source(gap.solution).splitlines()[0]
        assert head in cells[place], f"{name} begins with {head}"
        assert "..." in cells[place]
        folded = re.search(r"<details>.*?```python\n(.*?)```", cells[place + 1], re.DOTALL)
        assert folded, f"the solution of {name} is folded into the cell after it"
        assert folded[1] == source(gap.solution), name


def doubled(x):
    return 2 * x


def added(x):
    return x + x


def summed(x):
    return x.cumsum(0)


def unfinished(x):
    return ... * x


def last(x):
    return x[..., -1]


GAPS = {"doubled": Gap(doubled, lambda: [(torch.ones(2),), (torch.arange(3.0),)], (Mistake("2 * x", "x", "Twice."),))}


def test_a_right_function_is_given_back_and_a_gap_replaced(capsys):
    assert fill_in("doubled", added, gaps=GAPS).__wrapped__ is added
    assert fill_in("doubled", unfinished, gaps=GAPS) is doubled
    assert capsys.readouterr().out.splitlines() == [
        "doubled: right.",
        "doubled: still to fill in. From here on the course's solution is used.",
    ]
    with pytest.raises(ValueError, match=r"name: expected one of \['doubled'\], got 'tripled'"):
        fill_in("tripled", added, gaps=GAPS)


OWN_PSI = """\
def psi(x):
    largest = F.relu(x.abs()).max()
    s = largest / sqrt(127 * 127)
    return s, torch.round(x / torch.where(s > 0, s, 1.0)).to(torch.int8)
"""
OWN_BLOCKS = """\
def psi_of_blocks(x, block):
    scales, integers = zip(*[psi(tile) for tile in x.split(block)])
    return torch.stack(scales), torch.cat(integers)
"""


def test_a_right_function_comes_back_in_a_later_notebook(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAGE_REF_YOURS", str(tmp_path))
    gaps, names = LESSONS["int8_quantization"], {"torch": torch, "F": torch.nn.functional, "sqrt": math.sqrt}
    for name, text in {"psi": OWN_PSI, "psi_of_blocks": OWN_BLOCKS}.items():
        assert yours("int8_quantization", name) is gaps[name].solution
        lesson("int8_quantization")(name, engine.defined(text, "a notebook's cell", names)[name])
        assert source(yours("int8_quantization", name)).endswith(text)
    assert plain(yours("int8_quantization", "psi_of_blocks")).__globals__["F"] is torch.nn.functional
    capsys.readouterr()
    for text in ("def psi(", OWN_PSI.replace("127", "128"), "\0"):
        (tmp_path / "int8_quantization" / "psi.py").write_text(text)
        assert yours("int8_quantization", "psi") is gaps["psi"].solution
    assert capsys.readouterr().out == 3 * "psi: the course's, because yours is saved, but not right here.\n"


def test_an_ellipsis_that_is_an_index_is_no_gap():
    assert engine.has_gap(source(unfinished))
    assert not engine.has_gap(source(last))


def test_what_was_expected_and_found_is_shown_without_a_hint_if_none_fits():
    with pytest.raises(NotYetError) as caught:
        fill_in("doubled", summed, gaps=GAPS)
    shown = ["1 of 2 entries differ, the first at [0]: expected 2", f"{' ' * 41}found    1"]
    assert caught.value._render_traceback_() == ["doubled: not yet.", *shown]


COLUMN, INTEGERS = torch.tensor([[1.0], [0.0], [-2.0]]), torch.tensor([3, -100, 127])


@pytest.mark.parametrize(
    ("found", "expected", "hint"),
    [
        (None, COLUMN, "It returns None"),
        (COLUMN, (COLUMN, COLUMN), "The number of results is wrong"),
        ((INTEGERS, COLUMN, 1), (COLUMN, INTEGERS, 1), "The results are in the wrong order"),
        ((COLUMN, COLUMN[:, 0]), (COLUMN, COLUMN), "An axis of size 1 is lost"),
        (COLUMN, COLUMN[:, 0], "There is an axis of size 1 too many"),
        (COLUMN.mT, COLUMN, "Rows and columns are exchanged"),
        (COLUMN.sum(), COLUMN, "An axis is lost"),
        (COLUMN - COLUMN[:, 0], COLUMN, "A row and a column made a matrix"),
        ((INTEGERS + INTEGERS).to(torch.int8), INTEGERS + INTEGERS, "An int8 ends at 127"),
        (INTEGERS.float(), INTEGERS.to(torch.int8), "These are floats"),
        (COLUMN.int(), COLUMN / 2, "These are integers"),
        (COLUMN / COLUMN, torch.ones(3, 1), "NaN comes from 0 / 0"),
        (1 / COLUMN, COLUMN, "Infinity comes from"),
        (-COLUMN, COLUMN, "The sign is wrong"),
        (127 / 128 * COLUMN, COLUMN, "Everything is 0.9922 times what it should be."),
        (INTEGERS - 1, INTEGERS, "Only the rounding differs"),
        (INTEGERS > 0, INTEGERS < 0, ""),
        (lambda: COLUMN + torch.ones(2, 1), COLUMN, "These shapes do not fit"),
        (lambda: COLUMN @ COLUMN, COLUMN, "The inner sizes differ"),
        (lambda: INTEGERS.clone().add_(0.5), COLUMN, "`x += y` keeps the dtype"),
        (lambda: COLUMN.int() @ COLUMN.mT, COLUMN, "Two dtypes do not fit"),
        (lambda: COLUMN.max(-1) / 127, COLUMN, "`max` along an axis"),
        (lambda: COLUMN.max((0, 1)), COLUMN, "`max` takes a single axis"),
        (lambda: max(COLUMN, -COLUMN), COLUMN, "Python's `max`"),
        (lambda: INTEGERS / None, COLUMN, "Something here is None"),
    ],
)
def test_a_result_shows_what_is_wrong_with_it_even_if_no_mistake_is_known(found, expected, hint):
    gap = Gap(doubled, lambda: [()], run=lambda function: function())
    found = gap.outcome(found, ()).result if callable(found) else found
    assert hints.about_result(found, expected).text.startswith(hint)


def without_mean(x, weight):
    total = weight.sum()
    share = weight / total
    mean = (share * x).sum()
    return mean, x - mean


WITHOUT_MEAN = Gap(
    without_mean,
    lambda: [(torch.arange(4.0), torch.tensor([1.0, 2.0, 3.0, 2.0]))],
    (Mistake(" / total", "", "Shares add up to one."), Mistake("x - mean", "x", "The mean is not taken away.")),
)
TOTAL, SHARE, RETURN = ("weight.sum()", "..."), ("weight / total", "weight"), ("x - mean", "x")


def said(capsys, gap, *edits):
    """What a reader is told who wrote the solution with these edits, line by line."""
    written = mistaken(gap, Mistake(*edits[0], more=edits[1:]))
    try:
        fill_in("g", written, gaps={"g": gap})
        return capsys.readouterr().out.splitlines()
    except NotYetError as error:
        return str(error).splitlines()


WRONG = ["Not right yet: share = weight", "Not right yet: return (mean, x)", "Hint: Shares add up to one."]


@pytest.mark.parametrize(
    ("edits", "what", "more"),
    [
        ([TOTAL], ": total", []),  # as the notebook has it, nothing filled in: nothing to praise
        ([TOTAL, ("weight / total", "(1 / total) * weight")], ": total; the rest is right", []),
        ([TOTAL, SHARE, RETURN], ": total", WRONG),
        ([TOTAL, ("mean = (", "m = (")], "", []),  # too different to try its lines
    ],
)
def test_lines_are_tried_before_all_are_filled_in(capsys, edits, what, more):
    first = f"g: still to fill in{what}. From here on the course's solution is used."
    assert said(capsys, WITHOUT_MEAN, *edits) == [first, *more]


def test_a_number_of_the_notebook_in_place_of_an_argument_is_named():
    gap = Gap(without_mean, WITHOUT_MEAN.trials)
    written = engine.defined(source(without_mean).replace("weight.sum()", "size"), "a cell", {"size": 9.0})[
        "without_mean"
    ]
    with pytest.raises(NotYetError, match="It reads `size` of the notebook, the same for all inputs."):
        fill_in("g", written, gaps={"g": gap})


def test_later_cells_get_the_solutions_result_where_a_right_one_differs_by_rounding():
    def in_double(x):
        return 2.0000001 * x.double()

    def right_in_the_trials_alone(x):
        return 2 * x if x.numel() < 10 else x

    def calls(function, x):
        return function(x)

    own = fill_in("doubled", in_double, gaps=GAPS)
    assert own(torch.ones(2)).equal(torch.tensor([2.0, 2.0]))
    assert own(torch.ones(2)).dtype == torch.float32
    assert fill_in("doubled", right_in_the_trials_alone, gaps=GAPS)(torch.ones(10)).equal(torch.ones(10))
    with_function = {"g": Gap(lambda function, x: function(x), lambda: [(abs, -1.0)])}
    assert fill_in("g", calls, gaps=with_function) is calls  # a second call could have effects


def test_two_mistakes_and_a_change_of_an_input_are_found(capsys):
    assert said(capsys, WITHOUT_MEAN, SHARE, RETURN)[3:] == WRONG
    assert said(capsys, WITHOUT_MEAN, (" * x", " / x"))[-1] == "Hint: `/` stands where a different operator belongs."
    in_place = said(capsys, WITHOUT_MEAN, ("mean = (", "x += 1\n    mean = ("))
    assert in_place[-1].startswith("Hint: It changes an input in place")


PROGRAM = """\
@triton.jit
def double(x_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    x = tl.load(x_ptr + place)
    y = 2 * x
    tl.store(x_ptr + place, y)
"""


def test_a_triton_programs_lines_are_tried_and_its_failure_shows_the_line(capsys):
    triton = pytest.importorskip("triton")
    names = {"triton": triton, "tl": triton.language, "__name__": "a lesson"}
    double = engine.defined(PROGRAM, "a lesson", names)["double"]
    gap = Gap(double, lambda: [(torch.arange(16.0),)], (), lambda program, x: program[(1,)](x, N=16) or x)
    lines = said(capsys, gap, ("tl.arange(0, N)", "..."), ("2 * x", "3 * x"))
    assert lines[1:] == ["Not right yet: y = 3 * x", "Hint: `3` stands where something different belongs."]
    assert said(capsys, gap, ("2 * x", "2 * z"))[2:] == [
        "found    NameError: name 'z' is not defined",
        "in the line: y = 2 * z",
        "Hint: This name has no value here. Is it spelt as in the function's first line?",
    ]
    if triton.knobs.runtime.interpret:  # on a GPU the first does not compile; the second reads other memory
        assert said(capsys, gap, ("2 * x", "x\n    for _ in range(0, x_ptr): y += x"))[2:] == [
            "found    TypeError: range: expected an integer, got a value of type pointer<fp32>",
            "in the line: for _ in range(0, x_ptr): y += x",
            "Hint: That is an address, not a number: is a `tl.load` missing?",
        ]
        assert said(capsys, gap, ("tl.load(x_ptr + place)", "tl.load(x_ptr + place - 1)"))[2:] == [
            "found    IndexError: tl.load: expected places in the program's tensors, got 1 outside all of them",
            "in the line: x = tl.load(x_ptr + place - 1)",
            "Hint: The term `1` does not belong here.",
        ]


def test_a_function_that_fails_is_told_why_and_where_and_may_be_a_known_mistake():
    def halved(x):
        x = x + 0
        return x / {}[2]

    gaps = {"doubled": replace(GAPS["doubled"], mistakes=(Mistake("2 * x", "x / {}[2]", "Not a table."),))}
    with pytest.raises(NotYetError) as caught:
        fill_in("doubled", halved, gaps=gaps)
    said = caught.value._render_traceback_()
    assert said[1:] == [
        "expected float32 [2]: 2, 2",
        "found    KeyError: 2",
        "in the line: return x / {}[2]",
        "Hint: Not a table.",
    ]


def test_a_mistake_made_with_another_gets_the_hint_of_the_trial_that_is_shown():
    def times_x(x):
        return x if len(x) == 2 else 5 * x

    with pytest.raises(NotYetError, match="Hint: Twice."):
        fill_in("doubled", times_x, gaps=GAPS)


def test_large_integers_that_differ_are_shown_with_all_digits():
    assert difference(torch.tensor([51511300]), torch.tensor([51511301])).expected == "51511301"


def test_a_function_that_overwrites_what_it_gets_is_refused_and_spoils_no_trial():
    def in_place(x):
        return x.mul_(2)

    def shifted(x):
        return x.add_(1)

    with pytest.raises(NotYetError) as caught:
        fill_in("doubled", in_place, gaps=GAPS)
    assert str(caught.value).splitlines()[1:] == [hints.IN_PLACE]
    with pytest.raises(NotYetError, match="expected 0\n") as caught:  # of the second trial's own input
        fill_in("doubled", shifted, gaps=GAPS)
    assert str(caught.value).endswith(hints.IN_PLACE)


class Odd:
    """An answer or a result with code of its own."""

    def __call__(self, x):
        return 2 * x

    def __eq__(self, other):
        raise ArithmeticError("no")

    def __repr__(self):
        raise ArithmeticError("no")


class Unprintable(Exception):
    def __str__(self):
        raise ArithmeticError("no")


def raising(error):
    def raise_it(x):
        raise error

    return raise_it


@pytest.mark.parametrize(
    "answer",
    [
        partial(torch.mul, 2),
        lru_cache(doubled),
        torch.no_grad()(doubled),
        Odd(),
        Odd().__call__,
        # as in fill_in("doubled",
        lambda x: 2 * x,
    ],
)
def test_whatever_can_be_called_is_tried(answer, tmp_path):
    own = fill_in("doubled", answer, gaps=GAPS, folder=tmp_path)
    assert answer in (own, getattr(own, "__wrapped__", None))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda x: Odd(), "found    a Odd that can't be shown"),
        (lambda x: (2 * x).to("meta"), "found    float32 [2], a tensor that is meta, which can't be compared"),
        (lambda x: (2 * x).to_sparse(), "found    float32 [2], a tensor that is sparse, which can't be compared"),
        (lambda x: "x" * 10**7, "found    '" + 799 * "x" + "..."),
        (raising(SystemExit(3)), "found    SystemExit: 3"),
        (raising(Unprintable()), "found    Unprintable: an error that can't be shown"),
        (partial(torch.mul, 3), "Hint: Everything is 1.5 times what it should be."),
    ],
)
def test_odd_answers_and_results_get_a_clear_word(answer, found):
    with pytest.raises(NotYetError) as caught:
        fill_in("doubled", answer, gaps=GAPS)
    assert found in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_what_is_no_function_is_refused():
    for answer in (7, None, torch.ones(2), "def doubled(x): return 2 * x"):
        with pytest.raises(NotYetError, match="expected a function"):
            fill_in("doubled", answer, gaps=GAPS)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.int8)),
        (torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8)),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int8)),
        (torch.tensor([1, 0]), torch.tensor([True, False])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
        ((torch.ones(2),), (torch.ones(2), torch.ones(2))),
        ((torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))),
        (1.001, 1.0),
        (1, True),
        (None, torch.ones(1)),
    ],
)
def test_these_differ(found, expected):
    assert difference(found, expected) is not None
    assert difference(expected, expected) is None


def test_rounding_is_no_difference():
    x = torch.linspace(-3, 3, 50)
    assert difference(x * (1 + 1e-6), x) is None
    assert difference(x * (1 + 1e-3), x) is not None


def test_numbers_of_all_kinds_may_stand_for_one_another():
    for found in (torch.tensor(0.1), torch.tensor(0.1).double(), np.float32(0.1), np.float64(0.1), np.array(0.1)):
        assert difference(found, 0.1) is None
    for found in (torch.tensor(3), torch.tensor(3, dtype=torch.int8), np.int64(3), 3.0):
        assert difference(found, 3) is None
    for found in (0.1, np.float64(0.1), torch.tensor(0.1).double()):
        assert difference(found, torch.tensor(0.1)) is None
    assert difference(torch.tensor([0.1]), 0.1).is_form
    assert difference(0.1, torch.tensor(0.1), same_dtype=True).is_form
    assert not difference(0.2, 0.1).is_form


def test_a_mistake_that_does_not_fit_the_solution_is_an_error():
    with pytest.raises(ValueError, match="expected '5' once in the solution, found it 0 times"):
        mistaken(GAPS["doubled"], Mistake("5", "6", ""))
