"""Tokens are the bytes of the files, batches are a function of (seed, step), and nothing to read is an error."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from sage_ref.training.corpus import Corpus, read_corpus, stdlib_corpus


@pytest.fixture(scope="module")
def stdlib():
    return stdlib_corpus()


def text_of(corpus):
    return corpus.tokens.numpy().tobytes()


def numbered(count):
    """A corpus whose tokens are 0, 1, 2, ..."""
    return Corpus("numbers", torch.arange(count).to(torch.uint16), count)


def test_the_default_is_the_standard_library(stdlib):
    root = Path(sysconfig.get_path("stdlib"))
    assert (stdlib.vocab_size, stdlib.tokens.dtype) == (256, torch.uint8)
    assert len(stdlib.tokens) > 5_000_000
    for name in ("argparse.py", "json/decoder.py"):
        assert (root / name).read_bytes() in text_of(stdlib)
    assert text_of(stdlib).startswith((root / "__future__.py").read_bytes())
    assert stdlib.sha256 == read_corpus().sha256


def test_the_standard_library_leaves_out_packages_tests_and_what_names_the_build_machine(stdlib):
    root = Path(sysconfig.get_path("stdlib"))
    assert Path(torch.__file__).read_bytes() not in text_of(stdlib)
    for excluded in (*root.glob("test/test_json/__init__.py"), *root.glob("_sysconfigdata*.py")):
        assert excluded.read_bytes() not in text_of(stdlib)


def test_a_text_file_is_its_bytes(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes("Grüße\n".encode())
    corpus = read_corpus(str(file))
    assert corpus.tokens.tolist() == list("Grüße\n".encode())
    assert corpus.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert corpus.name == "poem.txt"


def test_a_folder_is_its_files_sorted_by_path_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a/z.md", "c", "a/b/c.py", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"{name};")
    assert text_of(read_corpus(tmp_path)) == b"a/b/c.py;a/z.md;b.txt;c;"


def test_a_bin_file_is_mapped_uint16(tmp_path):
    file = tmp_path / "train.bin"
    values = np.array([0, 50256, 7, 65535], dtype="<u2")
    values.tofile(file)
    corpus = read_corpus(file)
    assert corpus.tokens.tolist() == values.tolist()
    assert corpus.vocab_size == 65536
    assert corpus.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    inputs, targets = corpus.batch(1, 3, seed=0, step=0)
    assert (inputs.tolist(), targets.tolist()) == ([[0, 50256, 7]], [[50256, 7, 65535]])


def test_split_takes_the_tail_for_validation():
    train, validation = numbered(100).split(0.2)
    assert train.tokens.tolist() == list(range(80))
    assert validation.tokens.tolist() == list(range(80, 100))
    assert validation.vocab_size == 100
    assert train.sha256 != validation.sha256
    with pytest.raises(ValueError, match="validation_fraction: expected a number between 0 and 1, got 1"):
        numbered(100).split(1)


def test_targets_are_the_next_tokens_and_every_place_can_be_drawn():
    inputs, targets = numbered(20).batch(400, 16, seed=0, step=0)
    assert (inputs.dtype, inputs.shape, targets.shape) == (torch.int64, (400, 16), (400, 16))
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2, 3}


def test_a_batch_is_a_function_of_seed_and_step():
    corpus = numbered(10_000)
    first = corpus.batch(8, 16, seed=1, step=2)[0]
    torch.manual_seed(5)
    assert torch.equal(corpus.batch(8, 16, seed=1, step=2)[0], first)
    others = [corpus.batch(8, 16, seed=s, step=t)[0] for s, t in ((1, 3), (2, 2), (2, 1), (1 + 2**32, 2))]
    assert not any(torch.equal(other, first) for other in others)


def test_too_few_tokens_are_refused():
    assert numbered(17).batch(2, 16, seed=0, step=0)[0].shape == (2, 16)
    with pytest.raises(ValueError, match="context: expected fewer than the 16 tokens of numbers, got 16"):
        numbered(16).batch(2, 16, seed=0, step=0)


@pytest.mark.parametrize(
    ("files", "path", "error", "message"),
    [
        ({}, "nowhere", FileNotFoundError, "path: expected a text file, a folder or a .bin file, found nothing at "),
        ({}, "", ValueError, "path: expected text, found 0 files"),
        ({"empty.txt": b""}, "empty.txt", ValueError, "path: expected text, found 1 files with no byte in them"),
        ({"odd.bin": b"abc"}, "odd.bin", ValueError, "path: expected uint16 tokens, two bytes each, found 3 bytes"),
        ({"no.bin": b""}, "no.bin", ValueError, "path: expected uint16 tokens, two bytes each, found 0 bytes"),
        ({"a.txt": b"a", "train.bin": b"ab"}, "", ValueError, "expected text files, found train.bin in "),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path, files, path, error, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_corpus(tmp_path / path)
