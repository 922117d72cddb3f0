"""`python -m sage_lab train-router`: stage 1 of SLA2, the router and alpha of a layer fitted to full attention.

minimise |O_M - O|^2 over proj_q, proj_k and alpha:  O full attention, O_M SLA2 with a substitute for the hard mask M.

The paper prints two substitutes, SoftTop-k of the scores (Eq. 16-17) and of their softmax P_c (Algorithm 2). The second
one can cheat: P_c over many blocks is tiny, so M is flat and cancels in the sparse branch's softmax, O_s is full
attention, and with alpha = 1 nothing is left to minimise, whatever the hard mask chooses. `ARMS` has both, Eq. 16-17
with c, and the library's default. Every error here is that of the hard mask, which stage 2 and inference use. The cheat
exists if a soft M weighs e^S, as we read the paper. `READINGS` also has softmax(S * M), as it is printed.

Errors are |O' - O|^2 / |O|^2 over all heads of a sample set.
"""

from __future__ import annotations  # a field may have the name of what reads it

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_lab.command_line import Arguments, device, from_zero, positive, usual_device
from sage_lab.plan import Plan, Run, opened
from sage_lab.records import RECORDED, Row, markdown_table, write_record
from sage_lab.training.capture import read_capture
from sage_ref.attention import softmax_scale
from sage_ref.sla2 import (
    EQUATIONS_16_17,
    PRINTED,
    SLA2,
    BlockSettings,
    Relaxation,
    block_mass,
    heuristic_scores,
    into_blocks,
    linear_branch,
    mix,
    per_query,
    selected_count,
    soft_sparse_linear_attention,
    sparse_branch,
    spread_blocks,
    top_blocks,
)
from sage_ref.sla2.blocks import by_parts_again, query_parts

FITTED, HELD_OUT = "fitted", "held out"
BASELINES = "baselines"
WITH_C = Relaxation("log P_c", EQUATIONS_16_17.temperature, straight_through=False)  # Eq. 16-17 of c scores
ARMS = (EQUATIONS_16_17, WITH_C, PRINTED, Relaxation())
RELAXATIONS = {relaxation.name: relaxation for relaxation in ARMS}


