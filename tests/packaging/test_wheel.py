"""The wheel: what it holds, and that it works far from the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from sage_course.outline import project
from sage_lab.records import REPOSITORY

PROJECT = project()
PACKAGES = {"sage_ref": REPOSITORY, "sage_kernels": REPOSITORY / "kernels"}
LARGEST = 400_000  # bytes


def run(*command, cwd):
    """Return what a command prints, run without the tests' own paths and settings."""
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = list(map(str, command))
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources, because building writes beside them."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("sage_ref", "kernels"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in REPOSITORY.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder
    run(*pip, ".", cwd=source)
    (found,) = folder.glob("*.whl")
    return found


def test_one_wheel_for_every_platform_holds_the_two_packages_alone(wheel):
    assert wheel.name == f"sage_ref-{PROJECT['version']}-py3-none-any.whl"
    assert wheel.stat().st_size < LARGEST
    archive = zipfile.ZipFile(wheel)
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [(root, x) for package, root in PACKAGES.items() for x in (root / package).rglob("*")]
    assert names == {str(x.relative_to(root)) for root, x in files if x.suffix in (".py", ".json", ".typed")}
    assert {"sage_ref/py.typed", "sage_kernels/py.typed", "sage_kernels/common/launch_hopper.json"} <= names
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(name).decode()
    assert set(re.findall(r"^Provides-Extra: (.+)$", text, re.MULTILINE)) == set(PROJECT["optional-dependencies"])
    assert f"\nRequires-Python: {PROJECT['requires-python']}\n" in text
    assert re.findall(r"^Requires-Dist: (?!.*extra ==)(.+)$", text, re.MULTILINE) == PROJECT["dependencies"]


LIBRARY = """
import json, sys
sys.modules["triton"] = None  # as where it isn't installed
import torch, sage_ref
q, k, v = (torch.randn(1, 4, 200, 32, requires_grad=True) for _ in range(3))
sla2 = sage_ref.SLA2(32, 4, sparsity=0.5, backend="reference")
(sage_ref.sagebwd_attention(q, k, v, backend="reference") + sla2(q, k, v)).sum().backward()
assert q.grad.isfinite().all()
print(json.dumps([x.__file__ for name, x in sys.modules.items() if name.partition(".")[0] == "sage_ref"]))
"""


def test_the_wheel_works_without_triton_and_far_from_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    files = json.loads(run(sys.executable, "-W", "ignore", "-c", LIBRARY, cwd=tmp_path))
    assert all(x.startswith(str(tmp_path)) for x in files)
