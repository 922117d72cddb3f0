"""Right answers pass, in every form in which students write them: right.toml has them.

Each is graded on the visible inputs. On 25 hidden ones as well, and the slow ones, too: EXERCISES_SEEDS=25.
"""

import os
import tomllib
from pathlib import Path

import pytest
from sage_course.gaps import Mistake, edited

from exercises import exercise_names
from exercises.answers import load_exercise
from exercises.grading import grade, table
from exercises.isolation import Limits, Sandbox

RIGHT = tomllib.loads(Path(__file__).with_name("right.toml").read_text(encoding="utf-8"))
SEEDS = [0, *map(str, range(int(os.environ.get("EXERCISES_SEEDS", "0"))))]
EDITS = [
    (number, facts["name"])
    for number, answers in RIGHT["edits"].items()
    for facts in answers
    if not facts.get("slow") or len(SEEDS) > 1
]
FORMS = [(number, name) for name, numbers in RIGHT["of"].items() for number in numbers]


def exercise_of(number):
    return load_exercise(next(name for name in exercise_names() if name.startswith(number)))


def in_form(exercise, name):
    """Return the master of an exercise in another form."""
    form = RIGHT["forms"][name]
    text = form.get("before", "") * form.get("times", 1) + exercise.master
    text += form.get("after", "").replace("CONTROL", "\x01" * form.get("control", 0))
    text += "".join(form["of_each"].format(name=x) for x in sorted(exercise.tested)) if "of_each" in form else ""
    return text.replace("\n", form.get("line_end", "\n")).encode()


def with_edits(exercise, name):
    (facts,) = (x for x in RIGHT["edits"][exercise.name[:2]] if x["name"] == name)
    first, *more = facts["edits"]
    return edited(exercise.master, [Mistake(*first, more=tuple(map(tuple, more)))]).encode()


@pytest.fixture(scope="module")
def patient():
    """A sandbox that gives an exercise as much more time as there are more seeds."""
    with Sandbox(Limits(call_seconds=100, exercise_seconds=600.0 * len(SEEDS))) as sandbox:
        yield sandbox


@pytest.mark.parametrize(("number", "name"), EDITS + FORMS)
def test_right_answer_earns_full_points(patient, number, name):
    exercise = exercise_of(number)
    make = in_form if (number, name) in FORMS else with_edits
    result = grade(exercise, make(exercise, name), SEEDS, patient)
    assert result.score == result.max_score, f"{table(result)}\n{result.error}"
