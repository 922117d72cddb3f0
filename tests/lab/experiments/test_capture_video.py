"""A capture holds the tensors that the attention of a video model read."""

import pytest
import torch
from sage_lab.__main__ import main
from sage_lab.experiments.capture_video import video_attention_tensors
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import RECORDED, read_record
from sage_lab.training.capture import read_capture
from sage_lab.training.loop import TrainingSettings
from sage_lab.training.video import VideoTraining, training_batch
from sage_lab.training.video_flow import flow_matching_loss

from sage_ref.attention import attention_forward
from sage_ref.sla2 import BlockSettings, block_mass


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The capture of a run of the command, its record, and the model that it trained for a step."""
    folder = tmp_path_factory.mktemp("captured")
    files = f"--out {folder}/c.safetensors --json {folder}/c.json --checkpoint {folder}/run.pt"
    main(["capture-video", "--steps", "1", "--device", "cpu", *files.split()])
    training = VideoTraining(VideoDiTConfig(), TrainingSettings(steps=1))
    training.load(folder / "run.pt")
    return read_capture(folder / "c.safetensors"), read_record(folder / "c.json"), training


def test_captured_tensors_reproduce_the_output_of_attention_and_losses_those_of_new_videos(captured):
    (provenance, kept), record, trained = captured
    cores, outputs = [block.attention.core for block in trained.model.blocks], {}
    hooks = [core.register_forward_hook(lambda core, qkv, o: outputs.update({core: o})) for core in cores]
    losses, layers = video_attention_tensors(trained)
    for hook in hooks:
        hook.remove()
    assert list(kept) == list(layers) == [2, 4]
    for layer, tensors in layers.items():
        assert list(tensors) == ["query", "key", "value"]
        assert {x.shape for x in tensors.values()} == {(2, 4, 1024, 32)}
        torch.testing.assert_close(attention_forward(*tensors.values()).output, outputs[cores[layer]])
        assert all(torch.equal(kept[layer][name], x.bfloat16()) for name, x in tensors.items())
        # QK-norm came before, and a rotation changes no length.
        gain = trained.model.blocks[layer].attention.qk_norm.key_norm.weight
        assert tensors["key"].square().mean(-1).sqrt().max() <= gain.abs().max() * 1.001
    video, _, noise = training_batch(trained.config, 2, seed=(2,))
    with torch.no_grad():
        assert losses == flow_matching_loss(trained.model, video, torch.tensor([0.4, 0.5]), noise).tolist()
    assert [row["loss"] for row in record.rows] == provenance["captured_losses"] == losses
    recorded, _ = read_capture(RECORDED / "capture_video.safetensors")
    assert provenance.keys() == recorded.keys()
    assert recorded["model"].items() <= provenance["model"].items()


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
