"""Training on a fixed corpus that is each batch: without gradient noise, runs differ by their attention alone.

The gradient of a step is then G + b: the corpus's gradient G plus the error b of the attention in use. Both are known
along the run, since exact attention in float32 computes G at the same weights. The noise of smaller batches is known,
too: passes over parts of the corpus differ by it. A run therefore measures without sampling what `python -m sage_lab
noise` estimates: |b|^2, tr(Sigma), and the tokens per batch T* = tr(Sigma) / |b|^2 where they meet.

With batch_size below the number of sequences, a batch has that many, drawn without replacement. Their mean has noise
tr(Sigma) (1/T - 1/T_all), which reaches |b|^2 already at T = T* T_all / (T* + T_all).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.records import Row
from sage_lab.training.corpus import Corpus
from sage_lab.training.loop import Diverged, ResumableTraining, TrainingSettings

# Columns of a curve: what each report says.
CURVE = (
    *("step", "train_loss", "exact_loss", "validation_loss", "gradient_norm", "gradient_error"),
    *("score_gradient_error", "value_offset", "bias_square", "noise_trace"),
)


@dataclass(frozen=True)
class FullBatchSettings(TrainingSettings):
    """Settings of a run. sequences: of the corpus. batch_size: those of a step; if all, always in the same order.

    micro_batch_size: sequences of one pass; it divides both. attention_in_bfloat16: attention gets Q, K, V and dO in 16
    bit; all else is float32. random_error: of each weight's gradient, added in every step: normal numbers whose norm is
    this share of the gradient's. compile: hand the reference's attention to torch.compile.
    """

    sequences: int = 256
    micro_batch_size: int = 32
    validation_sequences: int = 32
    attention_in_bfloat16: bool = False
    random_error: float = 0.0
    compile: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.check_whole_passes("sequences")


class InBfloat16(nn.Module):
    """An attention core between two roundings: forward(q, k, v) in float32, computed in bfloat16."""

    takes_prologue = False

    def __init__(self, core: nn.Module):
        super().__init__()
        self.core = core

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.core(query.bfloat16(), key.bfloat16(), value.bfloat16()).to(query.dtype)


class CorpusGradient(NamedTuple):
    """The corpus's mean loss and its gradient, mean [parameters].

    noise_trace: tr(Sigma), the variance of the gradient of one token, from that among passes; None if there is but one.
    """

    loss: float
    mean: Tensor
    noise_trace: float | None


def windows(corpus: Corpus, first: int, count: int, context: int) -> Tensor:
    """Cut int64 [count, context + 1] from token `first` on: sequences, each with the token that follows it."""
    end = first + count * context + 1
    if len(corpus.tokens) < end:
        raise ValueError(f"corpus: expected at least {end} tokens, {corpus.name} has {len(corpus.tokens)}")
    return corpus.tokens[first:end].long().unfold(0, context + 1, context)


class FullBatchTraining(ResumableTraining):
    """A Llama that learns a fixed corpus: the first `settings.sequences` windows, in an order drawn once.

    Windows behind them are for validation. config: with fused_prologue=False, so that every attention is given the same
    Q and K.
    """

    def __init__(
        self, corpus: Corpus, config: LlamaConfig, settings: FullBatchSettings, device: torch.device | str = "cpu"
    ):
        self.config = config
        super().__init__(
            build_of(config, settings), settings, {"corpus_sha256": corpus.sha256} | asdict(config), device
        )
        found = windows(corpus, 0, settings.sequences, config.context)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
        self.sequences = found[order].to(self.device)
        behind = settings.sequences * config.context
        self.validation = windows(corpus, behind, settings.validation_sequences, config.context).to(self.device)
        self.truth = Llama(replace(config, attention="exact")).to(self.device)  # lends its forward, not its weights

    def accumulate_gradients(self) -> Tensor:
        loss = super().accumulate_gradients()
        if share := self.settings.random_error:
            for weight in self.model.parameters():
                noise = torch.randn_like(weight)
                weight.grad += noise * (share * weight.grad.norm() / noise.norm())
        return loss

    def chosen(self) -> Tensor | slice:
        """Return the places of the sequences that step `self.step` sees."""
        settings = self.settings
        if settings.batch_size == settings.sequences:
            return slice(None)
        drawn = np.random.default_rng((settings.seed, self.step)).permutation(settings.sequences)
        return torch.from_numpy(drawn[: settings.batch_size]).to(self.device)

    def passes(self) -> list[tuple[Tensor]]:
        return [(part,) for part in self.parts(self.sequences[self.chosen()])]

    def parts(self, sequences: Tensor) -> tuple[Tensor, ...]:
        return sequences.split(self.settings.micro_batch_size)

    def loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss of sequences [B, context + 1], with the attention in use."""
        in_16_bit = self.settings.attention_in_bfloat16
        with nullcontext() if in_16_bit else sdpa_kernel(SDPBackend.MATH):
            return token_loss(self.model(sequences[:, :-1]), sequences)

    def exact_loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss with exact attention in float32, at the same weights."""
        with sdpa_kernel(SDPBackend.MATH):
            weights = dict(self.model.named_parameters())
            return token_loss(functional_call(self.truth, weights, (sequences[:, :-1],)), sequences)

    def corpus_gradient(self, loss_of: Callable[[Tensor], Tensor]) -> CorpusGradient:
        parameters = list(self.model.parameters())
        total, losses, squares = 0, [], []
        for part in self.parts(self.sequences):
            loss = loss_of(part)
            gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)]).double()
            total = total + gradient
            losses.append(loss.item())
            squares.append(gradient.square().sum().item())
        count = len(losses)
        mean = total / count
        trace = None
        if count > 1:
            tokens = self.settings.micro_batch_size * self.config.context
            trace = tokens * (sum(squares) - count * mean.square().sum().item()) / (count - 1)
        return CorpusGradient(sum(losses) / count, mean, trace)

    def validation_loss(self) -> float:
        losses = [self.loss(part) * len(part) for part in self.parts(self.validation)]
        return (sum(losses) / len(self.validation)).item()

    def report(self, train_losses: Sequence[float]) -> Row:
        """Add to the base's row how the whole corpus's gradient with this attention differs from exact attention's."""
        self.seed_draws()
        row = super().report(train_losses)
        exact, found = self.corpus_gradient(self.exact_loss), self.corpus_gradient(self.loss)
        error, scores = found.mean - exact.mean, self.makes_scores()
        row["exact_loss"] = exact.loss
        row["gradient_norm"] = exact.mean.norm().item()
        row["gradient_error"] = (error.norm() / exact.mean.norm()).item()
        row["score_gradient_error"] = (error[scores].norm() / exact.mean[scores].norm()).item()
        row["value_offset"] = self.value_offset()
        row["bias_square"] = error.square().sum().item()
        row["noise_trace"] = exact.noise_trace
        if not math.isfinite(exact.loss):
            self.losses.pop()
            raise Diverged(f"the loss after step {self.step} is not finite")
        return row

    def value_offset(self) -> float:
        """Return the largest share of a layer's |V|^2 that is its mean over tokens, for the first sequence.

        Near 1, all values are nearly the same vector, and delta is nearly dP: dS is a small difference.
        """
        shares: list[float] = []

        def measure(_, inputs, value: Tensor) -> None:
            square = value.double().square().sum(-1).mean()  # value [1, N, width]
            shares.append((value.double().mean(-2).square().sum() / square).item())

        hooks = [block.attention.value.register_forward_hook(measure) for block in self.truth.blocks]
        try:
            self.exact_loss(self.sequences[:1])
        finally:
            for hook in hooks:
                hook.remove()
        return max(shares)

    def makes_scores(self) -> Tensor:
        """Return bool [parameters]: the weights that make Q and K, which the errors of dS reach first."""
        makers = ("attention.query.", "attention.key.", "attention.qk_norm.")
        parts = [
            torch.full((x.numel(),), any(maker in name for maker in makers), device=self.device)
            for name, x in self.model.named_parameters()
        ]
        return torch.cat(parts)

    @property
    def curve(self) -> list[list[float | None]]:
        """A row of `CURVE` for every report."""
        return [[row.get(name) for name in CURVE] for row in self.losses]


def is_simulated(config: LlamaConfig) -> bool:
    """Return whether SageBwd is computed by the reference, which torch.compile can make faster."""
    return config.attention == "sagebwd" and config.backend == "reference"


def build_of(config: LlamaConfig, settings: FullBatchSettings) -> Callable[[], Llama]:
    def build() -> Llama:
        model = Llama(config)
        for block in model.blocks:
            if settings.compile and is_simulated(config):
                block.attention.core.compile(dynamic=False)
            if settings.attention_in_bfloat16:
                block.attention.core = InBfloat16(block.attention.core)
        return model

    return build


def token_loss(logits: Tensor, sequences: Tensor) -> Tensor:
    """Return the cross-entropy in nats of the tokens that follow."""
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
