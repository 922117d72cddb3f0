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


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The capture of a run of the command, its record, and the model that it trained for a step."""
    folder = tmp_path_factory.mktemp("captured")
    files = f"--out {folder}/c.safetensors --json {folder}/c.json --checkpoint {folder}/run.pt"
    main(["capture-video", "--steps", "1", "--device", "cpu", *files.split()])
    training = VideoTraining(VideoDiTConfig(), TrainingSettings(steps=1))
    training.load(folder / "run.pt")
    return read_capture(folder / "c.safetensors"), read_record(folder / "c.json"), training


def test_captured_tensors_reproduce_the_output_of_attention_and_losses_those_of_new_videos(captured, largest_tensor):
    (provenance, kept), record, trained = captured
    cores, outputs = [block.attention.core for block in trained.model.blocks], {}
    hooks = [core.register_forward_hook(lambda core, qkv, o: outputs.update({core: o})) for core in cores]
    with largest_tensor() as largest:
        losses, layers = video_attention_tensors(trained)
    assert largest.numbers < 2 * 4 * 1024**2 / 4  # videos, heads, tokens
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