def printed_soft_attention(
    query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """Compute `soft_sparse_linear_attention` with O_s = softmax(S * M) V, as SLA2 prints it: a score times its weight.

    At M = 0 a score becomes 0 and keeps the weight e^0, so this is not the sparse branch of a hard mask (erratum).
    """

    def rows(query: Tensor, weights: Tensor) -> tuple[Tensor]:
        s = query @ key.mT * softmax_scale(settings.scale, query.shape[-1])
        return ((s * spread_blocks(weights, *s.shape[-2:], settings)).softmax(-1) @ value,)

    (o_s,) = by_parts_again(rows, query_parts(query, key, settings), (query,), (block_weights,))
    o_l = linear_branch(query, key, value, 1 - block_weights, settings)
    return mix(o_s, o_l, per_query(alpha, query.shape[-2], settings))


# The two readings of a soft M in the softmax: it weighs e^S, as in the library, or it multiplies S.
WEIGHTED, MULTIPLIED = "M e^S", "softmax(S * M)"
READINGS = {WEIGHTED: soft_sparse_linear_attention, MULTIPLIED: printed_soft_attention}


@dataclass(frozen=True)
class FitSettings:
    """Settings of one fit with Adam.

    The projections start at the identity and alpha at the mass that the heuristic mask holds, so `seed` decides one
    thing: which sample and which blocks of queries each step reads. reading: of a soft M, one of READINGS.
    """

    sparsity: float = 0.97
    relaxation: Relaxation = Relaxation()
    reading: str = WEIGHTED
    block_q: int = 16
    block_kv: int = 8
    steps: int = 200
    query_blocks: int = 16
    learning_rate: float = 2e-3
    alpha_learning_rate: float = 0.05
    seed: int = 0

    @property
    def blocks(self) -> BlockSettings:
        return BlockSettings(self.block_q, self.block_kv)


class Samples(NamedTuple):
    """Q, K, V [B, H, N, D] of one layer, O of full attention, and the true mass of every block [B, H, Tm, Tn]."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mass: Tensor


def samples(query: Tensor, key: Tensor, value: Tensor, blocks: BlockSettings, device: str = "cpu") -> Samples:
    """Compute once what every fit and every error needs. Q, K, V [B, H, N, D] in any float dtype."""
    q, k, v = (x.to(device, torch.float32) for x in (query, key, value))
    return Samples(q, k, v, F.scaled_dot_product_attention(q, k, v), block_mass(q, k, blocks))


def fit_router(fitted: Samples, settings: FitSettings) -> SLA2:
    """Run stage 1 on samples of one layer; return SLA2 in stage 2."""
    count, heads, n, head_dim = fitted.query.shape
    model = SLA2(
        head_dim, heads, sparsity=settings.sparsity, block_q=settings.block_q, block_kv=settings.block_kv,
        quantize=False, backend="reference",
    ).to(fitted.query.device)  # fmt: skip
    model.initialize_alpha(fitted.query, fitted.key)
    model.stage(1)
    groups = [
        {"params": list(model.router.parameters()), "lr": settings.learning_rate},
        {"params": [model.alpha_logit], "lr": settings.alpha_learning_rate},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)  # to zero
    generator = torch.Generator().manual_seed(settings.seed)

    for _ in range(settings.steps):
        sample = int(torch.randint(count, (), generator=generator))
        rows = torch.randperm(n // settings.block_q, generator=generator)[: settings.query_blocks]
        loss, _ = stage1_loss(model, fitted, settings, [sample], rows.to(fitted.query.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    if not all(p.isfinite().all() for p in model.parameters()):
        raise RuntimeError(f"weights: expected finite ones after the fit with {settings}, got others")
    return model.stage(2)


def stage1_loss(
    model: SLA2, fitted: Samples, settings: FitSettings, sample: Sequence[int], rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return |O_M - O|^2 / |O|^2 over the queries of blocks `rows` of some samples, and SoftTop-k of those rows."""
    blocks = model.settings
    # [b, H, rows * block_q, D]
    q, o = (into_blocks(x[sample], blocks.block_q)[:, :, rows].flatten(2, 3) for x in (fitted.query, fitted.output))
    k, v = fitted.key[sample], fitted.value[sample]
    count = selected_count(model.sparsity, fitted.mass.shape[-1])
    weights, soft = model.router.soft_choice(q, k, count, settings.relaxation)
    alpha = model.alpha(len(sample), fitted.mass.shape[-2])[:, :, rows]
    output = READINGS[settings.reading](q, k, v, weights, alpha, blocks)
    return (output - o).square().sum() / o.square().sum(), soft


def flatness(soft: Tensor) -> float:
    """Return 1 if every block has the same weight, 0 if weights are 0 and 1: 1 - variance / largest one, mean of rows.

    soft: [..., blocks], from 0 to 1.
    """
    share = soft.mean(-1)
    return (1 - soft.var(-1, correction=0) / (share * (1 - share))).mean().item()


def branches(data: Samples, mask: Tensor, blocks: BlockSettings) -> tuple[Tensor, Tensor]:
    """Return (O_s, O_l) [B, H, N, D] for a hard mask."""
    o_s, _ = sparse_branch(data.query, data.key, data.value, mask, blocks)
    return o_s, linear_branch(data.query, data.key, data.value, ~mask, blocks)


def fitted_alpha(data: Samples, o_s: Tensor, o_l: Tensor) -> Tensor:
    """Return the alpha of each head, [H], for which |alpha O_s + (1 - alpha) O_l - O|^2 is smallest."""
    toward, wanted = o_s - o_l, data.output - o_l
    return ((toward * wanted).sum((0, 2, 3)) / toward.square().sum((0, 2, 3))).clamp(0, 1)


def squared_error(output: Tensor, data: Samples) -> Tensor:
    """Return |O' - O|^2 / |O|^2."""
    return (output - data.output).square().sum() / data.output.square().sum()


def held_mass(data: Samples, mask: Tensor) -> Row:
    """Return the mass in the mask's blocks, mean of rows, and its share of what the best mask of that size holds."""
    held = (data.mass * mask).sum(-1)
    best = data.mass.sort(-1, descending=True).values[..., : int(mask[0, 0, 0].sum())].sum(-1)
    return {"mass": held.mean().item(), "share_of_best_mass": (held.mean() / best.mean()).item()}


def mixed_row(data: Samples, mask: Tensor, alpha: Tensor, blocks: BlockSettings) -> Row:
    """Measure O = alpha O_s + (1 - alpha) O_l with a hard mask; alpha [H], or [B, H, Tm] as a layer has it."""
    o_s, o_l = branches(data, mask, blocks)
    if alpha.dim() == 1:
        alpha = alpha[None, :, None].expand(mask.shape[:-1])
    output = mix(o_s, o_l, per_query(alpha, data.query.shape[-2], blocks))
    return {"error": squared_error(output, data).item(), "alpha": alpha.mean().item()} | held_mass(data, mask)


def heuristic_mask(data: Samples, settings: FitSettings) -> Tensor:
    """Select blocks by the scores of mean queries and keys, as SLA does."""
    return top_blocks(heuristic_scores(data.query, data.key, settings.blocks), count_of(data, settings))


def best_mask(data: Samples, settings: FitSettings) -> Tensor:
    """Select blocks by their true mass: no mask of that size holds more."""
    return top_blocks(data.mass, count_of(data, settings))


def count_of(data: Samples, settings: FitSettings) -> int:
    """Return the number of blocks that a row selects."""
    return selected_count(settings.sparsity, data.mass.shape[-1])


@torch.no_grad()
def mask_rows(fitted: Samples, held_out: Samples, settings: FitSettings) -> list[Row]:
    """Measure the heuristic mask and the best mask, each with one alpha per head from the fitted samples.

    "alpha from data": the mass that the mask holds; "alpha fitted": that with the smallest error; "sparse only": 1.
    """
    rows = []
    for (sample_set, data), (name, mask_of) in itertools.product(
        ((FITTED, fitted), (HELD_OUT, held_out)), (("heuristic", heuristic_mask), ("best mask", best_mask))
    ):
        fitted_mask, mask = mask_of(fitted, settings), mask_of(data, settings)
        alphas = {
            "alpha from data": (fitted.mass * fitted_mask).sum(-1).mean((0, 2)),
            "alpha fitted": fitted_alpha(fitted, *branches(fitted, fitted_mask, settings.blocks)),
            "sparse only": torch.ones(fitted.query.shape[1], device=fitted.query.device),
        }
        for words, alpha in alphas.items():
            row = mixed_row(data, mask, alpha, settings.blocks)
            rows.append({"method": f"{name}, {words}", "samples": sample_set} | row)
    return rows


@torch.no_grad()
def trained_rows(fitted: Samples, held_out: Samples, model: SLA2, settings: FitSettings) -> list[Row]:
    """Measure a layer that was trained with these settings, with its hard mask, on both sample sets.

    error_fitted_alpha: with the alphas that suit the hard mask best on the fitted samples (stage 2 trains them too).
    error_stage1: the error that stage 1 minimises, with the stand-in for the mask.
    """
    fitted_mask = model.block_mask(fitted.query, fitted.key)
    best_alpha = fitted_alpha(fitted, *branches(fitted, fitted_mask, model.settings))
    all_blocks = torch.arange(fitted.query.shape[-2] // model.settings.block_q, device=fitted.query.device)
    rows = []
    for sample_set, data in ((FITTED, fitted), (HELD_OUT, held_out)):
        mask = model.block_mask(data.query, data.key)
        alpha = model.alpha(mask.shape[0], mask.shape[2])
        loss, soft = stage1_loss(model, data, settings, list(range(len(data.query))), all_blocks)
        row = {"method": "SLA2", "samples": sample_set} | mixed_row(data, mask, alpha, model.settings)
        row |= {
            "error_fitted_alpha": mixed_row(data, mask, best_alpha, model.settings)["error"],
            "error_stage1": loss.item(),
            "flatness": flatness(soft),
        }
        rows.append(row)
    return rows


@dataclass(frozen=True)
class RouterRun(Run):
    """One fit of a layer's router; or, in place of its stand-in's name, BASELINES: masks that were not learned."""

    layer: int
    relaxation: str
    reading: str
    seed: int


def router_runs(layers: Iterable[int], seeds: Iterable[int]) -> list[RouterRun]:
    """Return every fit, after the baselines of its layer."""
    fits = list(itertools.product(RELAXATIONS, READINGS, seeds))
    return [RouterRun(layer, *fit) for layer in layers for fit in ((BASELINES, WEIGHTED, 0), *fits)]


def split_samples(tensors: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return Q, K, V of all samples but the last, to fit on, and of the last, held out."""
    inputs = [tensors[name] for name in ("query", "key", "value")]
    return [x[:-1] for x in inputs], [x[-1:] for x in inputs]


def run_rows(run: RouterRun, fitted: Samples, held_out: Samples, settings: FitSettings) -> list[Row]:
    """Measure a run's rows, with numbers of five digits. settings: what all fits share."""
    settings = replace(settings, reading=run.reading, seed=run.seed)
    place = {"layer": run.layer, "sparsity": settings.sparsity, "blocks": count_of(fitted, settings)}
    if run.relaxation == BASELINES:
        rows = mask_rows(fitted, held_out, settings)
    else:
        settings = replace(settings, relaxation=RELAXATIONS[run.relaxation])
        rows = trained_rows(fitted, held_out, fit_router(fitted, settings), settings)
        place |= {"relaxation": run.relaxation, "reading": run.reading, "seed": run.seed}
    return [place | {k: float(f"{x:.5g}") if isinstance(x, float) else x for k, x in row.items()} for row in rows]


def result_table(rows: Sequence[Row]) -> str:
    """Return the mean error over layers and seeds of every method, on both sets of samples."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        stand_in = "; ".join(row[name] for name in ("relaxation", "reading") if name in row)
        groups.setdefault((row["method"], stand_in, row["samples"]), []).append(row["error"])
    lines = [(*group, f"{mean(errors):.4f}") for group, errors in groups.items()]
    return markdown_table(("method", "stand-in", "samples", "error"), lines)


@dataclass(frozen=True, kw_only=True)
class TrainRouter(Arguments):
    """Fit the recorded layers of a video model."""

    layers: Annotated[tuple[int, ...], from_zero, "of those that capture_video has"] = (2, 4)
    seeds: Annotated[int, positive, "number of seeds"] = 3
    steps: Annotated[int, positive, "steps of one fit"] = FitSettings.steps
    device: Annotated[str, device] = field(default_factory=usual_device)

    def run(self, command: str) -> None:
        capture = RECORDED / "capture_video.safetensors"
        layers = read_capture(capture).layers
        if unknown := set(self.layers) - layers.keys():
            raise ValueError(f"layers: expected some of {list(layers)}, got {sorted(unknown)}")
        source = {"capture": capture.name, "sha256": sha256(capture.read_bytes()).hexdigest()}
        settings = FitSettings(steps=self.steps)

        @cache
        def sets(layer: int) -> tuple[Samples, Samples]:
            return tuple(samples(*x, settings.blocks, self.device) for x in split_samples(layers[layer]))

        plan = Plan("train_router", router_runs(self.layers, range(self.seeds)))
        with opened(plan, Path("runs"), (source, settings, self.device)) as work:
            work.finish(lambda run, _: run_rows(run, *sets(run.layer), settings))
            print("Hard mask, mean over layers and seeds:\n\n" + result_table(work.rows))
            facts = {"data": source, "settings": asdict(settings), "seeds": list(range(self.seeds))}
            facts |= {"device": self.device, "threads": torch.get_num_threads()}
            write_record(self.json, work.rows, command=command, **facts)
            work.parts.remove()
