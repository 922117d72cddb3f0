"""Works off the plan: two stages of fine-tuning, then the questions; what is finished stays finished after a kill.

A run's rows are kept as soon as it is done, and its checkpoints removed. The full model's samples are kept as well:
later arms are compared with them.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from sage_lab.experiments.video.measures import Answers, Questions, answers, questions
from sage_lab.experiments.video.pictures import write_film, write_strip
from sage_lab.experiments.video.plan import ARMS, FULL, Run, VideoPlan, planned
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.plan import FinishedParts, OutOfTime
from sage_lab.records import Row, replaced
from sage_lab.training.capture import watched_attention
from sage_lab.training.processes import ParallelTraining, Processes, run_training
from sage_lab.training.video import noisy
from sage_lab.training.video_clips import clips_from, write_clips
from sage_lab.training.video_flow import FlowSettings, FlowTraining, Weights, digest, fast_arithmetic, started_model
from sage_lab.training.video_router import RouterSettings, RouterTraining
from sage_ref.sla2 import SLA2

UNTIMED_STEPS = 10  # the first of a run, in which programs are compiled
Settings = TypeVar("Settings", RouterSettings, FlowSettings)
DRAWN = (FULL, "SLA2", "SLA at 90%", "sparse only", "rows in order")  # pictures of all are below 3 MB


class Start(NamedTuple):
    """What every run begins with: the pre-trained weights, their model, the digits; and where it works.

    folder: of checkpoints and logs. is_over: whether the time is, asked after each checkpoint.
    """

    weights: Weights
    model: VideoDiTConfig
    digits: Tensor
    folder: Path
    is_over: Callable[[], bool]
    group: Processes = Processes()


class Tuned(NamedTuple):
    """An arm after both stages. weights: the moving average's, on the CPU. row: how training went."""

    config: VideoDiTConfig
    weights: Weights
    row: Row


def tune(plan: VideoPlan, run: Run, start: Start) -> Tuned:
    """Both stages of an arm, from their checkpoints if they exist. `OutOfTime` if it goes on another time."""
    arm, config = ARMS[run.arm], plan.config(start.model, run.arm)
    weights, row = start.weights, {}
    if arm.stage1:
        fitted = plan.config(start.model, run.stage1.arm)
        stage1 = RouterTraining(fitted, shared_out(plan.stage1(run), start), start.digits, weights, start.group)
        if stage1.settings.learns:
            finish(stage1, start, stage1_name(run))
        weights = weights | stage1.core_weights()
        row = {"stage1_error": stage1.losses[-1]["validation_loss"], "stage1_seconds": round(stage1.seconds, 2)}
        row["diverged"] = stage1.diverged
    if not arm.tuned or row.get("diverged"):
        return Tuned(config, weights, {"steps": 0, "diverged": None} | row)
    on_gpu = start.group.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    stage2 = FlowTraining(config, shared_out(plan.stage2(run), start), start.digits, start.group, start=weights)
    finish(stage2, start, run.name)
    row |= {"steps": stage2.step, "diverged": stage2.diverged, "seconds": round(stage2.seconds, 2)}
    row["step_ms"] = median_step_ms(start.folder / f"{run.name}.jsonl")
    row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2) if on_gpu else None
    row["curve"] = [[x["step"], x["validation_loss"]] for x in stage2.losses]
    return Tuned(config, stage2.averaged(), row)


