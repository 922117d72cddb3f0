"""What the book is made from: outline, addresses, Colab's cell, and the tables that Sphinx builds."""

import json
import re
import sys
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from sage_ref.course import colab
from sage_ref.course.outline import colab_address, file_address, notebooks, public_address
from sage_ref.records import REPOSITORY


@pytest.fixture
def course_pages(monkeypatch):
    """The Sphinx extension book/course_pages.py."""
    pytest.importorskip("sphinx", reason="needs the extra book: make .venv/book")
    monkeypatch.syspath_prepend(REPOSITORY / "book")
    import course_pages

    yield course_pages
    sys.modules.pop("course_pages")


def test_addresses_lead_to_the_public_repository():
    address = public_address()
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", address)
    assert file_address(Path("README.md")) == f"{address}/blob/main/README.md"
    assert file_address(Path("notebooks/recorded")) == f"{address}/tree/main/notebooks/recorded"
    owner = address.removeprefix("https://github.com/")
    opened = colab_address(Path("notebooks/x.ipynb"))
    assert opened == f"https://colab.research.google.com/github/{owner}/blob/main/notebooks/x.ipynb"


def test_no_other_file_names_the_public_address():
    """A second copy would stay behind when the project moves."""
    address = public_address().removeprefix("https://")
    folders = ("sage_ref", "kernels", "exercises", "book", "tests", ".ci")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    files = [path for path in files if path.suffix in {".py", ".md", ""}]
    files += [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("*.txt"), REPOSITORY / "Makefile"]
    assert [path for path in files if path.is_file() and address in path.read_text()] == []


def test_colab_installs_the_pinned_versions_of_what_notebooks_import():
    pins = colab.pinned()
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(pins)
    assert set(pins) <= set((REPOSITORY / "constraints.txt").read_text().splitlines())
    assert {pin.partition("==")[0] for pin in pins} >= {"matplotlib", "numpy", "safetensors", "scipy", "tokenizers"}
    assert not {pin.partition("==")[0] for pin in pins} & colab.FROM_COLAB


def test_a_requirement_without_a_pin_is_named(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((REPOSITORY / name).read_text().replace("scipy==", "other=="))
    monkeypatch.setattr(colab, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"constraints\.txt: expected a version of each of \['scipy'\]"):
        colab.pinned()


def test_colabs_cell_is_a_cell_that_does_nothing_elsewhere():
    cell = colab.install_cell("https://example.org/owner/name")
    assert "!git clone --quiet --depth 1 https://example.org/owner/name\n" in cell
    program = TransformerManager().transform_cell(cell)
    (script,) = re.findall(r"name/(\S+\.py)", cell)
    assert REPOSITORY / script == Path(colab.__file__)
    before = list(sys.path)
    exec(program, {})  # get_ipython is unknown here: a command that ran would raise
    assert sys.path == before
    sys.modules["google.colab"] = None
    try:
        with pytest.raises(NameError, match="get_ipython"):
            exec(program, {})
    finally:
        del sys.modules["google.colab"]


def test_steps_have_the_minutes_of_the_notebooks_themselves(course_pages):
    first = notebooks()[0]
    ((link, minutes),) = course_pages.steps(["notebook 00"])
    assert minutes == first.minutes
    assert link == f"[{first.title}](/notebooks/00_start_here.ipynb)"
    (_, minutes), _ = course_pages.steps(["exercise 01", "notebook 00"])
    assert f"Minutes: {minutes}\n" in (REPOSITORY / "exercises/01_block_quantizer/master.py").read_text()
    with pytest.raises(ValueError, match=r"way: expected lines among .*'notebook 00'.*, got 'notebook 99'"):
        course_pages.steps(["notebook 99"])


def test_a_notebooks_page_has_a_head_and_says_where_a_slider_stands(course_pages):
    text = (REPOSITORY / "notebooks" / "00_start_here.ipynb").read_text()
    content = [text]
    course_pages.with_head_and_notes(None, "notebooks/00_start_here", content)
    before, after = json.loads(text)["cells"], json.loads(content[0])["cells"]
    assert after[0] == before[0]
    assert colab_address(Path("notebooks/00_start_here.ipynb")) in after[1]["source"]
    assert colab.install_cell(public_address()) in after[1]["source"]
    assert [cell["source"] for cell in after[2:]] == [cell["source"] for cell in before[1:]]
    sliders = text.count(course_pages.WIDGET)
    assert sliders > 0
    assert content[0].count("Here the notebook has a slider") == sliders
    assert course_pages.WIDGET not in content[0]


def test_every_glossary_entry_has_two_sentences():
    entries = re.findall(r"\n((?:  \S.*\n)+)", (REPOSITORY / "book" / "glossary.md").read_text())
    assert len(entries) > 60
    for entry in entries:
        text = re.sub(r"\$[^$]*\$|`[^`]*`", "x", " ".join(entry.split()))
        assert len(re.findall(r"[^.]\.(?= [A-Zx0-9]|$)", text)) == 2, entry
