"""`python -m sage_lab video ACTION`: pre-train a video model, fine-tune it with SLA2, judge it.

train      pre-train with full attention
finetune   train and judge all arms of the plan, or some; a rerun continues
speed      time a training step and sampling with SLA2 in turn with its competitors
"""

import argparse
from contextlib import suppress
from dataclasses import asdict, replace

import torch

from sage_lab.command_line import (
    add_device_option,
    add_minutes_option,
    input_file,
    output_file,
    output_folder,
    positive,
    positive_number,
    zero_to_one,
)
from sage_lab.experiments.video.plan import ARMS, PLANS, TRAINED, planned
from sage_lab.experiments.video.runs import Experiment
from sage_lab.experiments.video.speed import CONTENDERS, SPEED_PLANS, length_rows, speed_table, why_missing
from sage_lab.experiments.video.verdicts import ALL_COLUMNS, arm_table, verdict_rows, verdict_table
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.plan import OutOfTime, Run, deadline, opened
from sage_lab.records import provenance, write_record
from sage_lab.training.loop import train
from sage_lab.training.video_flow import FlowSettings, FlowTraining, read_weights, write_weights
from sage_lab.training.video_scenes import digit_images

# 16,384 tokens; a block of 64 is a cube of 4 x 4 x 4.
MODEL = VideoDiTConfig(frames=16, size=128, patch=4, cube=(4, 4, 4), layers=6, width=384, heads=3)
# Too small to show anything, large enough to try the program.
SMALL = VideoDiTConfig(frames=4, size=8, patch=2, cube=(2, 2, 2), layers=1, width=16, heads=1, block_q=16, block_kv=8)
SIZES = ("frames", "size", "patch", "layers", "width", "heads")


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action", parser_class=type(parser))
    words = {line.split()[0]: " ".join(line.split()[1:]) for line in __doc__.splitlines()[2:] if line}
    for name, (add, act) in ACTIONS.items():
        action = actions.add_parser(name, help=words[name], description=words[name])
        add(action)
        # Where it is not given, the one before the action counts.
        action.add_argument("--json", type=output_file, metavar="FILE", default=argparse.SUPPRESS, help="the result")
        action.set_defaults(act=act)


def video_command(options: argparse.Namespace) -> None:
    options.act(options)


# train


def add_train_options(parser: argparse.ArgumentParser) -> None:
    for name in SIZES:
        parser.add_argument(f"--{name}", type=positive, default=getattr(MODEL, name))
    parser.add_argument("--cube", type=positive, nargs=3, default=MODEL.cube, help="patches with consecutive tokens")
    parser.add_argument("--steps", type=positive, default=2000)
    parser.add_argument("--batch", type=positive, default=8, help="videos in a batch")
    parser.add_argument("--learning-rate", type=positive_number, default=6e-4)
    parser.add_argument("--average", type=zero_to_one, default=FlowSettings.average, help="decay of the moving average")
    parser.add_argument("--reports", type=positive, default=10, help="validation losses and checkpoints of a run")
    parser.add_argument("--checkpoint", type=output_file, default="runs/video/train.pt", metavar="FILE")
    words = "at the end, write bfloat16 weights to NAME.1.safetensors and so on"
    parser.add_argument("--weights", type=output_file, metavar="NAME", help=words)
    add_minutes_option(parser)
    add_device_option(parser)


