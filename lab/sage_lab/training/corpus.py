"""Tokens from the Python sources on this machine, from any text file, from Linux, or from a nanoGPT-style .bin.

Text is read as bytes, so there is no tokenizer to download and no vocabulary to agree on: 256 tokens. The archive of
Linux's sources has a tokenizer of its own (`linux_source`), whose work is kept in a .safetensors file beside it.
A .bin file holds uint16 tokens made elsewhere (OpenWebText in GPT-2 tokens, say) and is mapped, not loaded.
"""

import hashlib
import json
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sage_lab.files import replaced
from sage_lab.training.tokens import Corpus

# Site packages are not the standard library, its tests are half of it and hold oddities on purpose, and the
# sysconfig data names the machine that Python was built on.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
EXCLUDED_PREFIX = "_sysconfigdata"
BYTES = 256


def read_corpus(path: str | Path | None = None) -> Corpus:
    """Read a text file or a .bin of uint16; None: `python_corpus`.

    Raises OSError or ValueError if there is nothing to read there.
    """
    if path is None:
        return python_corpus()
    path = Path(path)
    if path.suffix == ".safetensors":
        return _prepared_corpus(path)
    if path.name.endswith(".tar.xz"):
        return _archive_corpus(path)
    return _binary_corpus(path) if path.suffix == ".bin" else _text_corpus(path.resolve().name, [path])


def python_corpus() -> Corpus:
    """Read the .py files of the standard library and of every installed package, without their tests.

    They come in the order of their names' hashes, so that the tail kept for validation is a fair sample.
    """
    roots = sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})
    names = {file.relative_to(root).as_posix(): file for root in roots for file in _sources(root)}
    shuffled = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    name = f"standard library of Python {platform.python_version()} and the packages installed beside it"
    return _text_corpus(name, [names[name] for name in shuffled])


def write_corpus(corpus: Corpus, path: Path) -> None:
    """Write a .safetensors file that `read_corpus` reads: the same corpus, ready to train on."""
    tensors = {"tokens": corpus.tokens} | ({} if corpus.held_out is None else {"held_out": corpus.held_out})
    described = {"name": corpus.name, "vocab_size": corpus.vocab_size, "source": corpus.source}
    with replaced(path) as temporary:
        save_file(tensors, temporary, {"corpus": json.dumps(described)})


def _archive_corpus(path: Path) -> Corpus:
    """Return the tokens of Linux's sources, which are kept beside their archive: a tokenizer needs minutes."""
    from sage_lab.training.linux_source import archive_sha256, linux_corpus  # a tokenizer

    kept = path.with_name(f"{path.name}.safetensors")
    if kept.exists():
        corpus = _prepared_corpus(kept)
        if corpus.source.get("archive_sha256") == archive_sha256(path):
            return corpus
    corpus = linux_corpus(path)
    write_corpus(corpus, kept)
    return corpus


def _prepared_corpus(path: Path) -> Corpus:
    """Read what `write_corpus` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads(file.metadata()["corpus"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
        return Corpus(**described, **tensors)
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise ValueError(f"corpus: expected what `pretrain` prepared, got {path}") from None


def _sources(root: Path) -> list[Path]:
    """Return the .py files below `root`, without tests and without packages that are installed below it."""
    return [
        file
        for file in root.rglob("*.py")
        if EXCLUDED_FOLDERS.isdisjoint(file.relative_to(root).parts) and not file.name.startswith(EXCLUDED_PREFIX)
    ]


def _text_corpus(name: str, files: Sequence[Path]) -> Corpus:
    """Return the bytes of `files`, one after the other, as a corpus."""
    text = bytearray()
    for file in files:
        text += file.read_bytes()
    if not text:
        raise ValueError(f"path: expected text, found {len(files)} empty files for {name}")
    return Corpus(name, torch.frombuffer(text, dtype=torch.uint8), BYTES)


def _binary_corpus(path: Path) -> Corpus:
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ValueError(f"path: expected uint16 tokens, two bytes each, found {size} bytes in {path}")
    tokens = torch.from_file(str(path), dtype=torch.uint16, size=size // 2)
    return Corpus(path.name, tokens, int(tokens.numpy().max()) + 1)
