"""`python -m sage_ref COMMAND`: measure, train, and write what the course shows."""

import argparse
import importlib
import sys
from typing import NamedTuple

from sage_ref.command_line import Parser, add_json_option, end_with_parent, finish, written


class Command(NamedTuple):
    """module: has `add_options(parser)` and `run(options)`; imported when its command is asked for, not before."""

    module: str
    description: str


COMMANDS = {
    "info": Command(
        "sage_ref.experiments.info", "this machine, the versions, and the backend that 'auto' would choose"
    ),
    "table1": Command("sage_ref.experiments.table1", "the paper's Table 1, swept over what it leaves open"),
    "table2": Command("sage_ref.experiments.table2", "the paper's Table 2 on captured activations"),
    "repair": Command(
        "sage_ref.experiments.repair", "what each remedy does to the errors of dS, dQ and dK, and what it costs"
    ),
    "full-batch": Command(
        "sage_ref.experiments.full_batch", "train without batch noise: does SageBwd fall behind, and do remedies help?"
    ),
    "drop-in": Command(
        "sage_ref.experiments.drop_in", "a pretrained encoder of transformers with exact and with INT8 attention"
    ),
    "readme": Command("sage_ref.course.readme", "write the measured tables and figure from the records"),
    "pretrain": Command(
        "sage_ref.experiments.pretrain", "pre-train a Llama, on one device or, under torchrun, on many"
    ),
    "pretrain-grid": Command("sage_ref.experiments.pretrain_grid", "the plan of runs behind notebook 06b, on all GPUs"),
    "pretrain-speed": Command(
        "sage_ref.experiments.pretrain_speed", "time of a step: exact, FlashAttention-2, SageBwd"
    ),
    "context-parallel": Command(
        "sage_ref.experiments.context_parallel", "time and memory of one long sequence on 1, 2, 4, ... GPUs"
    ),
    "noise": Command(
        "sage_ref.experiments.gradient_noise", "gradient noise against the bias of quantisation, on checkpoints"
    ),
    "capture": Command("sage_ref.experiments.capture", "save what enters the attention of a pre-trained model"),
    "capture-video": Command(
        "sage_ref.experiments.capture_video",
        "train a small video diffusion transformer and save what enters its attention",
    ),
    "video": Command(
        "sage_ref.experiments.video.command",
        "pre-train a video model, fine-tune it with SLA2 beside every ablation, sample from it and judge it",
    ),
    "train-router": Command(
        "sage_ref.experiments.router_fit",
        "fit SLA2's router and alpha to full attention, and compare with SLA and the best mask",
    ),
}


def main(arguments: list[str] | None = None) -> None:
    end_with_parent()
    arguments = sys.argv[1:] if arguments is None else arguments

    def run() -> int | None:
        options = read_options(arguments)
        return options.run(options)  # every command runs here

    if status := finish(" ".join(["python -m sage_ref", *arguments[:1]]), run):
        sys.exit(status)


def read_options(arguments: list[str]) -> argparse.Namespace:
    """The options of the command that `arguments` begin with, its function as `run`, the whole line as `command`."""
    parser = Parser(prog="python -m sage_ref", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        if arguments[:1] == [name]:
            chosen = importlib.import_module(module)
            chosen.add_options(command)
            command.set_defaults(run=chosen.run)
        add_json_option(command)
    options = parser.parse_args(arguments)
    options.command = written("sage_ref", arguments)
    return options


if __name__ == "__main__":
    main()
