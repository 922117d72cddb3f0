"""The command captures one validation sequence of a checkpoint, on its own corpus; the committed captures are two."""

from pathlib import Path

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.records import read_record
from sage_lab.training.capture import TENSORS, attention_tensors, read_capture
from sage_lab.training.corpus import read_corpus
from sage_lab.training.pretrain import load_model

from sage_ref.tracing import rms


def capture(options):
    main(["capture", *options.split(), "--device", "cpu", "--out", "c.safetensors"])
    return read_capture(Path("c.safetensors"))


def validation_sequence():
    return read_corpus(Path("text.txt")).split(0.02)[1].batch(1, 16, seed=0, step=0)


def test_the_command_captures_one_validation_sequence_of_a_checkpoint(text, checkpoint, capsys):
    capsys.readouterr()
    provenance, layers = capture("run.pt --corpus text.txt --layers 2 0 2 --json c.json")
    model, arguments = load_model(checkpoint)
    loss, expected = attention_tensors(model, *validation_sequence(), (0, 2))
    assert list(layers) == [0, 2]
    for layer, tensors in expected.items():
        assert set(layers[layer]) == set(tensors)
        for name, x in tensors.items():
            assert torch.equal(layers[layer][name], x.bfloat16()), (layer, name)
    facts = {"loss": loss, "run": arguments, "heads": [0, 1, 2, 3], "loss_normalisation": "mean over 16 tokens"}
    assert facts.items() <= provenance.items()
    assert arguments["step"] == 2
    assert provenance["corpus"]["sha256"] == arguments["corpus_sha256"]
    assert f"layers 0, 2 of a sequence with loss {loss:.3f}: c.safetensors" in capsys.readouterr().out
    record = read_record(text / "c.json")
    assert record.provenance["loss"] == loss
    assert [(row["layer"], row["tensor"]) for row in record.rows] == [(n, name) for n in (0, 2) for name in TENSORS]
    for row in record.rows:
        assert row["shape"] == [1, 4, 16, 8]
        assert row["rms"] == pytest.approx(rms(expected[row["layer"]][row["tensor"]]), rel=1e-12)


def test_the_command_captures_the_heads_asked_for(checkpoint):
    some, whole = (capture(f"run.pt --corpus text.txt --layers 1 {heads}") for heads in ("--heads 3 1", ""))
    assert some.provenance["heads"] == [1, 3]
    for name, x in some.layers[1].items():
        assert torch.equal(x, whole.layers[1][name][:, [1, 3]]), name


def test_a_run_in_bfloat16_is_captured_in_bfloat16(text):
    options = "--context 16 --layers 1 --width 32 --heads 4 --tokens 32 --tokens-per-step 32 --micro-batch 2"
    where = "--corpus text.txt --device cpu --autocast --checkpoint low.pt --validation-sequences 2"
    main(["pretrain", *options.split(), *where.split()])
    found = capture("low.pt --corpus text.txt --layers 0")
    model, _ = load_model(text / "low.pt")
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = attention_tensors(model, *validation_sequence(), (0,))
    assert expected[0]["query"].dtype == torch.bfloat16
    for name, x in found.layers[0].items():
        assert torch.equal(x, expected[0][name]), name


def test_a_checkpoint_is_captured_on_its_own_corpus(text, checkpoint, capsys):
    (text / "other.txt").write_text("whether 'tis nobler in the mind to suffer " * 200)
    with pytest.raises(SystemExit):
        capture("run.pt --corpus other.txt --layers 0")
    assert "corpus: expected that of run.pt, got other.txt, sha256 " in capsys.readouterr().err
    assert not (text / "c.safetensors").exists()
