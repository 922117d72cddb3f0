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
from sage_lab.experiments import pretrain_grid as grid_module
from sage_lab.experiments.pretrain_grid import CPU_PLAN, Cell, GridPlan, RepairPlan, chosen_rates, train_in_a_process
from sage_lab.records import Record, read_record, write_record
from sage_lab.repairs import UNBIASED
from sage_lab.training.corpus import read_corpus, write_tokens

PLANS = {"gpu": GridPlan(), "cpu": CPU_PLAN}
SMALL = {"context": 16, "layers": 1, "width": 16, "heads": 1, "validation_sequences": 2}
TINY = replace(CPU_PLAN, tokens=256, tokens_per_step=(32, 128), **SMALL)


def all_cells(plan):
    rates = {number: 10.0 * number for number in plan.tokens_per_step}
    return plan.search(), plan.cells(rates)


# The plan


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_plan_has_every_cell_of_the_experiment(plan):
    """Tokens per step x {exact, SageBwd} x {QK-norm, none} x smoothing {none, K, Q and K} of SageBwd.

    The main four cells have at least three seeds, all others the first. At the large step one has the paper's scales.
    The learning rate is searched with exact attention alone.
    """
    search, cells = all_cells(plan)
    small, large = plan.tokens_per_step
    ways = {("exact", None, None, None), ("sagebwd", "none", "auto", None), ("sagebwd", "k", "auto", None),
            ("sagebwd", "qk", "reference", "row")}  # fmt: skip
    kinds = {(size, qk_norm, *way) for size in (small, large) for qk_norm in (True, False) for way in ways}
    kinds |= {(large, True, "sagebwd", "k", "reference", "block")}
    names, found = ("tokens_per_step", "qk_norm", "attention", "smoothing", "backend", "granularity"), {}
    for cell in cells:
        found.setdefault(tuple(getattr(cell, name) for name in names), []).append(cell.seed)
    assert found.keys() == kinds
    seeds = {small: plan.seeds, large: plan.seeds_at_large}
    assert 3 <= len(plan.seeds) < len(plan.seeds_at_large)
    for (size, qk_norm, attention, smoothing, _, granularity), of_kind in found.items():
        is_main = qk_norm and granularity is None and (attention == "exact" or smoothing == "k")
        assert sorted(of_kind) == list(seeds[size] if is_main else plan.seeds[:1])
    assert all(cell.learning_rate == 10 * cell.tokens_per_step for cell in cells)
    slow = [cell.backend == "reference" for cell in cells]
    assert slow == sorted(slow, reverse=True)  # the slowest start first
    assert {(cell.attention, cell.qk_norm, cell.seed) for cell in search} == {("exact", True, plan.seeds[0])}
    rates = [(cell.tokens_per_step, cell.learning_rate) for cell in search]
    assert rates == [(size, rate) for size in plan.tokens_per_step for rate in plan.learning_rates]
    assert large >= 8 * small
    for size in plan.tokens_per_step:
        assert plan.tokens % size == size % plan.context == 0
        sequences = size // plan.context
        assert all(sequences % min(x, sequences) == 0 for x in (plan.micro_batch, plan.reference_micro_batch))


