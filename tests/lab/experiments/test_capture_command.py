"""The command captures one validation sequence of a checkpoint, on its own corpus; the committed captures are two."""

from pathlib import Path

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.table2 import CAPTURES, table2_rows
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import TENSORS, attention_tensors, read_capture
from sage_lab.training.corpus import read_corpus
from sage_lab.training.pretrain import load_model

from sage_ref.sagebwd.settings import SageBwdSettings
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


@pytest.fixture(scope="module")
def committed():
    return {norm: read_capture(RECORDED / f"{name}.safetensors") for norm, name in CAPTURES.items()}


def test_the_committed_captures_are_small_and_whole(committed):
    assert sum((RECORDED / f"{name}.safetensors").stat().st_size for name in CAPTURES.values()) <= 4_000_000
    for provenance, layers in committed.values():
        assert provenance["layers_kept"]["kept"] == list(layers)
        assert len(layers) == 3
        for tensors in layers.values():
            assert tuple(sorted(tensors)) == tuple(sorted(TENSORS))
            for tensor in tensors.values():
                assert (tensor.shape, tensor.dtype) == ((1, 1, 512, 128), torch.bfloat16)
                assert tensor.isfinite().all()
                assert tensor.float().std() > 0


def test_the_committed_captures_differ_in_qk_norm_alone(committed):
    runs = {norm: provenance["run"] for norm, (provenance, _) in committed.items()}
    assert [runs[norm].pop("qk_norm") for norm in ("QK-norm", "no QK-norm")] == [True, False]
    for run in runs.values():
        assert run.pop("step") == run["steps"] == 4096
        assert run["batch_size"] * run["context"] == 16384
        assert (run["layers"], run["width"], run["heads"], run["attention"]) == (4, 384, 3, "exact")
    assert runs["QK-norm"] == runs["no QK-norm"]
    # Queries and keys of unit gain have RMS 1 before the rotation, which changes no length; without the norm they vary.
    for norm, (_, layers) in committed.items():
        lengths = torch.cat([tensors["key"].float().square().mean(-1).flatten() for tensors in layers.values()])
        assert (lengths.std() / lengths.mean() < 0.3) == (norm == "QK-norm")


def test_the_committed_layers_are_the_first_and_the_most_error_prone(committed):
    errors = {}
    for provenance, layers in committed.values():
        recorded = {int(layer): error for layer, error in provenance["layers_kept"]["rel_l2_of_dQ"].items()}
        assert list(recorded) == provenance["layers_kept"]["captured"] == list(range(provenance["run"]["layers"]))
        for row in table2_rows(layers, SageBwdSettings.printed(is_causal=True)):
            assert row["tensor"] != "dQ" or row["rel_l2"] == pytest.approx(recorded[row["layer"]], rel=0.02)
        for layer, error in recorded.items():
            errors[layer] = max(error, errors.get(layer, 0))
    first, *others = sorted(errors)
    others.sort(key=errors.get, reverse=True)
    assert list(layers) == sorted([first, *others[:2]])
