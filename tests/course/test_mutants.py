"""Small changes of a solution's text are recognised, and nothing is said that isn't so."""

import pytest
import torch
from sage_course.check import NotYetError, fill_in
from sage_course.gaps import Gap, Mistake, mistaken


def attend(s, v, c):
    total, largest = torch.zeros(3), s.amax(-1, keepdim=True)
    p = torch.exp(c * (s - largest))
    for row in p:
        total += row[:3] if len(row) > 2 else row
    o = p @ v / p.sum(-1, keepdim=True)
    return o, total


def trials():
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(*x, generator=generator) for x in ((4, 5), (5, 2))) + (c,) for c in (0.5, 0.25)]


GAP = Gap(attend, trials, ())
SHAPES = "These shapes do not fit together. Is a `keepdim=True` or a `[:, None]` missing?"
MAX = "`max` along an axis returns values and places, `amax` the values alone."
BRACKETS = "The parts are right, but brackets are in the wrong place."


def hint(*edits, gap=GAP):
    with pytest.raises(NotYetError) as caught:
        fill_in("attend", mistaken(gap, Mistake(*edits[0], more=edits[1:])), gaps={"attend": gap})
    return caught.value.args[0].splitlines()[-1].removeprefix("Hint: ")


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([("return o, total", "return total, o")], "These are in the wrong order: `(total, o)`."),
        ([("s.amax(-1, keepdim=True)", "s.abs().amax(-1, keepdim=True)")], "`.abs` does not belong here."),
        ([("s - largest", "largest - s")], "The two sides of `largest - s` are exchanged."),
        ([("s.amax(-1", "s.amax(0")], "`s.amax(0, keepdim=True)` goes along the wrong axis."),
        ([("c * (s", "(s")], "The factor `c` is missing."),
        ([("c * (s", "2 * c * c * (s")], "The factor `2 * c` does not belong here."),
        ([(" / p.sum(-1, keepdim=True)", "")], "A divisor is missing."),
        ([("s - largest", "s")], "The term `largest` is missing."),
        ([(", keepdim=True)\n    p", ")\n    p")], "`keepdim=True` is missing."),
        ([("s - largest", "s + largest")], "`+` stands where a different operator belongs."),
        ([("amax", "amin")], "`amin` stands where something different belongs."),
        ([("amax", "max")], f"`max` stands where something different belongs. {MAX}"),
        ([("s - largest", "s - 3 * v.std(0)")], SHAPES),
        ([("row[:3]", "row[:2]")], "`2` stands where something different belongs."),
        ([("c * (s - largest)", "c * s - largest")], BRACKETS),
        ([("s - largest", "s - 3 * s.std()")], "Not right yet: p = torch.exp(c * (s - 3 * s.std()))"),
    ],
)
def test_a_small_change_is_recognised(edits, said):
    assert hint(*edits) == said


def sums_of_products(a, b):
    return (a * b).sum(-1, keepdim=True)


def test_a_sum_that_takes_the_last_factor_alone_is_recognised():
    gap = Gap(sums_of_products, lambda: [(torch.ones(2, 3), torch.ones(2, 3))])
    assert hint(("(a * b)", "a * b"), gap=gap) == BRACKETS


def test_what_no_small_change_explains_gets_none():
    assert hint(("p @ v / p.sum(-1, keepdim=True)", "p.cumsum(0)[:, :2]")) == "Not right yet: o = p.cumsum(0)[:, :2]"
