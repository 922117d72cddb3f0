"""A small diffusion transformer for video: patches as tokens, full attention over all frames, adaLN-zero.

x <- x + g_1 * Attention(m_1(x));  x <- x + g_2 * MLP(m_2(x));  m(x) = LayerNorm(x) * (1 + scale) + shift.

Shift, scale and gate g are computed from the noise level alone. They start at zero, so that every block starts as the
identity (adaLN-zero). Queries and keys are normalised (QK-norm) and rotated by their place in time, height and width.
The core that the configuration names computes attention (`attention_core`): exact, SageBwd, SLA or SLA2. Its inputs are
Q, K, V; any module that maps them to O can replace it: `block.attention.core = SLA2(...)`.

Only SLA and SLA2 have weights of their own; models with different attentions share all other weights (`load_weights`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_lab.models.rotary import Rotation
from sage_ref.sagebwd.api import sagebwd_attention
from sage_ref.sla2 import SLA, SLA2, BlockSettings
from sage_ref.smoothing import QKNorm

ATTENTIONS = ("exact", "sagebwd", "sla", "sla2")
CHANNELS = 3  # red, green, blue
NORM_EPS = 1e-6
NOISE_FREQUENCIES = 32


@dataclass(frozen=True)
class VideoDiTConfig:
    """Shape of the video and of the model.

    patch: pixels of a patch's side, within one frame. cube: frames x rows x columns of patches whose tokens are
    consecutive, see `raster_order`; (1, 1, 1) is plain raster order.
    attention: one of ATTENTIONS. sparsity, block_q, block_kv: of SLA and SLA2. quantize, backward: of SLA2. backend: of
    all but exact attention.
    """

    frames: int = 4
    size: int = 32
    patch: int = 2
    cube: tuple[int, int, int] = (2, 4, 4)
    layers: int = 6
    width: int = 128
    heads: int = 4
    attention: str = "exact"
    sparsity: float = 0.97
    block_q: int = BlockSettings.block_q
    block_kv: int = BlockSettings.block_kv
    quantize: bool = True
    backward: str = BlockSettings.backward
    backend: str = "auto"

    def __post_init__(self):
        if self.size % self.patch:
            raise ValueError(f"size: expected a multiple of patch={self.patch}, got {self.size}")
        if any(side % c for side, c in zip(self.grid, self.cube, strict=True)):
            raise ValueError(f"cube: expected three numbers that divide the grid {self.grid}, got {self.cube}")
        if self.width % (2 * self.heads) or self.head_dim < 6:
            raise ValueError(
                f"width: expected an even number, 6 or more, for each of the {self.heads} heads, got {self.width}"
            )

    @property
    def blocks(self) -> BlockSettings:
        """The blocks of SLA and SLA2."""
        return BlockSettings(self.block_q, self.block_kv, quantize=self.quantize, backward=self.backward)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The number of patches in time, height and width."""
        return self.frames, self.size // self.patch, self.size // self.patch

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def raster_order(grid: tuple[int, int, int], cube: tuple[int, int, int]) -> Tensor:
    """Return the place in raster order (frame, row, column) of each token of the sequence, int64 [N].

    Cube follows cube, each in raster order. A block of sparse attention is a run of consecutive tokens. In raster order
    32 of them are two rows across a whole frame; in cubes they form a compact box, whose tokens are alike.
    """
    frames, rows, columns = (side // c for side, c in zip(grid, cube, strict=True))
    places = torch.arange(math.prod(grid)).view(frames, cube[0], rows, cube[1], columns, cube[2])
    return places.permute(0, 2, 4, 1, 3, 5).flatten()


class RotaryEmbedding3D(Rotation):
    """Rotation of pairs of features (x_i, x_(i + D/2)) by angles proportional to their token's frame, row or column.

    Of the D/2 pairs 3/8 follow the row, 3/8 the column, the rest the frame. Each axis turns its pairs by 1 down to
    about 1/100 radian per place: 10000, as used for text, would leave most pairs nearly still on axes this short.
    The angle between a query and a key depends on their distance in time, height and width alone. So no learned
    position is added: a shape looks the same wherever it is.
    forward(x [..., N, D]) -> [..., N, D]; positions: [N, 3], frame, row and column of each token.
    """

    def __init__(self, head_dim: int, positions: Tensor):
        pairs = head_dim // 2
        spatial = 3 * pairs // 8 or 1
        angles = [
            positions[:, axis, None] * 100.0 ** (-torch.arange(count) / count)
            for axis, count in enumerate((pairs - 2 * spatial, spatial, spatial))
        ]
        super().__init__(torch.cat(angles, dim=-1))  # [N, D/2]


class Patches(nn.Module):
    """Maps between a video [B, C, T, H, W] and the pixels of its patches [B, N, C * patch^2], in the config's order."""

    def __init__(self, config: VideoDiTConfig):
        super().__init__()
        self.config = config
        order = raster_order(config.grid, config.cube)
        axes = [torch.arange(side) for side in config.grid]
        self.positions = torch.cartesian_prod(*axes)[order]  # [N, 3]
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", order.argsort(), persistent=False)

    def split(self, video: Tensor) -> Tensor:
        patch = self.config.patch
        # [B, C, T, h, patch, w, patch]
        x = video.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))
        return x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)[:, self.order]

    def join(self, patches: Tensor) -> Tensor:
        patch = self.config.patch
        # [B, T, h, w, C, patch, patch]
        x = patches[:, self.inverse].unflatten(1, self.config.grid).unflatten(-1, (CHANNELS, patch, patch))
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(-2).flatten(-3, -2)


