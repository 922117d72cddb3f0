"""Small changes of a solution's text are recognised, and nothing is said that isn't so."""

import tomllib
from pathlib import Path

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
CHANGES = tomllib.loads(Path(__file__).with_name("small_changes.toml").read_text(encoding="utf-8"))["changes"]
BRACKETS = "The parts are right, but brackets are in the wrong place."


def hint(old, new, gap=GAP):
    with pytest.raises(NotYetError) as caught:
        fill_in("attend", mistaken(gap, Mistake(old, new)), gaps={"attend": gap})
    return caught.value.args[0].splitlines()[-1].removeprefix("Hint: ")


@pytest.mark.parametrize(("old", "new", "said"), CHANGES)
def test_a_small_change_is_recognised(old, new, said):
    assert hint(old, new) == said


def sums_of_products(a, b):
    return (a * b).sum(-1, keepdim=True)


def test_a_sum_that_takes_the_last_factor_alone_is_recognised():
    gap = Gap(sums_of_products, lambda: [(torch.ones(2, 3), torch.ones(2, 3))])
    assert hint("(a * b)", "a * b", gap) == BRACKETS


def test_what_no_small_change_explains_gets_none():
    assert hint("p @ v / p.sum(-1, keepdim=True)", "p.cumsum(0)[:, :2]") == "Not right yet: o = p.cumsum(0)[:, :2]"
