"""A capture holds the tensors that the attention of a video model read."""

import json
from dataclasses import asdict

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.capture_video import TENSORS, video_attention_tensors
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import read_capture
from sage_lab.training.loop import TrainingSettings
from sage_lab.training.video import VideoTraining, training_batch
from sage_lab.training.video_flow import flow_matching_loss

from sage_ref.attention import attention_forward
from sage_ref.sla2 import BlockSettings, block_mass

CONFIG = VideoDiTConfig(frames=2, size=16, cube=(1, 4, 4), layers=3, width=32, heads=2)
LEVELS, LAYERS = (0.4, 0.7, 1.0), (2, 0)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The capture of a run of the command, its record, and the model that it trained for a few steps."""
    folder = tmp_path_factory.mktemp("captured")
    size = "--frames 2 --size 16 --cube 1 4 4 --depth 3 --width 32 --heads 2 --steps 5"
    options = f"{size} --layers 2 0 --noise-levels 0.4 0.7 1 --device cpu --out c.safetensors --json c.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["capture-video", *options.split()])
    training = VideoTraining(CONFIG, TrainingSettings(steps=5))
    training.load(folder / "runs" / "capture_video.pt")
    return read_capture(folder / "c.safetensors"), read_record(folder / "c.json"), training


def test_captured_tensors_reproduce_the_output_of_attention_and_losses_those_of_new_videos(captured):
    (provenance, kept), record, trained = captured
    cores, outputs = [block.attention.core for block in trained.model.blocks], {}
    hooks = [core.register_forward_hook(lambda core, qkv, o: outputs.update({core: o})) for core in cores]
    losses, layers = video_attention_tensors(trained, LEVELS, LAYERS)
    for hook in hooks:
        hook.remove()
    assert list(kept) == sorted(LAYERS)
    for layer in LAYERS:
        tensors = layers[layer]
        assert (tuple(tensors), kept[layer].keys()) == (TENSORS, set(TENSORS))
        assert {x.shape for x in tensors.values()} == {(3, 2, 128, 16)}
        torch.testing.assert_close(attention_forward(*tensors.values()).output, outputs[cores[layer]])
        assert all(torch.equal(kept[layer][name], x.bfloat16()) for name, x in tensors.items())
        # QK-norm came before, and a rotation changes no length.
        gain = trained.model.blocks[layer].attention.qk_norm.key_norm.weight
        assert tensors["key"].square().mean(-1).sqrt().max() <= gain.abs().max() * 1.001
    video, _, noise = training_batch(CONFIG, 3, seed=(2,))
    with torch.no_grad():
        assert losses == flow_matching_loss(trained.model, video, torch.tensor(LEVELS), noise).tolist()
    assert [row["loss"] for row in record.rows] == provenance["captured_losses"] == losses
    assert record.provenance["losses"] == provenance["losses"]
    assert provenance["model"] == json.loads(json.dumps(asdict(CONFIG)))
    assert (provenance["tokens"]["grid"], provenance["noise_levels"]) == ([2, 8, 8], list(LEVELS))


@pytest.mark.parametrize(
    ("name", "values"), [("layers", (3,)), ("layers", ()), ("noise_levels", (1.5,)), ("noise_levels", (-0.5,))]
)
def test_captures_that_cannot_be_are_refused(captured, name, values):
    last = {"layers": 2, "noise_levels": 1}[name]
    with pytest.raises(ValueError, match=f"{name}: expected numbers from 0 to {last}, got "):
        video_attention_tensors(captured[2], **{"noise_levels": (0.5,), "layers": (0,)} | {name: values})


def test_the_committed_capture_is_concentrated_enough_for_a_router():
    provenance, layers = read_capture(RECORDED / "capture_video.safetensors")
    losses = provenance["losses"]
    assert losses[-1]["validation_loss"] < 0.3 * losses[0]["validation_loss"]
    for tensors in layers.values():
        for x in tensors.values():
            assert (x.shape, x.dtype) == ((2, 4, 1024, 32), torch.bfloat16)
            assert x.isfinite().all()
        # In every head the best tenth of the blocks holds more than twice its share of the mass.
        for block_q, block_kv in ((32, 16), (16, 8)):
            mass = block_mass(tensors["query"].float(), tensors["key"].float(), BlockSettings(block_q, block_kv))
            best = mass.sort(-1, descending=True).values.mean(-2)[..., : round(0.1 * mass.shape[-1])]
            assert best.sum(-1).min() > 0.2
