"""`python -m sage_lab matched`: compare SLA2's printed backward pass with one that matches the forward pass.

Algorithm 3 recomputes P from 16-bit scores with the L of the INT8 forward pass; "matched", the library's default, takes
the INT8 scores. Each arm names its form. The column `part` of the record says what a row measures:

gradients  errors of O and of the gradients as scores grow, on Gaussian inputs and on what trained models computed
memory     peak memory and time of a step by length; on a GPU only
training   a small video model that learns without QK-norm at rates of which the largest lets the scores grow; see ARMS
"""

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from sage_lab.bench.timing import paired
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.plan import Plan, Run, opened
from sage_lab.records import RECORDED, Row, markdown_table
from sage_lab.training.capture import read_capture
from sage_lab.training.video_flow import flow_batch, flow_matching_loss
from sage_lab.training.video_scenes import digit_images
from sage_ref.sla2 import SLA2, BlockSettings, per_query, sla2_backward, sla2_forward, spread_blocks, whole
from sage_ref.tracing import relative_l2

LENGTHS = (4096, 8192, 16_384, 32_760, 65_536)
HEADS, HEAD_DIM, SPARSITY = 12, 128, 0.97  # of `memory`: the paper's
LEARNING_RATES, SEEDS, STEPS = (0.003, 0.01, 0.03), 3, 200  # of `training`, whose rows are of every tenth step
STEP_EVERY = 10
NAMES = ("dQ", "dK", "dV")
MODEL = VideoDiTConfig(layers=2, heads=2, attention="sla2", sparsity=0.75)  # 1,024 tokens, 2 heads of 64


@dataclass(frozen=True)
class Arm:
    """How a model of `training` computes attention. cure: one of CURES, for the printed P."""

    backward: str
    quantize: bool = True
    cure: str | None = None
    qk_norm: bool = False


# From the scores of the selected blocks (-inf elsewhere) and L, a P that lacks a fault of exp(S - L).
CURES = {
    "P at most 1": lambda scores, log_sum_exp: torch.exp((scores - log_sum_exp).clamp(max=0)),
    "rows sum to 1": lambda scores, log_sum_exp: scores.softmax(-1).nan_to_num(),
}
ARMS = {
    "exact": Arm("printed", quantize=False),  # without INT8 both forms are one
    "printed": Arm("printed"),
    "printed, P at most 1": Arm("printed", cure="P at most 1"),
    "printed, rows sum to 1": Arm("printed", cure="rows sum to 1"),
    "matched": Arm("matched"),
    "printed, QK-norm": Arm("printed", qk_norm=True),
}


@dataclass(frozen=True)
class MatchedRun(Run):
    """One part of the record: a length, one arm of training, or all errors of gradients."""

    part: str
    arm: str = ""
    seed: int = 0
    length: int = 0
    learning_rate: float = 0.0


def cured_backward(
    cure: str,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    alpha: Tensor,
    sparse_output: Tensor,
    log_sum_exp: Tensor,
    settings: BlockSettings,
) -> tuple[Tensor, ...]:
    """Compute `sla2_backward` as printed, but with the P of a cure in place of exp(S - L)."""
    saved = query, key, value, block_mask, alpha, sparse_output
    # With L = infinity P is 0: the linear branch's share, and dalpha.
    dq, dk, dv, dalpha = sla2_backward(grad_output, *saved, torch.full_like(log_sum_exp, math.inf), settings)
    q, k, v, do = (x.float() for x in (query, key, value, grad_output))
    c = q.shape[-1] ** -0.5
    seen = spread_blocks(block_mask, q.shape[-2], k.shape[-2], settings)
    p = CURES[cure]((q @ k.mT * c).masked_fill(~seen, -math.inf), log_sum_exp)
    do_s = per_query(alpha.float(), q.shape[-2], settings) * do
    ds = p * (do_s @ v.mT - (do_s * sparse_output).sum(-1, keepdim=True))
    return dq + ds @ k * c, dk + ds.mT @ q * c, dv + p.mT @ do_s, dalpha


