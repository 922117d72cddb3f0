"""`python -m sage_lab matched`: compare SLA2's printed backward pass with one that matches the forward pass.

Algorithm 3 recomputes P from 16-bit scores with the L of the INT8 forward pass; "matched", the library's default, takes
the INT8 scores. Each arm names its form. The column `part` of the record says what a row measures:

gradients  errors of O and of the gradients as scores grow, on Gaussian inputs and on what trained models computed
training   a small video model that learns without QK-norm at rates of which the largest lets the scores grow; see ARMS

The record matched_h100 also has peak memory and time by length, and two arms with a cure of the printed P.
"""

from __future__ import annotations  # a field may have the name of what reads it

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from sage_lab.command_line import Arguments, device, positive, positive_number, usual_device
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.plan import Plan, Run, opened
from sage_lab.records import RECORDED, Row, markdown_table
from sage_lab.training.capture import read_capture
from sage_lab.training.video_flow import flow_batch, flow_matching_loss
from sage_lab.training.video_scenes import digit_images
from sage_ref.sla2 import SLA2, BlockSettings, sla2_backward, sla2_forward, spread_blocks, whole
from sage_ref.tracing import relative_l2

STEP_EVERY = 10  # of training, whose rows are of every tenth step
NAMES = ("dQ", "dK", "dV")


@dataclass(frozen=True)
class MatchedPlan:
    """Sizes. tokens: at most so many of a captured layer."""

    model: VideoDiTConfig
    tokens: int


SLA2_MODEL = VideoDiTConfig(layers=2, heads=2, attention="sla2", sparsity=0.75)  # 1,024 tokens, 2 heads of 64
SMALL = {"frames": 1, "size": 16, "cube": (1, 4, 4), "width": 32, "layers": 1, "block_q": 16, "block_kv": 16}
PLANS = {
    "gpu": MatchedPlan(SLA2_MODEL, tokens=4096),
    # Too small to show anything, large enough to try the program.
    "cpu": MatchedPlan(replace(SLA2_MODEL, **SMALL, backend="reference"), tokens=256),
}


@dataclass(frozen=True)
class Arm:
    """How a model of `training` computes attention."""

    backward: str
    quantize: bool = True
    qk_norm: bool = False


ARMS = {
    "exact": Arm("printed", quantize=False),  # without INT8 both forms are one
    "printed": Arm("printed"),
    "matched": Arm("matched"),
    "printed, QK-norm": Arm("printed", qk_norm=True),
}


@dataclass(frozen=True)
class MatchedRun(Run):
    """One part of the record: one arm of training, or all errors of gradients."""

    part: str
    arm: str = ""
    seed: int = 0
    learning_rate: float = 0.0


class NoNorm(nn.Module):
    """Stands in for QK-norm: forward(query, key) returns both."""

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


@torch.no_grad()
def mismatch(
    qkv: list[Tensor], grad_output: Tensor, block_mask: Tensor, alpha: Tensor, arm: Arm, blocks: BlockSettings
) -> Row:
    """Return the largest score, the largest row sum of P, and errors of O and of the gradients.

    qkv, grad_output [B, H, N, D]. Errors are relative, against the unquantised SLA2. blocks: their sizes.
    """
    q, k, v, do = (x.float() for x in (*qkv, grad_output))
    settings = replace(blocks, backward=arm.backward, quantize=arm.quantize)
    results = {}
    for name, chosen in (("exact", replace(settings, quantize=False)), ("found", settings)):
        forward = sla2_forward(q, k, v, block_mask, alpha, chosen)
        gradients = sla2_backward(do, q, k, v, block_mask, alpha, forward.sparse_output, forward.log_sum_exp, chosen)
        results[name] = forward.output, *gradients[:3]
    left, right, log_sum_exp = q, k, forward.log_sum_exp
    if settings.matched:
        left, right, mean_scores = whole.int8_operands(q, k, settings)
        log_sum_exp = log_sum_exp - mean_scores
    scores = left @ right.mT * q.shape[-1] ** -0.5
    seen = spread_blocks(block_mask, q.shape[-2], k.shape[-2], settings)
    rows = torch.exp((scores - log_sum_exp).masked_fill(~seen, -math.inf)).sum(-1)
    pairs = zip(("O", *NAMES), results["found"], results["exact"], strict=True)
    errors = {f"error_{name}": relative_l2(x, y) for name, x, y in pairs}
    found = {"max_score": (q @ k.mT).abs().max().item() * q.shape[-1] ** -0.5, "largest_row_sum": rows.max().item()}
    return {name: rounded(x) for name, x in (found | errors).items()}


def rounded(x: float) -> float | None:
    """Return four digits of a number, and None if it is not finite: JSON has no word for it."""
    return float(f"{x:.4g}") if math.isfinite(x) else None


