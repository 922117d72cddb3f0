"""Which launch a kernel gets on which GPU, and what a user's own table may look like. The GPUs here are made up."""

import json

import pytest
import torch

pytest.importorskip("triton")
import triton
from sage_kernels.common import launch_tables
from sage_kernels.common.candidates import DEFAULTS, Launch
from sage_kernels.common.launch import choose_launch
from sage_kernels.common.launch_tables import Case, measured_launches, table_for, users_table

CUDA = torch.device("cuda", 0)
RTX = "NVIDIA GeForce RTX 4090"
DQ = Case("dq", 3, 64, True)
SLOW, FAST = Launch(64, 128, 8, 1), Launch(32, 128, 4, 3)  # both candidates of dq


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A function that says which GPU this machine has; the user's cache folder and the packaged tables are empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "packaged").mkdir()
    monkeypatch.setattr(launch_tables.resources, "files", lambda _: tmp_path / "packaged")
    caches = (table_for, measured_launches, launch_tables.compiled_launches)

    def name(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        for cached in caches:
            cached.cache_clear()

    yield name
    for cached in caches:
        cached.cache_clear()


def row(case=DQ, launch=SLOW, **more):
    return case._asdict() | launch._asdict() | more


def write(path, *rows, gpu=RTX, version=triton.__version__):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": {"gpu": gpu, "triton": version}, "rows": rows}))


def chosen(case=DQ):
    return choose_launch(*case, CUDA)


def test_the_table_that_knows_the_gpu_best_is_taken(gpu, tmp_path):
    packaged, users = tmp_path / "packaged", Launch(128, 128, 8, 2)
    gpu("NVIDIA H100", (9, 0))
    assert chosen() == DEFAULTS["dq"]
    write(packaged / "launch_compiled.json", row(launch=SLOW, capability=90), row(launch=SLOW, capability=86))
    gpu("NVIDIA H100", (9, 0))
    assert chosen() == SLOW
    write(packaged / "launch_hopper.json", row(launch=FAST))
    gpu("NVIDIA H100", (9, 0))
    assert chosen() == FAST
    write(users_table("NVIDIA H100", "sagebwd"), row(launch=users), gpu="NVIDIA H100")
    gpu("NVIDIA H100", (9, 0))
    assert (chosen(), chosen(Case("dq", 3, 64, False))) == (users, SLOW)
    gpu("NVIDIA H200", (9, 0))
    assert chosen() == FAST
    for capability in ((8, 6), (8, 9)):  # the same code
        gpu("another", capability)
        assert chosen() == SLOW
    gpu("another", (8, 0))
    assert chosen() == DEFAULTS["dq"]


def test_small_heads_take_the_launch_of_64_and_other_devices_the_default(gpu, tmp_path):
    write(tmp_path / "packaged" / "launch_compiled.json", row(launch=FAST, capability=86))
    gpu(RTX, (8, 6))
    assert choose_launch("dq", 3, 32, True, CUDA) == FAST
    assert choose_launch("dq", 3, 128, True, CUDA) == DEFAULTS["dq"]
    assert choose_launch("dq", 3, 64, True, torch.device("cpu")) == DEFAULTS["dq"]


def test_the_packaged_tables_hold_what_the_tests_run():
    tables = [measured_launches(), *map(launch_tables.compiled_launches, (80, 86, 89, 120))]
    assert all(tables)
    for case, launch in [x for table in tables for x in table.items()]:
        assert launch in launch_tables.candidates(case.kernel, case.level), case


UNREADABLE = {
    "not JSON": '{"provenance": {',
    "another GPU's": {"gpu": "NVIDIA L4"},
    "another Triton's": {"version": "2.0"},
    "a column missing": {"rows": [{"kernel": "dq"}]},
    "a kernel that is gone": {"rows": [row(Case("gone", 3, 64, True))]},
    "a list for a level": {"rows": [row(Case("dq", [3], 64, True))]},
    "a tile that scales do not cover": {"rows": [row(launch=Launch(64, 64, 4, 2))]},
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_table_that_cannot_be_used_is_named_once_and_left(gpu, content):
    path = users_table(RTX, "sagebwd")
    if isinstance(content, str):
        write(path)
        path.write_text(content)
    else:
        write(path, *content.pop("rows", [row()]), **content)
    gpu(RTX, (8, 9))
    with pytest.warns(UserWarning, match=r"_4090_sagebwd\.json is not used.*: expected .*bench --tune") as said:
        launches = [chosen(), chosen()]
    assert launches == [DEFAULTS["dq"]] * 2
    assert len(said) == 1
