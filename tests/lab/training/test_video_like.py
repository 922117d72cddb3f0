"""Made-up video attention is a function of its seed."""

import torch
from sage_lab.training.video_like import VideoLike, video_like
from torch.testing import assert_close


def test_tensors_have_their_shapes_and_are_a_function_of_the_seed():
    config = VideoLike(grid=(2, 6, 10), cube=(2, 3, 5), heads=1, head_dim=128)
    (first, far_cube), (again, _), (other, _) = (video_like(config, 3, seed=seed) for seed in (3, 3, 4))
    assert tuple(first) == ("query", "key", "value")
    for name, x in first.items():
        assert (x.shape, x.dtype) == ((3, 1, 120, 128), torch.float32)
        assert torch.equal(x, again[name])
        assert not torch.equal(x, other[name])
        assert not torch.equal(x[0], x[1])
    # Every cube is some cube's far cube.
    assert_close(far_cube.sort(-1).values, torch.arange(config.cubes).expand_as(far_cube))
