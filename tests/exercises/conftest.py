"""What the tests of the exercises share: sandboxes for a whole session, since each loads torch, and small exercises."""

import pytest

from exercises.answers import Exercise
from exercises.grading import Sandboxes, grade
from exercises.isolation import RESOURCES, Limits
from exercises.task import Call, Task

SEEDS = (0, "hidden")


@pytest.fixture(scope="session")
def sandboxes():
    with Sandboxes() as sandboxes:
        sandboxes.of("visible")  # its folder for temporary files is the run's, not that of the first test
        yield sandboxes


@pytest.fixture(scope="session")
def quick():
    """Sandboxes that wait for a few seconds."""
    with Sandboxes(Limits(call_seconds=3, resources=RESOURCES | {"RLIMIT_CPU": 3})) as sandboxes:
        sandboxes.of("visible")
        yield sandboxes


class Small(Exercise):
    """An exercise without a folder. Its test calls `f` with numbers drawn, or what `calls` gives for a draw."""

    def __init__(self, master="def f(x): return 2 * x\n", calls=None, mistakes=(), triton=False, **facts):
        task, calls = Task(), calls or (lambda draw: [Call("f", (draw.normal(draw.integers(3, 9), 4),))])

        def drawn(draw):
            """THE HINT"""
            return calls(draw)

        task.test("the test", **facts)(drawn)
        self.name, self.stub, self.master, self.triton = "00_small", "", master, triton
        self.tests, self.mistakes, self.given = tuple(task.tests), mistakes, {}


@pytest.fixture
def graded(sandboxes):
    """Grade a text as a submission of a small exercise."""

    def graded(source, exercise=None, seeds=SEEDS, sandboxes=sandboxes):
        return grade(exercise or Small(), source.encode("utf-8", "surrogateescape"), seeds, sandboxes)

    graded.small = Small
    return graded
