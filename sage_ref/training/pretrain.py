"""Pre-train the Llama: gradient accumulation up to a number of tokens per step, one device or many, killed and resumed.

Which sequences a step reads is a function of (seed, step). The processes that torchrun starts deal them out among
themselves, and each works through its share in passes of `micro_batch_size`. So the number of devices and the size of a
pass change the order of a sum, and nothing else.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from sage_ref.models.llama import Llama, LlamaConfig
from sage_ref.records import Row, only_writer, replaced
from sage_ref.training.capture import attention_errors, attention_tensors, next_token_loss
from sage_ref.training.corpus import Corpus
from sage_ref.training.loop import Diverged, ResumableTraining, TrainingSettings, read_checkpoint

VALIDATION_SHARE = 0.02
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class PretrainSettings(TrainingSettings):
    """batch_size: sequences per step, over all processes. micro_batch_size: sequences in one pass of one process.

    autocast: run the matmuls in bfloat16; weights, their gradients and AdamW's averages stay in float32.
    compile: hand the model to torch.compile.
    """

    micro_batch_size: int = 8
    validation_sequences: int = 64
    autocast: bool = False
    compile: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("micro_batch_size", "validation_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


class Processes(NamedTuple):
    """This process's place among those that train one model together."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The group that torchrun started; without torchrun, this process alone. device: "cpu" or "cuda"."""
    if "RANK" not in os.environ:
        yield Processes(device=torch.device(device))
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()


