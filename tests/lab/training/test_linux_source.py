"""Tokens of Linux's sources: what is read, what is held out, and that the same archive gives the same tokens."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from sage_lab.training import linux_source
from sage_lab.training.corpus import read_corpus
from sage_lab.training.linux_source import Sizes, learnt_tokenizer, linux_corpus, sources, tokens_of

FILES = {
    "kernel/a.c": "int one(void)\n{\n\t\treturn 1;\n}\n",
    "include/b.h": "#define TWO 2\n",
    "Documentation/c.rst": "Größe\n=====\n",
    "sound/soc/d.c": "int four(void)\n{\n\t\treturn 4;\n}\n",
    "drivers/gpu/drm/amd/include/e.h": "#define GENERATED 5\n",
    "Makefile": "all:\n",
}
SIZES = Sizes(vocabulary=300, text=10_000, train=1_000, held_out=1_000)


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "linux-source-6.1.tar.xz"
    with tarfile.open(path, "w:xz") as files:
        for name, text in FILES.items():
            entry = tarfile.TarInfo(f"linux-source-6.1/{name}")
            entry.size = len(text.encode())
            files.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_sources_leave_out_what_is_generated_and_hold_out_sound_drivers(archive):
    train, held_out = sources(archive)
    assert sorted(train) == sorted(FILES[name] for name in ("kernel/a.c", "include/b.h", "Documentation/c.rst"))
    assert held_out == [FILES["sound/soc/d.c"]]


def test_tokens_say_what_the_files_say_and_a_line_end_takes_its_tabs_along(archive):
    train, _ = sources(archive)
    tokenizer = learnt_tokenizer(train, SIZES)
    tokens = tokens_of(train, tokenizer, 1_000)
    assert tokens.dtype == torch.uint16
    starts = [place for place, token in enumerate(tokens.tolist()) if token == 0]
    assert len(starts) == 3
    assert tokenizer.decode(tokens.tolist()) == "".join(train)
    assert "Ċĉĉ" in tokenizer.encode(FILES["kernel/a.c"]).tokens  # as bytes are written there: "\n\t\t"
    assert torch.equal(tokens_of(train, tokenizer, 20), tokens[:20])


def test_the_same_archive_gives_the_same_tokens_which_are_kept_beside_it(archive, monkeypatch):
    first, second = linux_corpus(archive, SIZES), linux_corpus(archive, SIZES)
    assert first.facts == second.facts
    assert set(first.source) == {"archive", "archive_sha256", "tokenizer_sha256"}
    train, validation = first.split()
    assert torch.equal(train.tokens, first.tokens)
    assert torch.equal(validation.tokens, first.held_out)
    found = read_corpus(archive)
    monkeypatch.setattr(linux_source, "linux_corpus", None)
    assert read_corpus(archive).facts == found.facts


def test_a_part_of_linux_gives_the_tokens_that_it_always_gave():
    """linux_part.tar.xz: eight files under the MIT or a BSD licence. The hash is what a record names a corpus by."""
    part = Path(__file__).with_name("linux_part.tar.xz")
    corpus = linux_corpus(part, Sizes(vocabulary=1000, text=50_000, train=20_000, held_out=5_000))
    assert corpus.sha256 == "6f33734e9c12b5cd16a834453261d721e126b66c31fea749713707be54000d5e"
    assert len(corpus.held_out) == 5_000


def test_an_archive_of_something_else_is_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz"):
        pass
    with pytest.raises(ValueError, match="corpus: expected the sources of Linux with sound/"):
        read_corpus(tmp_path / "x.tar.xz")
