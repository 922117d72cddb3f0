"""Pre-training in processes of its own: killed with SIGKILL again and again, and two that train one model together."""

import contextlib
import math
import os
import random
import shutil
import signal
import sys

import pytest
import torch
from pretrain_cases import SETTINGS, STOCHASTIC, assert_same_bits, log_rows, pretrained, saved
from process_cases import run_forked, run_together
from sage_lab.__main__ import main
from sage_lab.experiments import pretrain as pretrain_command
from sage_lab.records import read_record
from sage_lab.training.pretrain import Pretraining
from sage_lab.training.processes import processes
from torch.utils._pytree import tree_leaves

# Killed

SNAPSHOTS = (4, 7)
PLACES = {"step": "advance", "report": "report", "checkpoint": "save"}


def run(folder, kill=None):
    """A whole run in `folder`. kill: (place, step, events): after so many calls and returns of Python functions,
    counted from the start of the process, or from the first step, report or checkpoint not before `step`, it is over.
    """
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
    if kill is not None:
        place, step, events = kill
        left = iter(range(events))

        def watch(frame, event, argument):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        if place == "start":
            sys.setprofile(watch)
        else:
            original = getattr(Pretraining, PLACES[place])

            def watched(training, *arguments):
                if training.step >= step:
                    sys.setprofile(watch)
                return original(training, *arguments)

            setattr(Pretraining, PLACES[place], watched)
    pretrained(folder, STOCHASTIC, SETTINGS, snapshots=SNAPSHOTS)


def counted_run(folder, monkeypatch):
    """A run that nothing interrupts, and how many calls and returns each place takes at least."""
    events, now = {}, 0

    def watch(frame, event, argument):
        nonlocal now
        now += 1

    def counting(place, original):
        def counted(*arguments):
            before = now
            found = original(*arguments)
            events[place] = min(events.get(place, now - before), now - before)
            return found

        return counted

    with monkeypatch.context() as patch:
        for place, name in (*PLACES.items(), ("__init__", "__init__"), ("load", "load")):
            patch.setattr(Pretraining, name, counting(place, getattr(Pretraining, name)))
        sys.setprofile(watch)
        try:
            for _ in range(2):  # the second one loads
                pretrained(folder, STOCHASTIC, SETTINGS, snapshots=SNAPSHOTS)
        finally:
            sys.setprofile(None)
    events["start"] = events.pop("__init__") + events.pop("load")
    return events


