"""What the tests of the exercises share: one sandbox for all of a process, since its server takes seconds to start."""

import contextlib
from pathlib import Path

import pytest

from exercises import __main__ as command_line
from exercises import checking, gradescope
from exercises.isolation import Sandbox


@pytest.fixture(scope="session")
def sandbox():
    with Sandbox() as sandbox:
        yield sandbox
        server = sandbox.server.pid
    assert not sandbox.folder.exists()
    assert not Path(f"/proc/{server}").exists()


@pytest.fixture
def commands_use_it(sandbox, monkeypatch):
    """What a command starts and ends is the sandbox that runs already."""
    for module in (checking, command_line, gradescope):
        monkeypatch.setattr(module, "Sandbox", lambda: contextlib.nullcontext(sandbox))
