"""The page "SageBwd in your training loop": every snippet is run as it stands."""

import contextlib
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from process_cases import run_together
from rooms import REPOSITORY
from torch import distributed

import sage_ref

PAGE = (REPOSITORY / "notebooks/book/training_loop.md").read_text(encoding="utf-8")
SETUP, *SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SNIPPETS = dict(zip(re.findall(r"\n## (.*)", PAGE), SNIPPETS, strict=True))  # one in each section
PROCESSES = ("DDP", "FSDP2")
GPU = ("CUDA graphs, by torch.compile", "CUDA graphs, by make_graphed_callables")
EXACT = SimpleNamespace(sdpa=lambda **_: contextlib.nullcontext())


def trained(snippet, library=sage_ref):
    """The parameters after a snippet, with the library or what stands in for it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    names = {}
    exec(SETUP, names)  # the page's own words
    names["sage_ref"] = library
    exec(snippet, names)
    return [(x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for x in names["model"].parameters()]


def assert_nearly_alike(ours, exact):
    assert any(not torch.equal(x, y) for x, y in zip(ours, exact, strict=True))
    assert all((x - y).abs().max() < 0.02 for x, y in zip(ours, exact, strict=True))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Compiled for the CPU by aot_eager: the default would translate the reference to C++, for minutes.

    Short calls are in INT8 on every GPU.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sage_ref.integrations.pytorch.pays_from", lambda *_: 0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.filterwarnings(
    "ignore:sage_ref. backend='auto'",
    "ignore::DeprecationWarning",
    # Of make_graphed_callables, and of torch.compile, which captures an empty graph for its memory and hides that
    "ignore:The (AccumulateGrad node's stream does not match|CUDA Graph is empty):UserWarning",
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.gpu] * (x in GPU)) for x in SNIPPETS if x not in PROCESSES]
)
def test_a_snippet_trains_with_int8_nearly_as_without(name):
    assert_nearly_alike(trained(SNIPPETS[name]), trained(SNIPPETS[name], EXACT))


def trained_together(folder):
    """What this process finds of each snippet for processes, in a file. It joins one group for all of them."""
    distributed.init_process_group()
    distributed.init_process_group = lambda: None
    found = {name: [trained(SNIPPETS[name], library) for library in (sage_ref, EXACT)] for name in PROCESSES}
    torch.save(found, folder / f"{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


def test_two_processes_train_one_model_with_int8(tmp_path):
    run_together(tmp_path, trained_together, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, (ours, exact) in first.items():
        assert_nearly_alike(ours, exact)
        assert all(torch.equal(x, y) for x, y in zip(ours, second[name][0], strict=True))