def test_a_run_killed_again_and_again_equals_an_uninterrupted_one_bit_for_bit(tmp_path, monkeypatch):
    """At a random call within a random step, report, checkpoint or start, and at last within the last checkpoint."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    events = counted_run(whole, monkeypatch)
    draw = random.Random(0)
    places = ["step", "step", "report", "checkpoint", "start"]
    draw.shuffle(places)
    steps = sorted(draw.randrange(SETTINGS.steps - SETTINGS.report_every) for _ in places)
    # Half as many calls again: into what comes after that place.
    plan = [(*at, draw.randrange(events[at[0]] * 3 // 2)) for at in zip(places, steps, strict=True)]
    plan.append(("checkpoint", SETTINGS.steps, draw.randrange(events["checkpoint"])))
    for kill in plan:
        assert run_forked(run, killed, kill) == -signal.SIGKILL
    assert run_forked(run, killed) == 0
    assert log_rows(killed) == log_rows(whole)
    files = {file.name for file in whole.iterdir()}
    assert {file.name for file in killed.iterdir() if not file.name.startswith(".")} == files
    for name in files - {"run.jsonl"}:
        assert_same_bits(saved(killed / name), saved(whole / name), name)


# Two processes, one model

OPTIONS = (  # noqa: SIM905 (as it is typed)
    "pretrain --corpus {text} --context 16 --layers 2 --width 16 --heads 2 --kv-heads 1 --qk-norm --tokens 512"
    " --tokens-per-step 64 --micro-batch 1 --validation-sequences 4 --reports 4 --snapshots 4 --device cpu"
    " --no-autocast --checkpoint {folder}/run.pt --json {folder}/run.json"
).split()


def train_together(runs):
    """Every list of arguments, all in one group. In folders "..._nan" the second process has no loss from step 2 on."""
    loss_of = Pretraining.loss

    def loss(training, *batch):
        is_poisoned = poisoned and training.step >= 2 and torch.is_grad_enabled() and training.processes.rank == 1
        return loss_of(training, *batch) * (math.nan if is_poisoned else 1)

    Pretraining.loss = loss
    with processes("cpu") as group:
        pretrain_command.processes = lambda device: contextlib.nullcontext(group)
        for options in runs:
            poisoned = any("_nan/" in option for option in options)
            main(options)


def arguments(folder, *more):
    places = {"folder": folder, "text": folder.parent / "text.txt"}
    return [option.format(**places) for option in OPTIONS] + list(more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of folders: the same run by one process, by two with DDP and with FSDP, and those that changed over."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    main(arguments(folder / "one"))
    shutil.copytree(folder / "one", folder / "one_then_fsdp")
    (folder / "one_then_fsdp" / "run_step4.pt").replace(folder / "one_then_fsdp" / "run.pt")
    together = [("ddp",), ("fsdp", "--fsdp"), ("one_then_fsdp", "--fsdp"), ("ddp_nan",)]
    run_together(folder, train_together, [arguments(folder / name, *more) for name, *more in together])
    (folder / "fsdp_then_one").mkdir()
    shutil.copy(folder / "fsdp" / "run_step4.pt", folder / "fsdp_then_one" / "run.pt")
    main(arguments(folder / "fsdp_then_one"))
    return folder


def values(folder, name):
    return [row[name] for row in log_rows(folder) if name in row]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_like_one_that_reads_as_many_tokens(runs, way):
    one, two = runs / "one", runs / way
    for name in ("step", "tokens", "loss", "gradient_norm", "validation_loss"):
        assert values(two, name)[0] == pytest.approx(values(one, name)[0], rel=1e-6), name
        assert values(two, name) == pytest.approx(values(one, name), rel=1e-4), name
    (row,), (expected,) = read_record(two / "run.json").rows, read_record(one / "run.json").rows
    assert (row["devices"], expected["devices"]) == (2, 1)
    same = row.keys() - {"devices", "seconds", "final_val_loss", "curve"}
    assert {name: row[name] for name in same} == {name: expected[name] for name in same}
    assert {file.name for file in two.iterdir()} == {file.name for file in one.iterdir()}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["run.pt", "run_step4.pt"])
def test_two_processes_save_what_one_does(runs, way, name):
    """Whole weights and averages of AdamW, under the same names, with what noise in float32 makes of them."""
    found, expected = saved(runs / way / name), saved(runs / "one" / name)
    assert found.keys() == expected.keys()
    assert (found["step"], found["arguments"]) == (expected["step"], expected["arguments"])
    weights, others = ((x["model"], x["optimizer"]["state"]) for x in (found, expected))
    for x in tree_leaves(weights):
        assert type(x) is torch.Tensor
    torch.testing.assert_close(weights, others, atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", ["one_then_fsdp", "fsdp_then_one"])
def test_a_run_changes_over_between_one_process_and_two(runs, way):
    one, changed = runs / "one", runs / way
    steps = values(changed, "step")
    assert steps == values(one, "step")[-len(steps) :]
    assert values(changed, "loss")[-4:] == pytest.approx(values(one, "loss")[-4:], rel=1e-4)
    assert values(changed, "validation_loss")[-2:] == pytest.approx(values(one, "validation_loss")[-2:], rel=1e-4)
    assert read_record(changed / "run.json").rows[0]["devices"] == (2 if way == "one_then_fsdp" else 1)


def test_what_diverges_in_one_process_ends_the_run_in_both(runs):
    reason = "the loss of step 2 is not finite"
    assert log_rows(runs / "ddp_nan")[-1] == {"step": 2, "diverged": reason}
    assert saved(runs / "ddp_nan" / "run.pt")["diverged"] == reason
    assert read_record(runs / "ddp_nan" / "run.json").rows[0]["diverged"] == reason
