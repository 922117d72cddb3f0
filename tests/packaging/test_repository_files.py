"""Files that others read: GitHub, pre-commit, conda, whoever cites. What they repeat is what pyproject.toml says."""

import re

import yaml
from sage_course.outline import project
from sage_kernels.sagebwd.ops import MAX_HEAD_DIM, MIN_HEAD_DIM
from sage_kernels.sla2.routing import MASK_BLOCK_KV, MASK_BLOCK_Q
from sage_lab.bench.compile import SHARED_MEMORY
from sage_lab.records import REPOSITORY, read_record

import sage_ref

PROJECT = project()
EDITABLE = "--editable . --editable lab --editable notebooks"


def read(path):
    return yaml.safe_load((REPOSITORY / path).read_text())


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_version_is_the_same_in_every_file_that_has_it():
    assert sage_ref.__version__ == read("CITATION.cff")["version"] == PROJECT["version"]


def test_workflows_run_what_every_machine_runs_on_the_oldest_and_the_newest_python():
    jobs = read(".github/workflows/test.yml")["jobs"]
    declared = [found[1] for x in PROJECT["classifiers"] if (found := re.fullmatch(r".*:: Python :: (3\.\d+)", x))]
    assert PROJECT["requires-python"] == f">={declared[0]}"
    assert jobs["linux"]["strategy"]["matrix"]["python"] == [declared[0], declared[-1]]
    assert commands(jobs["linux"])[-1] == (REPOSITORY / ".ci" / "run").read_text().splitlines()[-1]
    assert commands(jobs["book"]) == ["make book"]
    oldest = re.search(r">=(\S+)", PROJECT["dependencies"][0])[1]
    for job, versions in (("without-triton", "--constraint constraints.txt"), ("oldest-torch", f'"torch=={oldest}.*"')):
        install, test = commands(jobs[job])
        assert versions in install
        assert install.endswith(EDITABLE)
        folders = re.findall(r"tests/\S+", test)
        assert folders
        assert all((REPOSITORY / folder).exists() for folder in folders)


def test_the_page_of_what_runs_where_says_what_was_compiled_pinned_and_measured():
    text = (REPOSITORY / "notebooks/book/support.md").read_text()
    for capability in SHARED_MEMORY:
        state = "measured" if capability == 90 else "compiled"
        assert f"| {capability / 10} | {state} |" in text
    pins = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line)
    measured = read_record("paired_h200").provenance
    for package, name in (("torch", "PyTorch"), ("triton", "Triton (Linux alone)")):
        assert f"| {name} | {pins[package]} | {measured[package].partition('+')[0]} |" in text
    assert f"| {MIN_HEAD_DIM} to {MAX_HEAD_DIM} |" in text
    assert f"| {MASK_BLOCK_Q} x {MASK_BLOCK_KV} |" in text
