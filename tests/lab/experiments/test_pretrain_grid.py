"""The plan has every cell of the experiment, a run has its place on a device to itself, what is finished stays so."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.command_line import PARENT
from sage_lab.experiments import pretrain_grid
from sage_lab.experiments.pretrain_grid import CPU_PLAN, Cell, GridPlan, RepairPlan, chosen_rates, train_in_a_process
from sage_lab.records import Record, read_record

SMALL = {"context": 16, "layers": 1, "width": 16, "heads": 1, "validation_sequences": 2}
TINY = replace(CPU_PLAN, tokens=128, tokens_per_step=(32, 64), seeds=(0, 1), seeds_at_large=(0,), **SMALL)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sage_lab.records._commit", lambda: "0" * 40)  # it would start git


# The plan


@pytest.mark.parametrize(("plan", "name"), [(GridPlan(), "pretrain_h200"), (RepairPlan(), "pretrain_repair_h200")])
def test_the_records_are_those_of_the_plans(plan, name):
    record = read_record(name)
    assert record.provenance["plan"] == json.loads(json.dumps(asdict(plan)))
    rows = [{"remedy": None} | row for row in record.rows]
    rates = chosen_rates(plan, [row for row in rows if row["attention"] == "exact" and row["qk_norm"]])
    assert {str(size): rate for size, rate in rates.items()} == record.provenance["learning_rate"]
    cells = list(dict.fromkeys(plan.search() + plan.cells(rates)))
    assert len({cell.name for cell in cells}) == len(cells)

    def kind(facts, granularity):
        names = ("attention", "qk_norm", "tokens_per_step", "seed", "learning_rate", "smoothing", "backend")
        return *(facts[name] for name in names), granularity or "row", facts["remedy"] or "none"

    found = [kind(row, row["granularity"]) for row in rows]
    if isinstance(plan, RepairPlan):
        found = [(*x[:-1], "none" if x[0] == "exact" else x[-1]) for x in found]
    assert sorted(found) == sorted(kind(cell.facts, cell.granularity) for cell in cells)


def searched(size, rate, loss, **more):
    row = {"attention": "exact", "tokens_per_step": size, "learning_rate": rate, "final_val_loss": loss}
    return row | {"diverged": None} | more


def test_a_rate_is_chosen_among_the_runs_that_did_not_diverge():
    rows = [searched(512, 0.1, 2.0), searched(512, 0.3, None, diverged="guessing"), searched(4096, 0.1, 2.5)]
    assert chosen_rates(CPU_PLAN, rows) == {512: 0.1, 4096: 0.1}
    message = "learning_rates: expected one that trains with 4096 tokens per batch, "
    for of_size, said in (([], "no run has finished"), ([searched(4096, 0.1, None, diverged="x")], "all 1 finished")):
        with pytest.raises(ValueError, match=message + said):
            chosen_rates(CPU_PLAN, rows[:2] + of_size)


# Running


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("device", [5, None])
def test_a_run_is_a_process_on_its_device_whose_output_is_kept(tmp_path, monkeypatch, status, device):
    """In place of Python, a program that says what it was called with."""
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@"\necho $CUDA_VISIBLE_DEVICES ${PARENT} >&2\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    cell = Cell("sagebwd", True, 2**17, 0, 0.001, "k", "auto", remedy="two terms")
    message = f"{cell.name}: the run ended with exit status 3, see .*{cell.name}.log"
    with pytest.raises(RuntimeError, match=message) if status else nullcontext():
        train_in_a_process(GridPlan(), cell, device, tmp_path)
    arguments, environment = (tmp_path / f"{cell.name}.log").read_text().splitlines()
    assert arguments.startswith("-m sage_lab pretrain --attention sagebwd --tokens-per-step 131072 ")
    for part in ("--backend auto", "--remedy two terms", "--micro-batch 64", "--autocast", "--snapshots 51 256"):
        assert f" {part}" in arguments
    assert f" --device {'cpu' if device is None else 'cuda'} " in arguments
    assert environment == f"{device or 7} {os.getpid()}"


def record(**facts):
    common = {"gpu": "H200", "driver": "1", "cpu": "c", "python": "3", "torch": "2", "triton": "3", "commit": "a"}
    return Record(common | {"date": "2026-01-01"} | facts, [])


def test_the_provenance_is_what_the_runs_have_in_common():
    records = [record(), record(date="2026-01-03", commit="b"), record(date="2026-01-02", driver=None)]
    varied = {"commit": ["a", "b"], "driver": ["1", None], "date": "2026-01-03"}
    assert pretrain_grid.measured_on(records) == record(**varied).provenance


def test_every_cell_trains_and_the_command_goes_on_with_what_is_unfinished(text, monkeypatch, capsys):
    """The smallest model, in this process; on a CPU, where the kernels would be interpreted, by the reference."""
    commands, fails = [], re.compile("sagebwd_qk|exact_plain_64")

    def run_here(command, **_):
        commands.append(command)
        if fails.search(command[command.index("--json") + 1]):
            return subprocess.CompletedProcess(command, 3)
        main(["reference" if x == "auto" else x for x in command[3:]])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(pretrain_grid.subprocess, "run", run_here)
    monkeypatch.setitem(pretrain_grid.PLANS, "cpu", TINY)
    outputs = ["--json", "grid.json", "--traces", "layers.json"]
    command = ["pretrain-grid", "--plan", "cpu", "--folder", "grid", *outputs]
    with pytest.raises(SystemExit):
        main([*command, "--corpus", "text.txt"])
    assert re.search("(exact_plain_64|sagebwd_qk).*: the run ended with exit status", capsys.readouterr().err)
    assert not Path("grid.json").exists()
    assert Path("grid/corpus.bin").read_bytes()[::2] == Path("text.txt").read_bytes()
    tried = len(commands)
    main([*command, "--report-only"])
    assert len(commands) == tried
    unfinished = read_record(Path("grid.json")).provenance["unfinished"]
    assert len(unfinished) == 5
    assert all(fails.match(name) for name in unfinished)
    fails = re.compile("nothing fails any more")
    main(command)  # the corpus is in the folder
    assert len(commands) == tried + 5
    found, traced = read_record(Path("grid.json")), read_record(Path("layers.json"))
    rates = {int(size): rate for size, rate in found.provenance["learning_rate"].items()}
    cells = list(dict.fromkeys(TINY.search() + TINY.cells(rates)))
    assert (found.provenance["unfinished"], found.provenance["corpus"]["name"]) == ([], "corpus.bin")
    for cell, row in zip(cells, found.rows, strict=True):
        names = ("attention", "qk_norm", "smoothing", "tokens_per_step", "learning_rate", "seed")
        assert [row[name] for name in names] == [getattr(cell, name) for name in names]
        assert row["granularity"] == (None if cell.attention == "exact" else cell.granularity or "row")
        assert (row["tokens"], row["diverged"]) == (128, None)
        run = read_record(Path(f"grid/{cell.name}.json")).provenance
        assert bool(run["traces"]) == (cell.attention == "exact")
        steps = 128 // cell.tokens_per_step
        expected = {name: getattr(TINY, name) for name in ("context", "layers", "width", "heads", "autocast")}
        expected |= {"micro_batch_size": min(8, cell.tokens_per_step // 16), "warmup_steps": round(0.1 * steps)}
        assert (expected | {"validation_sequences": 2}).items() <= run["arguments"].items()
        if cell.attention == "exact" or cell.backend == "reference":
            assert (run["arguments"]["block_q"], run["arguments"]["block_kv"]) == (64, 64)
        assert Path(f"grid/{cell.name}_step{steps // 2}.pt").exists()
    exact = [cell for cell in TINY.cells(rates) if cell.attention == "exact" and cell.seed == 0]
    places = dict.fromkeys((row["tokens_per_step"], row["qk_norm"], row["seed"]) for row in traced.rows)
    assert list(places) == [(cell.tokens_per_step, cell.qk_norm, cell.seed) for cell in exact]
