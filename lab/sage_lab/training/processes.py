"""Training by one process or by those that torchrun starts, killed and resumed; what language and video models share.

The examples of a step are a function of (seed, step). The processes deal them out among themselves, and each works
through its share in passes of `micro_batch_size`. So the number of devices and the size of a pass change the order of a
sum, and nothing else.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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

from sage_lab.records import Row, only_writer
from sage_lab.training.loop import Diverged, Log, ResumableTraining, TrainingSettings, snapshot_path

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


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


def agreed(value: Any, group: Processes) -> Any:
    """Return the first process's value, in all of them."""
    shared = [value]
    if group.count > 1:
        dist.broadcast_object_list(shared, src=0, device=group.device)
    return shared[0]


class ParallelTraining(ResumableTraining):
    """A model that one process trains, or several together. Whoever inherits says what the passes of a step are.

    settings: with micro_batch_size. fsdp: every process keeps a part of the weights and of AdamW's averages (FSDP)
    instead of all of them (DDP); build's model has `blocks`.
    Raises ValueError if the processes and passes don't divide the examples of a step.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        settings: TrainingSettings,
        arguments: dict[str, Any],
        processes: Processes,
        *,
        fsdp: bool = False,
    ):
        if settings.batch_size % (processes.count * settings.micro_batch_size):
            passes = f"passes of {settings.micro_batch_size} sequences in each of {processes.count} processes"
            raise ValueError(f"batch_size: expected a multiple of {passes}, got {settings.batch_size}")
        self.processes, self.fsdp = processes, fsdp
        super().__init__(lambda: self.placed(build()), settings, arguments, processes.device)
        self.parallel = self.compiled(self.model)
        if processes.count > 1 and not fsdp:
            self.parallel = DistributedDataParallel(self.parallel)

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on this process's device, or this process's part of it."""
        model = model.to(self.processes.device)
        if self.fsdp:
            for part in (*model.blocks, model):
                fully_shard(part)
        return model

    def compiled(self, model: nn.Module) -> nn.Module:
        """What runs in place of the model."""
        return model

    @abstractmethod
    def passes(self) -> list[tuple[Tensor, ...]]:
        """What this process works on in step `self.step`: the arguments of `loss`, pass by pass."""

    @abstractmethod
    def loss(self, *batch: Tensor) -> Tensor:
        """Mean loss of one pass, by `self.parallel`."""

    def accumulate_gradients(self) -> Tensor:
        self.seed_draws()
        passes = self.passes()
        total = torch.zeros((), device=self.processes.device)
        for number, batch in enumerate(passes, start=1):
            with self.gradients_shared(number == len(passes)):
                loss = self.loss(*batch) / len(passes)
                loss.backward()
            total += loss.detach()
        self.look_ahead()
        if self.processes.count > 1:
            dist.all_reduce(total)
        total /= self.processes.count
        if not total.isfinite():
            raise Diverged(f"the loss of step {self.step} is not finite")
        return total

    def look_ahead(self) -> None:
        """Called when all of a step is under way on the device, and before this process waits for its loss."""

    def seed_draws(self) -> None:
        """Stochastic rounding draws from the global generator: a function of the step, too."""
        sequence = np.random.SeedSequence((self.settings.seed, self.step, self.processes.rank))
        torch.manual_seed(int(sequence.generate_state(1)[0]))

    def dealt(self, *batch: Tensor) -> list[tuple[Tensor, ...]]:
        """This process's share of a step's examples, in passes."""
        group, size = self.processes, self.settings.micro_batch_size
        return list(zip(*(x[group.rank :: group.count].split(size) for x in batch), strict=True))

    @contextmanager
    def gradients_shared(self, now: bool) -> Iterator[None]:
        """Average the gradients over the processes in this backward pass, or leave it to a later one."""
        if self.fsdp:
            self.model.set_requires_gradient_sync(now)
        is_copied = isinstance(self.parallel, DistributedDataParallel)
        with self.parallel.no_sync() if is_copied and not now else nullcontext():
            yield

    def clip_gradients(self) -> Tensor:
        norm = super().clip_gradients()
        return norm.full_tensor() if self.fsdp else norm

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


class NoLog:
    """For all processes but the first."""

    def write(self, row: Row) -> None:
        """The first process writes the same row."""


def run_training(
    training: ParallelTraining,
    checkpoint: Path,
    log_path: Path,
    snapshots: Sequence[int] = (),
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """To the last step or to divergence, from `checkpoint` if it exists.

    log_path: JSON lines, one per step and one per report. checkpoint: written at every report. snapshots: steps whose
    checkpoint is kept beside it (`snapshot_path`). is_over: asked after each checkpoint, alike in all processes; the
    run then goes on another time.
    """
    with only_writer(checkpoint) if training.processes.is_first else nullcontext():
        _run(training, checkpoint, log_path, snapshots, is_over)


def _run(
    training: ParallelTraining, checkpoint: Path, log_path: Path, snapshots: Sequence[int], is_over: Callable[[], bool]
) -> None:
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
                log.write(training.step_row(losses[-1]))
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
                if is_over():
                    return
