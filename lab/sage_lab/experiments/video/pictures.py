"""Videos as small files for a notebook."""

from io import BytesIO

import torch
from torch import Tensor

COLOURS = 64
FRAME_MS = 80


def film(video: Tensor) -> bytes:
    """Return a GIF with 64 colours that plays in a loop, of a video [3, T, size, size] in [-1, 1]."""
    from PIL import Image

    levels = ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
    pictures = (Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in levels.unbind(1))
    frames = [picture.quantize(COLOURS, dither=Image.Dither.NONE) for picture in pictures]
    found = BytesIO()
    frames[0].save(found, "GIF", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
    return found.getvalue()