class Pretraining(ResumableTraining):
    """A Llama that learns to predict the next token of a corpus, whose tail is kept for validation.

    fsdp: every process keeps a part of the weights and of AdamW's averages (FSDP) instead of all of them (DDP).
    trace: at every report, measure the error that SageBwd makes, or would make, in each layer (`traces`).
    Raises ValueError if the processes and passes don't divide the sequences of a step.
    """

    def __init__(
        self,
        corpus: Corpus,
        config: LlamaConfig,
        settings: PretrainSettings,
        processes: Processes = Processes(),  # noqa: B008 (immutable)
        *,
        fsdp: bool = False,
        trace: bool = False,
    ):
        if settings.batch_size % (processes.count * settings.micro_batch_size):
            passes = f"passes of {settings.micro_batch_size} sequences in each of {processes.count} processes"
            raise ValueError(f"batch_size: expected a multiple of {passes}, got {settings.batch_size}")
        if (fsdp and processes.count == 1) or (trace and processes.count > 1):
            raise ValueError(
                f"fsdp, trace: expected fsdp with several processes, trace with one, got {processes.count}"
            )
        self.config, self.processes, self.fsdp, self.trace = config, processes, fsdp, trace
        identity = {"corpus_sha256": corpus.sha256} | asdict(config)
        super().__init__(self.build, settings, identity, processes.device)
        self.train_corpus, self.validation_corpus = corpus.split(VALIDATION_SHARE)
        self.parallel = torch.compile(self.model) if settings.compile else self.model
        if processes.count > 1 and not fsdp:
            self.parallel = DistributedDataParallel(self.parallel)
        self.diverged: str | None = None
        self.traces: list[Row] = []

    def build(self) -> nn.Module:
        model = Llama(self.config).to(self.processes.device)
        if self.fsdp:
            for part in (*model.blocks, model):
                fully_shard(part)
        return model

    def accumulate_gradients(self) -> Tensor:
        settings, group = self.settings, self.processes
        # Stochastic rounding draws from the global generator: a function of the step, too.
        torch.manual_seed(int(np.random.SeedSequence((settings.seed, self.step, group.rank)).generate_state(1)[0]))
        batch = self.train_corpus.batch(settings.batch_size, self.config.context, seed=settings.seed, step=self.step)
        mine = (x[group.rank :: group.count].split(settings.micro_batch_size) for x in batch)
        passes = list(zip(*mine, strict=True))
        total = torch.zeros((), device=group.device)
        for number, (inputs, targets) in enumerate(passes, start=1):
            with self.gradients_shared(number == len(passes)):
                loss = self.loss(inputs, targets) / len(passes)
                loss.backward()
            total += loss.detach()
        if group.count > 1:
            dist.all_reduce(total)
        total /= group.count
        if not total.isfinite():
            raise Diverged(f"the loss of step {self.step} is not finite")
        return total

    @property
    def tokens_per_step(self) -> int:
        return self.settings.batch_size * self.config.context

    @contextmanager
    def gradients_shared(self, now: bool) -> Iterator[None]:
        """Average the gradients over the processes in this backward pass, or leave it to a later one."""
        if self.fsdp:
            self.model.set_requires_gradient_sync(now)
        is_copied = isinstance(self.parallel, DistributedDataParallel)
        with self.parallel.no_sync() if is_copied and not now else nullcontext():
            yield

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        device = self.processes.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.autocast):
            return next_token_loss(self.parallel, inputs.to(device), targets.to(device))

    def validation_loss(self) -> float:
        settings = self.settings
        batch = self.validation_corpus.batch(settings.validation_sequences, self.config.context, seed=0, step=0)
        passes = zip(*(x.split(settings.micro_batch_size) for x in batch), strict=True)
        losses = [self.loss(inputs, targets) * len(inputs) for inputs, targets in passes]
        return (sum(losses) / settings.validation_sequences).item()

    def report(self, train_losses: Sequence[float]) -> Row:
        """The base's row, and the errors of every layer's attention if asked for.

        Raises `Diverged` if the validation loss is not finite, or if the training loss since the last report is above
        that of guessing, ln(vocabulary). The first steps, and those of the warm-up, are not judged by that: a model
        that has learned nothing yet may well be worse than guessing.
        """
        since = self.losses[-1]["step"] if self.losses else 0
        row = super().report(train_losses)
        if not math.isfinite(row["validation_loss"]):
            raise Diverged(f"the validation loss after step {self.step} is not finite")
        if self.trace:
            self.traces += [{"step": self.step} | error for error in self.attention_errors()]
        guessing = math.log(self.config.vocab_size)
        if since >= max(1, self.settings.warmup_steps) and row["train_loss"] > guessing:
            raise Diverged(
                f"the loss before step {self.step} is {row['train_loss']:.3f}, that of guessing {guessing:.3f}"
            )
        return row

    def attention_errors(self) -> list[Row]:
        """Of every layer, on one validation sequence."""
        device = self.processes.device
        batch = (x.to(device) for x in self.validation_corpus.batch(1, self.config.context, seed=0, step=0))
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self.settings.autocast):
            _, captured = attention_tensors(self.model, *batch, range(self.config.layers))
        return attention_errors(captured, self.config.reference_settings)

    def state(self) -> dict[str, Any]:
        return super().state() | {"diverged": self.diverged, "traces": self.traces}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.diverged, self.traces = state["diverged"], state["traces"]

    def weights(self) -> dict[str, Any]:
        """Whole, also where every process keeps a part: a checkpoint fits any number of processes."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        return {"model": model, "optimizer": optimizer}

    def restore_weights(self, state: dict[str, Any]) -> None:
        weights = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **weights, options=WHOLE)

    def save(self, checkpoint: Path) -> None:
        if self.processes.is_first:
            super().save(checkpoint)
        elif self.fsdp:
            self.state()  # to the first process, which writes it


class Log:
    """JSON lines on disk, each there as soon as it is written. A resumed run takes back those after its checkpoint.

    last_step, diverged: of the checkpoint.
    """

    def __init__(self, path: Path, last_step: int, diverged: str | None):
        self.path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A kill may have left half a line, and it is the last one: its step was after the checkpoint.
        rows = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        # A step that diverges has the number of the one before it, which the checkpoint may be of.
        kept = [line for line, row in rows if row["step"] <= last_step and row.get("diverged") in (None, diverged)]
        with replaced(path) as temporary:
            temporary.write_text("".join(kept))

    def write(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class NoLog:
    """For all processes but the first."""

    def write(self, row: Row) -> None:
        """The first process writes the same row."""


def pretrain(training: Pretraining, checkpoint: Path, log_path: Path, snapshots: Sequence[int] = ()) -> None:
    """To the last step or to divergence, from `checkpoint` if it exists.

    log_path: JSON lines, one per step and one per report. checkpoint: written at every report. snapshots: steps whose
    checkpoint is kept beside it (`snapshot_path`).
    """
    with only_writer(checkpoint) if training.processes.is_first else nullcontext():
        _pretrain(training, checkpoint, log_path, snapshots)


def _pretrain(training: Pretraining, checkpoint: Path, log_path: Path, snapshots: Sequence[int]) -> None:
    settings, is_first = training.settings, training.processes.is_first
    is_new = not checkpoint.exists()
    if not is_new:
        training.load(checkpoint)
    log = Log(log_path, -1 if is_new else training.step, training.diverged) if is_first else NoLog()
    if is_new:
        log.write(training.report([]))
    losses = []
    with tqdm(total=settings.steps, initial=training.step, unit="step", disable=not is_first) as bar:
        while training.step < settings.steps and training.diverged is None:
            try:
                losses.append(training.advance())
                log.write(step_row(training, losses[-1]))
                bar.update()
                is_due = training.step % settings.report_every == 0 or training.step == settings.steps
                if is_due:
                    log.write(training.report(losses))
                    losses = []
                    bar.set_postfix_str("validation {validation_loss:.3f}".format(**training.losses[-1]))
            except Diverged as reason:
                training.diverged, is_due = str(reason), True
                log.write({"step": training.step, "diverged": training.diverged})
            # The snapshot first: a run killed between the two would not come back to it.
            if training.step in snapshots:
                training.save(snapshot_path(checkpoint, training.step))
            if is_due:
                training.save(checkpoint)


def step_row(training: Pretraining, loss: float) -> Row:
    tokens = training.step * training.tokens_per_step
    rate = training.optimizer.param_groups[0]["lr"]
    row = {"step": training.step, "tokens": tokens, "loss": loss, "gradient_norm": training.gradient_norm}
    return row | {"learning_rate": rate, "seconds": round(training.seconds, 4)}


def result_row(training: Pretraining) -> Row:
    """What became of a run, in one row of a record. curve: [tokens, validation loss] at every report."""
    config, settings = training.config, training.settings
    is_exact = config.attention == "exact"
    smoothing = "".join(name for name, on in (("q", config.smooth_q), ("k", config.smooth_k)) if on) or "none"
    return {
        "attention": config.attention,
        "backend": None if is_exact else config.backend,
        "qk_norm": config.qk_norm,
        "smoothing": None if is_exact else smoothing,
        "granularity": None if is_exact else config.granularity,
        "block_q": None if is_exact else config.block_q,
        "block_kv": None if is_exact else config.block_kv,
        "ds_rounding": None if is_exact else config.ds_rounding,
        "tokens_per_step": training.tokens_per_step,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "steps": training.step,
        "tokens": training.step * training.tokens_per_step,
        "final_val_loss": None if training.diverged else training.losses[-1]["validation_loss"],
        "diverged": training.diverged,
        "devices": training.processes.count,
        "seconds": round(training.seconds, 2),
        "curve": [[row["step"] * training.tokens_per_step, row["validation_loss"]] for row in training.losses],
    }


def snapshot_path(checkpoint: Path, step: int) -> Path:
    """NAME.pt -> NAME_stepS.pt."""
    return checkpoint.with_name(f"{checkpoint.stem}_step{step}{checkpoint.suffix}")


def load_model(checkpoint: Path, device: torch.device | str = "cpu") -> tuple[Llama, dict[str, Any]]:
    """The model that `pretrain` saved, and the arguments of its run. ValueError if the file is no such checkpoint."""
    state = read_checkpoint(checkpoint)
    arguments = state["arguments"]
    names = {field.name for field in fields(LlamaConfig)}
    if "vocab_size" not in arguments:
        raise ValueError(f"checkpoint: expected one of `python -m sage_ref pretrain`, {checkpoint} has another model")
    # A choice that an older checkpoint doesn't know, or left open as None, is the default.
    model = Llama(LlamaConfig(**{k: x for k, x in arguments.items() if k in names and x is not None}))
    model.load_state_dict(state["model"])
    return model.to(device), arguments | {"step": state["step"]}
