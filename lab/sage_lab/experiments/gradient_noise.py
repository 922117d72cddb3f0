"""`python -m sage_lab noise`: compare gradient noise with quantisation bias, on checkpoints of `pretrain`.

The papers say that because of this bias SageBwd falls behind with many tokens per batch.

The gradient of a batch of T tokens is G + n + b + v. G is the exact gradient of the expected loss; n is the noise of
the batch, E n = 0 and E|n|^2 = tr(Sigma) / T; b is the quantisation error that every batch repeats, its bias; v is the
rest of that error, E v = 0 and E|v|^2 = tr(V) / T. More tokens per batch average n and v away, not b: at
T* = tr(Sigma) / |b|^2 the bias is as large as the noise. The gradient noise scale is tr(Sigma) / |G|^2.

Both gradients of a pair, exact and quantised, have the same batch, so their difference has no batch noise. Everything
is computed in float32, so that only the attention differs, except for the variant "bf16".
"""

from __future__ import annotations  # a field may have the name of what reads it

import hashlib
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from sage_lab.command_line import POSITIONAL, Arguments, device, input_file, positive, usual_device
from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.plan import Plan, Run, opened
from sage_lab.records import Row, markdown_table, write_record
from sage_lab.training.capture import next_token_loss
from sage_lab.training.corpus import Corpus, read_corpus
from sage_lab.training.pretrain import VALIDATION_SHARE, load_model
from sage_lab.training.probe import attention_as

# All that a configuration may say about SageBwd, whatever the checkpoint was trained with.
SAGEBWD = {name: getattr(LlamaConfig, name) for name in ("smooth_k", "smooth_q", "ds_rounding", "remedy")}
SAGEBWD |= {"attention": "sagebwd", "backend": "reference", "block_q": 64, "block_kv": 64}
# What computes the second gradient of a pair: changes to the model's configuration. "bf16" is no SageBwd at all but
# what everybody trains with: exact attention, all matmuls in bfloat16.
VARIANTS = {
    "bf16": {"attention": "exact"},
    "per block, nearest": SAGEBWD | {"granularity": "block"},
    "per block, stochastic": SAGEBWD | {"granularity": "block", "ds_rounding": "stochastic"},
    "per row, nearest": SAGEBWD | {"granularity": "row"},
    "per row, stochastic": SAGEBWD | {"granularity": "row", "ds_rounding": "stochastic"},
    "per block, no smoothing": SAGEBWD | {"granularity": "block", "smooth_k": False},
    "per block, Q and K smoothed": SAGEBWD | {"granularity": "block", "smooth_q": True},
}
SCALES = ("granularity", "block_q", "block_kv")
WHOLE = "whole"


@dataclass(frozen=True)
class NoiseSettings:
    """Sizes of the sample. batches: pairs of gradients, in `folds` independent parts. sequences: of one batch."""

    batches: int = 32
    sequences: int = 8
    folds: int = 8
    variants: tuple[str, ...] = tuple(VARIANTS)
    seed: int = 0

    def __post_init__(self):
        if self.batches % self.folds or self.batches == self.folds:
            raise ValueError(f"batches: expected at least 2 x {self.folds}, got {self.batches}")


class Moments(NamedTuple):
    """Estimates for random vectors with mean m: |m|^2, its standard error, and the trace of their covariance."""

    square: float
    square_error: float
    trace: float


