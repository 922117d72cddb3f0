"""Text -> tokens: the standard library of the running Python, any text file or folder, or a nanoGPT-style .bin.

Text is read as bytes, so there is no tokenizer to download and no vocabulary to agree on: 256 tokens.
A .bin file holds uint16 tokens made elsewhere (OpenWebText in GPT-2 tokens, say) and is mapped, not loaded.
"""

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Site packages are not the standard library, its tests are half of it and hold oddities on purpose, and the
# sysconfig data names the machine that Python was built on.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests"}
EXCLUDED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class Corpus:
    """tokens: uint8 or uint16 [T], each below vocab_size."""

    name: str
    tokens: Tensor
    vocab_size: int

    @cached_property
    def sha256(self) -> str:
        """Of the tokens as stored: for a single file what `sha256sum` prints."""
        return hashlib.sha256(self.tokens.numpy().data).hexdigest()

    def split(self, validation_fraction: float = 0.1) -> tuple["Corpus", "Corpus"]:
        """(train, validation): validation is the tail, so that no training sequence overlaps it."""
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction: expected a number between 0 and 1, got {validation_fraction}")
        cut = round(len(self.tokens) * (1 - validation_fraction))
        parts = (("train", self.tokens[:cut]), ("validation", self.tokens[cut:]))
        train, validation = (Corpus(f"{self.name} ({part})", tokens, self.vocab_size) for part, tokens in parts)
        return train, validation

    def batch(self, batch_size: int, context: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and the tokens that follow them, int64 [batch_size, context] each, from random places.

        A function of (seed, step) alone: a run resumed at a step reads what the uninterrupted run read.
        """
        if len(self.tokens) <= context:
            tokens = f"the {len(self.tokens)} tokens of {self.name}"
            raise ValueError(f"context: expected fewer than {tokens}, got {context}")
        starts = np.random.default_rng((seed, step)).integers(len(self.tokens) - context, size=batch_size)
        windows = torch.stack([self.tokens[start : start + context + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]


def read_corpus(path: str | Path | None = None) -> Corpus:
    """The corpus at `path`: a text file, a folder (all its files, sorted), or a .bin of uint16; None: `stdlib_corpus`.

    Raises FileNotFoundError or ValueError if there is nothing to read there.
    """
    if path is None:
        return stdlib_corpus()
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: expected a text file, a folder or a .bin file, found nothing at {path}")
    if path.suffix == ".bin":
        return _binary_corpus(path)
    files = [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    if binaries := [file.name for file in files if file.suffix == ".bin"]:
        raise ValueError(f"path: expected text files, found {binaries[0]} in {path}; give a .bin file by its own path")
    return _text_corpus(path.resolve().name, path, files)


def stdlib_corpus() -> Corpus:
    """The .py files of the running interpreter's standard library, sorted by path.

    They differ between versions of Python, and where a distribution patches or splits it: compare `sha256`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in root.rglob("*.py")
        if EXCLUDED_FOLDERS.isdisjoint(file.relative_to(root).parts) and not file.name.startswith(EXCLUDED_PREFIX)
    ]
    return _text_corpus(f"standard library of Python {platform.python_version()}", root, files)


def _text_corpus(name: str, root: Path, files: Sequence[Path]) -> Corpus:
    """The bytes of `files`, sorted by path relative to root, one after the other."""
    text = bytearray()
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        text += file.read_bytes()
    if not text:
        raise ValueError(f"path: expected text, found {len(files)} files with no byte in them at {root}")
    return Corpus(name, torch.frombuffer(text, dtype=torch.uint8), 256)


def _binary_corpus(path: Path) -> Corpus:
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ValueError(f"path: expected uint16 tokens, two bytes each, found {size} bytes in {path}")
    tokens = torch.from_file(str(path), dtype=torch.uint16, size=size // 2)
    return Corpus(path.name, tokens, int(tokens.numpy().max()) + 1)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
