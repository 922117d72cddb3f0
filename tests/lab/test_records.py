"""Records: written whole or not at all, read back as they were, with where they come from."""

import json
import re
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch
from sage_lab import records
from sage_lab.command_line import written
from sage_lab.records import Record, markdown_table, provenance, read_record, replaced, write_record

ROWS = [{"tensor": "dQ", "rel_l2": 0.25, "std": None}, {"tensor": "dK", "rel_l2": 0.5, "std": 0.1}]


def test_replaced_writes_in_one_step(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    with replaced(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent  # else the last step could be a copy
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("text", ["half of the n", None])
def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, error, text):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error), replaced(path) as temporary:  # noqa: PT012
        if text:
            temporary.write_text(text)
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_reads_back_as_it_was_written_and_one_that_json_cannot_hold_leaves_it(tmp_path):
    path = tmp_path / "table.json"
    write_record(path, ROWS, command="python -m this", seeds=[0, 1])
    with pytest.raises(TypeError):
        write_record(path, [{"rel_l2": torch.ones(1)}], command="another")
    record = read_record(path)
    assert record.rows == ROWS
    assert (record.provenance["command"], record.provenance["seeds"]) == ("python -m this", [0, 1])
    assert len(path.read_text().splitlines()) < 30  # a row per line: changes are readable in a diff
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_names_files_not_folders_of_the_machine_that_wrote_it():
    arguments = ["noise", "--json", "/somewhere/out.json", "--corpus=/a b/text.txt", "--folder", "runs/one", "--x=1/2"]
    expected = "python -m sage_lab noise --json out.json --corpus=text.txt --folder runs/one --x=1/2"
    assert written("sage_ref", arguments) == expected
    for path in records.RECORDED.glob("*.json"):
        assert not re.search(r" /|=/", str(read_record(path).provenance["command"])), path.name


@pytest.fixture
def installed_elsewhere(tmp_path, monkeypatch):
    """The package lies where no checkout is, and so does the current folder; a checkout is beside them."""
    monkeypatch.delenv("SAGE_REF_REPOSITORY", raising=False)
    monkeypatch.setattr(records, "_package_parent", lambda: tmp_path / "site-packages")
    for folder in ("site-packages", "somewhere", "checkout/notebooks/recorded", "checkout/deep/down"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "somewhere")
    return tmp_path / "checkout"


def test_the_checkout_is_where_the_package_lies():
    assert (records.REPOSITORY / "pyproject.toml").exists()
    assert records.RECORDED == records.REPOSITORY / "notebooks" / "recorded"
    with pytest.raises(AttributeError, match="no attribute 'REPOSITORIES'"):
        records.REPOSITORIES  # noqa: B018


def test_without_a_checkout_the_error_says_what_was_expected_and_where(installed_elsewhere, monkeypatch):
    expected = r"repository: expected a checkout .* at .*site-packages, .*somewhere or above it.*SAGE_REF_REPOSITORY"
    with pytest.raises(FileNotFoundError, match=expected):
        read_record("table1")
    monkeypatch.setenv("SAGE_REF_REPOSITORY", "nowhere")
    with pytest.raises(FileNotFoundError, match="SAGE_REF_REPOSITORY: expected a folder with .*, got nowhere"):
        records.REPOSITORY  # noqa: B018


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "current folder"])
def test_records_of_another_checkout_are_found_by_name(installed_elsewhere, monkeypatch, is_named):
    if is_named:
        monkeypatch.setenv("SAGE_REF_REPOSITORY", str(installed_elsewhere))
    else:
        monkeypatch.chdir(installed_elsewhere / "deep" / "down")
    write_record(installed_elsewhere / "notebooks" / "recorded" / "table1.json", ROWS, command="c")
    assert read_record("table1").rows == ROWS
    with pytest.raises(FileNotFoundError, match=r"name: expected a record at .*table2\.json, found none"):
        read_record("table2")


def test_the_commit_of_another_checkout_is_not_the_packages(installed_elsewhere, monkeypatch):
    monkeypatch.setattr(records, "_output", lambda *command: "0123456")
    monkeypatch.chdir(installed_elsewhere)
    for named, expected in (("", "unknown"), ("abcdef0", "abcdef0")):
        monkeypatch.setenv("SAGE_REF_COMMIT", named)
        assert records._commit() == expected


def test_select_wants_every_value():
    record = Record({}, ROWS)
    assert record.select(tensor="dQ") == ROWS[:1]
    assert record.select(tensor="dK", rel_l2=0.5) == ROWS[1:]
    assert record.select(tensor="dK", rel_l2=0.25) == []
    assert record.select() == ROWS
    with pytest.raises(KeyError, match="tenso"):
        record.select(tenso="dQ")


def test_provenance_says_what_measured_and_when(monkeypatch):
    monkeypatch.setenv("SAGE_REF_COMMIT", "0123456789abcdef")
    facts = provenance("python -m this")
    assert set(facts) == {"gpu", "driver", "cpu", "python", "torch", "triton", "commit", "date", "command"}
    assert facts["torch"] == torch.__version__
    assert (facts["gpu"] is None) == (not torch.cuda.is_available())
    assert re.fullmatch(r".+, \d+ cores", facts["cpu"])
    assert abs((datetime.now(UTC) - datetime.fromisoformat(facts["date"])).total_seconds()) < 5
    assert facts["commit"] == "0123456789abcdef"
    assert json.loads(json.dumps(facts)) == facts


def test_a_version_is_that_of_the_module_in_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="0.1.2"))
    assert provenance("python -m this")["triton"] == "0.1.2"


def test_the_commit_is_marked_when_sources_differ_from_it(monkeypatch):
    monkeypatch.delenv("SAGE_REF_COMMIT", raising=False)
    for commit, status, expected in (
        ("0123456", "", "0123456"),
        ("0123456", " M sage_ref/backend.py", "0123456-dirty"),
        (None, None, "unknown"),  # no git
    ):
        answers = {"rev-parse": commit, "status": status}
        monkeypatch.setattr(records, "_output", lambda git, subcommand, *rest, found=answers: found[subcommand])
        assert records._commit() == expected
    monkeypatch.setenv("SAGE_REF_COMMIT", "abcdef0")  # a copy's own history says nothing about it
    monkeypatch.setattr(records, "_output", lambda git, subcommand, *rest: " M sage_ref/backend.py")
    assert records._commit() == "abcdef0"


@pytest.mark.parametrize(
    ("gpu", "commit", "caption"),
    [
        ("H200", "0123456789", "H200, 2026-01-02, commit 0123456"),
        (None, "0123456789", "a CPU, 2 cores, 2026-01-02, commit 0123456"),
        (["H100", "H200"], ["0123456789", "abcdef0123-dirty"], "H100 and H200, 2026-01-02, commits 0123456, abcdef0"),
    ],
)
def test_caption_names_devices_day_and_commits(gpu, commit, caption):
    facts = {"gpu": gpu, "cpu": "a CPU, 2 cores", "date": "2026-01-02T03:04:05+00:00", "commit": commit}
    assert Record(facts, []).caption == f"measured on {caption}"


def test_markdown_table():
    assert markdown_table(("a", "b"), [(1, None), ("x", 0.5)]) == "| a | b |\n| --- | --- |\n| 1 | None |\n| x | 0.5 |"
