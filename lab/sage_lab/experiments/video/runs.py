"""Runs of the plan: two stages of fine-tuning, then the measurements. A killed run continues from a checkpoint."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sage_lab.experiments.video.measures import Questions, answers, questions
from sage_lab.experiments.video.plan import ARMS, VideoPlan, VideoRun
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.plan import Work
from sage_lab.records import Row
from sage_lab.training.loop import train
from sage_lab.training.video_flow import FlowTraining, Weights, digest, started_model
from sage_lab.training.video_router import RouterTraining


class Tuned(NamedTuple):
    """An arm after both stages. weights: the moving average's, on the CPU. row: how training went."""

    config: VideoDiTConfig
    weights: Weights
    row: Row


@dataclass(frozen=True)
class Experiment:
    """Everything that the runs share: settings, the pre-trained weights and their model, and digits."""

    plan: VideoPlan
    weights: Weights
    model: VideoDiTConfig
    digits: Tensor
    device: torch.device

    @property
    def arguments(self) -> tuple:
        """Everything that the rows depend on besides their run."""
        return self.plan, digest(self.weights), self.device.type

    @cached_property
    def questions(self) -> Questions:
        """The questions, which are the same for every arm."""
        return questions(self.plan, self.model, self.digits.to(self.device))

    def measure(self, run: VideoRun, work: Work) -> list[Row]:
        """Train and judge a run: its row, and those of arms that are judged as this one."""
        tuned = self.tune(run, work)
        rows = [self.judged(run, tuned)]
        for name, arm in ARMS.items():
            if arm.judged_as == run.arm:
                twin = tuned._replace(config=replace(tuned.config, **arm.changes))
                rows.append(self.judged(VideoRun(name, run.seed), twin))
        return rows

    def tune(self, run: VideoRun, work: Work) -> Tuned:
        """Train both stages of an arm, from their checkpoints if they exist; raise `OutOfTime` if time runs out."""
        plan, arm, config = self.plan, ARMS[run.arm], self.plan.config(self.model, run.arm)
        weights, row = self.weights, {}
        if arm.stage1:
            stage1 = RouterTraining(config, plan.stage1(run), self.digits, weights, self.device)
            if stage1.settings.learns:
                train(stage1, work.checkpoint(run).with_suffix(".stage1.pt"), is_over=work.is_over)
            weights = weights | stage1.core_weights()
            row = {
                "stage1_error": stage1.losses[-1]["validation_loss"],
                "stage1_seconds": round(stage1.seconds, 2),
                "diverged": stage1.diverged,
            }
        if not arm.tuned or row.get("diverged"):
            return Tuned(config, weights, {"steps": 0, "diverged": None} | row)
        stage2 = FlowTraining(config, plan.stage2(run), self.digits, self.device, start=weights)
        train(stage2, work.checkpoint(run), is_over=work.is_over)
        row |= {"steps": stage2.step, "diverged": stage2.diverged, "seconds": round(stage2.seconds, 2)}
        row["curve"] = [[x["step"], x["validation_loss"]] for x in stage2.losses]
        return Tuned(config, stage2.averaged(), row)

    def judged(self, run: VideoRun, tuned: Tuned) -> Row:
        """Measure a trained arm: its row."""
        row = arm_row(run, tuned.config) | tuned.row
        if row["diverged"]:
            return row
        model = started_model(tuned.config, tuned.weights).to(self.device).requires_grad_(False)
        if self.plan.compile:
            model.compile_blocks()
        return row | answers(model, self.questions, self.plan)


def arm_row(run: VideoRun, config: VideoDiTConfig) -> Row:
    """Return the columns that describe a run."""
    arm, is_sparse = ARMS[run.arm], config.attention in ("sla", "sla2")
    is_sla2 = config.attention == "sla2"
    return {
        "arm": run.arm,
        "seed": run.seed,
        "attention": config.attention,
        "sparsity": config.sparsity if is_sparse else None,
        "int8": {"sagebwd": True, "sla2": config.quantize}.get(config.attention, False),
        "router": arm.router if is_sla2 else None,
        "alpha": arm.alpha if is_sla2 else None,
        "stage1": arm.stage1 if is_sla2 else None,
        "cube": list(config.cube),
        "tokens": config.tokens,
    }
