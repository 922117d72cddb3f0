"""Step times: one row per context, attention and way to use the devices, and a table that compares with exact."""

import json
from dataclasses import asdict, replace

import pytest

from sage_ref.__main__ import main
from sage_ref.models.llama import Llama, LlamaConfig
from sage_ref.recorded import read_record
from sage_ref.training import speed
from sage_ref.training.pretrain import Pretraining, Processes
from sage_ref.training.speed import SpeedPlan, speed_table, step_times

PLAN = SpeedPlan((16, 32), layers=1, width=16, heads=2, tokens_per_device=64, tokens_per_pass=32, warmup=1, steps=5)


@pytest.fixture
def clock(monkeypatch):
    """Steps take 1, 2, 3, ... seconds of a clock that stands still otherwise; the first of each model is 100 s longer.

    The list of models that took steps, each once a step.
    """
    now, stepped = [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed, "VOCABULARY", 64)

    def advance(training):
        number = sum(x is training for x in stepped)
        stepped.append(training)
        now[0] += number + 100 * (number == 0)

    monkeypatch.setattr(Pretraining, "advance", advance)
    return stepped


def test_a_row_is_the_median_and_the_percentiles_of_the_timed_steps(clock):
    rows = list(step_times(PLAN, Processes()))
    assert [(row["context"], row["attention"]) for row in rows] == [
        (16, "exact"), (16, "sagebwd"), (32, "exact"), (32, "sagebwd")
    ]  # fmt: skip
    for row in rows:
        # Steps of 1, 2, 3, 4 and 5 seconds after one that doesn't count.
        assert (row["ms_median"], row["ms_p20"], row["ms_p80"]) == (3000.0, 1800.0, 4200.0)
        assert (row["devices"], row["parallel"], row["tokens_per_step"]) == (1, "none", 64)
        assert row["tokens_per_second"] == round(64 / 3)
    model = Llama(LlamaConfig(64, context=16, layers=1, width=16, heads=2, kv_heads=2, qk_norm=True))
    assert {row["parameters"] for row in rows} == {sum(x.numel() for x in model.parameters())}
    assert len(clock) == 4 * 6


def test_steps_are_those_of_the_plan(clock):
    list(step_times(PLAN, Processes()))
    trainings = list(dict.fromkeys(clock))
    assert [(x.config.attention, x.config.context) for x in trainings] == [
        ("exact", 16), ("sagebwd", 16), ("exact", 32), ("sagebwd", 32)
    ]  # fmt: skip
    for training in trainings:
        settings, config = training.settings, training.config
        assert (settings.batch_size * config.context, settings.micro_batch_size * config.context) == (64, 32)
        assert (config.layers, config.width, config.heads, config.kv_heads) == (1, 16, 2, 2)
        assert (config.qk_norm, config.smooth_k, config.backend) == (True, True, "auto")
        assert not settings.autocast  # that is for a GPU
        assert training.processes == Processes()


def test_several_devices_are_timed_alone_with_ddp_and_with_fsdp(monkeypatch):
    """The others wait while the first is alone, and only the first has rows. No process is started here."""
    made, waited = [], []

    def row(plan, corpus, context, attention, group, fsdp):
        made.append((context, attention, group.count, fsdp))
        return {"number": len(made)}

    monkeypatch.setattr(speed, "_row", row)
    monkeypatch.setattr(speed.dist, "barrier", lambda: waited.append(len(made)))
    ways = [(1, False), (2, False), (2, True)]
    cells = [(context, attention) for context in PLAN.contexts for attention in ("exact", "sagebwd")]
    assert list(step_times(PLAN, Processes(0, 2))) == [{"number": n + 1} for n in range(12)]
    assert made == [(*cell, *way) for cell in cells for way in ways]
    assert waited == list(range(1, 13))
    made.clear()
    waited.clear()
    assert list(step_times(PLAN, Processes(1, 2))) == []
    assert made == [(*cell, *way) for cell in cells for way in ways if way[0] == 2]
    assert len(waited) == 12


def test_the_table_compares_with_exact_attention_at_the_same_place():
    def row(context, attention, rate, devices=1, parallel="none"):
        names = {"context": context, "attention": attention, "devices": devices, "parallel": parallel}
        return names | {"ms_median": 1e6 / rate, "tokens_per_second": rate}

    rows = [row(16, "exact", 1000), row(16, "sagebwd", 1500), row(32, "exact", 500), row(32, "sagebwd", 250)]
    rows += [row(16, "exact", 4000, 2, "ddp"), row(16, "sagebwd", 5000, 2, "ddp")]
    assert speed_table(rows) == [
        (16, 1, "none", "exact", 1000.0, "1,000", "1.00"),
        (16, 1, "none", "sagebwd", 1e6 / 1500, "1,500", "1.50"),
        (32, 1, "none", "exact", 2000.0, "500", "1.00"),
        (32, 1, "none", "sagebwd", 4000.0, "250", "0.50"),
        (16, 2, "ddp", "exact", 250.0, "4,000", "1.00"),
        (16, 2, "ddp", "sagebwd", 200.0, "5,000", "1.25"),
    ]


def test_a_step_smaller_than_a_pass_is_one_pass(clock):
    list(step_times(replace(PLAN, contexts=(16,), tokens_per_pass=2**15), Processes()))
    assert {(x.settings.batch_size, x.settings.micro_batch_size) for x in clock} == {(4, 4)}


@pytest.mark.filterwarnings("ignore:sage_ref. backend='auto' uses the reference:UserWarning")
def test_the_command_times_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "VOCABULARY", 64)
    options = "--contexts 16 32 --layers 1 --width 32 --heads 1 --tokens-per-device 64 --device cpu --json"
    main(["pretrain-speed", *options.split(), str(tmp_path / "speed.json")])
    record = read_record(tmp_path / "speed.json")
    assert [(row["context"], row["attention"]) for row in record.rows] == [
        (16, "exact"), (16, "sagebwd"), (32, "exact"), (32, "sagebwd")
    ]  # fmt: skip
    assert record.provenance["plan"] == json.loads(json.dumps(asdict(SpeedPlan((16, 32), 1, 32, 1, 64))))
    printed = capsys.readouterr().out
    for row in record.rows:
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["ms_median"], rel=0.01)
        assert f"| {row['context']} | 1 | none | {row['attention']} | {row['ms_median']} |" in printed
