"""Tokens are the bytes of the files, batches are a function of (seed, step), and nothing to read is an error."""

import hashlib
import sysconfig

import numpy as np
import pytest
import torch
from sage_lab.training.corpus import Corpus, read_corpus, write_corpus


def text_of(corpus):
    return corpus.tokens.numpy().tobytes()


def numbered(count):
    """A corpus whose tokens are 0, 1, 2, ..."""
    return Corpus("numbers", torch.arange(count).to(torch.uint16), count)


def written(root, *names):
    """Files below `root`, each of which says its name."""
    for name in names:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(f"{name};")
    return root


def test_the_default_is_python_in_the_order_of_its_files_hashes_without_tests_and_the_build(tmp_path, monkeypatch):
    kept = ["ast.py", "json/decoder.py", "zipfile.py"]
    left_out = ["test/a.py", "json/tests/b.py", "site-packages/c.py", "dist-packages/d.py"]
    stdlib = written(tmp_path / "stdlib", *kept, *left_out, "_sysconfigdata_x.py", "e.c")
    of_packages = ["tool/__init__.py", "tool/deep/er.py", "testing.py"]
    packages = written(stdlib / "site-packages", *of_packages, "tool/tests/g.py", "tool/test/h.py")
    paths = {"stdlib": stdlib, "purelib": packages, "platlib": packages}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(paths[name]))
    # "c.py" is where packages are: left out of the standard library, and found as a package.
    files = [*kept, *of_packages, "c.py"]
    expected = sorted(files, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    says = {"c.py": "site-packages/c.py;"}
    corpus = read_corpus()
    assert (corpus.vocab_size, corpus.tokens.dtype) == (256, torch.uint8)
    assert text_of(corpus).decode() == "".join(says.get(name, f"{name};") for name in expected)


def test_a_text_file_is_its_bytes(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes("Grüße\n".encode())
    corpus = read_corpus(str(file))
    assert corpus.tokens.tolist() == list("Grüße\n".encode())
    assert (corpus.name, corpus.sha256) == ("poem.txt", hashlib.sha256(file.read_bytes()).hexdigest())


def test_a_bin_file_is_mapped_uint16(tmp_path):
    file = tmp_path / "train.bin"
    values = np.array([0, 50256, 7, 65535], dtype="<u2")
    file.write_bytes(values.tobytes())
    corpus = read_corpus(file)
    assert corpus.tokens.tolist() == values.tolist()
    assert corpus.vocab_size == 65536
    assert corpus.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    inputs, targets = corpus.batch(1, 3, seed=0, step=0)
    assert (inputs.tolist(), targets.tolist()) == ([[0, 50256, 7]], [[50256, 7, 65535]])


def test_a_prepared_corpus_is_the_same_corpus(tmp_path):
    held_out = torch.tensor([7, 8], dtype=torch.uint16)
    corpus = Corpus("numbers", torch.arange(100).to(torch.uint16), 128, held_out, {"archive": "x.tar.xz"})
    write_corpus(corpus, tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "c.safetensors"]
    found = read_corpus(tmp_path / "c.safetensors")
    assert found.facts == corpus.facts
    assert found.facts["archive"] == "x.tar.xz"
    train, validation = found.split()
    assert (train.tokens.tolist(), validation.tokens.tolist()) == (list(range(100)), [7, 8])


def test_split_takes_the_tail_for_validation():
    train, validation = numbered(100).split(0.2)
    assert train.tokens.tolist() == list(range(80))
    assert validation.tokens.tolist() == list(range(80, 100))
    assert validation.vocab_size == 100
    assert train.sha256 != validation.sha256


def test_targets_are_the_next_tokens_and_every_place_can_be_drawn():
    inputs, targets = numbered(20).batch(400, 16, seed=0, step=0)
    assert (inputs.dtype, inputs.shape, targets.shape) == (torch.int64, (400, 16), (400, 16))
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2, 3}
    assert numbered(17).batch(2, 16, seed=0, step=0)[0].shape == (2, 16)
    with pytest.raises(ValueError, match="context: expected fewer than the 16 tokens of numbers, got 16"):
        numbered(16).batch(2, 16, seed=0, step=0)


def test_a_batch_is_a_function_of_seed_and_step():
    corpus = numbered(10_000)
    first = corpus.batch(8, 16, seed=1, step=2)[0]
    torch.manual_seed(5)
    assert torch.equal(corpus.batch(8, 16, seed=1, step=2)[0], first)
    others = [corpus.batch(8, 16, seed=s, step=t)[0] for s, t in ((1, 3), (2, 2), (2, 1), (1 + 2**32, 2))]
    assert not any(torch.equal(other, first) for other in others)
