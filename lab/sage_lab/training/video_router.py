"""Stage 1 of fine-tuning with SLA2: router and alpha of every layer, fitted to the pre-trained model's full attention.

minimise |O_M - O|^2 / |O|^2, mean over videos and layers:  O full attention, O_M SLA2 with a substitute for its mask.

The model itself does not change: it runs on made-up videos and provides Q, K, V and O. To save time, a step reads a few
blocks of queries, drawn anew each time, and all keys. The attention is that of `SLA2.stage(1)`, which keeps nothing of
the size queries x keys; its backend is the model's.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.training.capture import watched_attention
from sage_lab.training.loop import ResumableTraining, TrainingSettings
from sage_lab.training.video_flow import (
    PURPOSES,
    Weights,
    digest,
    fast_arithmetic,
    flow_batch,
    in_parts,
    noisy,
    started_model,
)
from sage_lab.training.video_scenes import seed_of
from sage_ref.shapes import in_working_dtype
from sage_ref.sla2 import SLA2, Relaxation, into_blocks

CERTAIN = 20.0  # sigmoid of it is 1 in float32


@dataclass(frozen=True)
class RouterSettings(TrainingSettings):
    """Settings of stage 1.

    batch_size: videos per step. query_blocks: blocks of queries of each video that a step reads. router: "learned", or
    fixed: "identity", the heuristic that it starts as, or "random" projections. alpha: "learned", or "one": the sparse
    branch alone. alpha_rate: how many times as fast alpha learns. relaxation: what stands in for the hard mask.
    """

    batch_size: int = 2
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    micro_batch_size: int = 1
    query_blocks: int = 4
    router: str = "learned"
    alpha: str = "learned"
    alpha_rate: float = 25.0
    relaxation: Relaxation = Relaxation()
    autocast: bool = False

    @property
    def learns(self) -> bool:
        """Whether there is something to fit."""
        return "learned" in (self.router, self.alpha)


class Routers(nn.Module):
    """The SLA2 of every layer, in stage 1: forward(captured, rows) -> mean relative error."""

    def __init__(self, config: VideoDiTConfig, settings: RouterSettings):
        super().__init__()
        self.layers = nn.ModuleList(new_core(config, settings, layer) for layer in range(config.layers))

    def forward(self, captured: list[tuple[Tensor, ...]], rows: Tensor) -> Tensor:
        """Return the error; captured: Q, K, V, O [B, H, N, D] of each layer; rows: int64, blocks of queries to read."""
        errors = [stage1_error(core, *qkvo, rows) for core, qkvo in zip(self.layers, captured, strict=True)]
        return sum(errors) / len(errors)


def new_core(config: VideoDiTConfig, settings: RouterSettings, layer: int) -> SLA2:
    """Make the SLA2 of a layer, with fixed projections or alpha if the settings say so."""
    core = SLA2(
        config.head_dim, config.heads, sparsity=config.sparsity, block_q=config.block_q, block_kv=config.block_kv,
        quantize=False, relaxation=settings.relaxation, backend=config.backend,
    ).stage(1)  # fmt: skip
    if settings.router == "random":
        generator = torch.Generator().manual_seed(seed_of((PURPOSES.index("route"), settings.seed, layer)))
        for projection in (core.router.proj_q, core.router.proj_k):
            nn.init.normal_(projection.weight, std=config.head_dim**-0.5, generator=generator)
    core.router.requires_grad_(settings.router == "learned")
    if settings.alpha == "one":
        nn.init.constant_(core.alpha_logit, CERTAIN)
        core.alpha_logit.requires_grad_(False)
    return core


def stage1_error(core: SLA2, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor) -> Tensor:
    """Return |O_M - O|^2 / |O|^2 over the queries of blocks `rows`, mean over videos. Q, K, V, O: [B, H, N, D]."""
    q, o = (into_blocks(x, core.settings.block_q)[:, :, rows].flatten(2, 3) for x in (query, output))
    found, o = in_working_dtype(core(q, key, value), o)
    return ((found - o).square().sum((1, 2, 3)) / o.square().sum((1, 2, 3))).mean()


class RouterTraining(ResumableTraining):
    """Stage 1. weights: of the pre-trained model. config: of the model with SLA2 that takes `core_weights`.

    Raises ValueError if the weights are of a different model.
    """

    def __init__(
        self,
        config: VideoDiTConfig,
        settings: RouterSettings,
        digits: Tensor,
        weights: Weights,
        device: torch.device | str = "cpu",
    ):
        self.config, self.digits = config, digits.to(device)
        arguments = asdict(config) | {"start": digest(weights)}
        super().__init__(lambda: Routers(config, settings), settings, arguments, device)
        exact = replace(config, attention="exact")
        self.watched: VideoDiT = started_model(exact, weights).to(device).requires_grad_(False)

    def parameter_groups(self) -> list[dict[str, Any]]:
        alphas = [core.alpha_logit for core in self.model.layers if core.alpha_logit.requires_grad]
        routers = [x for core in self.model.layers for x in core.router.parameters() if x.requires_grad]
        groups = [{"params": routers}, {"params": alphas, "rate_factor": self.settings.alpha_rate}]
        return [group for group in groups if group["params"]]

    def passes(self) -> list[tuple[Any, ...]]:
        seed = (PURPOSES.index("route"), self.settings.seed, self.step)
        batch = flow_batch(self.settings.batch_size, self.digits, self.config, seed=seed)
        parts = in_parts(batch, self.settings.micro_batch_size)
        return [(self.captured(*part), self.rows(self.step)) for part in parts]

    def rows(self, step: int) -> Tensor:
        """Draw the blocks of queries that a step reads."""
        generator = torch.Generator().manual_seed(seed_of((PURPOSES.index("route"), self.settings.seed, step, 2)))
        drawn = torch.randperm(self.config.tokens // self.config.block_q, generator=generator)
        return drawn[: self.settings.query_blocks].to(self.device, non_blocking=True)

    @torch.no_grad()
    def captured(self, video: Tensor, noise_level: Tensor, noise: Tensor) -> list[tuple[Tensor, ...]]:
        """Return Q, K, V, O of every layer [B, H, N, D] in the pre-trained model."""
        layers = range(self.config.layers)
        with (
            fast_arithmetic(self.device, self.settings.autocast),
            watched_attention(self.watched, layers) as (inputs, outputs),
        ):
            self.watched(noisy(video, noise_level, noise), noise_level)
        return [(*inputs[layer], outputs[layer]) for layer in layers]

    def loss(self, captured: list[tuple[Tensor, ...]], rows: Tensor) -> Tensor:
        return self.model(captured, rows)

    def validation_loss(self) -> float:
        """Return the error of one video that no step reads, at a noise level drawn for it."""
        batch = flow_batch(1, self.digits, self.config, seed=(PURPOSES.index("validate"), 1))
        return self.model(self.captured(*batch), self.rows(self.settings.steps)).item()

    def core_weights(self) -> Weights:
        """Return the cores' weights under their names in the model."""
        return {
            f"blocks.{layer}.attention.core.{name}": x.detach().cpu()
            for layer, core in enumerate(self.model.layers)
            for name, x in core.state_dict().items()
        }
