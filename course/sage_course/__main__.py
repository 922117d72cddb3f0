"""`python -m sage_course`: write the measured parts of README.md, RESULTS.md, the kernels' pages and the notebooks."""

import sys

from sage_lab.command_line import Parser, add_json_option, finish

from sage_course import readme


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m sage_course", description=__doc__)
    add_json_option(parser)
    if status := finish("python -m sage_course", lambda: readme.write_pages(parser.parse_args(arguments))):
        sys.exit(status)


if __name__ == "__main__":
    main()
