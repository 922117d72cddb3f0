"""The second variant of each exercise is another exercise: one year's answers don't earn the other's points."""

import json
from types import SimpleNamespace

import pytest
from sage_course.gaps import defined

from exercises import __main__ as command_line
from exercises import exercise_names, stubs, variants
from exercises.answers import Exercise
from exercises.checking import outcomes_of
from exercises.grading import grade, table

FIRST = "01_block_quantizer"


def answers(source, calls, deadline):
    """Return what a sandbox does, from this process: an answer is one of our own masters."""
    functions = defined(source.decode(), f"<an answer: {hash(source)}>", {"__name__": "answer"})
    return [outcomes_of(functions, of_test) for of_test in calls], ""


HERE = SimpleNamespace(answers=answers, open=lambda: None, limits=SimpleNamespace(exercise_seconds=0))


def points(exercise, source):
    result = grade(exercise, source.encode(), [0], HERE)
    return result.score, table(result)


@pytest.mark.parametrize("name", exercise_names())
def test_an_answer_earns_the_points_of_its_own_variant(name):
    for file in variants.replacements(name):
        variants.read_text(name, file, 2)
    first, second = Exercise(name), Exercise(name, 2)
    score, shown = points(second, second.master)
    assert score == second.points, shown
    for exercise, other in ((first, second), (second, first)):
        exercise.mistakes = ()  # which the hints need, and the points don't
        score, shown = points(exercise, other.master)
        assert score <= exercise.points / 2, shown


def test_a_replacement_that_no_longer_applies_is_named(tmp_path, monkeypatch, capsys):
    """So is an exercise that has no second variant."""
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    folder = tmp_path / FIRST
    folder.mkdir()
    assert command_line.main(["stubs", "--variant", "2"]) == 2
    assert f"{FIRST}: expected a variant.toml for a second variant, got none" in capsys.readouterr().err
    (folder / "master.py").write_text("x = x\n")
    for replacement, expected in (("'z', ''", "1 times 'z'"), ("'x', 'z', 3", "3 times 'x'")):
        (folder / "variant.toml").write_text(f"'master.py' = [[{replacement}]]\n")
        with pytest.raises(ValueError, match=f"{FIRST}/variant.toml: expected {expected} in master.py, got"):
            variants.read_text(FIRST, "master.py", 2)


def test_from_stubs_to_a_class_in_the_second_variant(tmp_path, monkeypatch, capsys):
    """A stub of the first variant gives way, what a student wrote doesn't; a report is of one variant."""
    monkeypatch.setattr(stubs, "ROOT", tmp_path / "student")
    folder, report = tmp_path / "student" / FIRST, tmp_path / "report.json"
    folder.mkdir(parents=True)
    (folder / "master.py").touch()
    for variant, written in ((1, ["exercise.py"]), (2, ["exercise.py", "README_2.md"]), (2, [])):
        assert [path.name for path in stubs.write([FIRST], variant)] == written
    (folder / "exercise.py").write_text(variants.read_text(FIRST, "master.py", 2))
    arguments = ["grade", "01", "--class", str(tmp_path), "--json", str(report), "--seed", "0", "--trust"]
    assert command_line.main([*arguments, "--variant", "2"]) == 0
    result = json.loads(report.read_text())["students"]["student"]
    assert (result["score"], result["exercises"][0]["exercise"]) == (8, f"{FIRST}, variant 2")
    assert command_line.main(arguments) == 2  # the first variant
    assert "got another" in capsys.readouterr().err
