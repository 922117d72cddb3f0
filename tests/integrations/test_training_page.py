"""The page "SageBwd in your training loop": every snippet is run as it stands."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sage_ref

PAGE = (Path(__file__).parents[2] / "notebooks/book/training_loop.md").read_text(encoding="utf-8")
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
SNIPPETS = {name: re.search(r"```python\n(.*?)```", text, re.DOTALL)[1] for name, text in SECTIONS.items()}
SETUP = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
PROCESSES = ("DDP", "FSDP2")
GPU = ("CUDA graphs, by torch.compile", "CUDA graphs, by make_graphed_callables")
EXACT = SimpleNamespace(sdpa=contextlib.nullcontext)
RUN = """
import sys, torch
torch.manual_seed(0)
names = {}
exec(sys.stdin.read(), names)
whole = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in names["model"].parameters())
torch.save([x.detach() for x in whole], sys.argv[1])
torch.distributed.destroy_process_group()
"""


def trained(snippet, library=sage_ref):
    """The parameters after a snippet, with the library or what stands in for it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    names = {}
    exec(SETUP, names)  # the page's own words
    names["sage_ref"] = library
    exec(snippet, names)
    return [x.detach() for x in names["model"].parameters()]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Compiled for the CPU by aot_eager: the default would translate the reference to C++, for minutes."""
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend("inductor")


@pytest.mark.filterwarnings("ignore:sage_ref. backend='auto'", "ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.gpu] * (x in GPU)) for x in SNIPPETS if x not in PROCESSES]
)
def test_a_snippet_trains_with_int8_nearly_as_without(name):
    ours, exact = trained(SNIPPETS[name]), trained(SNIPPETS[name], EXACT)
    assert any(not torch.equal(x, y) for x, y in zip(ours, exact, strict=True))
    assert all((x - y).abs().max() < 0.02 for x, y in zip(ours, exact, strict=True))


@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_train_one_model_with_int8(name, tmp_path):
    results = {}
    for library in ("", "import contextlib\nsage_ref.sdpa = contextlib.nullcontext\n"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        place = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        files = [tmp_path / f"{len(results)}_{rank}.pt" for rank in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", RUN, str(file)], text=True, stdin=subprocess.PIPE,
                stderr=subprocess.PIPE, env=place | {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        for process in processes:
            process.stdin.write(SETUP + library + SNIPPETS[name])
            process.stdin.close()
        errors = []
        for process in processes:
            with process:  # closes its pipes
                errors.append(process.stderr.read())
        assert errors == [""] * 2
        assert [x.returncode for x in processes] == [0] * 2
        first, second = (torch.load(file) for file in files)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        results[library] = first
    ours, exact = results.values()
    assert any(not torch.equal(x, y) for x, y in zip(ours, exact, strict=True))
    assert all((x - y).abs().max() < 0.02 for x, y in zip(ours, exact, strict=True))
