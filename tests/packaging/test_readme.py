"""README.md: every command in it is tried in a clean clone, and every snippet of Python is run."""

import re
import subprocess
import sys

import pytest
import torch
from sage_lab.records import REPOSITORY
from torch import nn

import sage_ref

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = {  # as README has them -> how this test tries them: what takes minutes is asked what it would do
    "git clone": ["git", "status", "--short"],
    "make lab": ["make", "--dry-run", "lab"],
    "make test": ["make", "--dry-run", "test"],
    "make book": ["make", "--dry-run", "book"],
    "pip install": [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-build-isolation", "."],
    "pip wheel --no-deps .": [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."],
    "conda env create --file environment.yml": ["test", "-f", "environment.yml"],
    "python -m exercises grade NAME": [sys.executable, "-m", "exercises", "grade", "03"],
    "python -m sage_lab NAME": [sys.executable, "-m", "sage_lab", "bench", "--help"],
}


def commands():
    """Every command of the page, without options that hold an address."""
    lines = [line.partition("#")[0] for kind, block in BLOCKS if not kind for line in block.splitlines()]
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE))
    for line in (*lines, *(" ".join(code.split()) for code in inline)):
        if found := re.match(r"(git clone|pip install|(?:make|pip|conda|python -m) [^\"]*)", line):
            yield found[1].strip()


def test_each_command_works_in_a_clean_clone(tmp_path):
    assert set(commands()) <= set(COMMANDS)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    for command in COMMANDS.values():
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.filterwarnings("ignore:sage_ref. backend='auto'")
def test_each_snippet_of_python_runs(monkeypatch):
    monkeypatch.setattr(nn.Module, "cuda", lambda module: module)
    embed, head = nn.Embedding(10, 64), nn.Linear(64, 1)

    def model(tokens):
        x = embed(tokens).unflatten(-1, (2, 32)).transpose(1, 2)
        return head(nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(-2)).mean()

    q, k, v = (torch.randn(1, 12, 256, 128, requires_grad=True) for _ in range(3))
    names = {"model": model, "tokens": torch.arange(10)[None], "query": q, "key": k, "value": v, "sage_ref": sage_ref}
    snippets = [block for kind, block in BLOCKS if kind == "python"]
    for snippet in snippets:
        exec(snippet, names)
    assert len(snippets) == 2
    assert embed.weight.grad.abs().sum() > 0
    assert names["output"].shape == q.shape
