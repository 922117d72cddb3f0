"""Make students' files, grade what is written in them, prove that the graders are sound, and pack for Gradescope."""

import argparse
import json
import signal
import sys
from pathlib import Path

from sage_lab.command_line import (
    DONE,
    FAILED,
    Parser,
    finish,
    imported,
    input_file,
    output_file,
    output_folder,
    positive,
)
from sage_lab.files import write_file

from exercises import ROOT, exercise_names
from exercises.variants import replacements


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the status that its process should end with."""
    parser = Parser(prog="python -m exercises", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("stubs", help="make each exercise.py that isn't there")
    command.add_argument("--table", action="store_true", help="write the table in README.md instead")
    add_variant(command)
    command.set_defaults(run=make_stubs, names=[])

    command = commands.add_parser("grade", help="grade what is written in exercise.py")
    command.add_argument("names", nargs="*", type=exercise, metavar="NAME", help="01_block_quantizer or 01")
    command.add_argument("--all", action="store_true", help="every exercise")
    whose = command.add_mutually_exclusive_group()
    whose.add_argument("--submission", type=folder, metavar="DIR", help="folder of what to grade (here: exercises/)")
    whose.add_argument("--class", type=folder, metavar="DIR", dest="students", help="folder with each student's zip")
    command.add_argument("--json", type=output_file, metavar="FILE", help="write the results there too")
    command.add_argument("--seed", type=int, help="repeat a grading: draws the hidden inputs from this number")
    command.add_argument("--workers", type=positive, default=2, help="students graded at a time (default: 2)")
    command.add_argument("--trust", action="store_true", help="grade other people's files without bubblewrap's walls")
    add_variant(command)
    command.set_defaults(run=grade)

    if (ROOT / "checking.py").is_file():  # not in a package, which has nothing to check or to pack
        add_instructors_commands(commands)

    def run() -> int:
        options = parser.parse_args(arguments)
        return options.run(options, parser)

    return finish(parser.prog, run)


def add_instructors_commands(commands) -> None:
    command = commands.add_parser("check", help="prove that masters pass, stubs fail, mistakes meet their hint")
    command.add_argument("names", nargs="*", type=exercise, metavar="NAME", help="exercises (default: all)")
    command.add_argument("--seeds", type=positive, default=1, help="seeds that each mistake is made on (default: 1)")
    add_variant(command)
    command.set_defaults(run=check)

    command = commands.add_parser("package", help="write autograder.zip and student.zip for Gradescope")
    command.add_argument("folder", type=output_folder, metavar="DIR")
    command.add_argument("names", nargs="*", type=exercise, metavar="NAME", help="exercises (default: all)")
    seeds = command.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=input_file, metavar="FILE", help="hidden_seeds.json of an earlier package")
    seeds.add_argument("--visible", action="store_true", help="no hidden inputs: it needs no bubblewrap")
    add_variant(command)
    command.set_defaults(run=package)


def add_variant(command) -> None:
    command.add_argument("--variant", type=int, choices=(1, 2), default=1, help="of the exercises (default: 1)")


def names_of(options) -> list[str]:
    """Return the exercises that a command is about. ValueError if one of them has no such variant."""
    names = options.names or exercise_names()
    for name in names if options.variant != 1 else ():
        replacements(name)
    return names


def exercise(text: str) -> str:
    """Return the name of an exercise given by its name or number."""
    found = [name for name in exercise_names() if text in (name, name[:2])]
    if not found:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(exercise_names())}, got {text!r}")
    return found[0]


def folder(text: str) -> Path:
    """Return the path of a folder that exists."""
    if not text or "\0" in text or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}")
    return Path(text)


def make_stubs(options, parser) -> int:
    from exercises import stubs

    if options.table:
        write_file(ROOT / "README.md", imported("exercises.checking").page())
        return DONE
    for path in stubs.write(names_of(options), options.variant):
        print(f"wrote {path.relative_to(ROOT)}")
    return DONE


def grade(options, parser) -> int:
    """Return 0 when the grading worked, whatever the score; 1 if a grader broke or a grading crashed."""
    if bool(options.names) == options.all:
        parser.error("grade: expected exercises or --all")
    grading, handing_in, isolation, stubs = map(imported, MODULES)
    names, of_others = names_of(options), options.submission or options.students
    if of_others and (options.all or options.students) and not options.trust and not isolation.have_walls():
        parser.error(f"grade: {isolation.OPEN} --trust does it all the same")
    if options.students:
        return grade_students(options, parser, names)
    if options.submission is None:
        stubs.write(names, options.variant)
    seeds, results = handing_in.seeds_of_grading(options.seed), []
    with isolation.Sandbox() as sandbox:
        for name in names:
            result = grading.grade_folder(
                options.submission or ROOT, name, seeds, sandbox, alone=len(names) == 1, variant=options.variant
            )
            results.append(result)
            if options.json:
                write_file(options.json, json.dumps([result.as_json() for result in results], indent=1) + "\n")
            print(grading.table(result), flush=True)
            if len(names) == 1 and result.printed:
                print("  what it printed:", *result.printed.splitlines()[-20:], sep="\n    ")
            if result.error:
                print(result.error, file=sys.stderr)
    if len(results) > 1:
        print(f"\n{sum(x.score or 0 for x in results):g} of {sum(x.max_score for x in results):g} points")
    if of_others and not sandbox.walls:  # one's own file needs no warning
        print(isolation.OPEN)
    return FAILED if any(result.broken or result.error for result in results) else DONE


MODULES = [f"exercises.{name}" for name in ("grading", "handing_in", "isolation", "stubs")]


def grade_students(options, parser, names: list[str]) -> int:
    """Grade a class into the report that --json names, and go on with it if it was begun."""
    classes, handing_in = map(imported, ("exercises.classes", "exercises.handing_in"))
    if options.json is None:
        parser.error("grade: expected --json FILE beside --class: the report, from which a second start goes on")
    students = classes.students_of(options.students)
    report = classes.read_report(options.json, names, options.seed, options.variant)
    for name, result in classes.grade_class(students, report, options.workers):
        report["students"][name] = result
        handing_in.write_private(options.json, json.dumps(report, indent=1) + "\n")
        print(f"{name}: {result['score']:g} of {result['max_score']:g} points {result['error']}".strip(), flush=True)
    graded = [report["students"][name] for name in students]
    broken = [x for x in graded if x["error"] or any(exercise["score"] is None for exercise in x["exercises"])]
    print(f"{len(graded)} students, {len(broken)} with an error; the report is {options.json}")
    return FAILED if broken else DONE


def check(options, parser) -> int:
    sound = True
    for line in imported("exercises.checking").check(names_of(options), options.seeds, options.variant):
        print(line, flush=True)
        sound &= "PROBLEM" not in line
    return DONE if sound else FAILED


def package(options, parser) -> int:
    gradescope, handing_in = map(imported, ("exercises.gradescope", "exercises.handing_in"))
    seeds = handing_in.fresh_seeds() if options.seeds is None else handing_in.read_seeds(options.seeds)
    seeds = [] if options.visible else seeds
    for path in gradescope.package(options.folder, names_of(options), seeds, options.variant):
        print(f"wrote {path}")
    return DONE


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # what was started is ended on the way out
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