def pretrain(options: argparse.Namespace) -> None:
    """Pre-train a model."""
    config = VideoDiTConfig(cube=tuple(options.cube), **{name: getattr(options, name) for name in SIZES})
    fast = dict.fromkeys(("autocast", "compile"), options.device.startswith("cuda"))
    settings = FlowSettings(
        steps=options.steps,
        batch_size=options.batch,
        learning_rate=options.learning_rate,
        warmup_steps=round(0.05 * options.steps),
        report_every=-(-options.steps // options.reports),
        average=options.average,
        **fast,
    )
    training = FlowTraining(config, settings, digit_images(), options.device)
    with suppress(OutOfTime):
        train(training, options.checkpoint, is_over=deadline(options.minutes))
    averaged, minutes = training.averaged(), round(training.seconds / 60, 2)
    outcome = "done" if training.step == settings.steps else "stopped, the same command goes on"
    outcome = f"diverged: {training.diverged}" if training.diverged else outcome
    count, loss = sum(x.numel() for x in averaged.values()), training.losses[-1]["validation_loss"]
    print(f"{count:,} parameters, {training.step} steps, {minutes} min, validation {loss:.4f}; {outcome}")
    if options.weights and not training.diverged:
        facts = {"pretraining": training.arguments, "losses": training.losses, "steps": training.step}
        facts |= {"minutes": minutes, "provenance": provenance(options.command)}
        for path in write_weights(options.weights, averaged, config, facts):
            print(path)
    row = {"steps": training.step, "diverged": training.diverged, "seconds": round(training.seconds, 2)}
    row |= {"final_validation_loss": loss, "parameters": count}
    row["curve"] = [[x["step"], x["train_loss"], x["validation_loss"]] for x in training.losses]
    write_record(options.json, [row], command=options.command, arguments=training.arguments)


# finetune


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    words = "all parts of the first weights"
    parser.add_argument("--start", type=input_file, nargs="+", required=True, metavar="FILE", help=words)
    parser.add_argument("--plan", choices=tuple(PLANS), default="gpu" if torch.cuda.is_available() else "cpu")
    arms = parser.add_mutually_exclusive_group(required=True)
    arms.add_argument("--all", action="store_true", help="every arm, the decisive ones first")
    some = f"some of {', '.join(TRAINED)}".replace("%", "%%")  # argparse formats its help
    arms.add_argument("--arms", choices=TRAINED, nargs="+", metavar="ARM", help=some)
    parser.add_argument("--folder", type=output_folder, default="runs/video", help="for checkpoints, rows and pictures")
    add_minutes_option(parser)
    add_device_option(parser)


def finetune(options: argparse.Namespace) -> None:
    """Fine-tune and judge the arms."""
    if options.plan == "gpu" and not options.device.startswith("cuda"):
        raise ValueError(f"plan: expected cpu on device {options.device}, got gpu")
    plan = PLANS[options.plan]
    weights, model, facts = read_weights(options.start)
    experiment = Experiment(plan, weights, model, digit_images(), torch.device(options.device))
    runs = planned(plan, options.arms or TRAINED)
    with opened(runs, options.folder, experiment.arguments, is_over=deadline(options.minutes)) as work:

        def write(_: Run | None = None) -> None:
            of_plan = {"plan": asdict(plan), "arms": {name: arm._asdict() for name, arm in ARMS.items()}}
            claims = verdict_rows(work.rows, ALL_COLUMNS)
            work.record(options.json, options.command, **of_plan, start=facts, claims=claims)

        left = work.finish(lambda run, _: experiment.measure(run, work), write)
        if work.rows:
            write()
        print(arm_table(work.rows) + "\n\n" + verdict_table(verdict_rows(work.rows)))
    if left:
        print(f"\n{len(left)} runs are unfinished, the next is {left[0].name}; the same command continues")


# speed


def add_speed_options(parser: argparse.ArgumentParser) -> None:
    words = "timed steps, at least 2"
    parser.add_argument("--repetitions", type=positive, default=SPEED_PLANS["cuda"].repetitions, help=words)
    add_device_option(parser)


def time_attentions(options: argparse.Namespace) -> None:
    """Time the attentions."""
    if options.repetitions < 2:
        raise ValueError(f"repetitions: expected at least 2, got {options.repetitions}")
    device, digits = torch.device(options.device), digit_images()
    plan = replace(SPEED_PLANS[device.type], repetitions=options.repetitions, sampled=max(2, options.repetitions // 2))
    model = MODEL if device.type == "cuda" else SMALL
    missing = {name: why_missing(name, device) for name in CONTENDERS}
    here = [name for name, reason in missing.items() if reason is None]
    found = [
        row for frames in plan.frames for row in length_rows(plan, replace(model, frames=frames), digits, device, here)
    ]
    rows, failed = ([row for row in found if ("missing" in row) == is_missing] for is_missing in (False, True))
    not_timed = {name: reason for name, reason in missing.items() if reason}
    not_timed |= {f"{x['provider']}, {x['what']}, {x['tokens']} tokens": x["missing"] for x in failed}
    facts = {"plan": asdict(plan), "model": asdict(model), "not_timed": not_timed}
    write_record(options.json, rows, command=options.command, **facts)
    print(speed_table(rows))
    for name, reason in not_timed.items():
        print(f"not timed: {name}: {reason}")


ACTIONS = {
    "train": (add_train_options, pretrain),
    "finetune": (add_finetune_options, finetune),
    "speed": (add_speed_options, time_attentions),
}
