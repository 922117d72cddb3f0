"""Clips are the frames of their file, in order and square."""

import numpy as np
import pytest
import torch
from sage_lab.training.packaged import packaged_file
from sage_lab.training.video_clips import bundled_clips, clips_from, read_clips, small_square, write_clips


def write_video(path, frames, *, height=16, width=24):
    """Write a lossless video; the grey of frame n is 10 n, and its left eighth is white."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "bgr0"
        for number in range(frames):
            picture = np.full((height, width, 3), 10 * number, np.uint8)
            picture[:, : width // 8] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_clips_are_spread_over_their_file_and_come_back_from_theirs_in_8_bits(tmp_path):
    path = write_video(tmp_path / "grey.mkv", 11)
    clips = read_clips([path], 3, 8, clips_per_file=3)
    assert clips.shape == (3, 3, 3, 8, 8)
    greys = ((clips[:, 0, :, 0, 0] + 1) * 12.75).round().int().tolist()
    assert greys == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert torch.equal(clips, clips[..., :1, :1].expand_as(clips))  # the white edge is not in the middle square
    with pytest.raises(ValueError, match=f"^path: expected a video of at least 12 frames, {path} has 11$"):
        read_clips([path], 6, 8)
    write_clips(tmp_path / "clips.npz", clips)
    assert (clips_from(tmp_path / "clips.npz", 3, 8) - clips).abs().max() <= 1 / 255 + 1e-6
    with pytest.raises(ValueError, match=r"^path: expected clips of 3 frames of 9 x 9 .* has \[3, 3, 3, 8, 8\]"):
        clips_from(tmp_path / "clips.npz", 3, 9)
    with pytest.raises(ValueError, match="^path: expected clips that `python -m sage_lab video clips` wrote, got"):
        clips_from(path, 3, 8)


def test_pictures_are_averaged_over_the_middle_square():
    picture = np.zeros((4, 8, 3), np.uint8)
    picture[:2, 2:4, 0] = (255, 255)
    assert small_square(picture, 2).tolist() == [[[1, -1], [-1, -1]], *[[[-1, -1]] * 2] * 2]


def test_the_bundled_clips_can_be_read_and_a_missing_package_says_so():
    clips = read_clips([bundled_clips()[-1]], 16, 128)
    assert clips.shape == (2, 3, 16, 128, 128)
    assert 0 < (clips[:, :, 1:] - clips[:, :, :-1]).abs().mean() < 0.1  # it moves, but not everywhere
    with pytest.raises(FileNotFoundError, match=r"^no-such-package: expected .* './lab\[video,pretrained\]'"):
        packaged_file("no-such-package", "data.csv")
    with pytest.raises(FileNotFoundError, match=r"^torch: expected to be installed with its file torch/none, found"):
        packaged_file("torch", "torch/none")
    with pytest.raises(ValueError, match=r"^torch: expected torch/version.py with sha256 00, got [0-9a-f]{64}$"):
        packaged_file("torch", "torch/version.py", "00")
