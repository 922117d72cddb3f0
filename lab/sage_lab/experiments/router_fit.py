"""`python -m sage_lab train-router`: stage 1 of SLA2, the router and alpha of a layer fitted to full attention.

minimise |O_M - O|^2 over proj_q, proj_k and alpha:  O full attention, O_M SLA2 with a stand-in for the hard mask M.

The printed stand-in, SoftTop-k of P_c with tau = 0.1, has a way out: a flat M cancels in the softmax of the sparse
branch, O_s is full attention, and with alpha = 1 nothing is left to minimise, whatever the hard mask would choose.
`Relaxation` says which stand-in is used; every error here is that of the hard mask, which stage 2 and inference run.
That way out exists where a soft M weighs e^S, as we read it. `READINGS` has softmax(S * M) as well, as it is printed.

Errors are |O' - O|^2 / |O|^2 over all heads of a sample set.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from sage_lab.command_line import add_device_option, input_path, number_from_zero, percentage, positive
from sage_lab.plan import FinishedParts
from sage_lab.records import RECORDED, Record, Row, markdown_table, only_writer, write_record
from sage_lab.training.capture import read_capture
from sage_lab.training.video_like import VideoLike, video_like
from sage_ref.attention import attention_forward, softmax_scale
from sage_ref.checks import check_choice
from sage_ref.sla2 import (
    PRINTED,
    SLA,
    SLA2,
    BlockSettings,
    Relaxation,
    block_count,
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

SLA_LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
FITTED, HELD_OUT = "fitted", "held out"
ALPHAS = {"mass": "alpha from data", "fit": "alpha fitted", "one": "sparse only"}


# The question of `train-router --study`: which stand-in makes the hard mask better?
STUDY = (
    *(Relaxation("P_c", tau, straight_through=False) for tau in (0.1, 0.03, 0.01, 0.003, 0.001)),
    *(Relaxation("log P_c", tau, straight_through=False) for tau in (1.0, 0.3, 0.1)),
    *(Relaxation("P_c", tau) for tau in (0.1, 0.01)),
    *(Relaxation("log P_c", tau) for tau in (1.0, 0.3)),
)


def printed_soft_attention(
    query: Tensor, key: Tensor, value: Tensor, block_weights: Tensor, alpha: Tensor, settings: BlockSettings
) -> Tensor:
    """`soft_sparse_linear_attention` with O_s = softmax(S * M) V, as SLA2 prints it: a score times its weight.

    At M = 0 a score becomes 0 and keeps the weight e^0, so this is not the sparse branch of a hard mask (erratum).
    """
    s = query @ key.mT * softmax_scale(settings.scale, query.shape[-1])
    o_s = (s * spread_blocks(block_weights, *s.shape[-2:], settings)).softmax(-1) @ value
    o_l = linear_branch(query, key, value, 1 - block_weights, settings)
    return mix(o_s, o_l, per_query(alpha, query.shape[-2], settings))


# What a soft M does in the softmax: it weighs e^S, as the library has it, or it multiplies S.
WEIGHTED, MULTIPLIED = "M e^S", "softmax(S * M)"
READINGS = {WEIGHTED: soft_sparse_linear_attention, MULTIPLIED: printed_soft_attention}


@dataclass(frozen=True)
class FitSettings:
    """One fit with Adam, learning rates following a cosine to zero.

    The projections start at the identity and alpha at the mass that the heuristic mask holds, so `seed` decides one
    thing: which sample and which blocks of queries each step reads. alpha_per_block: one alpha per head and block of
    queries instead of one per head. reading: of a soft M, one of READINGS.
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
    alpha_per_block: bool = False
    seed: int = 0

    def __post_init__(self):
        check_choice("reading", self.reading, tuple(READINGS))
        for name, least in (("steps", 2), ("query_blocks", 1)):  # the first step and the last are reported
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")

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


class FittedRouter(NamedTuple):
    """model: SLA2 in stage 2. trace: loss, flatness of SoftTop-k and the projections' gradient, first and last step."""

    model: SLA2
    trace: list[Row]


