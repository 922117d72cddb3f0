"""Records: written whole or not at all, read back as they were, with their provenance."""

import re
import runpy
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch
from sage_course.results import instructions
from sage_lab import records
from sage_lab.__main__ import read_options
from sage_lab.command_line import written
from sage_lab.files import replaced
from sage_lab.records import Record, provenance, read_record, write_record
from sage_lab.training.capture import read_capture
from sage_lab.training.video_flow import read_weights

ROWS = [{"tensor": "dQ", "rel_l2": 0.25, "std": None}, {"tensor": "dK", "rel_l2": 0.5, "std": 0.1}]


@pytest.mark.parametrize("text", ["half of the n", None])
def test_a_file_is_replaced_in_one_step_or_after_an_error_not_at_all(tmp_path, text):
    path = tmp_path / "new" / "folder" / "file.txt"
    with replaced(path) as temporary:
        temporary.write_text("whole")
        assert temporary.parent == path.parent  # else the last step could be a copy
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), replaced(path) as temporary:  # noqa: PT012
        if text:
            temporary.write_text(text)
        raise KeyboardInterrupt
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_record_reads_back_as_it_was_written_and_one_that_json_cannot_hold_leaves_it(tmp_path):
    path = tmp_path / "table.json"
    write_record(path, ROWS, command="python -m this", seeds=[0, 1])
    with pytest.raises(TypeError):
        write_record(path, [{"rel_l2": torch.ones(1)}], command="another")
    record = read_record(path)
    assert record.rows == ROWS
    with pytest.raises(KeyError, match="tenso"):
        record.select(tenso="dQ")
    assert (record.provenance["command"], record.provenance["seeds"]) == ("python -m this", [0, 1])
    assert len(path.read_text().splitlines()) < 30  # a row per line: changes are readable in a diff
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_names_files_not_folders_of_the_machine_that_wrote_it():
    arguments = ["noise", "--json", "/somewhere/out.json", "--corpus=/a b/text.txt", "--folder", "runs/one", "--x=1/2"]
    expected = "python -m sage_lab noise --json out.json --corpus=text.txt --folder runs/one --x=1/2"
    assert written("sage_lab", arguments) == expected
    for path in records.RECORDED.glob("*.json"):
        assert not re.search(r" /|=/", str(read_record(path).provenance["command"])), path.name


def test_records_are_those_of_this_checkout_or_of_the_one_that_is_named(tmp_path, monkeypatch):
    assert (records.REPOSITORY / "pyproject.toml").exists()
    assert records.RECORDED == records.REPOSITORY / "notebooks" / "recorded"
    with pytest.raises(FileNotFoundError, match=r"name: expected a record at .*no_such\.json, found none"):
        read_record("no_such")
    write_record(tmp_path / "notebooks" / "recorded" / "table9.json", ROWS, command="c")
    monkeypatch.setenv("SAGE_REF_REPOSITORY", str(tmp_path))
    assert runpy.run_path(records.__file__)["read_record"]("table9").rows == ROWS


@pytest.mark.parametrize("content", ["", "[]", '{"provenance": {}}', '{"provenance": [], "rows": []}'])
def test_a_file_that_is_no_record_is_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="(path|name): expected a record .*x.json"):
        read_record(tmp_path / "x.json")


def test_provenance_says_what_measured_and_when(monkeypatch):
    monkeypatch.setenv("SAGE_REF_COMMIT", "0123456789abcdef")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="0.1.2"))  # the module in use counts
    facts = provenance("python -m this")
    assert set(facts) == {"gpu", "driver", "cpu", "python", "torch", "triton", "commit", "date", "command"}
    assert (facts["torch"], facts["triton"], facts["commit"]) == (torch.__version__, "0.1.2", "0123456789abcdef")
    assert (facts["gpu"] is None) == (not torch.cuda.is_available())
    assert abs((datetime.now(UTC) - datetime.fromisoformat(facts["date"])).total_seconds()) < 60


def test_a_caption_names_all_devices_and_says_when_a_record_is_archived():
    facts = {"gpu": ["H100", "H200"], "date": "2026-01-02T03:04:05", "commit": "0123456789"}
    assert Record(facts, []).caption == "measured on H100 and H200, 2026-01-02"
    archived = Record(facts | {"archived": "its command is gone"}, [])
    assert archived.caption == "measured on H100 and H200, 2026-01-02, archived"


def provenances():
    """Every record's name and provenance, those of captures and of weights too."""
    for path in sorted(records.RECORDED.glob("*.json")):
        yield path.name, read_record(path).provenance
    for path in sorted(records.RECORDED.glob("*.safetensors")):
        if path.name.startswith("capture"):
            yield path.name, read_capture(path).provenance
        else:
            yield path.name, read_weights([path])[2]["provenance"]


def is_on_this_branch(commit):
    asked = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(asked, cwd=records.REPOSITORY, capture_output=True, check=False).returncode == 0


def all_commits_are_here():
    asked = ["git", "rev-parse", "--is-shallow-repository"]
    found = subprocess.run(asked, cwd=records.REPOSITORY, capture_output=True, text=True, check=False)
    return found.stdout.strip() == "false"


@pytest.mark.parametrize(("name", "facts"), list(provenances()), ids=lambda x: x if isinstance(x, str) else "")
def test_a_record_can_be_made_again_or_says_why_not(name, facts, tmp_path, monkeypatch):
    """Its command is accepted, and its commit is an ancestor of this one."""
    if "archived" in facts:
        assert facts["archived"]
        return
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(facts["command"].rpartition(" -m ")[2])
    for argument in arguments:
        if "." in argument:  # the files that it reads are there
            (tmp_path / argument).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / argument).touch()
    if program == "sage_lab":
        assert read_options([{"gpu": "cpu"}.get(x, x.replace("cuda", "cpu")) for x in arguments]).run
    else:
        assert (program, arguments) == (instructions.__name__, [])
    if all_commits_are_here():
        assert all(map(is_on_this_branch, records.listed(facts["commit"])))


def test_the_commit_is_marked_when_sources_differ_from_it(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", *identity, *arguments], cwd=tmp_path, text=True).strip()

    monkeypatch.delenv("SAGE_REF_COMMIT", raising=False)
    monkeypatch.setattr(records, "REPOSITORY", tmp_path)
    assert provenance("")["commit"] == "unknown"  # no repository
    files = [tmp_path / source / "x.py" for source in ("sage_ref", "kernels", "lab", "notebooks")]
    for file in files:
        file.parent.mkdir()
        file.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert provenance("")["commit"] == commit
    for file in files:
        file.write_text("2")
        assert provenance("")["commit"] == (commit if file == files[-1] else f"{commit}-dirty")
        file.write_text("1")