class NoiseEmbedding(nn.Module):
    """Embedding [B, width] of noise levels [B]: sines and cosines of 1 to 1000 radians per unit, then an MLP."""

    def __init__(self, width: int):
        super().__init__()
        frequency = 1000.0 ** torch.linspace(0, 1, NOISE_FREQUENCIES)
        self.register_buffer("frequency", frequency, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * NOISE_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, noise_level: Tensor) -> Tensor:
        angle = noise_level[:, None] * self.frequency
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1))


class AttentionCore(nn.Module):
    """Full attention, exact or SageBwd: forward(query, key, value [B, H, N, D]) -> O [B, H, N, D]."""

    def __init__(self, config: VideoDiTConfig):
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.config.attention == "exact":
            return F.scaled_dot_product_attention(query, key, value)
        return sagebwd_attention(query, key, value, backend=self.config.backend)


def attention_core(config: VideoDiTConfig) -> nn.Module:
    """Return the core that the configuration names."""
    blocks = {name: getattr(config, name) for name in ("sparsity", "block_q", "block_kv", "backend")}
    if config.attention == "sla2":
        return SLA2(config.head_dim, config.heads, quantize=config.quantize, backward=config.backward, **blocks)
    if config.attention == "sla":
        return SLA(config.head_dim, config.heads, **blocks)
    return AttentionCore(config)


def attend(core: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Call a core."""
    return core(query, key, value)


attend_uncompiled: Callable[..., Tensor] = torch.compiler.disable(attend)


class Attention(nn.Module):
    """Attention block: project, normalise, rotate, attend, project. forward(x [B, N, width]) -> [B, N, width]."""

    def __init__(self, config: VideoDiTConfig, positions: Tensor):
        super().__init__()
        self.head_dim = config.head_dim
        # Their offsets let a head look at a fixed distance: rotated, the offsets of q and k match at that distance.
        self.query, self.key, self.value = (nn.Linear(config.width, config.width) for _ in range(3))
        self.qk_norm = QKNorm(config.head_dim)
        self.rotary = RotaryEmbedding3D(config.head_dim, positions)
        self.core, self.attend = attention_core(config), attend
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # [B, N, H * D] -> [B, H, N, D]
        projected = (project(x) for project in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        q, k = (self.rotary(y).to(v.dtype) for y in self.qk_norm(q, k))
        return self.output(self.attend(self.core, q, k, v).transpose(1, 2).flatten(-2))


class Modulation(nn.Module):
    """Vectors from the noise embedding, zero at the start. forward([B, width]) -> count x [B, 1, width]."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.count = count
        self.linear = nn.Linear(width, count * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, noise: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(noise))[:, None].chunk(self.count, dim=-1)


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Compute LayerNorm(x) * (1 + scale) + shift: the norm's gain and offset are functions of the noise level."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


class Block(nn.Module):
    """Block of attention, then an MLP, each on a modulated norm of the residual stream, added back through a gate."""

    def __init__(self, config: VideoDiTConfig, positions: Tensor):
        super().__init__()
        self.modulation = Modulation(config.width, 6)
        self.attention = Attention(config, positions)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(noise)
        x = x + gate_1 * self.attention(modulated_norm(x, shift_1, scale_1))
        return x + gate_2 * self.mlp(modulated_norm(x, shift_2, scale_2))


class VideoDiT(nn.Module):
    """Transformer: forward(video [B, C, T, H, W], noise_level [B] in [0, 1]) -> velocity [B, C, T, H, W]."""

    def __init__(self, config: VideoDiTConfig):
        super().__init__()
        self.config = config
        self.patches = Patches(config)
        pixels = CHANNELS * config.patch**2
        self.input = nn.Linear(pixels, config.width)
        self.noise = NoiseEmbedding(config.width)
        self.blocks = nn.ModuleList(Block(config, self.patches.positions) for _ in range(config.layers))
        self.modulation = Modulation(config.width, 2)
        self.output = nn.Linear(config.width, pixels)
        for name, parameter in self.named_parameters():
            if is_of_core(name):
                continue
            if name.endswith("weight") and parameter.dim() == 2 and "modulation" not in name:
                nn.init.xavier_uniform_(parameter)
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.zeros_(self.output.weight)

    def forward(self, video: Tensor, noise_level: Tensor) -> Tensor:
        patches = self.patches.split(video)
        x = self.input(patches).to(patches.dtype)  # the residual stream stays in float32 under autocast
        noise = self.noise(noise_level)
        for block in self.blocks:
            x = block(x, noise)
        return self.patches.join(self.output(modulated_norm(x, *self.modulation(noise))))

    def compile_blocks(self) -> None:
        """Pass everything but the cores to torch.compile: one program for all blocks."""
        for block in self.blocks:
            block.attention.attend = attend_uncompiled
            block.compile(dynamic=False)


def is_of_core(name: str) -> bool:
    """Return whether the parameter belongs to SLA or SLA2 itself; all attentions share the others."""
    return ".attention.core." in name


def load_weights(model: VideoDiT, weights: dict[str, Tensor]) -> None:
    """Load weights in any dtype. Those of cores may be missing or left over.

    Raises ValueError if names or shapes of the weights that all attentions share differ.
    """
    expected = {name: x.shape for name, x in model.state_dict().items() if not is_of_core(name)}
    found = {name: x.shape for name, x in weights.items() if not is_of_core(name)}
    if found != expected:
        differ = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"weights: expected those of an equal VideoDiT, got {len(differ)} others: {differ[0]}")
    model.load_state_dict(weights, strict=False)
