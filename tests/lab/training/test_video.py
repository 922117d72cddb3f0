"""Videos of moving shapes are functions of their seed; a model learns them."""

from dataclasses import replace

import pytest
import torch
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.training.loop import TrainingSettings, train
from sage_lab.training.video import TRAINING, VideoTraining, training_batch, videos
from sage_lab.training.video_flow import flow_matching_loss

CONFIG = VideoDiTConfig(frames=2, size=16, cube=(2, 4, 4), layers=2, width=32, heads=2)
SETTINGS = TrainingSettings(steps=20, batch_size=4, learning_rate=1e-2, warmup_steps=5, report_every=5)


def test_videos_are_those_that_the_recorded_capture_was_trained_on():
    """Every shape, texture, colour and motion counts in the sum: the same numbers are drawn in the same order."""
    video = videos(32, 3, 16, seed=(0, 7))
    weights = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    found = (video.mean(), video.std(), video.diff(dim=2).square().mean(), (video * weights).sum())
    assert [x.item() for x in found] == pytest.approx([0.0488715, 0.473563, 0.0760587, -109.592], rel=1e-4)


def test_every_step_draws_its_own_batch_with_levels_from_zero_to_one_and_normal_noise():
    first = _, noise_level, noise = training_batch(CONFIG, 8, seed=(0, 1))
    assert (noise_level * 8).floor().tolist() == list(range(8))
    assert (noise_level * 8 % 1).std() > 0.1
    assert (noise.mean().item(), noise.std().item()) == pytest.approx((0, 1), abs=0.03)
    for seed, is_same in (((0, 1), True), ((0, 2), False), ((1, 1), False)):
        for tensor, expected in zip(training_batch(CONFIG, 8, seed=seed), first, strict=True):
            assert torch.equal(tensor, expected) is is_same
    training = VideoTraining(CONFIG, replace(SETTINGS, seed=3))
    training.step = 1
    batch = training_batch(CONFIG, SETTINGS.batch_size, seed=(TRAINING, 3, 1))
    assert torch.equal(training.accumulate_gradients(), flow_matching_loss(training.model, *batch).mean())


def test_training_learns_and_no_other_run_goes_on(tmp_path):
    training = VideoTraining(CONFIG, SETTINGS)
    train(training, tmp_path / "run.pt")
    first, last = training.losses[0], training.losses[-1]
    # A new model answers zero: its loss is the mean of (e - x)^2, which is 1 + mean x^2.
    assert 1.0 < first["validation_loss"] < 1.5
    assert last["validation_loss"] < 0.7 * first["validation_loss"]
    other = VideoTraining(replace(CONFIG, cube=(1, 1, 1)), SETTINGS)
    with pytest.raises(ValueError, match=r"checkpoint: expected a run with cube=\(1, 1, 1\), .* has cube=\(2, 4, 4\)"):
        train(other, tmp_path / "run.pt")