def samples(query: Tensor, key: Tensor, value: Tensor, blocks: BlockSettings, device: str = "cpu") -> Samples:
    """What every fit and every error needs, computed once. Q, K, V [B, H, N, D] in any float dtype."""
    q, k, v = (x.to(device, torch.float32) for x in (query, key, value))
    return Samples(q, k, v, attention_forward(q, k, v).output, block_mass(q, k, blocks))


def fit_router(fitted: Samples, settings: FitSettings) -> FittedRouter:
    """Stage 1 on samples of one layer."""
    count, heads, n, head_dim = fitted.query.shape
    if n < settings.block_q:
        raise ValueError(f"query: expected at least block_q={settings.block_q} tokens, got {n}")
    model = SLA2(
        head_dim,
        heads,
        sparsity=settings.sparsity,
        block_q=settings.block_q,
        block_kv=settings.block_kv,
        quantize=False,
        query_blocks=block_count(n, settings.block_q) if settings.alpha_per_block else 1,
        backend="reference",
    ).to(fitted.query.device)
    model.initialize_alpha(fitted.query, fitted.key)
    model.stage(1)
    optimizer = torch.optim.Adam(
        [
            {"params": list(model.router.parameters()), "lr": settings.learning_rate},
            {"params": [model.alpha_logit], "lr": settings.alpha_learning_rate},
        ],
        betas=(0.9, 0.99),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    generator = torch.Generator().manual_seed(settings.seed)
    trace = []
    for step in range(settings.steps):
        sample = int(torch.randint(count, (), generator=generator))
        rows = torch.randperm(n // settings.block_q, generator=generator)[: settings.query_blocks]
        rows = rows.to(fitted.query.device)
        loss, soft = stage1_loss(model, fitted, settings.relaxation, [sample], rows, settings.reading)
        optimizer.zero_grad()
        loss.backward()
        if step in (0, settings.steps - 1):
            gradient = math.hypot(*(p.grad.norm().item() for p in model.router.parameters()))
            trace.append({"step": step, "loss": loss.item(), "flatness": flatness(soft), "gradient": gradient})
        optimizer.step()
        schedule.step()
    if not all(p.isfinite().all() for p in model.parameters()):
        raise RuntimeError(f"the fit with {settings} left weights that are not finite")
    return FittedRouter(model.stage(2), trace)


def stage1_loss(
    model: SLA2,
    fitted: Samples,
    relaxation: Relaxation,
    sample: Sequence[int],
    rows: Tensor,
    reading: str = WEIGHTED,
) -> tuple[Tensor, Tensor]:
    """|O_M - O|^2 / |O|^2 over blocks `rows` of the queries of the samples `sample`, and SoftTop-k of those rows."""
    blocks = model.settings
    # [b, H, rows * block_q, D]
    q, o = (into_blocks(x[sample], blocks.block_q)[:, :, rows].flatten(2, 3) for x in (fitted.query, fitted.output))
    k, v = fitted.key[sample], fitted.value[sample]
    scores = relaxation.scores_of(model.router(q, k))
    weights, soft = relaxation.block_weights(scores, selected_count(model.sparsity, fitted.mass.shape[-1]))
    alpha = model.alpha(len(sample), fitted.mass.shape[-2])[:, :, rows]
    output = READINGS[reading](q, k, v, weights, alpha, blocks)
    return (output - o).square().sum() / o.square().sum(), soft


def flatness(soft: Tensor) -> float:
    """1 if every block has the same weight, 0 if weights are 0 and 1: mean over rows of 1 - variance / largest one."""
    share = soft.mean(-1)
    return (1 - soft.var(-1, correction=0) / (share * (1 - share))).mean().item()


def branches(data: Samples, mask: Tensor, blocks: BlockSettings) -> tuple[Tensor, Tensor]:
    """(O_s, O_l) [B, H, N, D] for a hard mask."""
    o_s, _ = sparse_branch(data.query, data.key, data.value, mask, blocks)
    return o_s, linear_branch(data.query, data.key, data.value, ~mask, blocks)


def fitted_alpha(data: Samples, o_s: Tensor, o_l: Tensor) -> Tensor:
    """The alpha of each head, [H], that makes |alpha O_s + (1 - alpha) O_l - O|^2 smallest: no fit can do better."""
    toward, wanted = o_s - o_l, data.output - o_l
    return ((toward * wanted).sum((0, 2, 3)) / toward.square().sum((0, 2, 3))).clamp(0, 1)


def squared_error(output: Tensor, data: Samples) -> Tensor:
    """|O' - O|^2 / |O|^2."""
    return (output - data.output).square().sum() / data.output.square().sum()


def held_mass(data: Samples, mask: Tensor) -> Row:
    """Mean over rows of the mass in the mask's blocks, and as a share of what the best mask of that size holds."""
    held = (data.mass * mask).sum(-1)
    best = data.mass.sort(-1, descending=True).values[..., : int(mask[0, 0, 0].sum())].sum(-1)
    return {"mass": held.mean().item(), "share_of_best_mass": (held.mean() / best.mean()).item()}


def mixed_row(data: Samples, mask: Tensor, alpha: Tensor, blocks: BlockSettings) -> Row:
    """Error of O = alpha O_s + (1 - alpha) O_l with a hard mask; alpha [H], or [B, H, Tm] as a layer has it."""
    o_s, o_l = branches(data, mask, blocks)
    if alpha.dim() == 1:
        alpha = alpha[None, :, None].expand(mask.shape[:-1])
    output = mix(o_s, o_l, per_query(alpha, data.query.shape[-2], blocks))
    return {"error": squared_error(output, data).item(), "alpha": alpha.mean().item()} | held_mass(data, mask)


def fitted_row(
    fitted: Samples, data: Samples, fitted_mask: Tensor, mask: Tensor, blocks: BlockSettings, alpha_from: str
) -> Row:
    """`mixed_row` of `data` with one alpha per head: "mass", "fit" (both on `fitted`), or "one", which is alpha = 1."""
    if alpha_from == "one":
        alpha = torch.ones(fitted.query.shape[1], device=fitted.query.device)
    elif alpha_from == "mass":
        alpha = (fitted.mass * fitted_mask).sum(-1).mean((0, 2))
    else:
        alpha = fitted_alpha(fitted, *branches(fitted, fitted_mask, blocks))
    return mixed_row(data, mask, alpha, blocks)


def sla_rows(fitted: Samples, held_out: Samples, settings: FitSettings) -> list[Row]:
    """SLA, O_s + Proj(O_l), its Proj fitted with as many steps of Adam as SLA2 gets, all queries in each.

    "SLA": the best of SLA_LEARNING_RATES for the fitted samples, at its last step. "SLA, best step": the learning rate
    and the step with the lowest error for each set of samples, as if someone had told it when to stop.
    """
    data_of = {FITTED: fitted, HELD_OUT: held_out}
    masks = {name: heuristic_mask(data, settings) for name, data in data_of.items()}
    parts = {name: branches(data, masks[name], settings.blocks) for name, data in data_of.items()}
    runs = []  # one {sample set: errors after 0, 1, ... steps} per learning rate
    for learning_rate in SLA_LEARNING_RATES:
        heads, head_dim = fitted.query.shape[1], fitted.query.shape[3]
        proj = SLA(head_dim, heads, sparsity=settings.sparsity).proj.to(fitted.query.device)
        optimizer = torch.optim.Adam(proj.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
        errors = {name: [] for name in data_of}
        for step in range(settings.steps + 1):
            for name, data in data_of.items():
                o_s, o_l = parts[name]
                with torch.set_grad_enabled(name == FITTED):
                    loss = squared_error(o_s + proj(o_l), data)
                errors[name].append(loss.item())
                if name == FITTED and step < settings.steps:
                    optimizer.zero_grad()
                    loss.backward()
            if step < settings.steps:
                optimizer.step()
                schedule.step()
        runs.append(errors)
    best = min(runs, key=lambda errors: errors[FITTED][-1])
    rows = []
    for name, data in data_of.items():
        found = {"SLA": best[name][-1], "SLA, best step": min(min(errors[name]) for errors in runs)}
        mass = held_mass(data, masks[name])
        rows += [{"method": m, "samples": name, "error": e, "alpha": None} | mass for m, e in found.items()]
    return rows


def heuristic_mask(data: Samples, settings: FitSettings) -> Tensor:
    scores = heuristic_scores(data.query, data.key, settings.blocks)
    return top_blocks(scores, count_of(data, settings))


def best_mask(data: Samples, settings: FitSettings) -> Tensor:
    """By the true mass: no mask of that size holds more."""
    return top_blocks(data.mass, count_of(data, settings))


def count_of(data: Samples, settings: FitSettings) -> int:
    return selected_count(settings.sparsity, data.mass.shape[-1])


@torch.no_grad()
def mask_rows(fitted: Samples, held_out: Samples, settings: FitSettings) -> list[Row]:
    """The heuristic mask and the best mask, each with alpha set in three ways on the fitted samples."""
    rows = []
    for (sample_set, data), (name, mask_of) in itertools.product(
        ((FITTED, fitted), (HELD_OUT, held_out)), (("heuristic", heuristic_mask), ("best mask", best_mask))
    ):
        for alpha_from, words in ALPHAS.items():
            masks = mask_of(fitted, settings), mask_of(data, settings)
            row = fitted_row(fitted, data, *masks, settings.blocks, alpha_from)
            rows.append({"method": f"{name}, {words}", "samples": sample_set} | row)
    return rows


@torch.no_grad()
def trained_rows(
    fitted: Samples, held_out: Samples, found: FittedRouter, relaxation: Relaxation, reading: str = WEIGHTED
) -> list[Row]:
    """The trained layer with its hard mask, on both sample sets.

    error_fitted_alpha: with the alphas that suit the hard mask best on the fitted samples (stage 2 trains them too).
    error_stage1: what stage 1 minimises, with the stand-in for the mask. alpha_minus_mass, alpha_correlation: learned
    alpha against the mass rowsum(P1) of the hard mask over heads and blocks of queries, None where one is constant.
    """
    model, rows = found.model, []
    fitted_mask = model.block_mask(fitted.query, fitted.key)
    all_rows = torch.arange(fitted.query.shape[-2] // model.settings.block_q, device=fitted.query.device)
    for sample_set, data in ((FITTED, fitted), (HELD_OUT, held_out)):
        mask = model.block_mask(data.query, data.key)
        alpha = model.alpha(mask.shape[0], mask.shape[2])
        row = mixed_row(data, mask, alpha, model.settings)
        refitted = fitted_row(fitted, data, fitted_mask, mask, model.settings, "fit")
        loss, soft = stage1_loss(model, data, relaxation, list(range(len(data.query))), all_rows, reading)
        mass = (data.mass * mask).sum(-1)
        row |= {
            "error_fitted_alpha": refitted["error"],
            "error_stage1": loss.item(),
            "flatness": flatness(soft),
            "alpha_minus_mass": (alpha - mass).mean().item(),
            "alpha_correlation": correlation(alpha, mass),
        }
        rows.append({"method": "SLA2", "samples": sample_set} | row)
    first, last = found.trace[0], found.trace[-1]
    moved = [(p.weight - torch.eye(len(p.weight), device=p.weight.device)).norm().item() for p in projections(model)]
    facts = {
        "flatness_at_start": first["flatness"],
        "gradient_at_start": first["gradient"],
        "gradient_at_end": last["gradient"],
        "projections_moved": math.hypot(*moved),
    }
    return [row | facts for row in rows]


def projections(model: SLA2) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    return model.router.proj_q, model.router.proj_k


def correlation(x: Tensor, y: Tensor) -> float | None:
    pair = torch.stack((x.flatten(), y.flatten()))
    return None if (pair.std(1) < 1e-6).any() else torch.corrcoef(pair)[0, 1].item()


class RouterSweep(NamedTuple):
    """Every combination is fitted. settings: what all fits share."""

    settings: FitSettings = FitSettings()
    sparsities: Sequence[float] = (0.95, 0.96, 0.97)
    relaxations: Sequence[Relaxation] = (PRINTED, Relaxation())
    readings: Sequence[str] = (WEIGHTED,)
    seeds: Sequence[int] = (0, 1, 2)


def split_samples(tensors: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Q, K, V of all samples but the last, to fit on, and of the last, held out."""
    inputs = [tensors[name] for name in ("query", "key", "value")]
    if len(inputs[0]) < 2:
        raise ValueError(f"capture: expected 2 samples or more, one of them to hold out, got {len(inputs[0])}")
    return [x[:-1] for x in inputs], [x[-1:] for x in inputs]


def router_sweep(
    sweep: RouterSweep, layers: dict[int, dict[str, Tensor]], parts: FinishedParts, device: str = "cpu"
) -> Iterator[list[Row]]:
    """One list of rows per layer, sparsity and fit, the baselines' first.

    layers: layer -> {"query", "key", "value"}, [B, H, N, D] each; the last sample is held out. No fit depends on
    another, so the rows of a sweep that goes on are those of an uninterrupted one.
    """
    for layer, tensors in layers.items():
        fitted, held_out = (samples(*x, sweep.settings.blocks, device) for x in split_samples(tensors))
        for sparsity in sweep.sparsities:
            at_sparsity = replace(sweep.settings, sparsity=sparsity)
            place = {"layer": layer, "sparsity": sparsity, "blocks": count_of(fitted, at_sparsity)}
            baselines = partial(baseline_rows, fitted, held_out, at_sparsity)
            yield parts.rows(f"{layer} {sparsity} baselines", partial(_placed, place, baselines))
            for relaxation, reading, seed in itertools.product(sweep.relaxations, sweep.readings, sweep.seeds):
                settings = replace(at_sparsity, relaxation=relaxation, reading=reading, seed=seed)
                fit = partial(fit_rows, fitted, held_out, settings)
                yield parts.rows(f"{layer} {sparsity} {relaxation.name} {reading} {seed}", partial(_placed, place, fit))


def _placed(place: Row, measure: Callable[[], list[Row]]) -> list[Row]:
    return [place | rounded(row) for row in measure()]


def baseline_rows(fitted: Samples, held_out: Samples, settings: FitSettings) -> list[Row]:
    return mask_rows(fitted, held_out, settings) + sla_rows(fitted, held_out, settings)


def fit_rows(fitted: Samples, held_out: Samples, settings: FitSettings) -> list[Row]:
    rows = trained_rows(fitted, held_out, fit_router(fitted, settings), settings.relaxation, settings.reading)
    fit = {"relaxation": settings.relaxation.name, "reading": settings.reading, "seed": settings.seed}
    return [fit | row for row in rows]


def rounded(row: Row) -> Row:
    return {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in row.items()}


def sweep_length(sweep: RouterSweep, layers: dict) -> int:
    """How many lists `router_sweep` yields."""
    return len(layers) * len(sweep.sparsities) * (1 + len(sweep.relaxations) * len(sweep.readings) * len(sweep.seeds))


def result_table(record: Record) -> str:
    """Per sparsity and method, mean over layers and seeds: errors, their range over seeds, and the mass held.

    "alpha fitted": the error on the held-out samples with the alphas that suit the hard mask on the fitted ones.
    """
    header = ("sparsity", "method", "fitted", "held out", "over seeds", "alpha fitted", "share of best mass")
    lines = []
    methods = dict.fromkeys((row["sparsity"], row["method"], *_stand_in(row)) for row in record.rows)
    for sparsity, method, *stand_in in methods:
        found = [row for row in record.select(sparsity=sparsity, method=method) if _stand_in(row) == tuple(stand_in)]
        fitted, held_out = ([row for row in found if row["samples"] == name] for name in (FITTED, HELD_OUT))
        by_seed: dict[int | None, list[float]] = {}
        for row in held_out:
            by_seed.setdefault(row.get("seed"), []).append(row["error"])
        errors = [mean(of_layers) for of_layers in by_seed.values()]
        refitted = [row["error_fitted_alpha"] for row in held_out if "error_fitted_alpha" in row]
        lines.append(
            (
                f"{sparsity:.0%}",
                f"{method} ({'; '.join(filter(None, stand_in))})" if any(stand_in) else method,
                f"{mean(row['error'] for row in fitted):.4f}",
                f"{mean(errors):.4f}",
                f"{min(errors):.4f} to {max(errors):.4f}" if len(errors) > 1 else "",
                f"{mean(refitted):.4f}" if refitted else "",
                f"{mean(row['share_of_best_mass'] for row in held_out):.3f}",
            )
        )
    return markdown_table(header, lines)


def _stand_in(row: Row) -> tuple[str | None, str | None]:
    """What trained the router, None for a router that wasn't; records from before the readings don't name theirs."""
    return row.get("relaxation"), row.get("reading")


def add_options(parser: argparse.ArgumentParser) -> None:
    default = FitSettings()
    parser.add_argument("--k", type=percentage, nargs="+", default=(5, 4, 3), help="per cent of the blocks to select")
    parser.add_argument("--seeds", type=positive, default=len(RouterSweep().seeds), help="number of seeds")
    parser.add_argument("--steps", type=positive, default=default.steps, help="of one fit, at least 2")
    parser.add_argument("--block-q", type=positive, default=default.block_q, help="queries in a block")
    parser.add_argument("--block-kv", type=positive, default=default.block_kv, help="keys in a block")
    parser.add_argument("--study", action="store_true", help="try every stand-in for the hard mask, not just two")
    parser.add_argument("--readings", action="store_true", help="read a soft mask M as softmax(S * M), too")
    parser.add_argument("--capture", type=input_path, metavar="FILE", help="default: the recorded one")
    parser.add_argument(
        "--outlier",
        type=number_from_zero,
        metavar="LOGIT",
        help="instead of a capture, made-up data with outliers of that size among the queries (0: none)",
    )
    add_device_option(parser)


def run(options: argparse.Namespace) -> None:
    if options.outlier is None:
        capture = options.capture or RECORDED / "capture_video.safetensors"
        layers = read_capture(capture).layers
        source = {"capture": capture.name, "sha256": sha256(capture.read_bytes()).hexdigest()}
    else:
        config = VideoLike(outlier=options.outlier)
        layers = {0: video_like(config, samples=4)[0]}
        source = {"structured": asdict(config), "samples": 4}
    settings = FitSettings(block_q=options.block_q, block_kv=options.block_kv, steps=options.steps)
    sweep = RouterSweep(
        settings,
        sparsities=[round(1 - percent / 100, 6) for percent in options.k],
        relaxations=STUDY if options.study else RouterSweep().relaxations,
        readings=tuple(READINGS) if options.readings else RouterSweep().readings,
        seeds=range(options.seeds),
    )
    for layer, tensors in layers.items():
        n = tensors["key"].shape[2]
        if block_count(n, options.block_kv) < 2 or n < options.block_q:
            raise ValueError(
                f"block_q, block_kv: expected at most {n}, the tokens of layer {layer}, and two blocks of keys, "
                f"got {options.block_q} and {options.block_kv}"
            )
    parts = FinishedParts(options.json or Path("runs/train_router.json"), (source, sweep, options.device))
    with only_writer(parts.path):
        fits = router_sweep(sweep, layers, parts, options.device)
        rows = [row for found in tqdm(fits, total=sweep_length(sweep, layers)) for row in found]
    print("Hard mask, mean over layers and seeds:\n\n" + result_table(Record({}, rows)))
    if options.json:
        facts = {"data": source, "settings": asdict(settings), "seeds": list(sweep.seeds), "device": options.device}
        write_record(options.json, rows, command=options.command, threads=torch.get_num_threads(), **facts)
    parts.remove()