def gradient_rows(tokens: int, device: torch.device) -> list[Row]:
    """Measure `mismatch` on Gaussian inputs of growing size and on captures of trained models."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, min(1024, tokens), 64, generator=generator).to(device) for _ in range(4)]
    inputs = {f"gaussian, times {size:g}": (drawn[0] * size, drawn[1] * size, *drawn[2:]) for size in (1, 2, 3, 4, 6)}
    one_channel = torch.ones(64, device=device)
    one_channel[0] = 8.0
    inputs["gaussian, times 3, one channel of K times 8"] = 3 * drawn[0], 3 * drawn[1] * one_channel, *drawn[2:]
    for name in ("capture_plain_h200", "capture_qk_norm_h200", "capture_video"):
        for layer, x in read_capture(RECORDED / f"{name}.safetensors").layers.items():
            tensors = [x[part].to(device)[:1, :, :tokens].float() for part in ("query", "key", "value")]
            do = x["grad_output"].to(device)[:1, :, :tokens] if "grad_output" in x else torch.randn_like(tensors[0])
            inputs[f"{name}, layer {layer}"] = *tensors, do
    for name, (q, k, v, do) in inputs.items():
        core = SLA2(q.shape[-1], q.shape[1], sparsity=0.75).to(device)
        mask = core.block_mask(q, k)
        alpha = torch.full(mask.shape[:3], 0.95, device=device)
        for backward in ("printed", "matched"):
            found = mismatch([q, k, v], do, mask, alpha, Arm(backward), core.settings)
            rows.append({"part": "gradients", "inputs": name, "arm": backward} | found)
    return rows


def training_rows(run: MatchedRun, plan: MatchedPlan, steps: int, device: torch.device) -> list[Row]:
    """Train one arm; keep every tenth step's loss and the `mismatch` of the last layer, until the loss isn't finite."""
    arm, rows, seen = ARMS[run.arm], [], {}
    torch.manual_seed(run.seed)
    model = VideoDiT(replace(plan.model, quantize=arm.quantize, backward=arm.backward))
    for block in model.blocks:
        if not arm.qk_norm:
            block.attention.qk_norm = NoNorm()

    def keep(core: SLA2, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["inputs"], seen["core"] = inputs, core
        output.register_hook(lambda gradient: seen.update(gradient=gradient))

    model.blocks[-1].attention.core.register_forward_hook(keep)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.learning_rate)
    digits = digit_images().to(device)
    low_bits = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    for step in range(steps):
        with low_bits:
            loss = flow_matching_loss(model, *flow_batch(4, digits, plan.model, seed=(0, run.seed, step))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        diverged = not math.isfinite(loss.item())
        if step % STEP_EVERY == STEP_EVERY - 1 or diverged:
            row = run.facts | {"step": step + 1, "loss": rounded(loss.item()), "diverged": diverged}
            if not diverged:
                q, k, v = (x.detach().float()[:1] for x in seen["inputs"])
                mask = seen["core"].block_mask(q, k)
                alpha = seen["core"].alpha(1, mask.shape[2])
                row |= mismatch([q, k, v], seen["gradient"][:1], mask, alpha, arm, seen["core"].settings)
            rows.append(row)
        if diverged:
            break
    return rows


@dataclass(frozen=True, kw_only=True)
class Matched(Arguments):
    """Measure gradients, then train every arm at every rate with every seed."""

    plan: Literal["gpu", "cpu"] = field(default_factory=lambda: "cpu" if usual_device() == "cpu" else "gpu")
    learning_rates: Annotated[tuple[float, ...], positive_number] = (0.003, 0.01, 0.03)
    seeds: Annotated[int, positive, "number of seeds"] = 3
    steps: Annotated[int, positive, "steps of a training"] = 200
    device: Annotated[str, device] = field(default_factory=usual_device)

    def run(self, command: str) -> None:
        cells = product(self.learning_rates, range(self.seeds), ARMS)
        training = [MatchedRun("training", arm, seed, rate) for rate, seed, arm in cells]
        plan, device = PLANS[self.plan], torch.device(self.device)

        def measure(run: MatchedRun, _: None) -> list[Row]:
            if run.part == "training":
                return training_rows(run, plan, self.steps, device)
            return gradient_rows(plan.tokens, device)

        with opened(
            Plan("matched", [[MatchedRun("gradients"), *training]]), Path("runs"), (plan, self.steps, device.type)
        ) as work:
            work.finish(measure)
            work.record(self.json, command)
        for run, rows in work.finished.items():
            if run.part == "gradients":
                names = [name for name in rows[0] if name != "part"]
                print(markdown_table(names, [[row[name] for name in names] for row in rows]))
            else:
                last = rows[-1]
                found = (f"{name} {last.get(name)}" for name in ("step", "loss", "max_score"))
                print(run.learning_rate, run.arm, run.seed, *found)
