"""Scenes are a function of their seed, and their objects are where they should be, in pixels."""

import math

import pytest
import torch
from sage_lab.training import video_scenes
from sage_lab.training.video_scenes import KINDS, OBJECTS, Scenes, draw_scenes, moving_scenes, render
from torch.testing import assert_close
from video_cases import made_up_digits

DIGITS = made_up_digits()


def one_object(kind, **changes):
    """Return a scene of one white object without texture over black, with a camera that stands still."""
    fields = {
        "is_there": torch.arange(OBJECTS)[None] < 1,
        "kind": torch.full((1, OBJECTS), float(KINDS.index(kind))),
        "digit": torch.zeros(1, OBJECTS, dtype=torch.long),
        "radius": torch.full((1, OBJECTS), 8.0),
        "start": torch.full((1, OBJECTS, 2), 20.0),
        "velocity": torch.zeros(1, OBJECTS, 2),
        "colours": torch.ones(1, OBJECTS, 2, 3),
        "wave": torch.ones(1, OBJECTS),
        "camera": torch.zeros(1, 2),
        "background_colours": -torch.ones(1, 2, 3),
        "background_wave": torch.ones(1, 2),
    }
    return Scenes(**(fields | changes))


def test_scenes_are_a_function_of_their_seed_whatever_the_number_rendered_together():
    scenes = draw_scenes(4, 5, 32, seed=(0, 7), device="cpu")
    video, again = render(scenes, DIGITS, 3, 32), moving_scenes(4, DIGITS, 3, 32, seed=(0, 7))
    assert (video.shape, video.dtype) == ((4, 3, 3, 32, 32), torch.float32)
    assert video.abs().max() <= 1
    assert torch.equal(again, video)
    part = render(Scenes(*(x[1::2] for x in scenes)), DIGITS, 3, 32)
    assert torch.equal(part, video[1::2])
    for seed in ((0, 8), (1, 7)):
        assert (moving_scenes(4, DIGITS, 3, 32, seed=seed) - video).abs().mean() > 0.1


@pytest.mark.parametrize(
    ("kind", "area"), [("disc", math.pi), ("square", 1.7**2), ("ring", math.pi * (1 - 0.25))]
)  # in squares of the radius
def test_a_shape_has_its_area_where_it_starts_and_moves_by_its_velocity_minus_the_cameras(kind, area):
    velocity, camera = torch.tensor([1.5, -0.75]), torch.tensor([0.5, 0.25])
    scene = one_object(kind, velocity=velocity.expand(1, OBJECTS, 2), camera=camera[None])
    video, time = render(scene, DIGITS, 5, 48), torch.arange(5)[:, None]
    light, place = (video[0, 0] + 1) / 2, torch.arange(48) + 0.5
    total = light.sum((1, 2))
    assert total[2].item() == pytest.approx(area * 8**2, rel=0.02)
    centre = torch.stack(((light.sum(2) * place).sum(1) / total, (light.sum(1) * place).sum(1) / total), -1)
    # The camera is where it should be in the middle of the video.
    assert_close(centre, 20 + velocity * time - camera * (time - 2), atol=0.05, rtol=0)


def test_objects_turn_back_at_the_walls():
    scene = one_object("disc", start=torch.tensor([2.0, 29.0]).expand(1, OBJECTS, 2),
                       velocity=torch.tensor([-3.0, 2.0]).expand(1, OBJECTS, 2))  # fmt: skip
    assert video_scenes.object_paths(scene, torch.arange(4.0), 32)[0, 0].tolist() == [
        [2, 29],
        [1, 31],
        [4, 31],
        [7, 29],
    ]
