"""What the commands' options share: types of arguments for argparse, and options that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sage_ref.training.corpus import Corpus


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def percentage(text: str) -> float:
    if not 0 < (number := float(text)) <= 100:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 100, got {text}")
    return number


def tile_size(text: str) -> tuple[int, int]:
    try:
        block_q, block_kv = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers as in 128x64, got {text!r}") from None
    return positive(str(block_q)), positive(str(block_kv))


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="a text file, a folder or a .bin of uint16 tokens")
    parser.add_argument(
        "--vocabulary", type=positive, default=256, help="256: bytes; more: byte pairs made from the text"
    )


def corpus_of(options: argparse.Namespace) -> Corpus:
    """The corpus that --corpus and --vocabulary name."""
    from sage_ref.training.corpus import BYTES, byte_pairs, read_corpus

    corpus = read_corpus(options.corpus)
    has_its_own_tokens = options.vocabulary == BYTES or corpus.vocab_size != BYTES
    return corpus if has_its_own_tokens else byte_pairs(corpus, options.vocabulary)
