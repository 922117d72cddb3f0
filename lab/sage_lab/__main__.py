"""`python -m sage_lab COMMAND`: compile, check and time the kernels, train models, and measure for the course."""

import argparse
import os
import sys

from sage_lab.command_line import PARENT, Parser, add_json_option, end_with, finish, imported, written

# By name: a module with NAME_command(options) and perhaps add_options(parser), imported when its command is called, and
# a description.
COMMANDS = {
    "bench": ("bench.bench_command", "time the public function and its peers in turn; goes on where it was stopped"),
    "accuracy": ("bench.accuracy", "compare the kernels with the reference on this GPU"),
    "profile": ("bench.profile", "measure what limits the Hopper kernels; needs Nsight Compute"),
    "compile": ("bench.compile", "compile every level for sm_80 to sm_120 and check the result"),
    "instructions": ("bench.instructions", "count what the loop of every level executes"),
    "choose": ("bench.choose", "choose launch settings for GPUs that aren't there, by compiling candidates"),
    "info": ("experiments.info", "this machine, the versions, and the backend that 'auto' would choose"),
    "table1": ("experiments.table1", "the paper's Table 1, swept over what it leaves open"),
    "table2": ("experiments.table2", "the paper's Table 2 on captured activations"),
    "repair": ("experiments.repair", "what each remedy does to the errors of dS, dQ and dK, and what it costs"),
    "full-batch": (
        "experiments.full_batch",
        "train without batch noise: does SageBwd fall behind, and do remedies help?",
    ),
    "drop-in": ("experiments.drop_in", "a pretrained encoder of transformers with exact and with INT8 attention"),
    "transformers-sweep": (
        "experiments.transformers_sweep",
        "INT8 attention against exact attention in every architecture of transformers",
    ),
    "pretrain": ("experiments.pretrain", "pre-train a Llama with exact attention or SageBwd"),
    "pretrain-grid": ("experiments.pretrain_grid", "the plan of runs behind notebook 06b, on all GPUs"),
    "pretrain-speed": ("experiments.pretrain_speed", "time of a step: exact, FlashAttention-2, SageBwd"),
    "context-parallel": ("experiments.context_parallel", "time and memory of one long sequence on 1, 2, 4, ... GPUs"),
    "matched": ("experiments.matched", "SLA2's backward pass as printed, and one that matches the forward pass"),
    "noise": ("experiments.gradient_noise", "gradient noise against the bias of quantisation, on checkpoints"),
    "capture": ("experiments.capture", "save what enters the attention of a pre-trained model"),
    "capture-video": (
        "experiments.capture_video",
        "train a small video diffusion transformer and save what enters its attention",
    ),
    "video": (
        "experiments.video.command",
        "pre-train a video model, fine-tune it with SLA2 beside every ablation, sample from it and judge it",
    ),
    "quantization-aware": (
        "experiments.quantization_aware",
        "quantise after fine-tuning or during it, for one SLA2 layer",
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
