"""Tokens of the Linux kernel's sources: text that anybody gets from Debian's package `linux-source-6.1`.

    apt-get download linux-source-6.1=6.1.192-2
    dpkg-deb --fsys-tarfile linux-source-6.1_*.deb | tar -xO ./usr/src/linux-source-6.1.tar.xz >linux-source-6.1.tar.xz
    python -m sage_lab pretrain --corpus linux-source-6.1.tar.xz

That is the version of the recorded runs; another one gives other tokens, which a record's sha256 tells apart.
Files come in the order of their names' hashes. Sound drivers are held out whole, so that no line of a held-out file
stands in a training file of the same driver.
"""

import hashlib
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from sage_lab.training.tokens import Corpus

SUFFIXES = (".c", ".h", ".rst", ".txt")
GENERATED = "drivers/gpu/drm/amd/include/"  # a fifth of all sources: numbers of registers
HELD_OUT = "sound/"
NEW_FILE = "<file>"
# Line ends with the tabs that follow them, words, numbers, signs, and what space is left.
PIECES = Regex(r"\n+\t*| ?[A-Za-z_]+| ?[0-9]+| ?[^\sA-Za-z_0-9]+|\s+?(?=\n)|\s+")
FILES_AT_ONCE = 2000


@dataclass(frozen=True)
class Sizes:
    """How much of the sources is used.

    vocabulary: tokens that there are. text: characters that they are learnt from. train, held_out: tokens to keep.
    """

    vocabulary: int = 20480
    text: int = 2**24
    train: int = 2**27
    held_out: int = 2**21


def linux_corpus(archive: Path, sizes: Sizes | None = None) -> Corpus:
    """Learn a tokenizer from the sources in a .tar.xz and return their tokens, at most as many as `sizes` says."""
    sizes = sizes or Sizes()
    train, held_out = sources(archive)
    if not train or not held_out:
        raise ValueError(f"corpus: expected the sources of Linux with {HELD_OUT}, got {archive}")
    tokenizer = learnt_tokenizer(train, sizes)
    source = {
        "archive": archive.name,
        "archive_sha256": archive_sha256(archive),
        "tokenizer_sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
    }
    return Corpus(
        archive.name.removesuffix(".tar.xz"),
        tokens_of(train, tokenizer, sizes.train),
        tokenizer.get_vocab_size(),
        tokens_of(held_out, tokenizer, sizes.held_out),
        source,
    )


def archive_sha256(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sources(archive: Path) -> tuple[list[str], list[str]]:
    """Return the texts to train on and those held out."""
    texts = {}
    with tarfile.open(archive, "r|xz") as files:
        for file in files:
            _, _, name = file.name.removeprefix("./").partition("/")  # without the archive's own folder
            if file.isfile() and name.endswith(SUFFIXES) and not name.startswith(GENERATED):
                texts[name] = files.extractfile(file).read().decode("utf-8", errors="replace")
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    parts = ([name for name in names if name.startswith(HELD_OUT) == is_held_out] for is_held_out in (False, True))
    train, held_out = ([texts[name] for name in part] for part in parts)
    return train, held_out


def learnt_tokenizer(texts: Iterable[str], sizes: Sizes) -> Tokenizer:
    """Learn byte-level byte-pair encoding."""
    tokenizer = Tokenizer(BPE())
    bytes_of_pieces = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(PIECES, "isolated"), bytes_of_pieces])
    tokenizer.decoder = ByteDecoder()
    trainer = BpeTrainer(
        vocab_size=sizes.vocabulary,
        special_tokens=[NEW_FILE],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(up_to(sizes.text, texts), trainer)
    return tokenizer


def up_to(characters: int, texts: Iterable[str]) -> Iterator[str]:
    """Yield the first texts, until they have so many characters."""
    for text in texts:
        if characters <= 0:
            return
        yield text
        characters -= len(text)


def tokens_of(texts: Iterable[str], tokenizer: Tokenizer, count: int) -> Tensor:
    """Return the first `count` tokens of all texts, uint16; each text begins with the token of a new file."""
    start, texts = tokenizer.token_to_id(NEW_FILE), iter(texts)
    parts: list[np.ndarray] = []
    left = count
    while left > 0 and (some := list(islice(texts, FILES_AT_ONCE))):
        for encoded in tokenizer.encode_batch_fast(some):
            parts.append(np.array([start, *encoded.ids], dtype=np.uint16))
            left -= len(parts[-1])
    return torch.from_numpy(np.concatenate(parts)[:count])
