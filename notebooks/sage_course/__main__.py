"""`python -m sage_course`: write the measured parts of README.md, RESULTS.md, the kernels' pages and the notebooks.

`python -m sage_course start` makes the reader's own copies of the notebooks.
"""

import sys
from dataclasses import dataclass

from sage_lab.command_line import Arguments, Parser, add_options, finish, imported, read_arguments, written


@dataclass(frozen=True, kw_only=True)
class Pages(Arguments):
    """Write the measured parts of the pages and the notebooks. `start` in front makes copies for a reader instead."""

    def run(self, command: str) -> None:
        imported("sage_course.readme").write_pages(self.json)


def main(arguments: list[str] | None = None) -> None:
    def run() -> None:
        words = sys.argv[1:] if arguments is None else arguments
        is_start = words[:1] == ["start"]
        kind = imported("sage_course.copies").Start if is_start else Pages
        parser = Parser(prog="python -m sage_course" + " start" * is_start, description=kind.__doc__)
        add_options(parser, kind)
        read_arguments(parser, words[is_start:]).run(written("sage_course", words))

    if status := finish("python -m sage_course", run):
        sys.exit(status)


if __name__ == "__main__":
    main()
