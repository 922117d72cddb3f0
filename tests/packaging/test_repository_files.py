"""Files that others read: GitHub, pre-commit, whoever cites. What they repeat is what pyproject.toml says."""

import re
import tomllib

import yaml
from sage_lab.records import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
GITHUB = REPOSITORY / ".github"


def read(path):
    return yaml.safe_load((REPOSITORY / path).read_text())


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def test_workflows_run_what_every_machine_runs_on_the_oldest_and_the_newest_python():
    jobs = read(".github/workflows/test.yml")["jobs"]
    declared = [found[1] for x in PROJECT["classifiers"] if (found := re.fullmatch(r".*:: Python :: (3\.\d+)", x))]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert jobs["linux"]["strategy"]["matrix"]["python"] == [declared[0], declared[-1]]
    ci = (REPOSITORY / ".ci" / "run").read_text().splitlines()[-1]
    assert commands(jobs["linux"]) == [ci]
    assert commands(jobs["book"]) == ["make book"]
    install, test = commands(jobs["without-triton"])
    assert "--constraint constraints.txt" in install
    extras = re.search(r"\.\[([\w,]+)\]", install)[1].split(",")
    assert "kernels" not in extras
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    folders = re.findall(r"tests/\w+", test)
    assert folders
    assert all((REPOSITORY / folder).is_dir() for folder in folders)


def test_issues_ask_for_what_a_program_prints():
    forms = {path.stem: read(path) for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"}
    assert set(forms) == {"wrong_result", "speed", "course"}
    for name, form in forms.items():
        assert {"name", "description", "body"} <= set(form), name
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids)), name
        assert any(field.get("validations", {}).get("required") for field in form["body"]), name


def test_pre_commit_runs_what_make_test_runs_first():
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].replace(" --fix", "") for hook in repository["hooks"]]
    makefile = (REPOSITORY / "Makefile").read_text()
    lint = re.findall(r"^\t\$\(BIN\)/(ruff [a-z]+)", makefile, re.MULTILINE)
    assert [f".venv/bin/{line}" for line in lint] == entries


def test_the_citation_says_what_pyproject_says():
    citation = read("CITATION.cff")
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]
    assert citation["title"].startswith(PROJECT["name"])
    readme = (REPOSITORY / "README.md").read_text()
    papers = re.findall(r"\b2\d{3}\.\d{5}\b", citation["message"])
    assert len(papers) == 4
    assert all(paper in readme for paper in papers)


def test_the_public_address_stands_in_none_of_them():
    """It may change: pyproject.toml is the one place."""
    address = PROJECT["urls"]["Repository"]
    files = [path for path in GITHUB.rglob("*") if path.is_file()]
    for path in (*files, REPOSITORY / "CITATION.cff", REPOSITORY / ".pre-commit-config.yaml", REPOSITORY / "setup.py"):
        assert address not in path.read_text(), path
