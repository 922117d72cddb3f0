"""python -m exercises stubs [--check] | grade [NAME | --all] [--submission DIR] | check [NAME ...] | package DIR"""

import json
import sys
from pathlib import Path

from sage_lab.command_line import Parser, finish, input_path, output_file

from exercises import ROOT, exercise_names, grading
from exercises.isolation import Sandbox


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m exercises", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("stubs", help="make exercise.py of every exercise, and the table in README.md")
    command.add_argument("--check", action="store_true", help="change nothing; fail if a file is out of date")
    command.set_defaults(run=make_stubs)

    command = commands.add_parser("grade", help="grade what is written in exercise.py")
    command.add_argument("name", nargs="?", help="one exercise, as 01_block_quantizer or 01")
    command.add_argument("--all", action="store_true", help="every exercise")
    command.add_argument(
        "--submission", type=Path, metavar="DIR", help="folder of the files to grade (here: exercises/)"
    )
    command.add_argument("--json", type=output_file, metavar="FILE", help="write the results there too")
    command.add_argument("--seed", type=int, help="repeat a grading: draws the hidden inputs from this number")
    command.set_defaults(run=grade)

    command = commands.add_parser("check", help="prove the exercises: masters pass, stubs fail, mutants are caught")
    command.add_argument("names", nargs="*", help="exercises (default: all)")
    command.add_argument("--json", type=output_file, metavar="FILE", help="write the verdicts there too")
    command.set_defaults(run=check)

    command = commands.add_parser("package", help="write autograder.zip and student.zip for Gradescope")
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("names", nargs="*", help="exercises (default: all)")
    command.add_argument("--seeds", type=input_path, metavar="FILE", help="hidden_seeds.json of an earlier package")
    command.set_defaults(run=package)

    options = parser.parse_args(arguments)
    return finish("python -m exercises", lambda: options.run(options, parser))


# The student's zip has no masters, and neither stubs.py nor what needs it: each command imports its own module.
def make_stubs(options, parser) -> int:
    from exercises import stubs

    if not options.check:
        for path in stubs.write():
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    stale = stubs.out_of_date()
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: run python -m exercises stubs", file=sys.stderr)
    return 1 if stale else 0


def grade(options, parser) -> int:
    """0 when the grading worked, whatever the score; 1 if a grader broke or a grading crashed."""
    if (options.name is None) != options.all:
        parser.error("expected one exercise or --all")
    names = exercise_names() if options.all else [_full_name(options.name, parser)]
    if options.submission and not options.submission.is_dir():
        parser.error(f"--submission: expected a folder, got {options.submission}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: expected a file in a folder that exists, got {options.json}")
    seeds, results = grading.seeds_of_grading(options.seed), []
    folder = grading.submission_folder(options.submission) if options.submission else ROOT
    with Sandbox() as sandbox:
        if sandbox.note:
            print(sandbox.note, file=sys.stderr)
        for name in names:
            result = grading.grade_folder(folder, name, seeds, sandbox, alone=not options.all)
            print(grading.table(result), flush=True)
            if not options.all and result.printed:
                print("  what it printed:", *result.printed.splitlines()[-20:], sep="\n    ")
            if result.error:
                print(result.error, file=sys.stderr)
            results.append(result)
    if len(results) > 1:
        print(f"\n{sum(x.score or 0 for x in results):g} of {sum(x.max_score for x in results):g} points")
    if options.json:
        options.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
    return 1 if any(result.broken or result.error for result in results) else 0


def check(options, parser) -> int:
    from exercises import checking

    names = [_full_name(name, parser) for name in options.names] or exercise_names()
    report = checking.check(names)
    print(checking.table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["sound"] else 1


def package(options, parser) -> int:
    from exercises import gradescope

    names = [_full_name(name, parser) for name in options.names] or exercise_names()
    seeds = grading.read_seeds(options.seeds) if options.seeds else grading.fresh_seeds()
    for path in gradescope.package(options.folder, names, seeds):
        print(f"wrote {path}")
    return 0


def _full_name(name, parser):
    """An exercise by its name or its number."""
    found = [full for full in exercise_names() if name in (full, full[:2])]
    if not found:
        parser.error(f"name: expected one of {', '.join(exercise_names())}, got {name!r}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
