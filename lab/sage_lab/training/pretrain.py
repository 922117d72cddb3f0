"""Pre-training of the Llama, with batches of any size, whose gradients are accumulated over several passes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.records import Row
from sage_lab.training.capture import next_token_loss
from sage_lab.training.loop import Diverged, ResumableTraining, TrainingSettings, read_checkpoint
from sage_lab.training.probe import probe
from sage_lab.training.processes import ALONE, Processes
from sage_lab.training.tokens import Corpus

VALIDATION_SHARE = 0.02


@dataclass(frozen=True)
class PretrainSettings(TrainingSettings):
    """Sequences are the examples of a step.

    autocast: run the matmuls in bfloat16; weights, their gradients and AdamW's averages stay in float32.
    compiled: compile the forward and backward pass of training; validation and probes run as written.
    probe_sequences: at every report, measure the error of the gradient on so many sequences that are held out
    (`probe`); 0: never.
    same_batch: every step reads the batch of the first, so that gradients have no noise and runs differ by bias alone.
    """

    micro_batch_size: int = 8
    validation_sequences: int = 64
    autocast: bool = False
    compiled: bool = False
    probe_sequences: int = 0
    same_batch: bool = False


class TokenLoss(nn.Module):
    """A model with its loss, so that both are compiled, or spread over processes, as one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, inputs, targets)


class Pretraining(ResumableTraining):
    """A Llama that learns to predict the next token of a corpus. What the corpus holds out validates."""

    def __init__(
        self,
        corpus: Corpus,
        config: LlamaConfig,
        settings: PretrainSettings,
        device: torch.device | str = "cpu",
        processes: Processes = ALONE,
    ):
        self.config = config
        arguments = arguments_of(config, settings, corpus)
        super().__init__(lambda: Llama(config), settings, arguments, device, processes)
        if settings.batch_size // settings.micro_batch_size % processes.count:
            passes = f"passes for each of {processes.count} processes"
            raise ValueError(f"batch_size: expected {passes}, got {settings.batch_size} sequences")
        self.train_corpus, self.validation_corpus = corpus.split(VALIDATION_SHARE)
        self.token_loss = TokenLoss(self.model)
        if settings.compiled:
            self.token_loss.compile(dynamic=False)
        if processes.count > 1:
            self.spread = DistributedDataParallel(self.token_loss, gradient_as_bucket_view=True)
        self.probes: list[Row] = []

    def passes(self) -> list[tuple[Tensor, ...]]:
        settings = self.settings
        step = 0 if settings.same_batch else self.step
        batch = self.train_corpus.batch(settings.batch_size, self.config.context, seed=settings.seed, step=step)
        passes = list(zip(*(x.split(settings.micro_batch_size) for x in batch), strict=True))
        return passes[self.processes.rank :: self.processes.count]

    @property
    def tokens_per_step(self) -> int:
        return self.settings.batch_size * self.config.context

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.autocast)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            return (self.spread or self.token_loss)(inputs.to(self.device), targets.to(self.device))

    def validation_batch(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Return held-out sequences, always the same."""
        batch = self.validation_corpus.batch(sequences, self.config.context, seed=0, step=0)
        inputs, targets = (x.to(self.device) for x in batch)
        return inputs, targets

    def validation_loss(self) -> float:
        settings, total = self.settings, 0.0
        batch = self.validation_batch(settings.validation_sequences)
        for inputs, targets in zip(*(x.split(settings.micro_batch_size) for x in batch), strict=True):
            with self.autocast():
                total += next_token_loss(self.model, inputs, targets).item() * len(inputs)
        return total / settings.validation_sequences

    def report(self, train_losses: Sequence[float]) -> Row:
        """Return the base's row, and probe the gradients if asked for.

        Raises `Diverged` as well if the training loss since the last report is above that of guessing, ln(vocabulary).
        The first steps and the warm-up are not judged: a model that has learned nothing yet may well be worse.
        """
        since = self.losses[-1]["step"] if self.losses else 0
        row = super().report(train_losses)
        if self.settings.probe_sequences:
            batch = self.validation_batch(self.settings.probe_sequences)
            self.probes.append({"step": self.step} | probe(self.model, batch, self.autocast))
        guessing = math.log(self.config.vocab_size)
        if since >= max(1, self.settings.warmup_steps) and row["train_loss"] > guessing:
            raise Diverged(
                f"the loss before step {self.step} is {row['train_loss']:.3f}, that of guessing {guessing:.3f}"
            )
        return row

    HISTORY = (*ResumableTraining.HISTORY, "probes")


def arguments_of(config: LlamaConfig, settings: PretrainSettings, corpus: Corpus) -> dict[str, Any]:
    """Return all that makes two runs the same run."""
    return {"corpus_sha256": corpus.sha256} | asdict(config) | asdict(settings)


def parameters(training: Pretraining) -> int:
    return sum(x.numel() for x in training.model.parameters())


def attention_facts(config: LlamaConfig) -> Row:
    """Return the columns that say which attention a model has; those of SageBwd alone are None for exact attention."""
    smoothing = "".join(name for name, on in (("q", config.smooth_q), ("k", config.smooth_k)) if on) or "none"
    names = ("attention", "backend", "qk_norm", "smoothing")
    names += ("granularity", "block_q", "block_kv", "ds_rounding", "remedy")
    facts = {name: smoothing if name == "smoothing" else getattr(config, name) for name in names}
    if config.attention == "exact":
        facts |= {name: None for name in names if name not in ("attention", "qk_norm")}
    return facts


def result_row(training: Pretraining) -> Row:
    """Return a run's row in a record. curve: [tokens, validation loss] at every report."""
    settings = training.settings
    return {
        **attention_facts(training.config),
        "tokens_per_step": training.tokens_per_step,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "steps": training.step,
        "tokens": training.step * training.tokens_per_step,
        "final_val_loss": None if training.diverged else training.losses[-1]["validation_loss"],
        "diverged": training.diverged,
        "parameters": parameters(training),
        "devices": training.processes.count,
        "arguments": training.arguments,
        "seconds": round(training.seconds, 2),
        "step_losses": [round(loss, 5) for loss in training.step_losses],
        "gradient_norms": [float(f"{norm:.4g}") for norm in training.gradient_norms],
        "probes": training.probes,
        "curve": [[row["step"] * training.tokens_per_step, row["validation_loss"]] for row in training.losses],
    }


def load_model(
    checkpoint: Path, device: torch.device | str = "cpu", corpus: Corpus | None = None
) -> tuple[Llama, dict[str, Any]]:
    """Return the model that `pretrain` saved, and the arguments of its run.

    Raises ValueError if the file is not a checkpoint of a language model, or of one trained on another corpus.
    """
    state = read_checkpoint(checkpoint)
    arguments = state["arguments"]
    names = {field.name for field in fields(LlamaConfig)}
    if "vocab_size" not in arguments:
        raise ValueError(f"checkpoint: expected one of `python -m sage_lab pretrain`, {checkpoint} has other sizes")
    if corpus and arguments["corpus_sha256"] != corpus.sha256:
        raise ValueError(f"corpus: expected that of {checkpoint}, got {corpus.name}, sha256 {corpus.sha256}")
    # A choice that an older checkpoint doesn't know, or left open as None, is the default.
    model = Llama(LlamaConfig(**{k: x for k, x in arguments.items() if k in names and x is not None}))
    model.load_state_dict(state["model"])
    return model.to(device), arguments | {"step": state["step"]}
