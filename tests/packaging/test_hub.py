"""The kernel hub's layout: one package that needs nothing but torch and triton, from any path, in several versions."""

import ast
import os
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("triton")
from sage_lab import __main__ as lab_main
from sage_lab import hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folders hub, as the command writes it, and hub2, of a different version."""
    root = tmp_path_factory.mktemp("hub")
    lab_main.main(["hub", str(root / "hub")])
    with pytest.MonkeyPatch.context() as patch:
        text_of = hub.text_of
        patch.setattr(hub, "text_of", lambda module: text_of(module) + "\n# a different version\n")
        lab_main.main(["hub", str(root / "hub2"), "--repository", "somebody/sage-ref", "--number", "2"])
    return root


def test_kernel_builder_finds_its_files(folder):
    first, second = (tomllib.loads((folder / name / "build.toml").read_text()) for name in ("hub", "hub2"))
    facts = {"name": "sage-ref", "version": 1, "edition": 5, "license": "Apache-2.0", "backends": ["cuda"]}
    assert first["general"] == facts
    assert second["general"] == facts | {"version": 2, "hub": {"repo-id": "somebody/sage-ref"}}
    assert first["torch-noarch"] == {"pyext": ["json", "py"]}
    files = {x.relative_to(folder / "hub").as_posix() for x in (folder / "hub").rglob("*") if x.is_file()}
    package = "torch-ext/sage_ref"
    assert {"LICENSE", "README.md", "tests/test_sage_ref.py", f"{package}/__init__.py"} <= files
    assert {f"{package}/reference/sagebwd/algorithm.py", f"{package}/kernels/common/launch_compiled.json"} <= files


def test_every_import_is_the_standard_library_torch_triton_or_its_own(folder):
    for path in (folder / "hub" / "torch-ext").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        names |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"torch", "triton"}, path


PROGRAM = """
import importlib.util, sys, torch

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sage_ref", "sage_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
for number, folder in enumerate(sys.argv[1:]):
    init = f"{folder}/torch-ext/sage_ref/__init__.py"
    spec = importlib.util.spec_from_file_location(f"loaded_{number}", init)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = []
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 1, 20, 32, dtype=torch.float16).requires_grad_() for _ in range(3))
        module.sagebwd_attention(q, k, v, backend=backend).sum().backward()
        output = module.SLA2(32, 1, sparsity=0.5, backend=backend)(q, k, v)
        results.append([x.detach().float() for x in (output, q.grad, k.grad, v.grad)])
    for x, y in zip(*results, strict=True):
        assert (x - y).norm() < 0.01 * y.norm()
    print(sorted(x for x in dir(torch.ops) if x.startswith("sage_")))
"""


def run(*command, cwd, **environment):
    """Return what a Python program prints, with other settings of the environment."""
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=os.environ | environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_versions_load_from_any_path_and_their_kernels_agree_with_their_reference(folder):
    printed = run("-c", PROGRAM, folder / "hub", folder / "hub2", cwd=folder, PYTHONPATH="", TRITON_INTERPRET="1")
    first, second = map(ast.literal_eval, printed.splitlines())
    assert (len(first), len(second)) == (1, 2)
    assert set(first) < set(second)


def test_its_own_test_passes(folder):
    pytest_options = ("-q", "-p", "no:cacheprovider", "-p", "no:nbval", "tests")
    package = str(folder / "hub" / "torch-ext")
    printed = run("-m", "pytest", *pytest_options, cwd=folder / "hub", PYTHONPATH=package, TRITON_INTERPRET="0")
    assert "2 passed" in printed


def test_a_folder_with_something_in_it_is_left_alone(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        lab_main.main(["hub", str(folder)])
    assert "folder: expected an empty one, or none yet" in capsys.readouterr().err
    assert sorted(x.name for x in folder.iterdir()) == ["hub", "hub2"]
