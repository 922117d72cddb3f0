"""Quantise after fine-tuning or during it? One SLA2 attention layer with linear maps, fitted to full attention.

O' = SLA2(Q W_q, K W_k, V W_v) W_o, per head, trained on |O' - O|^2 with O full attention of Q, K, V, and judged with
the sparse branch in INT8. `WAYS` differ in what training sees:

afterwards        no quantisation; INT8 only when all is done
algorithm 3       quantisation-aware as the paper prints it: INT8 forward, and a 16-bit backward from the unquantised
                  Q, K, V with the O_s and L that the INT8 forward left
straight-through  INT8 forward, and the whole gradient of the unquantised attention, from its own O_s and L
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sage_lab.records import RECORDED, Record, Row, write_record
from sage_lab.training.capture import read_capture
from sage_ref.attention import attention_forward
from sage_ref.checks import check_count
from sage_ref.sla2 import SLA2, sparse_linear_attention
from sage_ref.tracing import relative_l2

WAYS = ("afterwards", "algorithm 3", "straight-through")


@dataclass(frozen=True)
class TuningSettings:
    """Adam, learning rates following a cosine to zero; each step reads `query_blocks` random blocks of queries.

    value_outlier: V's first channel enters SLA2 that many times as large and leaves it divided again. Without
    quantisation this changes nothing; with it, the other channels of V get a coarser grid.
    """

    sparsity: float = 0.9
    block_q: int = 128
    block_kv: int = 64
    steps: int = 40
    query_blocks: int = 1
    learning_rate: float = 1e-3
    alpha_learning_rate: float = 0.02
    value_outlier: float = 1.0

    def __post_init__(self):
        for name in ("steps", "query_blocks"):
            check_count(name, getattr(self, name))
        if not self.value_outlier > 0:
            raise ValueError(f"value_outlier: expected a positive number, got {self.value_outlier}")


class MappedSLA2(nn.Module):
    """SLA2 between linear maps [4, H, D, D]: of Q, K, V and O. They start at the identity."""

    def __init__(self, head_dim: int, num_heads: int, settings: TuningSettings):
        super().__init__()
        self.maps = nn.Parameter(torch.eye(head_dim).repeat(4, num_heads, 1, 1))
        self.value_scale = torch.ones(head_dim)
        self.value_scale[0] = settings.value_outlier
        self.sla2 = SLA2(
            head_dim, num_heads, sparsity=settings.sparsity, block_q=settings.block_q, block_kv=settings.block_kv,
            backend="reference",
        )  # fmt: skip

    def forward(self, query: Tensor, key: Tensor, value: Tensor, way: str) -> Tensor:
        """O' [B, H, Nq, D] as training sees it: in INT8 unless `way` is "afterwards"."""
        query, key, value = (x @ w for x, w in zip((query, key, value), self.maps[:3], strict=True))
        block_mask = self.sla2.block_mask(query, key)
        alpha = self.sla2.alpha(query.shape[0], block_mask.shape[-2])
        operands = query, key, value * self.value_scale, block_mask, alpha
        blocks = {"block_q": self.sla2.settings.block_q, "block_kv": self.sla2.settings.block_kv}

        def attention(*, quantize: bool) -> Tensor:
            return sparse_linear_attention(*operands, quantize=quantize, backend="reference", **blocks)

        output = attention(quantize=way == "algorithm 3")
        if way == "straight-through":
            with torch.no_grad():
                error = attention(quantize=True) - output
            output = output + error
        return (output / self.value_scale) @ self.maps[3]


def fine_tune(query: Tensor, key: Tensor, value: Tensor, way: str, settings: TuningSettings, seed: int) -> MappedSLA2:
    """The layer after training on Q, K, V [B, H, N, D], float32. seed: which blocks of queries each step reads.

    ValueError if way is not one of WAYS.
    """
    if way not in WAYS:
        raise ValueError(f"way: expected one of {WAYS}, got {way!r}")
    heads, n, head_dim = query.shape[1:]
    exact = attention_forward(query, key, value).output
    layer = MappedSLA2(head_dim, heads, settings)
    layer.sla2.initialize_alpha(query, key)
    groups = [
        {"params": [layer.maps], "lr": settings.learning_rate},
        {"params": [layer.sla2.alpha_logit], "lr": settings.alpha_learning_rate},
    ]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.steps):
        blocks = torch.randperm(n // settings.block_q, generator=generator)[: settings.query_blocks]
        rows = (blocks[:, None] * settings.block_q + torch.arange(settings.block_q)).flatten()
        output = layer(query[:, :, rows], key, value, way)
        loss = (output - exact[:, :, rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return layer


@torch.no_grad()
def errors(layer: MappedSLA2, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """Relative L2 error against full attention of Q, K, V: unquantised, and with the sparse branch in INT8."""
    exact = attention_forward(query, key, value).output
    return tuple(relative_l2(layer(query, key, value, way), exact) for way in ("afterwards", "algorithm 3"))


class Study(NamedTuple):
    """Every combination is one row of the record."""

    layers: Sequence[int] = (2, 4)
    heads: int = 2
    value_outliers: Sequence[float] = (1.0, 30.0, 100.0, 300.0)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)


def study_rows(study: Study, layers: Mapping[int, Mapping[str, Tensor]]) -> Iterator[Row]:
    """Train on the first video of a capture's layers, judge on it ("fitted") and on the second ("other").

    layers: layer -> {"query", "key", "value"}, each [2, H, N, D]. Errors as in `errors`, in 16 bit and in INT8; the
    name 16 bit stands for no quantisation at all.
    """
    for layer, value_outlier, way, seed in itertools.product(study.layers, study.value_outliers, WAYS, study.seeds):
        tensors = [layers[layer][name][:, : study.heads].float() for name in ("query", "key", "value")]
        fitted, other = ([x[i : i + 1] for x in tensors] for i in (0, 1))
        tuned = fine_tune(*fitted, way, TuningSettings(value_outlier=value_outlier), seed)
        row = {"layer": layer, "value_outlier": value_outlier, "way": way, "seed": seed}
        for name, videos in (("fitted", fitted), ("other", other)):
            plain, int8 = errors(tuned, *videos)
            row |= {f"{name}_16bit": round(plain, 6), f"{name}_int8": round(int8, 6)}
        yield row


def effect(record: Record, column: str, way: str, **where: Any) -> tuple[float, float]:
    """(mean, standard deviation) over seeds of `column` with `way` minus that with "afterwards", seed by seed."""
    found, baseline = (
        {row["seed"]: row[column] for row in record.select(way=name, **where)} for name in (way, "afterwards")
    )
    differences = [found[seed] - baseline[seed] for seed in found]
    return mean(differences), stdev(differences)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = list(study_rows(Study(), read_capture(RECORDED / "capture_video.safetensors").layers))
    write_record(RECORDED / "quantization_aware_cpu.json", rows, command=f"python -m {__spec__.name}")
