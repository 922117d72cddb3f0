"""`pretrain`: options arrive, the record says what ran, divergence is a result, no run is made twice."""

import math
import tomllib
from pathlib import Path

import pytest
from pretrain_cases import poisoned
from process_cases import run_together
from sage_lab.__main__ import main
from sage_lab.experiments import pretrain
from sage_lab.experiments.pretrain import PretrainRun, recorded
from sage_lab.records import read_record, write_record

OPTIONS = (  # noqa: SIM905 (as it is typed)
    "pretrain --corpus text.txt --context 16 --layers 2 --width 16 --heads 2 --tokens 512 --tokens-per-step 64"
    " --tokens-per-pass 32 --validation-sequences 4 --probe-sequences 1 --reports 4 --device cpu"
    " --folder runs --json run.json"
).split()


def test_the_command_trains_and_records(text):
    options = "--attention unsmoothed --qk-norm yes --seed 3 --learning-rate 0.004 --warmup 0.25"
    main([*OPTIONS, *options.split()])
    record = read_record(text / "run.json")
    (row,) = record.rows
    expected = tomllib.loads((Path(__file__).parent / "pretrain_arguments.toml").read_text(encoding="utf-8"))
    assert expected.items() <= row["arguments"].items()
    assert (row["arm"], row["steps"], row["tokens"], row["tokens_per_step"]) == ("unsmoothed", 8, 512, 64)
    assert [tokens for tokens, _ in row["curve"]] == [0, 128, 256, 384, 512]
    assert [probe["step"] for probe in row["probes"]] == [0, 2, 4, 6, 8]
    assert len(row["step_losses"]) == len(row["gradient_norms"]) == 8
    assert record.provenance["corpus"]["name"] == "text.txt"
    assert record.provenance["corpus"]["sha256"] == row["arguments"]["corpus_sha256"]
    assert [x.suffix for x in (text / "runs").iterdir()] == [".pt"]


def test_the_command_ends_well_when_training_diverges(text, monkeypatch):
    poisoned(monkeypatch, step=3, loss=math.nan)
    main(OPTIONS)
    assert read_record(text / "run.json").rows[0]["diverged"] == "the loss of step 3 is not finite"


def test_runs_that_the_record_has_are_not_made_again(text, capfd):
    arms = [*OPTIONS, "--same-batch", "--attention", "exact", "sagebwd"]
    main(arms)
    first = read_record(text / "run.json")
    assert [row["arm"] for row in first.rows] == ["exact", "sagebwd"]
    assert [row["step_losses"][0] for row in first.rows] == [pytest.approx(math.log(256), rel=0.05)] * 2
    assert first.provenance["unfinished"] == []
    (text / "runs").rename(text / "gone")  # on another machine
    main([*arms, "printed"])
    second = read_record(text / "run.json")
    assert second.rows[:2] == first.rows
    assert second.provenance["commands"] == [x.provenance["command"] for x in (first, second)]
    assert [row["arm"] for row in second.rows] == ["exact", "sagebwd", "printed"]
    with pytest.raises(SystemExit):
        main([*arms, "--warmup", "0.5"])
    assert "json: expected a file whose small_exact" in capfd.readouterr().err


def test_a_run_that_an_option_did_not_reach_is_no_result(text, capfd, monkeypatch):
    monkeypatch.setattr(pretrain, "train_in_a_process", lambda options, run, gpu: [{"arguments": {"steps": 1}}])
    with pytest.raises(SystemExit):
        main([*OPTIONS, "--attention", "exact", "sagebwd"])
    assert "got {'steps': 1}" in capfd.readouterr().err
    assert not (text / "run.json").exists()


def test_a_record_from_before_an_option_goes_on(tmp_path):
    run = PretrainRun("small", "exact", False, 2e-3, 64, 16, 512, 0)
    write_record(tmp_path / "old.json", [run.facts | {"arguments": {"steps": 8}}], command="pretrain")
    assert list(recorded(tmp_path / "old.json", {run: {"steps": 8, "same_batch": False}})) == [run]
    with pytest.raises(ValueError, match="made with the same arguments"):
        recorded(tmp_path / "old.json", {run: {"steps": 8, "same_batch": True}})


def test_steps_are_timed_in_turn(text):
    main([*OPTIONS, "--attention", "exact", "sagebwd", "--time", "2"])
    rows = read_record(text / "run.json").rows
    assert [(row["arm"], row["protocol"], row["devices"]) for row in rows] == [
        (arm, "paired", 1) for arm in ("exact", "sagebwd")
    ]
    for row in rows:
        assert row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["ms_median"], rel=0.01)
    assert not (text / "runs").exists()


def test_two_processes_train_as_one_does_and_go_on_where_they_were_stopped(text):
    """Two passes a step: the sum of their halves is the same number in any order."""
    main(OPTIONS)
    alone = read_record(text / "run.json").rows[0]
    together = [*OPTIONS[:-3], "together", "--json", "together.json"]
    printed = run_together(text, main, [*together, "--minutes", "0.0001"])
    assert "the same command goes on" in printed
    assert not (text / "together.json").exists()
    run_together(text, main, together)
    record = read_record(text / "together.json")
    (row,) = record.rows
    assert (row["devices"], row["parameters"]) == (2, alone["parameters"])
    for name in ("step_losses", "gradient_norms", "curve", "probes"):
        assert row[name] == alone[name], name
    assert record.provenance["command"].startswith("torchrun --standalone --nproc-per-node 2 -m sage_lab pretrain ")
