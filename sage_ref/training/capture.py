"""Train a small language model on a CPU, then save what enters and leaves its attention: Q, K, V and dO.

INT8 errors depend on the data. A trained model's has what Gaussian numbers lack: channels with an offset, a few keys
that many queries agree on, and rows of dS that are nearly zero.
"""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from sage_ref.models.llama import Llama, LlamaConfig
from sage_ref.recorded import Row, replaced
from sage_ref.training.corpus import Corpus

TENSORS = ("query", "key", "value", "grad_output")
VALIDATION_SEQUENCES = 8


@dataclass(frozen=True)
class TrainingSettings:
    """AdamW with clipped gradients; the learning rate warms up linearly, then follows a cosine to a tenth of its peak.

    report_every: steps from one validation loss and checkpoint to the next.
    """

    steps: int
    batch_size: int = 4
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    report_every: int = 25
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "report_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def learning_rate_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class ResumableTraining(ABC):
    """A model in training: all that a checkpoint holds. Whoever inherits says what the loss of a step is.

    Weights are drawn from settings.seed, every batch is a function of (seed, step), and nothing else is random: the
    step number is the state of the random numbers. So a resumed run equals an uninterrupted one bit for bit, given
    the same machine and number of threads. arguments: what else makes two runs the same run.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        settings: TrainingSettings,
        arguments: dict[str, Any],
        device: torch.device | str = "cpu",
    ):
        self.arguments = arguments | asdict(settings)
        self.settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = build().to(device)
        matrices = [x for x in self.model.parameters() if x.dim() > 1]
        gains = [x for x in self.model.parameters() if x.dim() == 1]
        groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
        self.step = 0
        self.seconds = 0.0
        self.losses: list[Row] = []

    @abstractmethod
    def step_loss(self) -> Tensor:
        """The loss of the batch of step `self.step`."""

    @abstractmethod
    def validation_loss(self) -> float:
        """The loss of a few examples that are never trained on, the same at every call."""

    def advance(self) -> float:
        """One step of training; returns its loss. Raises RuntimeError if a gradient is not finite."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step)
        loss = self.step_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - started
        return loss.item()

    @torch.no_grad()
    def report(self, train_losses: Sequence[float]) -> Row:
        """The mean of the training losses since the last report, and the validation loss."""
        train_loss = mean(train_losses) if train_losses else None
        self.losses.append({"step": self.step, "train_loss": train_loss, "validation_loss": self.validation_loss()})
        return self.losses[-1]

    def save(self, checkpoint: Path) -> None:
        state = {"arguments": self.arguments, "step": self.step, "seconds": self.seconds, "losses": self.losses}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with replaced(checkpoint) as temporary:
            torch.save(state, temporary)

    def load(self, checkpoint: Path) -> None:
        """Go on where `checkpoint` was saved; ValueError if that was a run with other arguments."""
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
        for name, value in self.arguments.items():
            if (found := state["arguments"].get(name)) != value:
                raise ValueError(
                    f"checkpoint: expected a run with {name}={value}, {checkpoint} has {name}={found}: "
                    "remove that file or name another"
                )
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Training(ResumableTraining):
    """A Llama that learns to predict the next token of a corpus, whose tail is kept for validation."""

    def __init__(self, corpus: Corpus, config: LlamaConfig, settings: TrainingSettings):
        super().__init__(lambda: Llama(config), settings, {"corpus_sha256": corpus.sha256} | asdict(config))
        self.config = config
        self.train_corpus, self.validation_corpus = corpus.split()

    def step_loss(self) -> Tensor:
        settings = self.settings
        batch = self.train_corpus.batch(settings.batch_size, self.config.context, seed=settings.seed, step=self.step)
        return next_token_loss(self.model, *batch)

    def validation_loss(self) -> float:
        batch = self.validation_corpus.batch(VALIDATION_SEQUENCES, self.config.context, seed=0, step=0)
        return next_token_loss(self.model, *batch).item()


