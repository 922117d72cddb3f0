"""The reader's copies, by the command that `make lab` runs."""

import json
import re
import subprocess

import pytest
import yaml
from sage_course.__main__ import main
from sage_course.copies import make_copies
from sage_course.outline import colab_address, notebook_files
from sage_lab.records import REPOSITORY


def test_make_lab_makes_copies_and_opens_one():
    commands = re.search(r"^lab: .*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1]
    assert "-m sage_course start\n" in commands
    assert "/lab/tree/my/00_start_here.ipynb" in commands
    assert "my/" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_a_copy_has_no_outputs_and_what_its_reader_writes_stays(tmp_path, capsys):
    command = ["start", "05", "--folder", str(tmp_path / "my")]
    main(command)
    copy = tmp_path / "my" / "05_sagebwd_backward.ipynb"
    assert capsys.readouterr().out == f"{copy}: made.\n"
    notebook = json.loads(copy.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
    assert "    return ...\n" in [line for cell in code for line in cell["source"]]
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\((\.\./[^)#]+)", text)]
    assert [link for link in links if not (REPOSITORY / "my" / link).resolve().exists()] == []
    assert any("book/" in link for link in links)
    code[5]["source"] = ["mine = 1"]
    copy.write_text(json.dumps(notebook))
    main(command)
    assert capsys.readouterr().out == f"{copy.parent}: 1 of your notebooks kept as they are.\n"
    assert "mine = 1" in copy.read_text()


def test_a_reader_is_told_when_the_original_has_changed_and_gets_it_beside_the_own_copy(tmp_path):
    original, folder = tmp_path / "05_title.ipynb", tmp_path / "my"
    cell = {"cell_type": "markdown", "source": ["old"]}
    original.write_text(json.dumps({"cells": [cell], "metadata": {}}))
    assert list(make_copies([original], folder)) == [f"{folder / original.name}: made."]
    original.write_text(json.dumps({"cells": [cell | {"source": ["new"]}], "metadata": {}}))
    told, how, _ = make_copies([original], folder)
    assert told.endswith("kept as you left it, but notebook 05 has changed since you began.")
    assert "`python -m sage_course start 05 --beside`" in how
    assert list(make_copies([original], folder, beside=True)) == [f"{folder / '05_title_2.ipynb'}: made."]
    assert ["old" in path.read_text() for path in sorted(folder.iterdir())] == [True, False]


def test_a_number_without_a_notebook_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["start", "99"])
    assert "numbers: expected some of 00 01 02" in capsys.readouterr().err


def test_colab_opens_a_copy_from_the_branch_that_the_workflow_pushes(tmp_path):
    text = (REPOSITORY / ".github" / "workflows" / "reader.yml").read_text()
    *_, start, push = [step["run"] for step in yaml.safe_load(text)["jobs"]["copies"]["steps"] if "run" in step]
    assert start.endswith("-m sage_course start")
    here, public = tmp_path / "here", tmp_path / "public.git"
    original = notebook_files()[5]
    list(make_copies([original], here / "my"))
    (here / ".gitignore").write_text("my/\n")
    for command in (f"git init --quiet --bare {public}", f"git init --quiet; git remote add origin {public}", push):
        subprocess.run(["sh", "-ec", command], cwd=here, check=True, capture_output=True)
    branch, path = re.search(r"/blob/(\w+)/(.*)", colab_address(original)).groups()
    shown = ["git", f"--git-dir={public}", "show", f"{branch}:{path}"]
    opened = json.loads(subprocess.run(shown, check=True, capture_output=True).stdout)
    assert [cell for cell in opened["cells"] if cell.get("outputs")] == []