class Accumulator:
    """Sums of vectors by fold, and of their squares, from which `moments` follow without keeping the vectors."""

    def __init__(self, folds: int, batches: int):
        self.folds, self.batches = folds, batches
        self.sums: list[Tensor | None] = [None] * folds
        self.squares = 0.0

    def add(self, batch: int, vector: Tensor) -> None:
        fold = batch % self.folds
        self.sums[fold] = vector.clone() if self.sums[fold] is None else self.sums[fold].add_(vector)
        self.squares += vector.double().square().sum().item()

    def moments(self) -> Moments:
        """Estimate |m|^2 by the mean product of the means of two different folds: their noise is independent.

        Its standard error is the jackknife's, leaving out one fold at a time. The trace is the sample variance.
        """
        means = torch.stack(self.sums) / (self.batches // self.folds)  # [folds, parameters]
        products = (means.double() @ means.double().mT).cpu()
        square = _mean_off_diagonal(products)
        others = [[f for f in range(self.folds) if f != left_out] for left_out in range(self.folds)]
        left = torch.tensor([_mean_off_diagonal(products[kept][:, kept]) for kept in others], dtype=torch.float64)
        error = math.sqrt((self.folds - 1) / self.folds * (left - left.mean()).square().sum().item())
        mean_square = products.mean().item()  # |mean of all|^2
        trace = (self.squares - self.batches * mean_square) / (self.batches - 1)
        return Moments(square, error, trace)


def _mean_off_diagonal(products: Tensor) -> float:
    count = len(products)
    return ((products.sum() - products.trace()) / (count * (count - 1))).item()


def parameter_groups(model: Llama) -> dict[str, list[Tensor]]:
    """Return the parameters that are measured together: in each layer those that make Q and K, and the others.

    The error of dS goes into dQ and dK. They reach Q's and K's projections directly, all else through the residual.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        part, *path = name.split(".")
        group = "embedding and norm"
        if part == "blocks":
            makes_scores = path[1] == "attention" and path[2] in ("query", "key", "qk_norm")
            group = f"layer {path[0]}, {'query and key' if makes_scores else 'other'}"
        groups.setdefault(group, []).append(parameter)
    return groups


def gradient(model: Llama, inputs: Tensor, targets: Tensor, groups: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of one batch, one flat vector per group."""
    parameters = [parameter for group in groups.values() for parameter in group]
    found = iter(torch.autograd.grad(next_token_loss(model, inputs, targets), parameters))
    return {name: torch.cat([next(found).flatten() for _ in group]) for name, group in groups.items()}


def gradient_noise(model: Llama, corpus: Corpus, settings: NoiseSettings) -> list[Row]:
    """Return a row per variant and group of parameters, with sums over each layer and over the whole model.

    noise_scale: tr(Sigma) / |G|^2 in tokens. bias_square: |b|^2 with its standard error. tokens_at_bias: T*, the tokens
    per step at which the bias reaches the noise; None if |b|^2 is not above zero.
    """
    device = model.embedding.weight.device
    groups = parameter_groups(model)
    context = model.config.context
    names = ("exact", *settings.variants)
    sums = {name: {group: Accumulator(settings.folds, settings.batches) for group in groups} for name in names}
    for number in tqdm(range(settings.batches), unit="batch"):
        batch = corpus.batch(settings.sequences, context, seed=settings.seed, step=number)
        batch = [x.to(device) for x in batch]
        with attention_as(model, attention="exact"):
            exact = gradient(model, *batch, groups)
        for group, vector in exact.items():
            sums["exact"][group].add(number, vector)
        for name in settings.variants:
            torch.manual_seed(settings.seed + number)  # the draws of stochastic rounding
            in_bf16 = torch.autocast(device.type, torch.bfloat16) if name == "bf16" else nullcontext()
            with attention_as(model, **VARIANTS[name]), in_bf16:
                quantized = gradient(model, *batch, groups)
            for group, vector in quantized.items():
                sums[name][group].add(number, vector.float() - exact[group])
    moments = {name: with_totals({group: x.moments() for group, x in found.items()}) for name, found in sums.items()}
    tokens = settings.sequences * context
    return [
        noise_row(group, name, moments["exact"][group], moments[name][group], tokens)
        for name, group in itertools.product(settings.variants, moments["exact"])
    ]


def with_totals(moments: dict[str, Moments]) -> dict[str, Moments]:
    """Add the sums over each layer and over the model: squares and traces of disjoint parts add up.

    Standard errors are added as if the parts were independent.
    """
    totals: dict[str, list[Moments]] = {}
    for group, found in moments.items():
        for total in dict.fromkeys((group, group.split(",")[0], WHOLE)):
            totals.setdefault(total, []).append(found)
    columns = {group: list(zip(*parts, strict=True)) for group, parts in totals.items()}
    return {group: Moments(sum(x), math.hypot(*errors), sum(z)) for group, (x, errors, z) in columns.items()}


def noise_row(group: str, variant: str, exact: Moments, error: Moments, tokens: int) -> Row:
    """Return a row. exact and error: moments of gradients over `tokens` tokens each."""
    return {
        "group": group,
        "variant": variant,
        **{name: VARIANTS[variant].get(name) for name in SCALES},  # None where nothing is quantised
        "gradient_square": exact.square,
        "noise_trace": exact.trace * tokens,
        "noise_scale": exact.trace * tokens / exact.square if exact.square > 0 else None,
        "bias_square": error.square,
        "bias_square_error": error.square_error,
        "variance_trace": error.trace * tokens,
        "tokens_at_bias": exact.trace * tokens / error.square if error.square > 0 else None,
    }


def checkpoint_rows(checkpoint: Path, corpus: Corpus, settings: NoiseSettings, device: str) -> list[Row]:
    """Return `gradient_noise` of a checkpoint; its rows also have its step, its training and the shape of its model.

    Raises ValueError if the checkpoint was trained on another corpus.
    """
    model, arguments = load_model(checkpoint, device, corpus)
    names = ("step", "qk_norm", "attention", "seed", "layers", "width", "heads")
    facts = {name: arguments[name] for name in names}
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    facts["tokens_per_step"] = arguments["batch_size"] * arguments["context"]
    train_corpus, _ = corpus.split(VALIDATION_SHARE)
    return [facts | row for row in gradient_noise(model, train_corpus, settings)]


def noise_table(rows: Sequence[Row]) -> str:
    """Return a table of the layers and the whole model."""
    names = ("step", "qk_norm", "group", "variant", "noise_scale", "gradient_square", "bias_square", "tokens_at_bias")
    lines = [
        [f"{row[name]:.3g}" if isinstance(row[name], float) else row[name] for name in names]
        for row in rows
        if "," not in row["group"]
    ]
    return markdown_table(names, lines)


@dataclass(frozen=True)
class NoiseRun(Run):
    """A checkpoint. sha256: of its file."""

    checkpoint: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Noise(Arguments):
    """Measure checkpoints, all on the corpus that they were trained on."""

    checkpoints: Annotated[tuple[Path, ...], POSITIONAL, input_file, "written by `pretrain`"]
    corpus: Annotated[Path | None, input_file, "text, or a .bin file of uint16 tokens"] = None
    batches: Annotated[int, positive, "number of pairs of gradients"] = NoiseSettings.batches
    sequences: Annotated[int, positive, "sequences in a batch"] = NoiseSettings.sequences
    variants: Annotated[tuple[Literal[tuple(VARIANTS)], ...], "of the second gradient"] = tuple(VARIANTS)
    device: Annotated[str, device] = field(default_factory=usual_device)

    def run(self, command: str) -> None:
        settings = NoiseSettings(self.batches, self.sequences, variants=self.variants)
        corpus = read_corpus(self.corpus)
        runs = [NoiseRun(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in self.checkpoints]
        with opened(Plan("noise", runs), Path("runs"), (settings, corpus.sha256, self.device)) as work:
            work.finish(lambda run, _: checkpoint_rows(Path(run.checkpoint), corpus, settings, self.device))
            print(noise_table(work.rows))
            facts = {"corpus": corpus.facts, "settings": asdict(settings)}
            write_record(self.json, work.rows, command=command, **facts)
            work.parts.remove()
