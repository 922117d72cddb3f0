"""Videos are functions of their seed, flow matching has its target, a stopped run goes on bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pretrain_cases import Stopped, assert_same_bits, stopped
from sage_lab.experiments.capture_video import video_attention_tensors
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.training import video as video_module
from sage_lab.training.loop import Diverged, ResumableTraining, TrainingSettings, train
from sage_lab.training.video import VideoTraining, flow_matching_loss, noisy, training_batch, videos

CONFIG = VideoDiTConfig(frames=2, size=16, cube=(2, 4, 4), layers=2, width=32, heads=2)
SETTINGS = TrainingSettings(steps=20, batch_size=4, learning_rate=1e-2, warmup_steps=5, report_every=5)


def test_videos_are_a_function_of_their_seed_fill_their_range_and_move_but_not_everywhere():
    first = videos(16, 3, 24, seed=(0, 7))
    assert (first.shape, first.dtype) == ((16, 3, 3, 24, 24), torch.float32)
    assert torch.equal(videos(16, 3, 24, seed=(0, 7)), first)
    for other in (videos(16, 3, 24, seed=(0, 8)), videos(16, 3, 24, seed=(1, 7)), first.roll(1, 0)):
        assert (other - first).abs().mean() > 0.1
    assert first.min() < -0.8
    assert first.max() > 0.8
    assert first.abs().max() <= 1
    moved = (first.diff(dim=2).abs().amax(1) > 0.05).float().mean((1, 2, 3))
    assert (moved > 0.02).all()
    assert (moved < 0.9).all()


TWO_COLOURS = np.array([[-1.0] * 3, [1.0] * 3])


def shape_alone(size, **fixed):
    """One shape, white with no texture, over black; `fixed` are the answers of the random numbers, in order."""

    class Fixed:
        answers = iter(fixed["uniform"])

        def uniform(self, low, high, shape=None):
            answer = np.asarray(next(self.answers), dtype=float)
            assert (low <= answer).all()
            assert (answer <= high).all()
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
    drawn = shape_alone(64, shape=shape, uniform=answers)
    covered = (drawn + 1) / 2
    assert covered.mean((1, 2)) == pytest.approx([area, area], rel=0.02)
    assert covered[1] == pytest.approx(np.roll(covered[0], (-2, 4), axis=(0, 1)), abs=1e-9)


def test_texture_moves_and_turns_with_its_shape():
    turned, expected = (
        shape_alone(32, shape="disc", uniform=[0.2, (0.5, 0.5), (0, 0), angle, turn, 0.2, TWO_COLOURS])
        for angle, turn in ((np.pi / 8, 0.4), (np.pi / 8 + 0.4, 0.0))
    )
    assert turned[1] == pytest.approx(expected[0])
    assert np.abs(turned[1] - turned[0]).max() > 0.5


def test_no_videos_are_refused():
    for name in ("count", "frames", "size"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            videos(**({"count": 1, "frames": 1, "size": 8} | {name: 0}), seed=(0,))


def test_noisy_goes_straight_from_the_video_to_noise():
    video, _, noise = training_batch(CONFIG, 3, seed=(0,))
    mixed = noisy(video, torch.tensor([0.0, 0.25, 1.0]), noise)
    assert torch.equal(mixed[0], video[0])
    assert torch.equal(mixed[1], 0.75 * video[1] + 0.25 * noise[1])
    assert torch.equal(mixed[2], noise[2])


def test_the_target_is_the_velocity_of_the_noisy_video():
    video, noise_level, noise = (x.double() for x in training_batch(CONFIG, 3, seed=(0,)))
    velocity = (noisy(video, noise_level + 1e-3, noise) - noisy(video, noise_level - 1e-3, noise)) / 2e-3

    def loss_of(answer):
        def model(x, t):
            assert torch.equal(x, noisy(video, noise_level, noise))
            assert torch.equal(t, noise_level)
            return answer

        return flow_matching_loss(model, video, noise_level, noise)

    assert loss_of(velocity).max() < 1e-18
    wrong = velocity + torch.tensor([0.0, 1.0, 2.0]).view(-1, 1, 1, 1, 1)
    assert loss_of(wrong).tolist() == pytest.approx([0, 1, 4])


def test_every_step_draws_its_own_batch_with_levels_from_zero_to_one_and_normal_noise():
    first = _, noise_level, noise = training_batch(CONFIG, 8, seed=(0, 1))
    assert (noise_level * 8).floor().tolist() == list(range(8))
    assert (noise_level * 8 % 1).std() > 0.1
    assert (noise.mean().item(), noise.std().item()) == pytest.approx((0, 1), abs=0.03)
    for seed, is_same in (((0, 1), True), ((0, 2), False), ((1, 1), False)):
        for tensor, expected in zip(training_batch(CONFIG, 8, seed=seed), first, strict=True):
            assert torch.equal(tensor, expected) is is_same


def trained(checkpoint, settings=SETTINGS, config=CONFIG):
    training = VideoTraining(config, settings)
    train(training, checkpoint)
    return training


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "run.pt")


def test_training_learns(uninterrupted):
    first, last = uninterrupted.losses[0], uninterrupted.losses[-1]
    assert [row["step"] for row in uninterrupted.losses] == [0, 5, 10, 15, 20]
    # A new model answers zero: its loss is the mean of (e - x)^2, which is 1 + mean x^2.
    assert 1.0 < first["validation_loss"] < 1.5
    assert last["validation_loss"] < 0.7 * first["validation_loss"]


def test_a_stopped_run_goes_on_bit_for_bit_and_no_other_run_does(tmp_path, uninterrupted, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stopped(patch, ResumableTraining, "advance", lambda training: training.step == 13)
        with pytest.raises(Stopped):
            trained(tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"checkpoint: expected a run with cube=\(1, 1, 1\), .* has cube=\(2, 4, 4\)"):
        trained(tmp_path / "run.pt", config=replace(CONFIG, cube=(1, 1, 1)))
    capsys.readouterr()
    resumed = trained(tmp_path / "run.pt")
    assert "goes on from step 10 in " in capsys.readouterr().out
    assert resumed.losses == uninterrupted.losses
    assert_same_bits(dict(resumed.model.state_dict()), dict(uninterrupted.model.state_dict()))


def test_the_gradients_of_a_step_are_those_of_its_loss_and_its_seed():
    losses = {}
    for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        training = VideoTraining(CONFIG, replace(SETTINGS, seed=seed))
        training.step = step
        loss = losses[seed, step] = training.accumulate_gradients()
        assert not loss.requires_grad
    assert len({loss.item() for loss in losses.values()}) == 4
    found = {name: p.grad.clone() for name, p in training.model.named_parameters()}
    training.model.zero_grad()
    batch = training_batch(CONFIG, SETTINGS.batch_size, seed=(video_module.TRAINING, 1, 1))
    expected = flow_matching_loss(training.model, *batch).mean()
    expected.backward()
    assert losses[1, 1] == expected
    for name, p in training.model.named_parameters():
        assert torch.equal(found[name], p.grad), name


def test_gradients_that_are_not_finite_stop_the_run():
    training = VideoTraining(CONFIG, SETTINGS)
    with torch.no_grad():
        next(p for p in training.model.parameters() if p.dim() > 1).fill_(float("nan"))
    with pytest.raises(Diverged, match="the gradient of step 0 is not finite"):
        training.advance()
    assert training.step == 0


def test_no_video_is_used_for_two_purposes(monkeypatch):
    drawn = []
    monkeypatch.setattr(video_module, "videos", lambda *shape, seed: drawn.append(seed) or videos(*shape, seed=seed))
    training = VideoTraining(CONFIG, SETTINGS)
    training.advance()
    training.validation_loss()
    video_attention_tensors(training, (0.5,), (0,))
    assert [len(seed) for seed in drawn] == [3, 1, 1]
    assert len({seed[0] for seed in drawn}) == 3


@pytest.mark.gpu
def test_a_run_on_cuda_starts_like_one_on_the_cpu(tmp_path):
    settings = replace(SETTINGS, steps=3, report_every=1)
    on_cuda = VideoTraining(CONFIG, settings, "cuda")
    train(on_cuda, tmp_path / "cuda.pt")
    for row, expected in zip(on_cuda.losses, trained(tmp_path / "cpu.pt", settings).losses, strict=True):
        assert row["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)
    again = VideoTraining(CONFIG, settings, "cuda")
    again.load(tmp_path / "cuda.pt")
    assert again.validation_loss() == pytest.approx(on_cuda.losses[-1]["validation_loss"])
