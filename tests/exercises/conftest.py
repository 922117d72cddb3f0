"""What the tests of the exercises share: sandboxes for a whole session, since each loads torch, and small exercises."""

import pytest

from exercises.answers import Exercise
from exercises.grading import grade
from exercises.isolation import Limits, Sandbox
from exercises.task import Call, Task

SEEDS = (0, "hidden")


@pytest.fixture(scope="session")
def sandbox():
    """A sandbox with time enough for a busy machine."""
    with Sandbox(Limits(call_seconds=100, exercise_seconds=600)) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def quick():
    """A sandbox that waits for some seconds, and gives out little memory."""
    with Sandbox(Limits(call_seconds=4, exercise_seconds=8, memory=2**29, processes=8)) as sandbox:
        yield sandbox


class Small(Exercise):
    """An exercise without a folder. Its test calls `f` with numbers drawn, or what `calls` gives for a draw."""

    def __init__(self, master="def f(x): return 2 * x\n", calls=None, mistakes=(), triton=False, **facts):
        task, calls = Task(), calls or (lambda draw: [Call("f", (draw.normal(draw.integers(3, 9), 4),))])

        def drawn(draw):
            """THE HINT"""
            return calls(draw)

        task.test("the test", **facts)(drawn)
        self.name, self.variant, self.stub, self.master = "00_small", 1, "", master
        self.triton, self.capstone = triton, ""
        self.tests, self.mistakes = tuple(task.tests), mistakes


@pytest.fixture
def graded(sandbox):
    """Grade a text as a submission of a small exercise."""

    def graded(source, exercise=None, seeds=SEEDS, sandbox=sandbox):
        return grade(exercise or Small(), source.encode("utf-8", "surrogateescape"), seeds, sandbox)

    graded.small = Small
    return graded
