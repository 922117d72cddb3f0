"""`python -m sage_lab pretrain`: options arrive, the record says what ran, divergence is a result."""

import math

from pretrain_cases import poisoned
from sage_lab.__main__ import main
from sage_lab.records import read_record

OPTIONS = (  # noqa: SIM905 (as it is typed)
    "pretrain --corpus text.txt --context 16 --layers 2 --width 16 --heads 2 --tokens 512"
    " --tokens-per-step 64 --micro-batch 2 --validation-sequences 4 --reports 4 --device cpu --no-autocast"
    " --checkpoint run.pt --json run.json"
).split()


def test_the_command_trains_and_records(text):
    sagebwd = "--attention sagebwd --backend reference --no-smooth-k --smooth-q --granularity block --blocks 8x16"
    options = f"{sagebwd} --qk-norm --seed 3 --learning-rate 0.004 --warmup 0.25".split()
    main([*OPTIONS, *options, "--snapshots", "2", "5"])
    record = read_record(text / "run.json")
    (row,) = record.rows
    arguments = record.provenance["arguments"]
    expected = {
        "vocab_size": 256, "context": 16, "layers": 2, "width": 16, "heads": 2, "qk_norm": True,
        "attention": "sagebwd", "smooth_k": False, "smooth_q": True, "backend": "reference", "granularity": "block",
        "block_q": 8, "block_kv": 16, "ds_rounding": "nearest", "steps": 8, "batch_size": 4, "learning_rate": 0.004,
        "warmup_steps": 2, "report_every": 2, "seed": 3, "micro_batch_size": 2, "validation_sequences": 4,
        "autocast": False,
    }  # fmt: skip
    assert expected.items() <= arguments.items()
    assert (row["steps"], row["tokens"], row["tokens_per_step"], row["smoothing"]) == (8, 512, 64, "q")
    assert [tokens for tokens, _ in row["curve"]] == [0, 128, 256, 384, 512]
    assert record.provenance["corpus"]["name"] == "text.txt"
    assert record.provenance["corpus"]["sha256"] == arguments["corpus_sha256"]
    assert record.provenance["traces"] == []
    files = {"text.txt", "run.pt", "run.json", "run_step2.pt", "run_step5.pt"}
    assert {x.name for x in text.iterdir()} == files


def test_the_command_ends_well_when_training_diverges(text, monkeypatch):
    poisoned(monkeypatch, step=3, loss=math.nan)
    main(OPTIONS)
    assert read_record(text / "run.json").rows[0]["diverged"] == "the loss of step 3 is not finite"
