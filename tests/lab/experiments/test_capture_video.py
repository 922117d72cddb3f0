"""A capture holds what the attention of a video model read, and says how concentrated it is."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.capture_video import TENSORS, concentration, video_attention_tensors
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import read_capture
from sage_lab.training.loop import TrainingSettings
from sage_lab.training.video import VideoTraining, flow_matching_loss, training_batch

from sage_ref.attention import attention_forward

CONFIG = VideoDiTConfig(frames=2, size=16, cube=(2, 4, 4), layers=2, width=32, heads=2)


@pytest.fixture(scope="module")
def trained():
    """A few steps on, so that no gate is closed any more."""
    training = VideoTraining(CONFIG, TrainingSettings(steps=5, learning_rate=1e-2, warmup_steps=1))
    for _ in range(5):
        training.advance()
    return training


def test_captured_tensors_reproduce_the_output_of_attention(trained):
    cores, outputs = [block.attention.core for block in trained.model.blocks], {}
    hooks = [core.register_forward_hook(lambda core, qkv, o: outputs.update({core: o})) for core in cores]
    losses, layers = video_attention_tensors(trained, (0.3, 0.6, 1.0), (0, 1))
    for hook in hooks:
        hook.remove()
    assert list(layers) == [0, 1]
    assert len(losses) == 3
    for layer, tensors in layers.items():
        assert tuple(tensors) == TENSORS
        assert {x.shape for x in tensors.values()} == {(3, 2, 128, 16)}
        assert not any(x.requires_grad for x in tensors.values())
        torch.testing.assert_close(attention_forward(*tensors.values()).output, outputs[cores[layer]])
        # QK-norm came before, and a rotation changes no length.
        gain = trained.model.blocks[layer].attention.qk_norm.key_norm.weight
        assert tensors["key"].square().mean(-1).sqrt().max() <= gain.abs().max() * 1.001
    assert not cores[0]._forward_hooks


def test_captured_losses_are_those_of_new_videos_at_their_noise_levels(trained):
    levels = (0.3, 0.6)
    losses, _ = video_attention_tensors(trained, levels, (0,))
    video, _, noise = training_batch(CONFIG, 2, seed=(2,))
    with torch.no_grad():
        expected = flow_matching_loss(trained.model, video, torch.tensor(levels), noise)
    assert losses == expected.tolist()


@pytest.mark.parametrize(
    ("name", "values", "got"),
    [("layers", (2,), r"\[2\]"), ("layers", (-1,), r"\[-1\]"), ("layers", (), r"\[\]"),
     ("noise_levels", (1.5,), r"\[1.5\]"), ("noise_levels", (-0.5,), r"\[-0.5\]"), ("noise_levels", (), r"\[\]")],
)  # fmt: skip
def test_captures_that_cannot_be_are_refused(trained, name, values, got):
    with pytest.raises(ValueError, match=f"{name}: expected numbers from 0 to 1, got {got}"):
        video_attention_tensors(trained, **{"noise_levels": (0.5,), "layers": (0,)} | {name: values})


def test_concentration_is_a_mean_over_blocks_of_queries_of_each_head():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 2, 128, 16) * 2
    rows = concentration({3: {"query": q, "key": k}})
    assert len(rows) == 2 * 2 * 2 * 3
    for row in rows:
        assert row["blocks"] == max(1, round(row["share"] * 128 / row["block_kv"]))
        best = []
        for p in (q @ k.mT / 4).softmax(-1)[row["sample"], row["head"]].split(row["block_q"]):
            best += sorted(block.sum().item() for block in p.split(row["block_kv"], 1))[-row["blocks"] :]
        assert row["mass"] == pytest.approx(sum(best) / 128, rel=1e-4)


def test_the_command_trains_captures_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    size = "--frames 2 --size 16 --cube 1 4 4 --depth 3 --width 32 --heads 2"
    options = f"{size} --steps 2 --layers 2 0 --noise-levels 0.4 0.7 --device cpu --out c.safetensors --json c.json"
    main(["capture-video", *options.split()])
    printed = capsys.readouterr()
    provenance, layers = read_capture(tmp_path / "c.safetensors")
    assert list(layers) == [0, 2]
    for tensors in layers.values():
        assert {x.shape for x in tensors.values()} == {(2, 2, 128, 16)}
        assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
    config = VideoDiTConfig(frames=2, size=16, cube=(1, 4, 4), layers=3, width=32, heads=2)
    assert provenance["model"] == json.loads(json.dumps(asdict(config)))
    assert provenance["tokens"]["grid"] == [2, 8, 8]
    assert provenance["noise_levels"] == [0.4, 0.7]
    again = VideoTraining(config, TrainingSettings(steps=2))
    again.load(tmp_path / "runs" / "capture_video.pt")
    assert provenance["captured_losses"] == video_attention_tensors(again, (0.4, 0.7), (0,))[0]
    assert "2/2" in printed.err
    record = read_record(tmp_path / "c.json")
    assert record.provenance["losses"] == provenance["losses"]
    for row in record.rows:
        line = rf"\| {row['layer']} \| {row['sample']} \| {row['head']} \| .*{row['mass']:.3f}"
        assert re.search(line, printed.out)


def test_the_committed_capture_is_what_a_router_can_learn_from():
    path = RECORDED / "capture_video.safetensors"
    provenance, layers = read_capture(path)
    assert path.stat().st_size <= 4 * 2**20
    assert len(layers) == 2
    for tensors in layers.values():
        assert set(tensors) == set(TENSORS)
        for tensor in tensors.values():
            assert (tensor.shape, tensor.dtype) == ((2, 4, 1024, 32), torch.bfloat16)
            assert tensor.isfinite().all()
        assert not torch.equal(*tensors["query"])
    losses = provenance["losses"]
    assert losses[-1]["step"] == provenance["training"]["steps"]
    assert losses[-1]["validation_loss"] < 0.3 * losses[0]["validation_loss"]
    # Attention is not flat: everywhere the best tenth of the blocks holds over twice its share.
    for row in concentration(layers):
        if row["share"] == 0.1:
            assert row["mass"] > 0.2