class Capture(NamedTuple):
    """layers: layer number (from 0) -> {"query", "key", "value"}, and "grad_output" if kept; bfloat16 [B, H, N, D]."""

    provenance: dict[str, Any]
    layers: dict[int, dict[str, Tensor]]


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, mean over all tokens of the batch: dO and what follows shrink as 1/(B N)."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(training: ResumableTraining, checkpoint: Path) -> None:
    """To the last step, from `checkpoint` if it exists, writing it every settings.report_every steps."""
    if checkpoint.exists():
        training.load(checkpoint)
        print(f"goes on from step {training.step} in {checkpoint}")
    else:
        print("step 0: validation loss {validation_loss:.3f}".format(**training.report([])))
    total, losses = training.settings.steps, []
    with tqdm(total=total, initial=training.step, unit="step") as bar:
        while training.step < total:
            losses.append(training.advance())
            bar.update()
            if training.step % training.settings.report_every == 0 or training.step == total:
                row = training.report(losses)
                training.save(checkpoint)
                losses = []
                bar.write("step {step}: train loss {train_loss:.3f}, validation {validation_loss:.3f}".format(**row))


@contextmanager
def watched_attention(
    model: nn.Module, layers: Sequence[int]
) -> Iterator[tuple[dict[int, tuple[Tensor, ...]], dict[int, Tensor]]]:
    """({layer: (Q, K, V)}, {layer: O}) of the attention cores of model.blocks, filled by each pass of the model."""
    inputs, outputs = {}, {}

    def keep(layer):
        def hook(core, qkv, output):
            inputs[layer], outputs[layer] = qkv, output

        return hook

    hooks = [model.blocks[layer].attention.core.register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield inputs, outputs
    finally:
        for hook in hooks:
            hook.remove()


def attention_tensors(
    model: Llama, inputs: Tensor, targets: Tensor, layers: Sequence[int]
) -> tuple[float, dict[int, dict[str, Tensor]]]:
    """The loss of one batch, and Q, K, V, dO of each layer's attention, all [B, H, N, D] in the model's dtype.

    Q and K are those that are multiplied: after QK-norm and rotation. Under grouped-query attention K and V are
    repeated for every query head that reads them. dO is the gradient of `next_token_loss`.
    """
    with watched_attention(model, layers) as (inputs_of, outputs):
        loss = next_token_loss(model, inputs, targets)
    grad_outputs = torch.autograd.grad(loss, [outputs[layer] for layer in layers])
    groups = model.config.heads // model.config.kv_heads
    tensors = {}
    for layer, do in zip(layers, grad_outputs, strict=True):
        q, k, v = (x.detach() for x in inputs_of[layer])
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        tensors[layer] = dict(zip(TENSORS, (q, k, v, do), strict=True))
    return loss.item(), tensors


def write_capture(path: Path, capture: Capture) -> None:
    """safetensors: tensors "layer2.query" and so on in bfloat16, and the provenance as JSON in the metadata."""
    tensors = {
        f"layer{layer}.{name}": x.to(torch.bfloat16).contiguous()
        for layer, named in capture.layers.items()
        for name, x in named.items()
    }
    with replaced(path) as temporary:
        temporary.write_bytes(save(tensors, metadata={"provenance": json.dumps(capture.provenance)}))


def read_capture(path: Path) -> Capture:
    """What `write_capture` wrote. FileNotFoundError if there is no file, ValueError if it is no capture."""
    if not Path(path).exists():
        raise FileNotFoundError(
            f"path: expected a capture at {path}, found none; `python -m sage_ref capture` makes one"
        )
    layers: dict[int, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "provenance" not in metadata:
            raise ValueError(f"path: expected a capture with provenance in its metadata, got {path}")
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            layer, tensor = name.removeprefix("layer").split(".")
            layers.setdefault(int(layer), {})[tensor] = file.get_tensor(name)
    return Capture(json.loads(metadata["provenance"]), dict(sorted(layers.items())))
