"""`python -m sage_course`: write the measured parts of README.md, RESULTS.md, the kernels' pages and the notebooks."""

import sys

from sage_lab.command_line import Parser, add_json_option, finish, imported


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m sage_course", description=__doc__)
    add_json_option(parser)
    parser.add_argument(
        "--load", action="store_true", help="write nothing, print what each notebook asks of its reader"
    )

    def run() -> None:
        options = parser.parse_args(arguments)
        imported("sage_course.readme").write_pages(options)

    if status := finish("python -m sage_course", run):
        sys.exit(status)


if __name__ == "__main__":
    main()
