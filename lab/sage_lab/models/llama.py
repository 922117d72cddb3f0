"""A Llama whose attention is chosen by name: RMSNorm, rotary positions, SwiGLU, or a squared ReLU as in other GPTs.

x <- x + Attention(RMSNorm(x));  x <- x + W_down(silu(W_gate h) * W_up h) with h = RMSNorm(x).
With a squared ReLU: x <- x + W_down(relu(W_up h)^2).

Queries and keys are normalised (optional QK-norm), then rotated, then meet in `AttentionCore`. What enters and leaves
that one module is what the papers measure: its inputs are Q, K, V and the gradient of its output is dO. With SageBwd
norm and rotation are a `Prologue`, which the core applies itself: then its inputs are raw Q and K, V and that prologue.
Input embedding and output projection share one matrix.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_lab.models.rotary import Rotation
from sage_lab.repairs import UNBIASED, RepairedSettings, with_remedy
from sage_ref.checks import check_choice
from sage_ref.prologue import Prologue, before_attention
from sage_ref.sagebwd.api import reference_attention, sagebwd_attention
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.smoothing import QKNorm

MLPS = ("swiglu", "squared_relu")
NORM_EPS = 1e-6


@dataclass(frozen=True)
class LlamaConfig:
    """The model's shape and attention.

    smooth_k, smooth_q, granularity and backend are those of `sagebwd_attention`. Only the reference leaves ds_rounding,
    block_q and block_kv open (see `SageBwdSettings`).
    remedy: a name of `REMEDIES`, whose changes are last. The kernels have one, `UNBIASED`; others are the reference's.
    fused_prologue: SageBwd normalises and rotates Q and K itself, as it reads them to quantise them; else that happens
    before, rounded to the dtype of V. Exact attention never does it.
    """

    vocab_size: int
    context: int = 512
    layers: int = 5
    width: int = 256
    heads: int = 4
    mlp: str = "swiglu"
    qk_norm: bool = False
    attention: str = "exact"
    smooth_k: bool = True
    smooth_q: bool = False
    fused_prologue: bool = True
    backend: str = "auto"
    granularity: str = SageBwdSettings.granularity
    ds_rounding: str = SageBwdSettings.ds_rounding
    block_q: int = SageBwdSettings.block_q
    block_kv: int = SageBwdSettings.block_kv
    remedy: str = "none"

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(f"width: expected an even number for each of the {self.heads} heads, got {self.width}")
        check_choice("mlp", self.mlp, MLPS)
        for name in ("ds_rounding", "block_q", "block_kv", "remedy"):
            chosen = getattr(self, name)
            if self.backend != "reference" and chosen not in (getattr(LlamaConfig, name), UNBIASED):
                reason = f"'reference', which alone takes {name}={chosen!r}"
                raise ValueError(f"backend: expected {reason}, got {self.backend!r}")
        if self.backend == "triton" and self.smooth_q:
            raise ValueError("backend: expected 'auto' or 'reference', as only that smooths Q, got 'triton'")
        self.reference_settings  # noqa: B018 (names a wrong granularity, rounding or remedy now, not in the first step)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        """Four times the width; SwiGLU has three matrices, which cost as much at a multiple of 64 near 8/3."""
        return 4 * self.width if self.mlp == "squared_relu" else -(-8 * self.width // (3 * 64)) * 64

    @property
    def reference_settings(self) -> RepairedSettings:
        """The reference's settings; stochastic rounding draws from torch's global generator."""
        names = ("smooth_k", "smooth_q", "block_q", "block_kv", "granularity", "ds_rounding")
        chosen = {name: getattr(self, name) for name in names}
        return with_remedy(SageBwdSettings(is_causal=True, **chosen), self.remedy)


class RotaryEmbedding(Rotation):
    """Turn each pair of features (x_i, x_(i + D/2)) of token n by the angle n / 10000^(2i/D).

    A query at m and a key at n then meet at an angle that depends on m - n alone.
    forward(x [..., N, D]) -> [..., N, D], N <= context.
    """

    def __init__(self, head_dim: int, context: int):
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        super().__init__(torch.arange(context)[:, None] * frequency)  # [context, D/2]


class AttentionCore(nn.Module):
    """Causal attention: forward(query, key, value [B, H, N, D], prologue) -> O [B, H, N, D].

    prologue: what happens to query and key first; None: nothing. Only where `takes_prologue`.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config

    @property
    def takes_prologue(self) -> bool:
        return self.config.attention == "sagebwd" and self.config.fused_prologue

    def forward(self, query: Tensor, key: Tensor, value: Tensor, prologue: Prologue | None = None) -> Tensor:
        if self.config.attention == "exact":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.config.backend == "reference":
            return reference_attention(query, key, value, self.config.reference_settings, prologue)
        options = {name: getattr(self.config, name) for name in ("smooth_k", "smooth_q", "granularity", "backend")}
        options["unbiased"] = self.config.remedy == UNBIASED
        return sagebwd_attention(query, key, value, is_causal=True, prologue=prologue, **options)


class Attention(nn.Module):
    """Project, normalise, rotate, attend, project back. forward(x [B, N, width]) -> [B, N, width]."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.query, self.key, self.value = (nn.Linear(config.width, config.width, bias=False) for _ in range(3))
        self.qk_norm = QKNorm(config.head_dim) if config.qk_norm else None
        self.rotary = RotaryEmbedding(config.head_dim, config.context)
        self.before, self.core = before_attention, AttentionCore(config)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(project(x)) for project in (self.query, self.key, self.value))
        if self.core.takes_prologue:
            o = self.core(q, k, v, self.prologue)
        else:
            q, k = self.before(q, k, self.prologue, v.dtype)
            o = self.core(q, k, v)
        return self.output(o.transpose(1, 2).flatten(-2))

    @property
    def prologue(self) -> Prologue:
        """QK-norm, if the model has it, and the rotation."""
        angles = self.rotary.cos, self.rotary.sin
        if self.qk_norm is None:
            return Prologue(*angles)
        of_query, of_key = self.qk_norm.query_norm, self.qk_norm.key_norm
        return Prologue(*angles, of_query.weight, of_key.weight, of_query.eps)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, N, H * D] -> [B, H, N, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) * W_up x)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SquaredReLU(nn.Module):
    """W_down(relu(W_up x)^2)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention, then the MLP, each on a normalised copy of the residual stream and added back to it."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.mlp = SquaredReLU(config) if config.mlp == "squared_relu" else SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """forward(tokens, int64 [B, N], N <= context) -> logits [B, N, vocab_size].

    Weights start from N(0, 0.02^2); those that write to the residual stream, two per layer, are smaller by
    sqrt(2 layers), which keeps its variance the same at any depth.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] > self.config.context:
            raise ValueError(f"tokens: expected at most {self.config.context} per sequence, got {tokens.shape[-1]}")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)
