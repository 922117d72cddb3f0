"""The wheel: what is in it, and that it works in an empty environment, far from the repository.

torch comes from the environment that runs the tests, so that nothing is downloaded. What that leaves untested: that an
installer finds torch and the extras' packages and that they fit, which `make lab` shows for the pinned ones.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from sage_lab.records import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
BUILT_FROM = ("sage_ref", "kernels", "notebooks/recorded")
OTHER_PYTHONS = ("3.12", "3.13", "3.14")
LARGEST = 12 * 2**20


def run(*command, cwd, status=0):
    """What a command prints, without the tests' own paths and settings."""
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "SAGE_REF_REPOSITORY")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """`pip wheel .` in a copy of the sources, for building writes beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in BUILT_FROM:
        shutil.copytree(REPOSITORY / name, folder / "source" / name, ignore=ignored)
    for path in REPOSITORY.iterdir():
        if path.is_file():
            shutil.copy(path, folder / "source")
    pip = sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder
    run(*pip, ".", cwd=folder / "source")
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with this wheel, and torch beside it: (its python, an empty folder)."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"
    run(*pip, wheel, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (folder / "empty").mkdir()
    return python, folder / "empty"


def test_one_wheel_for_every_platform_holds_the_packages_and_the_records(wheel):
    assert wheel.name == f"sage_ref-{PROJECT['version']}-py3-none-any.whl"
    assert wheel.stat().st_size < LARGEST
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, root in (("sage_ref", REPOSITORY), ("sage_kernels", REPOSITORY / "kernels")):
        files = [x for x in (root / package).rglob("*") if x.suffix in (".py", ".json", ".typed")]
        assert {str(x.relative_to(root)) for x in files} <= names
    recorded = {f"sage_ref/recorded/{x.name}" for x in (REPOSITORY / "notebooks" / "recorded").iterdir() if x.is_file()}
    assert recorded <= names
    assert {name.partition("/")[0] for name in names} - {"sage_ref", "sage_kernels"} == {
        f"sage_ref-{PROJECT['version']}.dist-info"
    }


def test_its_metadata_names_the_extras_and_the_pythons(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    assert set(re.findall(r"^Provides-Extra: (.+)$", text, re.MULTILINE)) == set(PROJECT["optional-dependencies"])
    assert "\nRequires-Python: >=3.11\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    needed = re.findall(r"^Requires-Dist: (?!.*extra ==)(.+)$", text, re.MULTILINE)
    assert needed == PROJECT["dependencies"] == ["torch>=2.11"]


PROGRAM = """
import json, pathlib, sys
import torch
import sage_ref, sage_lab.records, sage_kernels
from sage_course import figures
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import read_capture
q, k, v = (torch.randn(1, 4, 200, 32, requires_grad=True) for _ in range(3))
for attention in (sage_ref.sagebwd_attention, sage_ref.SLA2(32, 4, sparsity=0.5, backend="reference")):
    options = {} if isinstance(attention, torch.nn.Module) else {"backend": "reference"}
    attention(q, k, v, **options).sum().backward()
assert q.grad.isfinite().all()
names = [x.stem for x in RECORDED.glob("*.json")]
rows = sum(len(read_record(name).rows) for name in names)
layers = [len(read_capture(x).layers) for x in sorted(RECORDED.glob("capture_*.safetensors"))]
figures.overview_figure(*map(read_record, ("table2_captures", "bench_h200"))).savefig("overview.png")
modules = [x.__file__ for name, x in sys.modules.items() if name.partition(".")[0] in ("sage_ref", "sage_kernels")]
print(json.dumps([len(names), rows, layers, sorted(x for x in modules if x), sys.path]))
"""


def test_attention_records_captures_and_figures_work_far_from_the_repository(installed):
    python, folder = installed
    records, rows, layers, modules, path = json.loads(run(python, "-W", "ignore", "-c", PROGRAM, cwd=folder))
    here = REPOSITORY / "notebooks" / "recorded"
    assert records == len(list(here.glob("*.json")))
    assert rows > 1000
    assert len(layers) == len(list(here.glob("capture_*.safetensors")))
    assert min(layers) > 0
    assert (folder / "overview.png").stat().st_size > 10_000
    site = str(python.parents[1])
    assert all(x.startswith(site) for x in modules)
    assert not any(x.startswith(str(REPOSITORY)) for x in path if "site-packages" not in x)


@pytest.mark.parametrize(
    ("command", "expected"),
    [("sage_ref info", "| backend chosen by auto |"), ("sage_kernels --help", "usage: python -m sage_lab")],
)
def test_commands_run_far_from_the_repository(installed, command, expected):
    python, folder = installed
    assert expected in run(python, "-m", *command.split(), cwd=folder)


def test_what_needs_the_repository_says_so_in_one_line(installed):
    """`readme` writes the course's pages, which are no part of the wheel."""
    python, folder = installed
    (line,) = run(python, "-m", "sage_ref", "readme", cwd=folder, status=2).splitlines()
    assert line.startswith("python -m sage_lab readme: repository: expected a checkout of sage_ref")


def python_of(version):
    """An interpreter of that version, from the path or from pyenv; None if there is none that starts."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *installed):
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_other_pythons_compile_it(wheel, tmp_path, version):
    """Without torch for them there is no more to try here; the workflows run all tests on the oldest and the newest."""
    if (python := python_of(version)) is None:
        pytest.skip(f"no Python {version} here")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    run(python, "-W", "error", "-m", "compileall", "-q", tmp_path, cwd=tmp_path)
