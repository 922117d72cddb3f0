"""`python -m sage_lab hub FOLDER`: the kernels as Hugging Face's kernel hub wants them.

A hub kernel is one package that may be loaded from any path, several versions at once, and imports nothing but torch,
triton and itself. So the modules that attention needs, of both packages, go below one, with relative imports, and
register their operations under a name that is made of their text.

    FOLDER/build.toml              what kernel-builder reads: pure Python, nothing to compile
    FOLDER/torch-ext/sage_ref/     __init__.py, reference/ (of sage_ref), kernels/ (of sage_kernels)
    FOLDER/tests/                  one test, against PyTorch's attention
"""

import argparse
import ast
import hashlib
import re
from importlib import metadata, resources
from pathlib import Path

from sage_lab.command_line import Failed, positive

NAME = "sage-ref"
FOLDERS = {"sage_ref": "reference", "sage_kernels": "kernels"}
ENTRANCES = ("sage_ref", "sage_kernels.sagebwd.ops", "sage_kernels.sla2.ops")
TABLES = ("sage_kernels.common", "launch_*.json")
IMPORT = re.compile(r"^(\s*)from (sage_ref|sage_kernels)((?:\.\w+)*) import", re.MULTILINE)
DIFFERENT = (  # (what stands in a module, what stands there in the hub)
    (r"torch\.ops\.sage_kernels\b", "torch.ops.{namespace}"),
    (r'Library\("sage_kernels"', 'Library("{namespace}"'),
    (r'f"sage_kernels::', 'f"{namespace}::'),
    (r'\("triton", "sage_kernels"\)', '("triton",)'),  # the kernels are here
)
MOVED = re.compile(r"^(?:from sage_ref import moved.*|moved\.install\(\))\n+", re.MULTILINE)

BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cuda"]
{hub}
[torch-noarch]
pyext = ["json", "py"]

[kernel]
"""
INIT = '''"""SageBwd and SLA2: attention for training in INT8, and sparse-linear attention, in Triton.

Made from sage-ref {version}. backend="auto" runs the kernels on a CUDA device, else the reference, with one warning.
"""

from .reference import SLA, SLA2, Prologue, QKNorm, sagebwd_attention, sparse_linear_attention

__version__ = "{version}"
__all__ = ["SLA", "SLA2", "Prologue", "QKNorm", "sagebwd_attention", "sparse_linear_attention"]
'''
TEST = '''"""Against PyTorch's attention, forward and backward: the kernels on a CUDA device, else the reference."""

import pytest
import torch
import torch.nn.functional as F

import sage_ref


@pytest.mark.parametrize("is_causal", [False, True])
def test_sagebwd_is_close_to_attention(is_causal):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    draw = torch.Generator(device).manual_seed(0)
    tensors = [torch.randn(2, 4, 300, 64, generator=draw, device=device, dtype=dtype) for _ in range(4)]
    results = []
    for attention in (sage_ref.sagebwd_attention, F.scaled_dot_product_attention):
        q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
        output = attention(q, k, v, is_causal=is_causal)
        output.backward(tensors[3])
        results.append([x.float() for x in (output, q.grad, k.grad, v.grad)])
    for found, exact in zip(*results, strict=True):
        assert 0 < (found - exact).norm() / exact.norm() < 0.1
