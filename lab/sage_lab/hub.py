"""`python -m sage_lab hub FOLDER`: the kernels as Hugging Face's kernel hub wants them.

A hub kernel is one package that may be loaded from any path, several versions at once, and imports nothing but torch,
triton and itself. So both packages go below one, with relative imports and without what needs more than that, and
register their operations under a name that is made of their text.

    FOLDER/build.toml              what kernel-builder reads: pure Python, nothing to compile
    FOLDER/torch-ext/sage_ref/     __init__.py, reference/ (of sage_ref), kernels/ (of sage_kernels)
    FOLDER/tests/                  one test, against PyTorch's attention
"""

import argparse
import hashlib
import re
import tomllib
from importlib import resources
from pathlib import Path

from sage_lab.command_line import Failed, positive
from sage_lab.records import REPOSITORY

NAME = "sage-ref"
FOLDERS = {"sage_ref": "reference", "sage_kernels": "kernels"}
LEFT_OUT = re.compile(  # what needs other packages, and what reads it
    r"reference/(parallel/|integrations/(diffusers|transformers))|kernels/(sagebwd/ring|common/interpreter|hopper/emulator)"
)
IMPORT = re.compile(r"^(\s*)from (sage_ref|sage_kernels)((?:\.\w+)*) import", re.MULTILINE)
DIFFERENT = (  # (what stands in a module, what stands there in the hub)
    (r"torch\.ops\.sage_kernels\b", "torch.ops.{namespace}"),
    (r'Library\("sage_kernels"', 'Library("{namespace}"'),
    (r'f"sage_kernels::', 'f"{namespace}::'),
    (r'\("triton", "sage_kernels"\)', '("triton",)'),  # the kernels are here
)

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


def text_of(file: Path) -> str:
    return file.read_text()


def files() -> dict[Path, str]:
    """Return the package's files by their paths below torch-ext/sage_ref, with the text that they get."""
    texts = {}
    for package, folder in FOLDERS.items():
        root = Path(str(resources.files(package)))
        for file in sorted([*root.rglob("*.py"), *root.rglob("launch_*.json")]):
            texts[Path(folder, file.relative_to(root))] = text_of(file)
    texts = {path: text for path, text in texts.items() if not LEFT_OUT.match(path.as_posix())}
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:10]
    for pattern, replacement in DIFFERENT:
        replacement = replacement.format(namespace=f"sage_ref_{digest}")
        before, texts = texts, {path: re.sub(pattern, replacement, text) for path, text in texts.items()}
        if before == texts:
            raise Failed(f"hub: expected {pattern} in some module, found it in none: DIFFERENT must name it as it is")
    return {path: relative(text, "." * len(path.parts)) for path, text in texts.items()}


def relative(text: str, dots: str) -> str:
    """Return a module's text with imports of its own package alone. dots: from the module to that package."""
    return IMPORT.sub(lambda at: f"{at[1]}from {dots}{FOLDERS[at[2]]}{at[3]} import", text)


def write(folder: Path, version: str, repository: str | None, number: int) -> list[Path]:
    """Write every file of the layout into an empty folder, or one that is made; return their paths."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: expected an empty one, or none yet, got {folder}")
    hub = f'\n[general.hub]\nrepo-id = "{repository}"\n' if repository else ""
    package = Path("torch-ext", NAME.replace("-", "_"))
    description = "Attention for training in INT8 (SageBwd) and sparse-linear attention (SLA2)"
    texts = {package / path: text for path, text in files().items()} | {
        package / "__init__.py": INIT.format(version=version),
        Path("build.toml"): BUILD.format(name=NAME, version=number, hub=hub),
        Path("README.md"): README.format(name=NAME, version=version, description=description),
        Path("LICENSE"): (REPOSITORY / "LICENSE").read_text(),
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
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    written = write(options.folder, version, options.repository, options.number)
    print(
        f"{len(written)} files in {options.folder}. Try it: PYTHONPATH={options.folder}/torch-ext pytest tests there."
    )
