"""The command captures one validation sequence of a checkpoint, on its own corpus."""

from pathlib import Path

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.records import read_record
from sage_lab.training.capture import attention_tensors, read_capture
from sage_lab.training.corpus import read_corpus
from sage_lab.training.pretrain import load_model


@pytest.mark.parametrize(("autocast", "option", "heads"), [(False, "", [0, 1, 2, 3]), (True, "--heads 3 1", [1, 3])])
def test_the_command_captures_one_validation_sequence_of_a_checkpoint(
    text, checkpoint, capsys, autocast, option, heads
):
    """In bfloat16 if the run was in bfloat16; with all heads if none are named; on its own corpus."""
    if autocast:
        state = torch.load(checkpoint, weights_only=True)
        torch.save(state | {"arguments": state["arguments"] | {"autocast": True}}, checkpoint)
    command = f"capture run.pt --layers 2 0 2 {option} --json c.json --device cpu --out c.safetensors --corpus".split()
    (text / "other.txt").write_text("whether 'tis nobler in the mind to suffer " * 200)
    with pytest.raises(SystemExit):
        main([*command, "other.txt"])
    assert "corpus: expected that of run.pt, got other.txt, sha256 " in capsys.readouterr().err
    assert not (text / "c.safetensors").exists()
    main([*command, "text.txt"])
    provenance, layers = read_capture(Path("c.safetensors"))
    model, arguments = load_model(checkpoint)
    batch = read_corpus(Path("text.txt")).split(0.02)[1].batch(1, 16, seed=0, step=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, expected = attention_tensors(model, *batch, (0, 2))
    assert expected[0]["query"].dtype == (torch.bfloat16 if autocast else torch.float32)
    assert list(layers) == [0, 2]
    for layer, tensors in expected.items():
        assert set(layers[layer]) == set(tensors)
        for name, x in tensors.items():
            assert torch.equal(layers[layer][name], x[:, heads].bfloat16()), (layer, name)
    facts = {"loss": loss, "run": arguments, "heads": heads, "loss_normalisation": "mean over 16 tokens"}
    assert facts.items() <= provenance.items()
    assert arguments["step"] == 2
    assert provenance["corpus"]["sha256"] == arguments["corpus_sha256"]
    assert read_record(text / "c.json").rows == [{"loss": loss}]