def test_notebook_14_compares_four_attentions_over_500_steps_at_the_rate_that_was_chosen():
    plan = RepairPlan()
    rates = chosen_rates(plan, [])
    cells = plan.cells(rates)
    arms = {(cell.attention, cell.granularity, cell.remedy) for cell in cells}
    assert arms == {
        ("exact", None, None), ("sagebwd", "block", None), ("sagebwd", "row", None), ("sagebwd", "row", UNBIASED)
    }  # fmt: skip
    assert len({cell.name for cell in cells}) == len(cells) == 3 * len(arms)
    assert {(cell.qk_norm, cell.seed) for cell in cells} == {(True, 0), (True, 1), (False, 0)}
    assert {plan.tokens // cell.tokens_per_step for cell in cells} == {500}
    assert {cell.learning_rate for cell in cells} == set(rates.values()) == {2e-3}
    assert cells[3].arguments[-2:] == ["--remedy", UNBIASED]


# Which rate


def searched(size, rate, loss, **more):
    row = {"attention": "exact", "tokens_per_step": size, "learning_rate": rate, "final_val_loss": loss}
    return row | {"diverged": None} | more


def test_the_rate_with_the_lowest_loss_is_chosen_at_each_size():
    rows = [searched(512, 0.1, 2.0), searched(512, 0.2, 1.9), searched(4096, 0.1, 2.5), searched(4096, 0.2, 2.6)]
    rows += [searched(512, 0.3, None, diverged="the loss of step 3 is not finite"), searched(2**20, 0.5, 0.1)]
    assert chosen_rates(CPU_PLAN, rows) == {512: 0.2, 4096: 0.1}
    message = "learning_rates: expected one that trains at 4096 tokens per step, "
    with pytest.raises(ValueError, match=f"{message}no run has finished"):
        chosen_rates(CPU_PLAN, rows[:2])
    rows[2:] = [searched(4096, rate, None, diverged="guessing") for rate in (0.1, 0.2)]
    with pytest.raises(ValueError, match=f"{message}all 2 finished runs diverged"):
        chosen_rates(CPU_PLAN, rows)


# Running


def fake_run(fails=(), loss=lambda options: 2.0):
    """Stand for subprocess.run: write the result that each run would, and remember the commands."""

    def run(command, *, stdout, stderr, env, check):
        run.commands.append(command)
        options = options_of(command)
        result = Path(options["--json"])
        if any(name in result.name for name in fails):
            return subprocess.CompletedProcess(command, 3)
        row = dict.fromkeys(("smoothing", "granularity", "diverged"))
        row |= {"attention": options["--attention"], "qk_norm": "--qk-norm" in command}
        row |= {"tokens_per_step": int(options["--tokens-per-step"]), "seed": int(options["--seed"])}
        row |= {"learning_rate": float(options["--learning-rate"]), "final_val_loss": loss(options)}
        found = [{"step": 0, "layer": 0, "tensor": "dS"}] if "--trace" in command else []
        write_record(result, [row], command=" ".join(command), corpus="text", arguments={}, traces=found)
        return subprocess.CompletedProcess(command, 0)

    run.commands = []
    return run


@pytest.fixture
def fake(monkeypatch):
    """fake(...) -> `fake_run`, from then on in the place of every run."""
    monkeypatch.setattr("sage_lab.records._commit", lambda: "0" * 40)  # it would start git

    def replace_runs(**options):
        run = fake_run(**options)
        monkeypatch.setattr(grid_module.subprocess, "run", run)
        return run

    return replace_runs


def options_of(command):
    return dict(zip(command, command[1:], strict=False))


def test_a_run_is_told_its_cell_and_its_plan(tmp_path, fake):
    run, plan = fake(), replace(GridPlan(), reference_micro_batch=4)
    exact = Cell("exact", False, 2**14, 1, 0.002)
    kernels = Cell("sagebwd", True, 2**17, 0, 0.001, "k", "auto")
    reference = Cell("sagebwd", True, 2**17, 0, 0.001, "qk", "reference", "row")
    unsmoothed = Cell("sagebwd", False, 2**14, 0, 0.001, "none", "auto")
    for cell in (exact, kernels, reference, unsmoothed):
        train_in_a_process(plan, cell, None, tmp_path)
    train_in_a_process(CPU_PLAN, Cell("exact", True, 2**12, 0, 0.001), None, tmp_path)
    first, *_, short = run.commands
    expected = (
        "--attention exact --tokens-per-step 16384 --learning-rate 0.002 --seed 1 --tokens 67108864 --context 1024"
        " --layers 4 --width 384 --heads 3 --kv-heads 3 --warmup 0.1 --validation-sequences 256 --micro-batch 16"
        f" --corpus {tmp_path}/corpus.bin --device cpu --json {tmp_path}/exact_plain_16384_lr0.002_seed1.json"
        f" --checkpoint {tmp_path}/exact_plain_16384_lr0.002_seed1.pt"
    ).split()
    assert set(zip(expected[::2], expected[1::2], strict=True)) <= options_of(first).items()
    assert first[first.index("--snapshots") :] == ["--snapshots", "410", "2048"]
    assert short[short.index("--snapshots") :] == ["--snapshots", "1", "2"]  # at steps that exist
    flags = ("--qk-norm", "--trace", "--smooth-k", "--no-smooth-k", "--smooth-q", "--autocast")
    chosen = ("--micro-batch", "--backend", "--granularity", "--blocks")  # a step of 16384 tokens has 16 sequences
    assert [([x for x in flags if x in y], *(options_of(y).get(name) for name in chosen)) for y in run.commands] == [
        (["--trace", "--autocast"], "16", "reference", "block", "64x64"),
        (["--qk-norm", "--smooth-k", "--autocast"], "64", "auto", None, None),
        (["--qk-norm", "--smooth-k", "--smooth-q", "--autocast"], "4", "reference", "row", "64x64"),
        (["--no-smooth-k", "--autocast"], "16", "auto", None, None),
        (["--qk-norm", "--trace"], "8", "reference", "block", "64x64"),
    ]


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("device", [5, None])
def test_a_run_is_a_process_on_its_device_whose_output_is_kept(tmp_path, monkeypatch, status, device):
    """In place of Python, a program that says what it was called with."""
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@"\necho $CUDA_VISIBLE_DEVICES ${PARENT} >&2\nexit {status}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    cell = Cell("exact", True, 512, 0, 0.001)
    message = f"{cell.name}: the run ended with exit status 3, see .*{cell.name}.log"
    with pytest.raises(RuntimeError, match=message) if status else nullcontext():
        train_in_a_process(CPU_PLAN, cell, device, tmp_path)
    arguments, environment = (tmp_path / f"{cell.name}.log").read_text().splitlines()
    assert arguments.startswith("-m sage_lab pretrain --attention exact")
    assert environment == f"{device or 7} {os.getpid()}"


# Records


def record(**facts):
    common = {"gpu": "H200", "driver": "1", "cpu": "c", "python": "3", "torch": "2", "triton": "3", "commit": "a"}
    return Record(common | {"date": "2026-01-01"} | facts, [])


def test_the_provenance_is_what_the_runs_have_in_common_and_traces_say_which_run_they_are_of():
    records = [record(), record(date="2026-01-03", commit="b"), record(date="2026-01-02", driver=None)]
    varied = {"commit": ["a", "b"], "driver": ["1", None], "date": "2026-01-03"}
    assert grid_module.measured_on(records) == record(**varied).provenance
    cells = [Cell("exact", qk_norm, 512, 0, 0.001) for qk_norm in (True, False)]
    traced = grid_module.traces({cell: record(traces=[{"step": 1}, {"step": 2}]) for cell in cells})
    assert traced == [
        {"tokens_per_step": 512, "seed": 0, "qk_norm": qk, "step": step} for qk in (True, False) for step in (1, 2)
    ]


def test_the_table_has_mean_range_and_divergence_of_every_kind_of_run():
    kind = {"qk_norm": True, "smoothing": None, "granularity": None, "remedy": None}
    rows = [searched(512, 0.1, loss, **kind, seed=seed) for seed, loss in enumerate((2.0, 2.5, 2.25))]
    rows += [searched(512, 0.1, None, **kind | {"qk_norm": False}, diverged="guessing")]
    rows += [searched(512, 0.1, loss, **kind | {"smoothing": "k"}, diverged=reason)
             for loss, reason in ((3.0, None), (None, "nan"))]  # fmt: skip
    header, lines = grid_module.grid_table(rows)
    names = ("tokens_per_step", "qk_norm", "attention", "smoothing", "granularity", "remedy", "learning_rate")
    assert header == (*names, "runs", "final validation loss", "range", "diverged")
    assert lines == [
        (512, True, "exact", "", "", "", 0.1, 3, "2.2500", "0.5000", 0),
        (512, False, "exact", "", "", "", 0.1, 1, "-", "-", 1),
        (512, True, "exact", "k", "", "", 0.1, 2, "3.0000", "-", 1),
    ]


# Command line


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


COMMAND = ["pretrain-grid", "--plan", "cpu", "--folder", "grid"]


def test_the_command_works_off_the_plan_and_records_it(text, fake, capsys):
    """Of the search 0.001 is best at the small step, 0.004 at the large one."""
    rates = {512: 0.001, 4096: 0.004}
    run = fake(loss=lambda x: 2.0 + (rates[int(x["--tokens-per-step"])] != float(x["--learning-rate"])))
    main([*COMMAND, "--corpus", "text.txt", "--json", "grid.json", "--traces", "layers.json"])
    cells = list(dict.fromkeys(CPU_PLAN.search() + CPU_PLAN.cells(rates)))
    names = [Path(options_of(command)["--json"]).stem for command in run.commands]
    assert sorted(names) == sorted(cell.name for cell in cells)
    assert set(names[:4]) == {cell.name for cell in CPU_PLAN.search()}
    assert {options_of(command)["--corpus"] for command in run.commands} == {"grid/corpus.bin"}
    assert (text / "grid" / "corpus.bin").read_bytes()[::2] == (text / "text.txt").read_bytes()
    found, traced = read_record(text / "grid.json"), read_record(text / "layers.json")
    assert len(found.rows) == len(cells)
    facts = {"plan": json.loads(json.dumps(asdict(CPU_PLAN))), "learning_rate": {"512": 0.001, "4096": 0.004}}
    assert (facts | {"unfinished": [], "corpus": "text"}).items() <= found.provenance.items()
    assert "| 4096 | True | sagebwd |" in capsys.readouterr().out
    expected = [cell for cell in CPU_PLAN.cells(rates) if cell.attention == "exact" and cell.seed == 0]
    assert len(expected) == 4
    places = [(row["tokens_per_step"], row["qk_norm"], row["seed"]) for row in traced.rows]
    assert places == [(cell.tokens_per_step, cell.qk_norm, cell.seed) for cell in expected]


def test_report_only_trains_nothing_and_the_command_goes_on_with_what_is_unfinished(text, fake, capsys):
    """A run with a trace is among them: its errors are left out."""
    outputs = ["--json", "grid.json", "--traces", "layers.json"]
    fake(fails=["sagebwd_qk", "exact_plain_4096"])
    with pytest.raises(SystemExit):
        main([*COMMAND, "--corpus", "text.txt", *outputs])
    assert re.search("(exact_plain_4096|sagebwd_qk).*: the run ended with exit status", capsys.readouterr().err)
    assert not (text / "grid.json").exists()
    run = fake()
    main([*COMMAND, "--report-only", *outputs])
    assert run.commands == []
    found, traced = read_record(text / "grid.json"), read_record(text / "layers.json")
    unfinished = found.provenance["unfinished"]
    assert len(unfinished) == 5
    assert all(name.startswith(("sagebwd_qk_reference_row", "exact_plain_4096")) for name in unfinished)
    assert f"unfinished: {', '.join(unfinished)}\n" in capsys.readouterr().out
    places = [(row["tokens_per_step"], row["qk_norm"]) for row in traced.rows]
    assert places == [(4096, True), (512, True), (512, False)]
    main([*COMMAND, *outputs])  # the corpus is in the folder
    assert len(run.commands) == 5
    assert len(read_record(text / "grid.json").rows) == len(found.rows) + 5


def test_every_cell_trains(text, monkeypatch):
    """The smallest model, in this process; on a CPU, where the kernels would be interpreted, by the reference."""

    def run_here(command, **_):
        main(["reference" if text == "auto" else text for text in command[3:]])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(grid_module.subprocess, "run", run_here)
    monkeypatch.setattr("sage_lab.records._commit", lambda: "0" * 40)
    write_tokens(read_corpus(text / "text.txt").tokens.numpy(), text / "corpus.bin")
    search, cells = all_cells(TINY)
    kinds = list(dict.fromkeys(replace(cell, learning_rate=0.001, seed=0) for cell in (*search, *cells)))
    assert len(kinds) == 2 * 2 * 4 + 1
    for cell in kinds:
        train_in_a_process(TINY, cell, None, text)
        found = read_record(text / f"{cell.name}.json")
        (row,) = found.rows
        names = ("attention", "qk_norm", "smoothing", "tokens_per_step", "learning_rate")
        assert [row[name] for name in names] == [getattr(cell, name) for name in names]
        assert row["granularity"] == (None if cell.attention == "exact" else cell.granularity or "row")
        assert (row["tokens"], row["diverged"]) == (256, None)
        assert bool(found.provenance["traces"]) == (cell.attention == "exact")
        steps = 256 // cell.tokens_per_step
        assert (text / f"{cell.name}_step{steps // 2}.pt").exists()
