"""Step times: one row per context and attention, and a table that compares them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sage_lab.__main__ import main
from sage_lab.experiments import pretrain_speed as speed
from sage_lab.experiments.pretrain_speed import PLANS, VOCABULARY
from sage_lab.experiments.turns import time_columns
from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.records import read_record
from sage_lab.training.corpus import Corpus

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
    assert set(record.rows[0]) == set(read_record("pretrain_speed_h200").rows[0])


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
    rows = speed.speed_rows(plan, corpus, 16, torch.device("cpu"))
    assert [row["attention"] for row in rows] == list(speed.ATTENTIONS)
    assert seen == [(torch.float32, (4, 2, 16, 8))] * 3
    query, key = torch.randn(2, 1, 1, 4, 8)
    assert speed._flash_attention_4(query, key, key.bfloat16()).dtype == torch.bfloat16
