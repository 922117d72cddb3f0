"""Made-up video attention has the links it claims, each as strong as its logits say, and is a function of its seed."""

import math
from dataclasses import replace

import pytest
import torch
from sage_lab.training.video_like import VideoLike, video_like
from torch.testing import assert_close

SMALL = VideoLike(grid=(2, 8, 12), cube=(1, 4, 4), heads=2, head_dim=16)
NOTHING = replace(SMALL, local=0, far=0, noise=0, offset=0)


def logits(config):
    tensors, far_cube = video_like(config)
    return (tensors["query"] @ tensors["key"].mT / math.sqrt(config.head_dim))[0], far_cube[0]


def test_tensors_have_their_shapes_and_are_a_function_of_the_seed():
    before = torch.get_rng_state()
    for config in (SMALL, replace(VideoLike(), grid=(2, 6, 10), cube=(2, 3, 5), heads=1, head_dim=128)):
        (first, far_cube), (again, _), (other, _) = (video_like(config, 3, seed=seed) for seed in (3, 3, 4))
        assert tuple(first) == ("query", "key", "value")
        for name, x in first.items():
            assert (x.shape, x.dtype) == ((3, config.heads, config.tokens, config.head_dim), torch.float32)
            assert torch.equal(x, again[name])
            assert not torch.equal(x, other[name])
            assert not torch.equal(x[0], x[1])
        # Every cube is some cube's far cube.
        assert_close(far_cube.sort(-1).values, torch.arange(config.cubes).expand_as(far_cube))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_local_logit_is_as_given_and_fades_with_distance_cube_by_cube():
    s, _ = logits(replace(NOTHING, local=8.0, head_dim=128, reach=2.0))
    assert_close(s.diagonal(dim1=-2, dim2=-1), torch.full((2, 192), 8.0))
    # The first cube is rows and columns 0 to 3 of the first frame.
    along_a_row = s[:, 0, :4].mean(0)
    assert_close(along_a_row, 8 * torch.exp(-(torch.arange(4.0) ** 2) / 8), atol=1.5, rtol=0)
    assert s[:, 0, 96:].abs().mean() < 4  # the other frame, and most of it far away
    s, _ = logits(replace(NOTHING, local=8.0, head_dim=128, reach=1.0))
    neighbour_in_its_column, next_cube = s[:, 0, 4].mean(), s[:, 0, 16].mean()
    assert neighbour_in_its_column > 2 > next_cube


def test_the_far_logit_is_as_given_between_linked_cubes_and_noise_has_its_deviation():
    s, far_cube = logits(replace(NOTHING, far=7.0))
    by_cube = s.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 16))  # [H, cube, 16, cube, 16]
    for head in range(2):
        for cube, far in enumerate(far_cube[head].tolist()):
            assert_close(by_cube[head, cube, :, far], torch.full((16, 16), 7.0))
            others = [c for c in range(SMALL.cubes) if c != far]
            assert by_cube[head, cube][:, others].max() < 7 - 1e-3
    assert logits(replace(NOTHING, noise=2.0))[0].std().item() == pytest.approx(2.0, rel=0.1)


def test_an_offset_of_all_keys_changes_no_attention():
    with_offset, without = (video_like(replace(SMALL, offset=offset))[0] for offset in (4.0, 0.0))
    assert with_offset["key"].mean(-2).std().item() == pytest.approx(4, rel=0.4)
    p, exact = ((x["query"].double() @ x["key"].double().mT / 4).softmax(-1) for x in (with_offset, without))
    assert_close(p, exact, atol=1e-4, rtol=0)


def test_one_query_in_sixteen_is_an_outlier_with_the_logit_that_is_asked_for():
    for outlier in (0.0, 120.0):
        q, k, _ = video_like(replace(SMALL, outlier=outlier, noise=0, offset=0), 4)[0].values()
        is_outlier = q[..., -1].abs() > 10
        assert is_outlier.float().mean().item() == pytest.approx(1 / 16 if outlier else 0, rel=0.3)
        largest = (q[..., -1:] @ k[..., -1:].mT / 4).amax().item()
        assert largest == pytest.approx(outlier, rel=0.02)
