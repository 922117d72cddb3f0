"""Q, K and V with the structure of a video's attention, of any size and without a model.

Tokens form a grid of frames x rows x columns, cube after cube. Every query looks at its own surroundings, and at one
far cube of which it knows only the identity: local and far links. The strength of each link is given in logits.

    features of q and k   | position (waves in time, height, width) | identity of a cube | the last channel
    q of a token          | where it is                             | its far cube's     | 0, or `outlier` (few tokens)
    k of a token          | where it is                             | its own cube's     | one slow wave over the video

K also has an offset in every channel, which changes no attention.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_lab.models.video_dit import raster_order

OUTLIER_EVERY = 16  # tokens


@dataclass(frozen=True)
class VideoLike:
    """Shape of `video_like`'s tensors, and the strength of each part.

    grid, cube: tokens in time, height and width; tokens of a cube are consecutive. local, far: logit of a query with
    the key at its own place, and with the keys of its far cube. reach: the local logit fades with the distance x as
    e^(-x^2 / 2 reach^2). noise: standard deviation of the logits that the noise in q and k would give by itself.
    offset: standard deviation over channels of the vector added to all keys. outlier: the last channel's largest logit.
    One query in 16, drawn at random, has it and looks only where the slow wave is high; its neighbours do not, but it
    dominates the mean of their block.
    """

    grid: tuple[int, int, int] = (4, 16, 16)
    cube: tuple[int, int, int] = (2, 4, 4)
    heads: int = 4
    head_dim: int = 32
    local: float = 8.0
    far: float = 8.0
    reach: float = 2.0
    noise: float = 0.5
    offset: float = 4.0
    outlier: float = 0.0

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def cubes(self) -> int:
        return self.tokens // math.prod(self.cube)


def video_like(config: VideoLike, samples: int = 1, *, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Draw {"query", "key", "value"}, float32 [samples, H, N, D], and the far cube of each cube [samples, H, cubes].

    They are a function of the arguments alone. Logits have the scale 1/sqrt(D).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    heads, n, d = config.heads, config.tokens, config.head_dim
    places = torch.cartesian_prod(*map(torch.arange, config.grid))[raster_order(config.grid, config.cube)].float()
    waves = d // 4
    identity_channels = d - 2 * waves - 1
    # cos(w x) cos(w y) + sin(w x) sin(w y) = cos(w (x - y)): its mean over many w fades as a Gaussian of x - y.
    angle = places @ normal(heads, 3, waves) / config.reach  # [H, N, waves]
    where = torch.cat((angle.cos(), angle.sin()), -1).expand(samples, -1, -1, -1) / math.sqrt(waves)
    far_cube = torch.rand(samples, heads, config.cubes, generator=generator).argsort(-1)
    identity = torch.nn.functional.normalize(normal(samples, heads, config.cubes, identity_channels), dim=-1)
    wanted = identity.gather(2, far_cube[..., None].expand_as(identity))
    direction = normal(samples, heads, 1, 3) / torch.tensor(config.grid)
    phase = 2 * math.pi * torch.rand(samples, heads, 1, generator=generator)
    slow_wave = torch.sin(math.pi * (direction * places).sum(-1) + phase)[..., None]
    is_outlier = torch.rand(samples, heads, n, 1, generator=generator) < 1 / OUTLIER_EVERY
    per_token = math.prod(config.cube)
    # A logit is q k / sqrt(D): q and k each get the square root of the missing factor.
    local, far, outlier = (math.sqrt(x * math.sqrt(d)) for x in (config.local, config.far, config.outlier))
    noise = math.sqrt(config.noise)
    query = torch.cat((local * where, far * wanted.repeat_interleave(per_token, 2), outlier * is_outlier), -1)
    key = torch.cat((local * where, far * identity.repeat_interleave(per_token, 2), outlier * slow_wave), -1)
    query = query + noise * normal(samples, heads, n, d)
    key = key + noise * normal(samples, heads, n, d) + config.offset * normal(samples, heads, 1, d)
    smooth = torch.sin(places @ normal(samples, heads, 3, d) / (4 * config.reach))
    cube_value = normal(samples, heads, config.cubes, d).repeat_interleave(per_token, 2)
    value = smooth + cube_value + normal(samples, heads, n, d)
    return {"query": query, "key": key, "value": value}, far_cube
