"""Training that can be stopped at any time: the contents of a checkpoint, and the loop that writes one now and then.

Weights are drawn from the seed of the settings, the examples of a step are a function of (seed, step), and so are the
draws of stochastic rounding: the step number is the state of the random numbers. So a run that continues from its
checkpoint equals an uninterrupted one bit for bit, given the same machine and number of threads.
"""

import io
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from sage_lab.files import only_writer, remove_leftovers, write_file
from sage_lab.plan import OutOfTime
from sage_lab.records import Row
from sage_lab.training.processes import ALONE, Processes


@dataclass(frozen=True)
class TrainingSettings:
    """AdamW with clipped gradients; the learning rate warms up linearly, then follows a cosine to a tenth of its peak.

    micro_batch_size: examples of one pass, of which a step has as many as it needs; None: all of a step at once.
    report_every: steps from one validation loss and checkpoint to the next.
    """

    steps: int
    batch_size: int = 4
    micro_batch_size: int | None = None
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    report_every: int = 25
    seed: int = 0

    def __post_init__(self):
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            expected = f"a multiple of micro_batch_size={self.micro_batch_size}"
            raise ValueError(f"batch_size: expected {expected}, got {self.batch_size}")

    def learning_rate_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class Diverged(RuntimeError):
    """The run is over: a loss or a gradient is not finite, or the model has become worse than guessing."""


class ResumableTraining(ABC):
    """A model in training. A subclass says which examples a step reads (`passes`), and what their loss is (`loss`).

    arguments: what else makes two runs the same run; a checkpoint of a run with other arguments is refused.
    diverged: why the run ended early, if it did.
    processes: those that train the model together, each with its share of a step's passes. The subclass then makes
    `spread`, which averages their gradients, and the first process alone writes checkpoints.
    """

    HISTORY = ("step", "step_seconds", "step_losses", "gradient_norms", "losses", "diverged")

    def __init__(
        self,
        build: Callable[[], nn.Module],
        settings: TrainingSettings,
        arguments: dict[str, Any],
        device: torch.device | str = "cpu",
        processes: Processes = ALONE,
    ):
        self.processes, self.spread = processes, None
        self.arguments = arguments | asdict(settings)
        self.settings, self.device = settings, torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = build().to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.parameter_groups(), betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.step = 0
        self.step_seconds: list[float] = []
        self.step_losses: list[float] = []
        self.gradient_norms: list[float] = []  # before they are clipped
        self.losses: list[Row] = []
        self.diverged: str | None = None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return AdamW's groups. One with a "rate_factor" learns that many times as fast as the others."""
        matrices = [x for x in self.model.parameters() if x.dim() > 1]
        gains = [x for x in self.model.parameters() if x.dim() == 1]
        return [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]

    spread: DistributedDataParallel | None

    def passes(self) -> list[tuple[Any, ...]]:
        """Return this process's examples of step `self.step`, in parts of equal size: the arguments of `loss`."""
        raise NotImplementedError

    def loss(self, *batch: Any) -> Tensor:
        """Return the mean loss of one part."""
        raise NotImplementedError

    @abstractmethod
    def validation_loss(self) -> float:
        """Return the loss of a few examples that are never trained on, the same at every call."""

    def look_ahead(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Prepare the next step; called when this one is under way on the device, before its loss is waited for."""

    def seed_draws(self) -> None:
        """Seed the global generator, from which stochastic rounding draws, from (seed, step)."""
        (seed,) = np.random.SeedSequence((self.settings.seed, self.step)).generate_state(1)
        torch.manual_seed(int(seed))

    def accumulate_gradients(self) -> Tensor:
        """Add the gradients of the loss of step `self.step` to the parameters', part by part; return that loss.

        Backward passes run in this thread: autograd's own one costs a pass that is written in Python 0.3 ms.
        """
        self.seed_draws()
        passes = self.passes()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(passes, start=1):
            is_shared = self.spread is None or number == len(passes)
            with nullcontext() if is_shared else self.spread.no_sync():
                loss = self.loss(*batch) / len(passes)
                with torch.autograd.set_multithreading_enabled(False):
                    loss.backward()
            total += loss.detach()
        self.look_ahead()
        total = self.processes.mean(total)
        if not total.isfinite():
            raise Diverged(f"the loss of step {self.step} is not finite")
        return total

    def advance(self) -> float:
        """Make one step and return its loss. Raises `Diverged` if the loss or a gradient is not finite."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step) * group.get("rate_factor", 1.0)
        loss = self.accumulate_gradients()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        if not norm.isfinite():
            raise Diverged(f"the gradient of step {self.step} is not finite")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.step_seconds.append(time.perf_counter() - started)
        self.gradient_norms.append(norm.item())
        self.step_losses.append(loss.item())
        return self.step_losses[-1]

    @property
    def seconds(self) -> float:
        """The time that all steps took."""
        return sum(self.step_seconds)

    @torch.no_grad()
    def report(self, train_losses: Sequence[float]) -> Row:
        """Add the mean of the training losses since the last report, and the validation loss, to `losses`.

        Raises `Diverged` if the validation loss is not finite.
        """
        train_loss, validation_loss = mean(train_losses) if train_losses else None, self.validation_loss()
        if not math.isfinite(validation_loss):
            raise Diverged(f"the validation loss after step {self.step} is not finite")
        self.losses.append({"step": self.step, "train_loss": train_loss, "validation_loss": validation_loss})
        return self.losses[-1]

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint holds."""
        state = {name: getattr(self, name) for name in ("arguments", *self.HISTORY)}
        return state | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        for name in self.HISTORY:
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, checkpoint: Path) -> None:
        """Write a checkpoint in one step, and remove what earlier calls left half written because they were killed."""
        if not self.processes.is_first:
            return
        state = self.state()
        remove_leftovers(checkpoint)
        # Into memory first: torch calls a file back from C++, and there Ctrl-C or a full disk may end the process.
        checkpoint_bytes = io.BytesIO()
        torch.save(state, checkpoint_bytes)
        with checkpoint_bytes.getbuffer() as content:  # released also where the disk is full
            write_file(checkpoint, content)

    def load(self, checkpoint: Path) -> None:
        """Go on where `checkpoint` was saved. Raises ValueError if that was a run with other arguments."""
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
    """Read what `ResumableTraining.save` wrote. Raises ValueError if the file is something else, or was cut off."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # zip, pickle and torch have many ways to say it
        state = None
    parts = {"arguments": dict, "step": int, "losses": list, "model": dict, "optimizer": dict}
    is_whole = isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in parts.items())
    if not is_whole or state["step"] < 0:
        raise ValueError(f"checkpoint: expected a complete one that a run saved, got {path}: name a different file")
    return state


