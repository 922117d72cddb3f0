"""Step times: one row per context and attention, and a table that compares them."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from process_cases import run_together
from sage_lab.__main__ import main
from sage_lab.experiments import pretrain_speed as speed
from sage_lab.experiments.pretrain_speed import PLANS, VOCABULARY, Place, relative_rate, speed_table
from sage_lab.experiments.turns import time_columns
from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.records import Record, read_record
from sage_lab.training.corpus import Corpus
from sage_lab.training.processes import Processes, processes

# Once per process, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:sage_ref. backend='auto' uses the reference:UserWarning")

FLASH_ON_CPU = "ScaledDotProductFlashAttentionForCpuBackward0"
ON_CPU = {"exact": FLASH_ON_CPU, "flash_attention_2": FLASH_ON_CPU, "sagebwd": "SageBwdFunctionBackward"}


def test_the_command_times_every_attention_that_runs_here(tmp_path, capsys):
    main(["pretrain-speed", "--warmup", "1", "--steps", "2", "--device", "cpu", "--json", str(tmp_path / "speed.json")])
    assert "not timed: FlashAttention-4, flash-attn-4 needs a CUDA device" in capsys.readouterr().out
    record = read_record(tmp_path / "speed.json")
    assert (record.provenance["plan"]["steps"], record.provenance["plan"]["contexts"]) == (2, [16, 32])
    assert [(row["context"], row["attention"]) for row in record.rows] == [
        (n, name) for n in (16, 32) for name in ON_CPU
    ]
    model = Llama(LlamaConfig(VOCABULARY, context=16, layers=1, width=16, heads=2, qk_norm=True))
    assert {row["parameters"] for row in record.rows} == {sum(x.numel() for x in model.parameters())}
    for row in record.rows:
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert row["autograd_node"] == ON_CPU[row["attention"]]
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["ms_median"], rel=0.01)
        assert (row["devices"], row["parallel"], row["tokens_per_step"], row["protocol"]) == (1, "none", 64, "paired")
    assert set(record.rows[0]) > set(read_record("pretrain_speed_h200").rows[0])


def test_times_are_their_median_and_percentiles():
    assert time_columns([5.0, 1.0, 2.0, 4.0, 3.0]) == {"ms_median": 3.0, "ms_p20": 1.8, "ms_p80": 4.2}
    assert time_columns([1.2345], digits=3) == dict.fromkeys(("ms_median", "ms_p20", "ms_p80"), 1.234)


def test_flash_attention_4_takes_the_place_of_exact_attention(monkeypatch):
    """Of a package that is made up, in 16 bit as under autocast. Steps have at least a pass."""
    seen = []

    def flash_attention_4(query, key, value, is_causal):
        seen.append((query.dtype, query.shape))
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    monkeypatch.setattr(speed.fa4, "flash_attention_4", flash_attention_4)
    monkeypatch.setattr(speed, "why_missing", lambda name, device: None)
    corpus = Corpus("zeros", torch.zeros(9999, dtype=torch.uint8), VOCABULARY)
    plan = replace(PLANS["cpu"], warmup=1, steps=2, tokens_per_pass=64)
    rows = speed.speed_rows(plan, corpus, 16, list(speed.ATTENTIONS), Place(Processes()))
    assert [row["attention"] for row in rows] == list(speed.ATTENTIONS)
    assert seen == [(torch.float32, (4, 2, 16, 8))] * 3
    query, key = torch.randn(2, 1, 1, 4, 8)
    assert speed._flash_attention_4(query, key, key.bfloat16()).dtype == torch.bfloat16


def gradients(corpus, place, *, communicates=True):
    """Of a step of two passes, put together from all shards."""
    plan = replace(PLANS["cpu"], warmup=0)
    training = speed.Model(plan, corpus, 16, "exact", place).training
    training.communicates = communicates
    training.accumulate_gradients()
    return [getattr(x.grad, "full_tensor", lambda x=x: x.grad)() for x in training.model.parameters()]


def measure(path):
    """Run in one of two processes: compare gradients of tokens that differ between them, then the command."""
    with processes("cpu") as world:
        drawn = torch.randint(VOCABULARY, (2, 9999), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
        corpora = [Corpus("drawn", tokens, VOCABULARY) for tokens in drawn]
        own = [gradients(corpus, Place(world)) for corpus in corpora]
        mean = [sum(x) / 2 for x in zip(*own, strict=True)]
        members = speed.groups_of_each_size(world)[1]
        for way in ("ddp", "fsdp2"):
            torch.testing.assert_close(gradients(corpora[world.rank], Place(world, members, way)), mean)
        silent = gradients(corpora[world.rank], Place(world, members, "ddp"), communicates=False)
        torch.testing.assert_close(silent, own[world.rank])
        speed.processes = lambda device: contextlib.nullcontext(world)
        line = "pretrain-speed --contexts 16 --warmup 1 --steps 2 --device cpu --attentions exact sagebwd --json"
        main([*line.split(), str(path)])


def test_ddp_and_fsdp_train_as_one_device_does(tmp_path):
    printed = run_together(tmp_path, measure, tmp_path / "record.json")
    record = read_record(tmp_path / "record.json")
    places = [(1, "none"), (2, "ddp"), (2, "fsdp2")]
    assert [(x["devices"], x["parallel"], x["attention"]) for x in record.rows] == [
        (*place, name) for place in places for name in ("exact", "sagebwd")
    ]
    for row in record.rows:
        one = record.select(devices=1, attention=row["attention"])[0]
        assert row["first_timed_loss"] == pytest.approx(one["first_timed_loss"], rel=1e-6)
        assert (row["tokens_per_step"], row["parameters"]) == (64 * row["devices"], one["parameters"])
        assert (row["ms_without_communication"] is None) == (row["parallel"] != "ddp")
    assert record.provenance["command"].startswith("torchrun --standalone --nproc-per-node 2 -m sage_lab pretrain-sp")
    assert "of one device's rate, each" in printed


def row(**columns):
    same = {"attention": "exact", "devices": 1, "parallel": "none", "context": 16}
    return same | {"ms_median": 10.0, "tokens_per_second": 1000, "ms_without_communication": None} | columns


def test_rates_are_compared_where_one_thing_differs():
    one, ours = row(), row(attention="sagebwd", tokens_per_second=1500)
    two = row(devices=2, parallel="ddp", tokens_per_second=1800, ms_without_communication=9.0)
    rows = [one, ours, two]
    record = Record({}, rows)
    assert relative_rate(record, ours, attention="exact") == 1.5
    assert relative_rate(record, two, attention="sagebwd") is None
    header, lines = speed_table(rows)
    assert header[5:] == ("times as fast as PyTorch's pick", "of one device's rate, each", "communication")
    assert [line[1] for line in lines] == ["1", "1", "2, DDP"]
    assert [" ".join(line[5:]) for line in lines] == ["1.00 1.00 ", "1.50 1.00 ", "1.00 0.90 10.0%"]
    assert len(speed_table([one, ours])[0]) == 6
