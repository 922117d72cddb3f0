"""Compile, check and time the kernels, train models, and make the course's measurements."""

import os
import sys

from sage_lab.command_line import (
    PARENT,
    Arguments,
    Parser,
    add_options,
    end_with,
    finish,
    imported,
    read_arguments,
    written,
)

# By name: the module of its class, imported when the command is called, and a description.
COMMANDS = {
    "bench": ("bench.bench_command", "time the public functions in turn with their peers; a rerun continues"),
    "accuracy": ("bench.accuracy", "compare the kernels with the reference on this GPU"),
    "compile": ("bench.compile", "compile every level for sm_80 to sm_120 and check the result"),
    "count": ("bench.count", "count what a score costs in your own forward kernel, beside our levels, without a GPU"),
    "info": ("experiments.info", "show this machine, the versions, and the backend that 'auto' chooses"),
    "tables": ("experiments.tables", "compute the SageBwd paper's two tables of errors again"),
    "pretrain": ("experiments.pretrain", "pre-train language models that differ in their attention; a rerun continues"),
    "train-router": ("experiments.router_fit", "fit SLA2's router and alpha to full attention"),
    "video train": ("experiments.video.command", "pre-train a video model with full attention"),
    "video finetune": ("experiments.video.command", "fine-tune it with SLA2 and with every ablation, and compare them"),
    "noise": ("experiments.gradient_noise", "compare gradient noise with the bias of quantisation, on checkpoints"),
}


def main(arguments: list[str] | None = None) -> None:
    if parent := os.environ.pop(PARENT, None):
        end_with(int(parent))
    arguments = sys.argv[1:] if arguments is None else arguments

    def run() -> int | None:
        return read_options(arguments).run(written("sage_lab", arguments))  # every command runs here

    if status := finish(" ".join(["python -m sage_lab", *arguments[:1]]), run):
        sys.exit(status)


def read_options(arguments: list[str]) -> Arguments:
    """Return the command that a line asks for."""
    parser = Parser(prog="python -m sage_lab", description=__doc__)
    groups = {"": parser.add_subparsers(required=True, metavar="command")}
    for name, (module, description) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            of_group = groups[""].add_parser(group, help=f"train and fine-tune a {group} model: see {group} --help")
            groups[group] = of_group.add_subparsers(required=True, metavar="action")
        command = groups[group].add_parser(last, help=description, description=description)
        if arguments[: len(name.split())] == name.split():
            class_name = name.title().replace("-", "").replace(" ", "")
            add_options(command, getattr(imported(f"sage_lab.{module}"), class_name))
    return read_arguments(parser, arguments)


if __name__ == "__main__":
    main()
