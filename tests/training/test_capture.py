"""A capture holds what the attention of a pre-trained model read and the gradient it got, as it was written."""

import pytest
import torch
from pretrain_cases import CONFIG, sixteen_letters
from safetensors.torch import save_file

from sage_ref.__main__ import MEASURES, main
from sage_ref.attention import attention_forward
from sage_ref.experiments.tables import CAPTURES, PAPER_TABLE2, table2_rows
from sage_ref.models.llama import Llama
from sage_ref.records import RECORDED, read_record
from sage_ref.sagebwd.whole import SageBwdSettings
from sage_ref.tracing import INTERMEDIATES, rms
from sage_ref.training.capture import (
    TENSORS,
    Capture,
    attention_tensors,
    next_token_loss,
    read_capture,
    write_capture,
)
from sage_ref.training.corpus import read_corpus
from sage_ref.training.pretrain import load_model


@pytest.fixture
def double_model():
    torch.manual_seed(0)
    model = Llama(CONFIG).double()
    batch = sixteen_letters().batch(2, CONFIG.context, seed=0, step=0)
    return model, *batch


def test_captured_q_k_v_are_what_attention_multiplies(double_model):
    model, inputs, targets = double_model
    outputs = {}
    for layer, block in enumerate(model.blocks):
        block.attention.core.register_forward_hook(lambda core, qkv, o, layer=layer: outputs.update({layer: o}))
    loss, layers = attention_tensors(model, inputs, targets, (0, 1))
    assert loss == next_token_loss(model, inputs, targets).item()
    assert list(layers) == [0, 1]
    for layer, tensors in layers.items():
        assert tuple(tensors) == TENSORS
        q, k, v, do = tensors.values()
        assert q.shape == k.shape == v.shape == do.shape == (2, 4, 24, 8)
        torch.testing.assert_close(attention_forward(q, k, v, is_causal=True).output, outputs[layer])
        # QK-norm with gains of one came before, and a rotation changes no length.
        torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 4, 24).double(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("layer", [0, 1])
def test_captured_grad_output_is_the_gradient_of_the_loss(double_model, layer):
    model, inputs, targets = double_model
    _, layers = attention_tensors(model, inputs, targets, (layer,))
    direction = torch.randn(layers[layer]["grad_output"].shape, dtype=torch.float64)
    losses = []
    for step in (1e-4, -1e-4):
        core = model.blocks[layer].attention.core
        hook = core.register_forward_hook(lambda core, qkv, o, step=step: o + step * direction)
        losses.append(next_token_loss(model, inputs, targets).item())
        hook.remove()
    slope = (losses[0] - losses[1]) / 2e-4
    assert slope == pytest.approx((layers[layer]["grad_output"] * direction).sum().item(), rel=1e-5)


def test_capturing_leaves_the_model_as_it_was(double_model):
    model, inputs, targets = double_model
    attention_tensors(model, inputs, targets, (1,))
    assert all(p.grad is None for p in model.parameters())
    assert not model.blocks[1].attention.core._forward_hooks


def test_a_capture_is_read_as_written(tmp_path, double_model):
    _, layers = attention_tensors(*double_model, (0, 1))
    capture = Capture({"corpus": {"name": "sixteen letters"}, "loss": 2.5}, layers)
    write_capture(tmp_path / "deep" / "capture.safetensors", capture)
    again = read_capture(tmp_path / "deep" / "capture.safetensors")
    assert again.provenance == capture.provenance
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            assert torch.equal(again.layers[layer][name], tensor.bfloat16())
    assert {row["tensor"] for row in table2_rows(again.layers, SageBwdSettings(is_causal=True))} == set(INTERMEDIATES)


def test_what_is_no_capture_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: expected a capture at .*none.safetensors, found none"):
        read_capture(tmp_path / "none.safetensors")
    save_file({"layer0.query": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="path: expected a capture with provenance in its metadata"):
        read_capture(tmp_path / "other.safetensors")


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A folder with text.txt and run.pt, a checkpoint of two steps on it; the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    shape = "--context 16 --layers 3 --width 32 --heads 4 --kv-heads 2 --tokens 64 --tokens-per-step 32"
    options = (
        f"{shape} --micro-batch 2 --warmup 1 --validation-sequences 2 --device cpu --no-autocast --checkpoint run.pt"
    )
    main(["pretrain", "--corpus", "text.txt", *options.split()])
    return tmp_path


def test_the_command_captures_one_validation_sequence_of_a_checkpoint(text, capsys):
    capsys.readouterr()
    options = "run.pt --corpus text.txt --layers 2 0 2 --device cpu --out c.safetensors --json c.json"
    main(["capture", *options.split()])
    provenance, layers = read_capture(text / "c.safetensors")
    model, arguments = load_model(text / "run.pt")
    _, validation = read_corpus(text / "text.txt").split(0.02)
    loss, expected = attention_tensors(model, *validation.batch(1, 16, seed=0, step=0), (0, 2))
    assert list(layers) == [0, 2]
    for layer, tensors in expected.items():
        assert set(layers[layer]) == set(tensors)
        for name, x in tensors.items():
            assert torch.equal(layers[layer][name], x.bfloat16()), (layer, name)
    assert provenance["loss"] == loss
    assert provenance["run"] == arguments
    assert provenance["run"]["step"] == 2
    assert (provenance["heads"], provenance["loss_normalisation"]) == ([0, 1, 2, 3], "mean over 16 tokens")
    assert provenance["corpus"]["sha256"] == arguments["corpus_sha256"]
    assert f"layers 0, 2 of a sequence with loss {loss:.3f}: c.safetensors" in capsys.readouterr().out
    record = read_record(text / "c.json")
    assert record.provenance["loss"] == loss
    assert [(row["layer"], row["tensor"]) for row in record.rows] == [(n, name) for n in (0, 2) for name in TENSORS]
    for row in record.rows:
        assert row["shape"] == [1, 4, 16, 8]
        assert row["rms"] == rms(expected[row["layer"]][row["tensor"]])


def test_the_command_captures_the_heads_asked_for(text):
    options = "run.pt --corpus text.txt --layers 1 --heads 3 1 --device cpu --out"
    main(["capture", *options.split(), "some.safetensors"])
    main(["capture", *options.replace("--heads 3 1", "").split(), "all.safetensors"])
    some, whole = read_capture(text / "some.safetensors"), read_capture(text / "all.safetensors")
    assert some.provenance["heads"] == [1, 3]
    for name, x in some.layers[1].items():
        assert torch.equal(x, whole.layers[1][name][:, [1, 3]]), name


def test_a_run_in_bfloat16_is_captured_in_bfloat16(text):
    options = "--context 16 --layers 1 --width 32 --heads 4 --tokens 32 --tokens-per-step 32 --micro-batch 2"
    where = "--corpus text.txt --device cpu --autocast --checkpoint low.pt --validation-sequences 2"
    main(["pretrain", *options.split(), *where.split()])
    options = "low.pt --corpus text.txt --layers 0 --device cpu --out c.safetensors"
    main(["capture", *options.split()])
    model, _ = load_model(text / "low.pt")
    _, validation = read_corpus(text / "text.txt").split(0.02)
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = attention_tensors(model, *validation.batch(1, 16, seed=0, step=0), (0,))
    assert expected[0]["query"].dtype == torch.bfloat16
    for name, x in read_capture(text / "c.safetensors").layers[0].items():
        assert torch.equal(x, expected[0][name]), name


def test_a_checkpoint_is_captured_on_its_own_corpus(text):
    (text / "other.txt").write_text("whether 'tis nobler in the mind to suffer " * 200)
    options = "run.pt --corpus other.txt --layers 0 --device cpu --out c.safetensors"
    with pytest.raises(SystemExit, match="corpus: expected that of run.pt, got other.txt, sha256 "):
        main(["capture", *options.split()])
    assert not (text / "c.safetensors").exists()


def test_table2_shows_the_worst_layer_of_each_capture(text, capsys):
    where = "--corpus text.txt --device cpu"
    main(["capture", "run.pt", "--layers", "0", "2", "--heads", "1", "--out", "some.safetensors", *where.split()])
    options = "--context 16 --layers 2 --width 32 --heads 4 --tokens 32 --tokens-per-step 32 --micro-batch 2 --qk-norm"
    kept = "--no-autocast --checkpoint norm.pt --validation-sequences 2"
    main(["pretrain", *options.split(), *kept.split(), *where.split()])
    main(["capture", "norm.pt", "--layers", "0", "1", "--out", "norm.safetensors", *where.split()])
    capsys.readouterr()
    main(["table2", "--capture", "norm.safetensors", "some.safetensors", "--granularity", "row", "--json", "t.json"])
    shown = capsys.readouterr().out
    record = read_record(text / "t.json")
    settings = SageBwdSettings.printed(is_causal=True, granularity="row")
    files = {"norm": True, "some": False}
    expected = [
        {"capture": name, "qk_norm": qk_norm} | row
        for name, qk_norm in files.items()
        for row in table2_rows(read_capture(text / f"{name}.safetensors").layers, settings)
    ]
    assert record.rows == expected
    assert [facts["file"] for facts in record.provenance["captures"]] == ["norm.safetensors", "some.safetensors"]
    assert [facts["run"]["qk_norm"] for facts in record.provenance["captures"]] == [True, False]
    header, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")
    )
    worst = {name: max(record.select(capture=name, tensor="dQ"), key=lambda row: row["rel_l2"]) for name in files}
    titles = [f"{name}, layer {row['layer']}: cosine" for name, row in worst.items()]
    assert header == ["tensor", titles[0], "relative L2", "RMS", titles[1], "relative L2", "RMS", "paper: cosine",
                      "relative L2"]  # fmt: skip
    assert [line[0] for line in lines] == list(INTERMEDIATES)
    for line in lines:
        rows = [record.select(capture=name, layer=row["layer"], tensor=line[0])[0] for name, row in worst.items()]
        cells = [f"{row[name]:{digits}}" for row in rows for name, digits in MEASURES.items()]
        assert line[1:] == [*cells, *(f"{x:.4f}" for x in PAPER_TABLE2[line[0]])]


def test_table2_refuses_a_capture_of_something_else(tmp_path):
    write_capture(tmp_path / "video.safetensors", Capture({"model": {}}, {0: {"query": torch.zeros(1, 1, 1, 1)}}))
    with pytest.raises(SystemExit, match="capture: expected a file of `python -m sage_ref capture`, got .*video"):
        main(["table2", "--capture", str(tmp_path / "video.safetensors")])


@pytest.fixture(scope="module")
def committed():
    return {norm: read_capture(RECORDED / f"{name}.safetensors") for norm, name in CAPTURES.items()}


def test_the_committed_captures_are_small_and_whole(committed):
    assert sum((RECORDED / f"{name}.safetensors").stat().st_size for name in CAPTURES.values()) <= 4_000_000
    for _, layers in committed.values():
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


def test_the_committed_captures_say_where_they_come_from(committed):
    for provenance, layers in committed.values():
        for name in ("gpu", "python", "torch", "commit", "date", "command", "loss"):
            assert provenance[name], name
        assert len(provenance["corpus"]["sha256"]) == 64
        assert (provenance["heads"], provenance["loss_normalisation"]) == ([0], "mean over 512 tokens")
        assert "/" not in provenance["command"] + provenance["corpus"]["name"]
        assert provenance["layers_kept"]["kept"] == list(layers)
        assert "4,000,000 bytes" in provenance["layers_kept"]["why"]


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
