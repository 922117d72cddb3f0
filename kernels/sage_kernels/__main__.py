"""`python -m sage_kernels bench|accuracy|profile|compile|instructions`: time, check, or compile the kernels."""

import argparse
import sys

from sage_kernels import hub
from sage_kernels.measure import accuracy_command, bench_command, choose, compile, instructions, predict, profile
from sage_ref.command_line import Parser, finish, written

COMMANDS = {
    "bench": bench_command,
    "accuracy": accuracy_command,
    "profile": profile,
    "compile": compile,
    "instructions": instructions,
    "choose": choose,
    "predict": predict,
    "hub": hub,
}


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments

    def run() -> int | None:
        options = read_options(arguments)
        return options.run(options)

    if status := finish(" ".join(["python -m sage_kernels", *arguments[:1]]), run):
        sys.exit(status)


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m sage_kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module in COMMANDS.items():
        text = module.run.__doc__.removesuffix(".")
        one = commands.add_parser(name, help=text[0].lower() + text[1:])
        module.add_options(one)
        one.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    options.command = written("sage_kernels", arguments)
    return options


if __name__ == "__main__":
    main()