'''
README = """---
license: apache-2.0
tags: [kernels]
---
# {name}

{description}. Pure Triton: nothing is compiled before it runs.

Functions and modules: `sagebwd_attention`, `sparse_linear_attention`, `SLA`, `SLA2`, `QKNorm`, `Prologue`. Their
docstrings give shapes, dtypes and errors. Made from {name} {version} by `python -m sage_lab hub`: change it there.
"""


def source_of(module: str) -> tuple[Path, bool]:
    """The file of a module of ours, and whether it is a package."""
    package, *rest = module.split(".")
    path = Path(str(resources.files(package)), *rest)
    return (path / "__init__.py", True) if path.is_dir() else (path.with_suffix(".py"), False)


def text_of(module: str) -> str:
    """Its text, without the signposts for names that an earlier version had."""
    return MOVED.sub("", source_of(module)[0].read_text())


def imported(text: str) -> set[str]:
    """The modules of ours that a text imports, and perhaps names in them, each with the packages that it lies in."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        for name in (name for name in names if name.partition(".")[0] in FOLDERS):
            parts = name.split(".")
            found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def needed_modules() -> list[str]:
    """All that the entrances import, and what that imports, and so on."""
    found: set[str] = set()
    left = {package for entrance in ENTRANCES for package in (entrance, *_packages_of(entrance))}
    while left:
        module = left.pop()
        if module not in found and source_of(module)[0].is_file():  # else a name in a module
            found.add(module)
            left |= imported(text_of(module))
    return sorted(found)


def _packages_of(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def files() -> dict[Path, str]:
    """The package's files by their paths below torch-ext/sage_ref, with the text that they get."""
    modules = {module: text_of(module) for module in needed_modules()}
    tables = resources.files(TABLES[0])
    texts = {("sage_kernels", "common", x.name): x.read_text() for x in Path(str(tables)).glob(TABLES[1])}
    for pattern, _ in DIFFERENT:
        if not any(re.search(pattern, text) for text in modules.values()):
            raise Failed(
                f"hub: expected {pattern} in some module, found it in none: it must stand in DIFFERENT as it is"
            )
    digest = hashlib.sha256("".join([*modules.values(), *texts.values()]).encode()).hexdigest()[:10]
    found = {Path("kernels", *path[1:]): text for path, text in texts.items()}
    for module, text in modules.items():
        package, *rest = module.split(".")
        is_package = source_of(module)[1]
        path = Path(FOLDERS[package], *rest, "__init__.py") if is_package else Path(FOLDERS[package], *rest)
        path = path if is_package else path.with_suffix(".py")
        found[path] = relative(text, dots="." * len(path.parts), namespace=f"sage_ref_{digest}")
    return found


def relative(text: str, dots: str, namespace: str) -> str:
    """The text of a module with imports of its own package alone. dots: from it to that package."""
    text = IMPORT.sub(lambda at: f"{at[1]}from {dots}{FOLDERS[at[2]]}{at[3]} import", text)
    for pattern, replacement in DIFFERENT:
        text = re.sub(pattern, replacement.format(namespace=namespace), text)
    return text


def license_text() -> str:
    """Of the checkout, or of what was installed."""
    beside = Path(str(resources.files("sage_ref"))).parent / "LICENSE"
    if beside.is_file():
        return beside.read_text()
    found = metadata.distribution(NAME).read_text("licenses/LICENSE")
    if found is None:
        raise Failed("LICENSE: expected it in the installed package, found none")
    return found


def write(folder: Path, version: str, repository: str | None, number: int) -> list[Path]:
    """Every file of the layout, in an empty folder or one that is made; their paths."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: expected an empty one, or none yet, got {folder}")
    hub = f'\n[general.hub]\nrepo-id = "{repository}"\n' if repository else ""
    package = Path("torch-ext", NAME.replace("-", "_"))
    description = "Attention for training in INT8 (SageBwd) and sparse-linear attention (SLA2)"
    texts = {package / path: text for path, text in files().items()} | {
        package / "__init__.py": INIT.format(version=version),
        Path("build.toml"): BUILD.format(name=NAME, version=number, hub=hub),
        Path("README.md"): README.format(name=NAME, version=version, description=description),
        Path("LICENSE"): license_text(),
        Path("tests", "test_sage_ref.py"): TEST,
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return sorted(texts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="an empty folder, or one that is not there yet")
    parser.add_argument("--repository", metavar="OWNER/NAME", help="on the hub, for build.toml")
    parser.add_argument("--number", type=positive, default=1, help="of the kernel's version on the hub")


def hub_command(options: argparse.Namespace) -> None:
    """Write the kernels in the layout of Hugging Face's kernel hub."""
    try:
        version = metadata.version(NAME)
    except metadata.PackageNotFoundError:
        raise Failed(f"{NAME}: expected it to be installed (make lab, or pip install), found sources alone") from None
    written = write(options.folder, version, options.repository, options.number)
    print(
        f"{len(written)} files in {options.folder}. Try it: PYTHONPATH={options.folder}/torch-ext pytest tests there."
    )