def train(
    training: ResumableTraining,
    checkpoint: Path,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Train to the last step or to divergence, from `checkpoint` if it exists.

    Args:
        training: what is trained; its `diverged` says in the end whether it came to the last step.
        checkpoint: written at every report.
        is_over: asked after each checkpoint.

    Raises:
        OutOfTime: `is_over` said so, and steps are left; the same call goes on.
        ValueError: the checkpoint is of another run, or another process is writing it.
    """
    settings, is_first = training.settings, training.processes.is_first
    with (
        only_writer(checkpoint) if is_first else nullcontext(),
        tqdm(total=settings.steps, unit="step", disable=not is_first) as bar,
    ):
        losses = []
        if training.processes.agreed(checkpoint.exists()):  # asked once, by the first: it saves the next one
            training.load(checkpoint)
            bar.write(f"goes on from step {training.step} in {checkpoint}")
            bar.update(training.step)
        else:
            training.report([])
        while training.step < settings.steps and training.diverged is None:
            try:
                losses.append(training.advance())
                bar.update()
                is_due = training.step % settings.report_every == 0 or training.step == settings.steps
                if is_due:
                    training.report(losses)
                    losses = []
                    bar.set_postfix_str("validation {validation_loss:.3f}".format(**training.losses[-1]))
            except Diverged as reason:
                training.diverged, is_due = str(reason), True
            if is_due:
                training.save(checkpoint)
                is_stopped = training.processes.agreed(is_over())
                if is_stopped and training.step < settings.steps and training.diverged is None:
                    raise OutOfTime(f"{checkpoint.stem} stopped after step {training.step} of {settings.steps}")