def shared_out(settings: Settings, start: Start) -> Settings:
    """With a process's share of a step's videos as one pass."""
    return replace(settings, micro_batch_size=max(1, settings.batch_size // start.group.count))


def stage1_name(run: Run) -> str:
    """Of the checkpoint of its stage 1, without an ending."""
    return f"{run.stage1.name}_stage1"


def finish(training: ParallelTraining, start: Start, name: str) -> None:
    """To the last step or to divergence; else `OutOfTime`."""
    run_training(training, start.folder / f"{name}.pt", start.folder / f"{name}.jsonl", is_over=start.is_over)
    if training.step < training.settings.steps and training.diverged is None:
        raise OutOfTime(f"{name} stopped after step {training.step} of {training.settings.steps}")


def median_step_ms(log: Path) -> float | None:
    """Of the steps after the first UNTIMED_STEPS, from a run's log; None if there are no two."""
    seconds = [row["seconds"] for row in map(json.loads, log.read_text().splitlines()) if "seconds" in row]
    steps = [
        after - before for before, after in zip(seconds[UNTIMED_STEPS:], seconds[UNTIMED_STEPS + 1 :], strict=False)
    ]
    steps = [step for step in steps if step > 0]  # a resumed run counts from its checkpoint
    return round(1e3 * statistics.median(steps), 2) if steps else None


class VideoRuns:
    """Runs of a plan on one device, one after the other. parts: rows of those that are finished."""

    def __init__(self, plan: VideoPlan, start: Start, clips: Tensor | None):
        self.plan, self.start, self.clips = plan, start, clips
        given = (plan, digest(start.weights), None if clips is None else digest({"clips": clips}))
        self.parts = FinishedParts(start.folder / "video.json", (given, start.group.device.type))
        self.finished: dict[Run, list[Row]] = {}
        self.asked: dict[tuple[int, int, int], Questions] = {}

    def work(self, runs: Iterable[Run], after_each: Callable[[], None]) -> list[Run]:
        """Finish the runs until none is left or the time is over; those that are left. after_each: called after each.

        A finished run costs nothing, so those of earlier calls come first, whatever the time.
        """
        runs = list(runs)
        with tqdm(runs, unit="run") as bar:
            for number, run in enumerate(runs):
                bar.set_postfix_str(run.name)
                if self.start.is_over() and not self.is_finished(run):
                    return runs[number:]
                try:
                    self.finished[run] = self.rows(run)
                except OutOfTime:
                    return runs[number:]
                bar.update()
                after_each()
        return []

    def is_finished(self, run: Run) -> bool:
        """A full model without its samples is none, as long as a run is left that is compared with them."""
        if run.name not in self.parts.parts or run.arm != FULL or self.samples_path(run.seed).exists():
            return run.name in self.parts.parts
        left = (other for other in planned(self.plan) if other.name not in self.parts.parts)
        return all(self.compared_seed(other) != run.seed for other in left)

    def compared_seed(self, run: Run) -> int:
        """Of the full model whose samples this run's are compared with: the same seed's, for a full model the first."""
        return self.plan.seeds[0] if run.arm == FULL else run.seed

    def rows(self, run: Run) -> list[Row]:
        if not self.is_finished(run):
            self.parts.parts.pop(run.name, None)
        rows = self.parts.rows(run.name, partial(self.measured, run))
        checkpoints = [run.name]
        left = (other for other in planned(self.plan) if other.name not in self.parts.parts)
        if all(other.stage1 != run.stage1 for other in left):
            checkpoints.append(stage1_name(run))
        for name in checkpoints:
            (self.start.folder / f"{name}.pt").unlink(missing_ok=True)
        return rows

    def samples_path(self, seed: int) -> Path:
        return self.start.folder / f"full_seed{seed}.samples.npz"

    def reference(self, run: Run) -> tuple[str | None, Tensor | None]:
        """The samples that this run's are compared with, and whose they are.

        Full models of two seeds say how far apart equally good models are.
        """
        seed = self.compared_seed(run)
        path, config = self.samples_path(seed), self.start.model
        if run == Run(FULL, self.plan.seeds[0]) or not path.exists():
            return None, None
        return f"{FULL}, seed {seed}", clips_from(path, config.frames, config.size)

    def measured(self, run: Run) -> list[Row]:
        """Trained and judged: its row, and those of arms that are judged as this one."""
        tuned = tune(self.plan, run, self.start)
        rows = [self.judged(run, tuned)]
        for name, arm in ARMS.items():
            if arm.judged_as == run.arm:
                config = replace(tuned.config, **arm.changes)
                rows.append(self.judged(Run(name, run.seed), Tuned(config, tuned.weights, tuned.row)))
        return rows

    def judged(self, run: Run, tuned: Tuned) -> Row:
        row = arm_row(run, tuned.config) | tuned.row
        if row["diverged"]:
            return row
        model = started_model(tuned.config, tuned.weights).to(self.start.group.device).requires_grad_(False)
        if self.plan.compile:
            model.compile_blocks()
        named, reference = self.reference(run)
        found = answers(model, self.questions(tuned.config), self.plan, reference)
        if run.arm == FULL:
            write_clips(self.samples_path(run.seed), found.samples)
        if run.arm in DRAWN and run.seed == self.plan.seeds[0]:
            self.draw(run, found, model)
        return row | learned_alphas(model) | {"compared_with": named} | found.row

    def questions(self, config: VideoDiTConfig) -> Questions:
        """The same for every arm: they don't depend on its attention."""
        key = (config.frames, config.size, config.patch)
        if key not in self.asked:
            digits = self.start.digits.to(self.start.group.device)
            self.asked[key] = questions(self.plan, config, digits, self.clips)
        return self.asked[key]

    def draw(self, run: Run, found: Answers, model: VideoDiT) -> None:
        """One sample as a film, a restored scene as a strip, and the blocks that the router selected."""
        folder = self.start.folder / "pictures"
        write_film(folder / f"{run.name}.gif", found.samples[0])
        write_strip(folder / f"{run.name}_restored.png", found.restored[0])
        if run.arm == FULL:
            write_strip(folder / "restored_truth.png", self.questions(model.config).restored[0])
        if run.arm == "SLA2":
            write_selected(folder / "selected.safetensors", model, self.questions(model.config), self.plan.autocast)


def arm_row(run: Run, config: VideoDiTConfig) -> Row:
    """What a run is."""
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


def learned_alphas(model: VideoDiT) -> Row:
    """alphas: of every layer and head; None without SLA2."""
    cores = [block.attention.core for block in model.blocks]
    if not isinstance(cores[0], SLA2):
        return {"alphas": None}
    return {"alphas": [[round(x, 4) for x in core.alpha_logit.sigmoid().mean(1).tolist()] for core in cores]}


@torch.no_grad()
def write_selected(path: Path, model: VideoDiT, asked: Questions, autocast: bool) -> None:
    """safetensors: frames of the first watched video in 8 bits, and the block masks of all layers.

    video: uint8 [3, T / cube, size, size], the first frame of each cube of tokens. selected: uint8
    [layers, H, Tm, ceil(Tn / 8)], bits of bool [.., Tn], the first block in the highest bit. noise_level: [1].
    """
    video, noise_level, noise = (x[:1] for x in asked.watched)
    layers = range(model.config.layers)
    with (
        fast_arithmetic(video.device, autocast),
        watched_attention(model, layers) as (inputs, _),
    ):
        model(noisy(video, noise_level, noise), noise_level)
    masks = [
        model.blocks[layer].attention.core.block_mask(*(x.float() for x in inputs[layer][:2]))[0] for layer in layers
    ]
    bits = torch.nn.functional.pad(torch.stack(masks).to(torch.uint8), (0, -masks[0].shape[-1] % 8)).unflatten(
        -1, (-1, 8)
    )
    place = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    levels = ((video[0, :, :: model.config.cube[0]] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    tensors = {"video": levels, "selected": (bits * place).sum(-1, dtype=torch.uint8), "noise_level": noise_level}
    with replaced(path) as temporary:
        temporary.write_bytes(save({name: x.cpu().contiguous() for name, x in tensors.items()}))


def all_rows(runs: VideoRuns) -> list[Row]:
    """In the plan's order."""
    return [row for run in planned(runs.plan) for row in runs.finished.get(run, [])]
