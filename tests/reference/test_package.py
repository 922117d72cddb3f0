"""The package as installed: what importing it needs, pins, the command line, and what the reference costs."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from sage_lab.__main__ import COMMANDS, main
from sage_lab.records import REPOSITORY
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_ref.attention import attention_backward, attention_forward
from sage_ref.sagebwd import SageBwdSettings, sagebwd_backward, sagebwd_forward

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def python(program, *arguments):
    """Standard output of a fresh interpreter that runs `program`."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What importing needs

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}, for this test")
sys.meta_path.insert(0, Blocker())
"""


def test_importing_is_quick_and_every_module_imports_without_triton_and_without_a_checkout():
    program = """
import sys, time, torch
before, start = set(sys.modules), time.process_time()
import sage_ref
print(time.process_time() - start, *{name.partition(".")[0] for name in set(sys.modules) - before}, sep=",")
import importlib, pkgutil, sage_lab.records
sage_lab.records._is_checkout = lambda folder: False
for module in pkgutil.walk_packages(sage_ref.__path__, "sage_ref."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # of the course's solutions some are programs in Triton
        assert "'triton'" in str(error) and module.name.startswith("sage_course.lessons."), module.name
    print(module.name)
"""
    for _ in range(3):  # processor time, and the least of three: something else may run on the machine
        first, *modules = python(BLOCK + program, "triton").splitlines()
        seconds, *brought = first.split(",")
        if float(seconds) <= 0.3:  # over `import torch`
            break
    assert float(seconds) <= 0.3
    assert set(brought) - sys.stdlib_module_names == {"sage_ref"}
    files = (REPOSITORY / "sage_ref").rglob("[!_]*.py")
    assert {str(f.relative_to(REPOSITORY).with_suffix("")).replace(os.sep, ".") for f in files} <= set(modules)


def test_attention_and_the_list_of_commands_need_torch_alone():
    """torch itself imports numpy where it finds it, so absence is tested by taking everything else away."""
    program = """
import contextlib, sys, torch, sage_ref
from sage_lab.__main__ import COMMANDS, main
q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
sage_ref.sagebwd_attention(*sage_ref.QKNorm(8)(q, k), v, backend="reference").sum().backward()
for model in (sage_ref.SLA(8, 2), sage_ref.SLA2(8, 2, backend="reference"), sage_ref.SLA2(8, 2).stage(1)):
    model(q, k, v).sum().backward()
assert q.grad.isfinite().all()
with contextlib.suppress(SystemExit):
    main(["--help"])
assert not {command.module for command in COMMANDS.values()} & set(sys.modules)
main(["info"])
"""
    others = "triton sage_kernels numpy scipy matplotlib tqdm safetensors hypothesis pytest"
    printed = python(BLOCK + program, *others.split())
    for name in COMMANDS:
        assert re.search(rf"^ +{name}\s", printed, re.MULTILINE)
    assert "| backend chosen by auto | reference, because" in printed


# Pins: pyproject.toml gives ranges, constraints.txt the versions, environment.yml installs under them


def canonical(name):
    return re.sub("[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def pins():
    """name -> version, from constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*,]+", str(pin.specifier)) for pin in found)
    pinned = {canonical(pin.name): str(pin.specifier).removeprefix("==") for pin in found}
    assert len(pinned) == len(found)
    return pinned


def test_every_requirement_is_pinned_within_its_range_and_the_course_extra_is_all_that_learners_need(pins):
    extras = dict(PROJECT["optional-dependencies"])
    (course,) = map(Requirement, extras["course"])
    peers = [Requirement(text) for text in extras.pop("peers")]
    assert all(str(peer.marker) == 'platform_system == "Linux"' for peer in peers)
    not_for_learners = {"book", "browser", "transformers", "diffusers", "pretrained"}
    assert course.extras == set(extras) - not_for_learners - {"course"}
    others = [text for name, texts in extras.items() if name != "course" for text in texts]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *others]):
        assert requirement.specifier.contains(pins[canonical(requirement.name)]), requirement
    # The pair of torch and triton that belong together, and the lowest that do.
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    lowest = {r.name: str(r.specifier) for r in map(Requirement, [*PROJECT["dependencies"], *extras["kernels"]])}
    assert lowest == {"torch": ">=2.11", "triton": ">=3.6"}


def test_conda_and_make_install_the_same_pins(pins):
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    *packages, by_pip = environment["dependencies"]
    assert by_pip == {"pip": ["--constraint constraints.txt", "--editable .[course]"]}
    (version,) = [package.removeprefix("python=") for package in packages if package.startswith("python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)
    assert "pip" in packages
    # Whatever else conda brings must not be a second source of a pinned package.
    assert not {canonical(re.split("[=<> ]", package)[0]) for package in packages} & set(pins)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(r"pip install .*--constraint constraints\.txt .*--editable \.\[course\]", makefile)


# Command line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


def test_info_says_what_this_machine_runs(capsys, tmp_path):
    main(["info", "--json", str(tmp_path / "info.json")])
    printed = capsys.readouterr().out
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["torch"] == torch.__version__
    assert re.match("triton|reference, because ", facts["backend chosen by auto"])
    for name, value in facts.items():
        assert f"| {name} | {value} |" in printed


# What the reference costs: forward and backward at B=1, H=4, N=512, D=64 in float32


@pytest.fixture(scope="module")
def passes():
    """Forward and backward of exact attention and of SageBwd, to be called."""
    q, k, v, do = torch.randn(4, 1, 4, 512, 64, generator=torch.Generator().manual_seed(0))

    def exact():
        forward = attention_forward(q, k, v)
        attention_backward(do, q, k, v, forward.output, forward.log_sum_exp)

    def sagebwd():
        settings = SageBwdSettings()
        forward = sagebwd_forward(q, k, v, settings)
        sagebwd_backward(do, q, k, v, forward.output, forward.log_sum_exp, settings)

    return exact, sagebwd


class PeakMemory(TorchDispatchMode):
    """Bytes that tensors made inside hold at most, counted after every operation."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {address: found for address, found in self.alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_the_reference_takes_at_most_four_times_as_long_as_exact_attention(passes):
    """Processor time on one thread, so that what else runs on the machine does not count. Medians of 5."""

    def seconds(run):
        start = time.process_time()
        run()
        return time.process_time() - start

    assert torch.get_num_threads() == 1
    times = [[seconds(run) for run in passes] for _ in range(6)][1:]
    of_exact, of_sagebwd = map(statistics.median, zip(*times, strict=True))
    assert of_sagebwd < 4 * of_exact


def test_the_reference_holds_at_most_four_times_the_memory_of_exact_attention(passes):
    peaks = []
    for run in passes:
        with PeakMemory() as memory:
            run()
        peaks.append(memory.peak)
    of_exact, of_sagebwd = peaks
    assert of_exact >= 4 * 4 * 512**2 * 4  # P, dP, dP - delta and dS at once
    assert of_sagebwd < 4 * of_exact
