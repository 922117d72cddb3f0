"""Compile, check and time the kernels, train models, and make the course's measurements."""

import argparse
import os
import sys

from sage_lab.command_line import PARENT, Parser, add_json_option, end_with, finish, imported, written

# By name: a module with NAME_command(options) and perhaps add_options(parser), imported when its command is called, and
# a description.
COMMANDS = {
    "bench": ("bench.bench_command", "time the public functions in turn with their peers; a rerun continues"),
    "accuracy": ("bench.accuracy", "compare the kernels with the reference on this GPU"),
    "profile": ("bench.profile", "measure what limits the Hopper kernels; needs Nsight Compute"),
    "compile": ("bench.compile", "compile every level for sm_80 to sm_120 and check the result"),
    "instructions": ("bench.instructions", "count the instructions in the loop of every level"),
    "climb": ("climb.command", "check your own forward kernel and place it among our levels, with or without a GPU"),
    "choose": ("bench.choose", "choose launch settings for GPUs that this machine lacks, by compiling candidates"),
    "info": ("experiments.info", "show this machine, the versions, and the backend that 'auto' chooses"),
    "table1": ("experiments.table1", "compute the paper's Table 1 for all settings that the paper leaves open"),
    "table2": ("experiments.table2", "compute the paper's Table 2 on captured activations"),
    "repair": ("experiments.repair", "measure the errors of dS, dQ and dK with each remedy, and its cost"),
    "full-batch": (
        "experiments.full_batch",
        "train without gradient noise, to see whether SageBwd falls behind and remedies help",
    ),
    "drop-in": ("experiments.drop_in", "compare INT8 with exact attention in a pretrained encoder of transformers"),
    "pretrain": ("experiments.pretrain", "pre-train a Llama with exact attention or SageBwd"),
    "pretrain-grid": ("experiments.pretrain_grid", "train all runs of notebook 06b, on all GPUs"),
    "pretrain-speed": ("experiments.pretrain_speed", "time a training step with exact attention and SageBwd"),
    "matched": ("experiments.matched", "compare SLA2's printed backward pass with one that matches the forward"),
    "noise": ("experiments.gradient_noise", "compare gradient noise with the bias of quantisation, on checkpoints"),
    "capture": ("experiments.capture", "save the attention inputs of a pre-trained model"),
    "video": (
        "experiments.video.command",
        "pre-train a video model, fine-tune it with SLA2 and with every ablation, and compare them",
    ),
    "quantization-aware": (
        "experiments.quantization_aware",
        "quantise one SLA2 layer during fine-tuning or after it",
    ),
    "train-router": (
        "experiments.router_fit",
        "fit SLA2's router and alpha to full attention, and compare with SLA and the best mask",
    ),
}


def main(arguments: list[str] | None = None) -> None:
    if parent := os.environ.pop(PARENT, None):
        end_with(int(parent))
    arguments = sys.argv[1:] if arguments is None else arguments

    def run() -> int | None:
        options = read_options(arguments)
        return options.run(options)  # every command runs here

    if status := finish(" ".join(["python -m sage_lab", *arguments[:1]]), run):
        sys.exit(status)


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line; the command's function is added as `run`, the whole line as `command`."""
    parser = Parser(prog="python -m sage_lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        if arguments[:1] == [name]:
            chosen = imported(f"sage_lab.{module}")
            getattr(chosen, "add_options", lambda parser: None)(command)
            command.set_defaults(run=getattr(chosen, f"{name.replace('-', '_')}_command"))
        add_json_option(command)
    options = parser.parse_args(arguments)
    options.command = written("sage_lab", arguments)
    return options


if __name__ == "__main__":
    main()