class CuredFunction(torch.autograd.Function):
    """SLA2 with `cured_backward`."""

    @staticmethod
    def forward(ctx, query, key, value, block_mask, alpha, settings, cure):
        found = sla2_forward(query, key, value, block_mask, alpha, settings)
        ctx.settings, ctx.cure = settings, cure
        ctx.save_for_backward(query, key, value, block_mask, alpha, found.sparse_output, found.log_sum_exp)
        return found.output.to(query.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        *gradients, dalpha = cured_backward(ctx.cure, grad_output, *ctx.saved_tensors, ctx.settings)
        dq, dk, dv = (dx.to(x.dtype) for dx, x in zip(gradients, ctx.saved_tensors, strict=False))
        return dq, dk, dv, None, dalpha, None, None


class CuredSLA2(SLA2):
    """SLA2 in stage 2 by `CuredFunction`, with its attribute `cure`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.block_mask(query.float(), key.float())
        with torch.autocast(query.device.type, enabled=False):
            alpha = self.alpha(*mask.shape[::2])
            return CuredFunction.apply(query, key, value, mask, alpha, self.settings, self.cure)


class NoNorm(nn.Module):
    """Stands in for QK-norm: forward(query, key) returns both."""

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


@torch.no_grad()
def mismatch(
    qkv: list[Tensor], grad_output: Tensor, block_mask: Tensor, alpha: Tensor, arm: Arm, blocks: BlockSettings
) -> Row:
    """Return the largest score, the largest row sum of P (before any cure), and errors of O and of the gradients.

    qkv, grad_output [B, H, N, D]. Errors are relative, against the unquantised SLA2. blocks: their sizes.
    """
    q, k, v, do = (x.float() for x in (*qkv, grad_output))
    settings = replace(blocks, backward=arm.backward, quantize=arm.quantize)
    results = {}
    for name, chosen in (("exact", replace(settings, quantize=False)), ("found", settings)):
        forward = sla2_forward(q, k, v, block_mask, alpha, chosen)
        compute = partial(cured_backward, arm.cure) if arm.cure and name == "found" else sla2_backward
        gradients = compute(do, q, k, v, block_mask, alpha, forward.sparse_output, forward.log_sum_exp, chosen)
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


def gradient_rows(device: torch.device) -> list[Row]:
    """Measure `mismatch` on Gaussian inputs of growing size and on captures of trained models."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, 1024, 64, generator=generator).to(device) for _ in range(4)]
    inputs = {f"gaussian, times {size:g}": (drawn[0] * size, drawn[1] * size, *drawn[2:]) for size in (1, 2, 3, 4, 6)}
    one_channel = torch.ones(64, device=device)
    one_channel[0] = 8.0
    inputs["gaussian, times 3, one channel of K times 8"] = 3 * drawn[0], 3 * drawn[1] * one_channel, *drawn[2:]
    for name in ("capture_plain_h200", "capture_qk_norm_h200", "capture_video"):
        for layer, x in read_capture(RECORDED / f"{name}.safetensors").layers.items():
            tensors = [x[part].to(device)[:1, :, :4096].float() for part in ("query", "key", "value")]
            do = x["grad_output"].to(device)[:1, :, :4096] if "grad_output" in x else torch.randn_like(tensors[0])
            inputs[f"{name}, layer {layer}"] = *tensors, do
    for name, (q, k, v, do) in inputs.items():
        core = SLA2(q.shape[-1], q.shape[1], sparsity=0.75).to(device)
        mask = core.block_mask(q, k)
        alpha = torch.full(mask.shape[:3], 0.95, device=device)
        for backward in ("printed", "matched"):
            found = mismatch([q, k, v], do, mask, alpha, Arm(backward), core.settings)
            rows.append({"part": "gradients", "inputs": name, "arm": backward} | found)
    return rows


def memory_rows(length: int, device: torch.device) -> list[Row]:
    """Measure the peak memory beyond the inputs and the time of both passes at one length, in bfloat16."""
    shape = {"dtype": torch.bfloat16, "device": device}
    q, k, v, do = (torch.randn(1, HEADS, length, HEAD_DIM, **shape) for _ in range(4))
    steps: dict[str, Callable[[], object]] = {}
    for name, backward in (("stage 2, printed", "printed"), ("stage 2, matched", "matched"), ("stage 1", "matched")):
        core = SLA2(HEAD_DIM, HEADS, sparsity=SPARSITY, backward=backward).to(device)
        core.stage(1 if name == "stage 1" else 2)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        parameters = [x for x in core.parameters() if x.requires_grad]
        steps[name] = lambda core=core, x=leaves, p=parameters: torch.autograd.grad(core(*x), [*x, *p], do)
    steps["initialize_alpha"] = lambda: core.initialize_alpha(q, k)
    rows = []
    for name, step in steps.items():
        step()  # compiles
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        rows.append({"part": "memory", "inputs": name, "length": length, "peak_gib": round(gib, 3)})
    for row, timing in zip(rows, paired(steps, 5).values(), strict=True):
        row |= {"ms_median": round(timing.ms_median, 3), "protocol": "paired"}
    return rows


def training_rows(run: MatchedRun, steps: int, device: torch.device) -> list[Row]:
    """Train one arm; keep every tenth step's loss and the `mismatch` of the last layer, until the loss isn't finite."""
    arm, rows, seen = ARMS[run.arm], [], {}
    torch.manual_seed(run.seed)
    model = VideoDiT(replace(MODEL, quantize=arm.quantize, backward=arm.backward))
    for block in model.blocks:
        attention, core = block.attention, block.attention.core
        core.__class__, core.cure = CuredSLA2 if arm.cure else SLA2, arm.cure
        attention.qk_norm = attention.qk_norm if arm.qk_norm else NoNorm()

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
            loss = flow_matching_loss(model, *flow_batch(4, digits, MODEL, seed=(0, run.seed, step))).mean()
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


def matched_command(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = [MatchedRun("memory", length=n) for n in LENGTHS] if device.type == "cuda" else []
    cells = product(LEARNING_RATES, range(SEEDS), ARMS)
    training = [MatchedRun("training", arm, seed, learning_rate=rate) for rate, seed, arm in cells]
    runs = [MatchedRun("gradients"), *memory, *training]

    def measure(run: MatchedRun, _: None) -> list[Row]:
        if run.part == "training":
            return training_rows(run, STEPS, device)
        return memory_rows(run.length, device) if run.part == "memory" else gradient_rows(device)

    with opened(Plan("matched", [runs]), Path("runs"), (STEPS, device.type)) as work:
        work.finish(measure)
        work.record(options.json, options.command)
    for run, rows in work.finished.items():
        if run.part == "training":
            last = rows[-1]
            found = (f"{name} {last.get(name)}" for name in ("step", "loss", "max_score"))
            print(run.learning_rate, run.arm, run.seed, *found)
        else:
            names = [name for name in rows[0] if name != "part"]
            print(markdown_table(names, [[str(row.get(name, "")) for name in names] for row in rows]))
