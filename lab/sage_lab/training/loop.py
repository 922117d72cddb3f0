"""A training run that can be killed: everything a checkpoint holds, and the loop that writes one now and then."""

import io
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from sage_lab.records import Row, only_writer, remove_leftovers, replaced


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


class Diverged(RuntimeError):
    """The run is over: a loss or a gradient is not finite, or the model has become worse than guessing."""


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
        self.optimizer = torch.optim.AdamW(
            self.parameter_groups(), betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.step = 0
        self.seconds = 0.0
        self.losses: list[Row] = []

    def parameter_groups(self) -> list[dict[str, Any]]:
        """AdamW's. A group with a "rate_factor" learns that many times as fast as the others."""
        matrices = [x for x in self.model.parameters() if x.dim() > 1]
        gains = [x for x in self.model.parameters() if x.dim() == 1]
        return [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]

    @abstractmethod
    def accumulate_gradients(self) -> Tensor:
        """Add the gradients of the loss of step `self.step` to the parameters'; returns that loss."""

    @abstractmethod
    def validation_loss(self) -> float:
        """The loss of a few examples that are never trained on, the same at every call."""

    def advance(self) -> float:
        """One step of training; returns its loss. Raises `Diverged` if a gradient is not finite."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step) * group.get("rate_factor", 1.0)
        loss = self.accumulate_gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(self.gradient_norm):
            raise Diverged(f"the gradient of step {self.step} is not finite")
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

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        state = {"arguments": self.arguments, "step": self.step, "seconds": self.seconds, "losses": self.losses}
        return state | self.weights()

    def weights(self) -> dict[str, Any]:
        """The model's weights and the optimizer's averages."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        self.restore_weights(state)

    def restore_weights(self, state: dict[str, Any]) -> None:
        """The reverse of `weights`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, checkpoint: Path) -> None:
        """In one step; what earlier saves left half written, because the run was killed, is removed."""
        state = self.state()
        remove_leftovers(checkpoint)
        # Into memory first: torch calls a file back from C++, and there Ctrl-C or a full disk may end the process.
        checkpoint_bytes = io.BytesIO()
        torch.save(state, checkpoint_bytes)
        with replaced(checkpoint) as temporary:
            temporary.write_bytes(checkpoint_bytes.getbuffer())

    def load(self, checkpoint: Path) -> None:
        """Go on where `checkpoint` was saved; ValueError if that was a run with other arguments."""
        state = read_checkpoint(checkpoint)
        for name, value in self.arguments.items():
            if (found := state["arguments"].get(name)) != value:
                raise ValueError(
                    f"checkpoint: expected a run with {name}={value}, {checkpoint} has {name}={found}: "
                    "remove that file or name another"
                )
        if state["step"] > self.settings.steps:
            raise ValueError(
                f"checkpoint: expected at most step {self.settings.steps}, {checkpoint} has {state['step']}"
            )
        self.restore(state)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `ResumableTraining.save` wrote. ValueError if the file is something else, or was cut off."""
    path.open("rb").close()  # an OSError if it isn't there
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # zip, pickle and torch have many ways to say it
        state = None
    parts = {"arguments": dict, "step": int, "losses": list, "model": dict, "optimizer": dict}
    is_whole = isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in parts.items())
    if not is_whole or state["step"] < 0:
        raise ValueError(f"checkpoint: expected one that a run saved, whole, got {path}: name another file")
    return state


def train(training: ResumableTraining, checkpoint: Path) -> None:
    """To the last step, from `checkpoint` if it exists, writing it every settings.report_every steps."""
    with only_writer(checkpoint):
        _train(training, checkpoint)


def _train(training: ResumableTraining, checkpoint: Path) -> None:
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
