"""`python -m sage_lab video ACTION`: pre-train a video model, fine-tune it with SLA2 and judge it."""

from __future__ import annotations  # a field may have the name of what reads it

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch

from sage_lab.command_line import (
    Arguments,
    device,
    input_file,
    output_file,
    output_folder,
    positive,
    positive_number,
    usual_device,
    zero_to_one,
)
from sage_lab.experiments.video.plan import ARMS, PLANS, TRAINED, planned
from sage_lab.experiments.video.runs import Experiment
from sage_lab.experiments.video.verdicts import arm_table, verdict_rows, verdict_table
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.plan import OutOfTime, Run, deadline, opened
from sage_lab.records import provenance, write_record
from sage_lab.training.loop import train
from sage_lab.training.video_flow import FlowSettings, FlowTraining, read_weights, write_weights
from sage_lab.training.video_scenes import digit_images

# 16,384 tokens; a block of 64 is a cube of 4 x 4 x 4.
MODEL = VideoDiTConfig(frames=16, size=128, patch=4, cube=(4, 4, 4), layers=6, width=384, heads=3)
SHAPE = ("frames", "size", "patch", "cube", "layers", "width", "heads")


@dataclass(frozen=True, kw_only=True)
class VideoTrain(Arguments):
    """Pre-train a model with full attention."""

    frames: Annotated[int, positive] = MODEL.frames
    size: Annotated[int, positive, "pixels of a side"] = MODEL.size
    patch: Annotated[int, positive, "pixels of a patch's side"] = MODEL.patch
    cube: Annotated[tuple[int, int, int], positive, "patches with consecutive tokens"] = MODEL.cube
    layers: Annotated[int, positive] = MODEL.layers
    width: Annotated[int, positive] = MODEL.width
    heads: Annotated[int, positive] = MODEL.heads
    steps: Annotated[int, positive] = 2000
    batch: Annotated[int, positive, "videos in a batch"] = 8
    learning_rate: Annotated[float, positive_number] = 6e-4
    average: Annotated[float, zero_to_one, "decay of the moving average"] = FlowSettings.average
    reports: Annotated[int, positive, "validation losses and checkpoints of a run"] = 10
    checkpoint: Annotated[Path, output_file] = Path("runs/video/train.pt")
    weights: Annotated[Path | None, output_file, "write bfloat16 weights to NAME.1.safetensors and so on"] = None
    minutes: Annotated[float | None, positive_number, "stop at the first report after this time"] = None
    device: Annotated[str, device] = field(default_factory=usual_device)

    @property
    def model(self) -> VideoDiTConfig:
        return VideoDiTConfig(**{name: getattr(self, name) for name in SHAPE})

    @property
    def settings(self) -> FlowSettings:
        on_a_gpu = self.device.startswith("cuda")
        return FlowSettings(
            steps=self.steps,
            batch_size=self.batch,
            learning_rate=self.learning_rate,
            warmup_steps=round(0.05 * self.steps),
            report_every=-(-self.steps // self.reports),
            average=self.average,
            autocast=on_a_gpu,
            compile=on_a_gpu,
        )

    def run(self, command: str) -> None:
        training = FlowTraining(self.model, self.settings, digit_images(), self.device)
        with suppress(OutOfTime):
            train(training, self.checkpoint, is_over=deadline(self.minutes))
        averaged, minutes = training.averaged(), round(training.seconds / 60, 2)
        outcome = "done" if training.step == self.steps else "stopped, the same command goes on"
        outcome = f"diverged: {training.diverged}" if training.diverged else outcome
        count, loss = sum(x.numel() for x in averaged.values()), training.losses[-1]["validation_loss"]
        print(f"{count:,} parameters, {training.step} steps, {minutes} min, validation {loss:.4f}; {outcome}")
        if self.weights and not training.diverged:
            facts = {"pretraining": training.arguments, "losses": training.losses, "steps": training.step}
            facts |= {"minutes": minutes, "provenance": provenance(command)}
            for path in write_weights(self.weights, averaged, self.model, facts):
                print(path)
        row = {
            "steps": training.step,
            "diverged": training.diverged,
            "seconds": round(training.seconds, 2),
            "final_validation_loss": loss,
            "parameters": count,
            "curve": [[x["step"], x["train_loss"], x["validation_loss"]] for x in training.losses],
        }
        write_record(self.json, [row], command=command, arguments=training.arguments)


@dataclass(frozen=True, kw_only=True)
class VideoFinetune(Arguments):
    """Fine-tune and judge arms, the decisive ones first; a rerun continues."""

    start: Annotated[tuple[Path, ...], input_file, "all parts of the first weights"]
    plan: Literal["gpu", "cpu"] = field(default_factory=lambda: "cpu" if usual_device() == "cpu" else "gpu")
    arms: tuple[Literal[TRAINED], ...] = TRAINED
    folder: Annotated[Path, output_folder, "for checkpoints, rows and pictures"] = Path("runs/video")
    minutes: Annotated[float | None, positive_number, "stop at the first report after this time"] = None
    device: Annotated[str, device] = field(default_factory=usual_device)

    def __post_init__(self):
        if self.plan == "gpu" and not self.device.startswith("cuda"):
            raise ValueError(f"plan: expected cpu on device {self.device}, got gpu")

    def run(self, command: str) -> None:
        plan = PLANS[self.plan]
        weights, model, facts = read_weights(self.start)
        experiment = Experiment(plan, weights, model, digit_images(), torch.device(self.device))
        runs = planned(plan, self.arms)
        with opened(runs, self.folder, experiment.arguments, is_over=deadline(self.minutes)) as work:

            def write(_: Run | None = None) -> None:
                arms = {name: arm._asdict() for name, arm in ARMS.items()}
                claims = verdict_rows(work.rows)
                work.record(self.json, command, plan=asdict(plan), arms=arms, start=facts, claims=claims)

            left = work.finish(lambda run, _: experiment.measure(run, work), write)
            if work.rows:
                write()
            print(arm_table(work.rows) + "\n\n" + verdict_table(verdict_rows(work.rows)))
        if left:
            print(f"\n{len(left)} runs are unfinished, the next is {left[0].name}; the same command continues")
