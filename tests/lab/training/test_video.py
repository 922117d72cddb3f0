"""Videos of moving shapes are functions of their seed; a model learns them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.training import video as video_module
from sage_lab.training.loop import TrainingSettings, train
from sage_lab.training.video import TRAINING, VideoTraining, training_batch, videos
from sage_lab.training.video_flow import flow_matching_loss

CONFIG = VideoDiTConfig(frames=2, size=16, cube=(2, 4, 4), layers=2, width=32, heads=2)
SETTINGS = TrainingSettings(steps=20, batch_size=4, learning_rate=1e-2, warmup_steps=5, report_every=5)
TWO_COLOURS = np.array([[-1.0] * 3, [1.0] * 3])


def test_videos_are_a_function_of_their_seed_fill_their_range_and_move_but_not_everywhere():
    first = videos(16, 3, 24, seed=(0, 7))
    assert (first.shape, first.dtype) == ((16, 3, 3, 24, 24), torch.float32)
    assert torch.equal(videos(16, 3, 24, seed=(0, 7)), first)
    for other in (videos(16, 3, 24, seed=(0, 8)), videos(16, 3, 24, seed=(1, 7)), first.roll(1, 0)):
        assert (other - first).abs().mean() > 0.1
    assert (first.min() < -0.8, first.max() > 0.8, first.abs().max() <= 1) == (True, True, True)
    moved = (first.diff(dim=2).abs().amax(1) > 0.05).float().mean((1, 2, 3))
    assert 0.02 < moved.min() < moved.max() < 0.9


def shape_alone(size, **fixed):
    """Draw one shape, white with no texture, over black; `fixed` are the answers of the random numbers, in order."""

    class Fixed:
        answers = iter(fixed["uniform"])

        def uniform(self, low, high, shape=None):
            answer = np.asarray(next(self.answers), dtype=float)
            assert ((low <= answer) & (answer <= high)).all()
            return answer

        def choice(self, shapes):
            return fixed["shape"]

        def random(self):
            return 0.9  # from 0.5 on: stripes

    time, y, x = np.meshgrid(np.arange(2), *2 * [(np.arange(size) + 0.5) / size], indexing="ij")
    return video_module.draw_shape(Fixed(), -np.ones((3, 2, size, size)), time, y, x)[0]


@pytest.mark.parametrize(
    ("shape", "area"), [("disc", np.pi * 0.2**2), ("square", 4 * 0.16**2), ("ring", np.pi * (0.2**2 - 0.1**2))]
)
def test_shapes_have_their_area_and_move_by_their_velocity(shape, area):
    # radius, start, velocity (y, x) per frame, angle, turn per frame, stripes' width, colours: white
    answers = [0.2, (0.5, 0.25), (-1 / 32, 1 / 16), 0.3, 0.0, 0.2, np.ones((2, 3))]
    covered = (shape_alone(64, shape=shape, uniform=answers) + 1) / 2
    assert covered.mean((1, 2)) == pytest.approx([area, area], rel=0.02)
    assert covered[1] == pytest.approx(np.roll(covered[0], (-2, 4), axis=(0, 1)), abs=1e-9)


def test_texture_moves_and_turns_with_its_shape():
    turned, expected = (
        shape_alone(32, shape="disc", uniform=[0.2, (0.5, 0.5), (0, 0), angle, turn, 0.2, TWO_COLOURS])
        for angle, turn in ((np.pi / 8, 0.4), (np.pi / 8 + 0.4, 0.0))
    )
    assert turned[1] == pytest.approx(expected[0])
    assert np.abs(turned[1] - turned[0]).max() > 0.5


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
