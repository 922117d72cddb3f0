"""Fixtures that the tests of the commands share: a text to train on, and a checkpoint of a run on it."""

import shutil

import pytest
from sage_lab.__main__ import main


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The current folder, with text.txt in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A checkpoint of two steps on text.txt, which nobody changes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    shape = "--context 16 --layers 3 --width 32 --heads 4 --tokens 64 --tokens-per-step 32 --warmup 1"
    options = f"--tokens-per-pass 32 --validation-sequences 2 --device cpu --folder {folder}/runs"
    main(["pretrain", "--corpus", f"{folder}/text.txt", *shape.split(), *options.split()])
    (checkpoint,) = (folder / "runs").glob("*.pt")
    return checkpoint


@pytest.fixture
def checkpoint(text, trained):
    """run.pt in `text`: two steps on its text.txt."""
    return shutil.copy(trained, text / "run.pt")
