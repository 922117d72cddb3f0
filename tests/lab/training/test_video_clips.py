"""Clips are the frames of their file, in order and square; what is no video says so."""

import numpy as np
import pytest
import torch
from sage_lab.training import video_clips
from sage_lab.training.video_clips import bundled_clips, clips_from, read_clips, small_square, write_clips


def write_video(path, frames, *, height=16, width=24):
    """Lossless; the grey of frame n is 10 n, and its left eighth is white."""
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


def greys(clip):
    return ((clip[0, :, 0, 0] + 1) * 12.75).round().int().tolist()


def test_clips_are_spread_over_their_file_and_hold_frames_one_after_the_other(tmp_path):
    path = write_video(tmp_path / "grey.mkv", 11)
    clips = read_clips([path], 3, 8, clips_per_file=3)
    assert clips.shape == (3, 3, 3, 8, 8)
    assert [greys(clip) for clip in clips] == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert torch.equal(clips, clips[..., :1, :1].expand_as(clips))  # the white edge is not in the middle square
    assert len(read_clips([path, path], 6, 8)) == 2  # what doesn't overlap, once from each


def test_pictures_are_averaged_over_the_middle_square():
    picture = np.zeros((4, 8, 3), np.uint8)
    picture[:2, 2:4, 0] = (255, 255)
    small = small_square(picture, 2)
    assert small[0].tolist() == [[1, -1], [-1, -1]]
    assert (small[1:] == -1).all()


def test_the_bundled_clips_can_be_read():
    carphone = bundled_clips()[-1]
    clips = read_clips([carphone], 16, 128, clips_per_file=2)
    assert clips.shape == (2, 3, 16, 128, 128)
    assert clips.std() > 0.2
    assert 0 < (clips[:, :, 1:] - clips[:, :, :-1]).abs().mean() < 0.1  # it moves, but not everywhere


def test_what_is_no_whole_video_says_so(tmp_path):
    carphone = bundled_clips()[-1].read_bytes()
    broken = bytearray(carphone)
    broken[2000:200_000] = bytes(198_000)
    files = {"text": b"hello" * 100, "empty": b"", "cut": carphone[:300_000], "broken": bytes(broken)}
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"^path: expected a video that can be decoded, {path} broke after 0 frames"
        ):
            read_clips([path], 2, 8)
    short = write_video(tmp_path / "short.mkv", 2)
    with pytest.raises(ValueError, match=f"^path: expected a video of at least 3 frames, {short} has 2$"):
        read_clips([short], 3, 8)
    with pytest.raises(ValueError, match="^size: expected at most 16, the smaller side of the pictures, got 17$"):
        read_clips([short], 2, 17)
    with pytest.raises(ValueError, match="^paths: expected at least one video file, got none$"):
        read_clips([], 2, 8)
    with pytest.raises(FileNotFoundError):
        read_clips([tmp_path / "none"], 2, 8)


def test_a_file_with_fewer_frames_than_it_announces_says_so(tmp_path, monkeypatch):
    path = write_video(tmp_path / "grey.mkv", 4)

    class Stream:
        frames = 9

    class Container:
        def __init__(self, real):
            self.real, self.streams = real, type("Streams", (), {"video": [Stream()]})

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.real.close()

        def decode(self, stream):
            return self.real.decode(video=0)

    import av

    real = av.open(str(path))
    monkeypatch.setattr(av, "open", lambda name: Container(real))
    with pytest.raises(ValueError, match=f"^path: expected a whole video, {path} announces 9 frames and has 4$"):
        list(video_clips.decoded(path))


def test_clips_come_back_from_their_file_in_8_bits(tmp_path):
    clips = torch.rand(2, 3, 4, 8, 8) * 2 - 1
    write_clips(tmp_path / "clips.npz", clips)
    found = clips_from(tmp_path / "clips.npz", 4, 8)
    assert (found - clips).abs().max() <= 1 / 255 + 1e-6
    with pytest.raises(
        ValueError, match=r"^path: expected clips of 4 frames of 9 x 9 pixels, .* has \[2, 3, 4, 8, 8\]"
    ):
        clips_from(tmp_path / "clips.npz", 4, 9)
    (tmp_path / "junk").write_bytes(b"junk" * 10)
    with pytest.raises(ValueError, match="^path: expected clips that `python -m sage_lab video clips` wrote, got"):
        clips_from(tmp_path / "junk", 4, 8)
