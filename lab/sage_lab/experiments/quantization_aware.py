"""`python -m sage_lab quantization-aware`: quantise after fine-tuning or during it?

One SLA2 attention layer with linear maps, fitted to full attention: O' = SLA2(Q W_q, K W_k, V W_v) W_o per head,
trained on |O' - O|^2 with O full attention of Q, K, V, and judged with the sparse branch in INT8. The `WAYS` differ in
the operations that training sees:

afterwards        no quantisation; INT8 only after training
algorithm 3       quantisation-aware as the paper prints it (backward="printed"): INT8 forward, and a 16-bit backward
                  from the unquantised Q, K, V with the O_s and L that the INT8 forward left
straight-through  INT8 forward, and the whole gradient of the unquantised attention, from its own O_s and L
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_lab.plan import Plan, Run, opened
from sage_lab.records import RECORDED, Row, write_record
from sage_lab.training.capture import read_capture
from sage_lab.training.fit import fit_with_adam
from sage_ref.sla2 import SLA2, sparse_linear_attention
from sage_ref.tracing import relative_l2

WAYS = ("afterwards", "algorithm 3", "straight-through")
HEADS = 2  # of the capture's


@dataclass(frozen=True)
class TuningSettings:
    """Settings of a fit with Adam; each step reads one random block of queries.

    value_outlier: V's first channel enters SLA2 that many times as large and leaves it divided again. Without
    quantisation this changes nothing; with it, the other channels of V get a coarser grid.
    """

    sparsity: float = 0.9
    block_q: int = 128
    block_kv: int = 64
    steps: int = 40
    learning_rate: float = 1e-3
    alpha_learning_rate: float = 0.02
    value_outlier: float = 1.0


class MappedSLA2(nn.Module):
    """SLA2 between linear maps [4, H, D, D], of Q, K, V and O, which start at the identity."""

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
        """Return O' [B, H, Nq, D] as training sees it: in INT8 unless `way` is "afterwards"."""
        query, key, value = (x @ w for x, w in zip((query, key, value), self.maps[:3], strict=True))
        block_mask = self.sla2.block_mask(query, key)
        alpha = self.sla2.alpha(query.shape[0], block_mask.shape[-2])
        operands = query, key, value * self.value_scale, block_mask, alpha
        blocks = {"block_q": self.sla2.settings.block_q, "block_kv": self.sla2.settings.block_kv}

        def attention(*, quantize: bool) -> Tensor:
            return sparse_linear_attention(
                *operands, quantize=quantize, backward="printed", backend="reference", **blocks
            )

        output = attention(quantize=way == "algorithm 3")
        if way == "straight-through":
            with torch.no_grad():
                error = attention(quantize=True) - output
            output = output + error
        return (output / self.value_scale) @ self.maps[3]


def fine_tune(query: Tensor, key: Tensor, value: Tensor, way: str, settings: TuningSettings, seed: int) -> MappedSLA2:
    """Train the layer on Q, K, V [B, H, N, D], float32. seed: decides which blocks of queries each step reads."""
    heads, n, head_dim = query.shape[1:]
    exact = F.scaled_dot_product_attention(query, key, value)
    layer = MappedSLA2(head_dim, heads, settings)
    layer.sla2.initialize_alpha(query, key)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(step: int) -> Tensor:
        block = torch.randperm(n // settings.block_q, generator=generator)[0].item()
        rows = slice(block * settings.block_q, (block + 1) * settings.block_q)
        return (layer(query[:, :, rows], key, value, way) - exact[:, :, rows]).square().mean()

    rates = {layer.maps: settings.learning_rate, layer.sla2.alpha_logit: settings.alpha_learning_rate}
    fit_with_adam([{"params": [x], "lr": rate} for x, rate in rates.items()], settings.steps, loss_of)
    return layer


@torch.no_grad()
def errors(layer: MappedSLA2, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """Return the relative L2 error against full attention of Q, K, V: unquantised, and in INT8."""
    exact = F.scaled_dot_product_attention(query, key, value)
    return tuple(relative_l2(layer(query, key, value, way), exact) for way in ("afterwards", "algorithm 3"))


@dataclass(frozen=True)
class TuningRun(Run):
    """One layer, trained one way; one row of the record."""

    layer: int
    value_outlier: float
    way: str
    seed: int


def tuning_row(run: TuningRun, tensors: dict[str, Tensor], settings: TuningSettings) -> Row:
    """Train on the first video of a capture's layer, judge on it ("fitted") and on the second ("other").

    tensors: {"query", "key", "value"}, each [2, H, N, D]. Errors as in `errors`; the name 16bit stands for no
    quantisation at all.
    """
    inputs = [tensors[name][:, :HEADS].float() for name in ("query", "key", "value")]
    fitted, other = ([x[i : i + 1] for x in inputs] for i in (0, 1))
    tuned = fine_tune(*fitted, run.way, settings, run.seed)
    row = {"layer": run.layer, "value_outlier": run.value_outlier, "way": run.way, "seed": run.seed}
    for name, video in (("fitted", fitted), ("other", other)):
        plain, int8 = errors(tuned, *video)
        row |= {f"{name}_16bit": round(plain, 6), f"{name}_int8": round(int8, 6)}
    return row


RUNS = [TuningRun(*x) for x in itertools.product((2, 4), (1.0, 30.0, 100.0, 300.0), WAYS, range(5))]


def quantization_aware_command(options: argparse.Namespace) -> None:
    layers = read_capture(RECORDED / "capture_video.safetensors").layers
    with opened(Plan("quantization_aware", [RUNS]), Path("runs"), TuningSettings()) as work:
        work.finish(
            lambda run, _: [tuning_row(run, layers[run.layer], TuningSettings(value_outlier=run.value_outlier))]
        )
        write_record(options.json, work.rows, command=options.command)
        work.parts.remove()
