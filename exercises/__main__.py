"""Make students' files, grade what is written in them, prove that the graders are sound, and pack for Gradescope."""

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from exercises import ROOT, exercise_names

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the status that its process should end with."""
    parser = argparse.ArgumentParser(prog="python -m exercises", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("stubs", help="make each exercise.py that isn't there")
    command.add_argument("--table", action="store_true", help="write the table in README.md instead")
    command.set_defaults(run=make_stubs)

    command = commands.add_parser("grade", help="grade what is written in exercise.py")
    command.add_argument("names", nargs="*", type=exercise, metavar="NAME", help="01_block_quantizer or 01")
    command.add_argument("--all", action="store_true", help="every exercise")
    command.add_argument("--submission", type=folder, metavar="DIR", help="folder of what to grade (here: exercises/)")
    command.add_argument("--json", type=file_to_write, metavar="FILE", help="write the results there too")
    command.add_argument("--seed", type=int, help="repeat a grading: draws the hidden inputs from this number")
    command.set_defaults(run=grade)

    if (ROOT / "checking.py").is_file():  # not in a package, which has nothing to check or to pack
        add_instructors_commands(commands)

    def run() -> int:
        options = parser.parse_args(arguments)
        return options.run(options, parser)

    return finish(run)


def add_instructors_commands(commands) -> None:
    command = commands.add_parser("check", help="prove that masters pass, stubs fail, mistakes meet their hint")
    command.add_argument("names", nargs="*", type=exercise, metavar="NAME", help="exercises (default: all)")
    command.add_argument("--seeds", type=positive, default=1, help="seeds that each mistake is made on (default: 1)")
    command.set_defaults(run=check)

    command = commands.add_parser("package", help="write autograder.zip and student.zip for Gradescope")
    command.add_argument("folder", type=folder_to_write, metavar="DIR")
    command.add_argument("names", nargs="*", type=exercise, metavar="NAME", help="exercises (default: all)")
    seeds = command.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=Path, metavar="FILE", help="hidden_seeds.json of an earlier package")
    seeds.add_argument("--visible", action="store_true", help="no hidden inputs: it needs no bubblewrap")
    command.set_defaults(run=package)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold signals back until the end of an import, which may swallow what they raise."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def exercise(text: str) -> str:
    """Return the name of an exercise given by its name or number."""
    found = [name for name in exercise_names() if text in (name, name[:2])]
    if not found:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(exercise_names())}, got {text!r}")
    return found[0]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def path(text: str, expected: str, fits: Callable[[Path], bool]) -> Path:
    if not text or "\0" in text or not fits(Path(text)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return Path(text)


def is_free(path: Path) -> bool:
    return path.parent.is_dir() and not path.exists()


folder = partial(path, expected="a folder", fits=Path.is_dir)
file_to_write = partial(path, expected="a file in a folder that exists", fits=lambda x: x.is_file() or is_free(x))
folder_to_write = partial(path, expected="a folder in one that exists", fits=lambda x: x.is_dir() or is_free(x))


def make_stubs(options, parser) -> int:
    from exercises import stubs

    if options.table:
        write(ROOT / "README.md", stubs.page())
        return DONE
    for path in stubs.write():
        print(f"wrote {path.relative_to(ROOT)}")
    return DONE


def grade(options, parser) -> int:
    """Return 0 when the grading worked, whatever the score; 1 if a grader broke or a grading crashed."""
    if bool(options.names) == options.all:
        parser.error("grade: expected exercises or --all")
    with undisturbed():
        from exercises import grading, handing_in, isolation, stubs

    if options.submission is None:
        stubs.write()
    names = options.names or exercise_names()
    seeds, results = handing_in.seeds_of_grading(options.seed), []
    with grading.Sandboxes() as sandboxes:
        for name in names:
            result = grading.grade_folder(options.submission or ROOT, name, seeds, sandboxes, alone=len(names) == 1)
            print(grading.table(result), flush=True)
            if len(names) == 1 and result.printed:
                print("  what it printed:", *result.printed.splitlines()[-20:], sep="\n    ")
            if result.error:
                print(result.error, file=sys.stderr)
            results.append(result)
    if len(results) > 1:
        print(f"\n{sum(x.score or 0 for x in results):g} of {sum(x.max_score for x in results):g} points")
    if options.submission and not sandboxes.walls:  # one's own file needs no warning
        print(isolation.OPEN)
    if options.json:
        write(options.json, json.dumps([result.as_json() for result in results], indent=1) + "\n")
    return FAILED if any(result.broken or result.error for result in results) else DONE


def check(options, parser) -> int:
    with undisturbed():
        from exercises import checking

    sound = True
    for report in checking.check(options.names or exercise_names(), options.seeds):
        print(checking.table(report), flush=True)
        sound &= not report["problems"]
    return DONE if sound else FAILED


def package(options, parser) -> int:
    with undisturbed():
        from exercises import gradescope, handing_in

    seeds = handing_in.read_seeds(options.seeds) if options.seeds else handing_in.fresh_seeds()
    seeds = [] if options.visible else seeds
    for path in gradescope.package(options.folder, options.names or exercise_names(), seeds):
        print(f"wrote {path}")
    return DONE


def write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file in one step: whoever reads it finds the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush() -> None:
    """Write what was printed. A stream that can't be written is no more, or Python ends with a status of its own."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            raise


def finish(run: Callable[[], int]) -> int:
    """Run a command and return its status. What went wrong is one line on stderr."""

    def end(number, frame):
        raise SystemExit(128 + number)  # what was started is ended on the way out

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    os.umask(os.umask(0o022) & 0o077)  # what the command makes, it must be able to use
    try:
        try:
            return run()
        finally:
            flush()
    except KeyboardInterrupt:
        line, status = "interrupted", INTERRUPTED
    except OSError as error:
        line, status = f"{error.filename}: {error.strerror}" if error.filename else str(error), BAD_INPUT
        if error.errno in (errno.EPIPE, errno.ENOSPC) and not error.filename:  # the output can't be written
            line, status = ("" if error.errno == errno.EPIPE else f"output: {error.strerror}"), FAILED
    except ValueError as error:
        if ": expected " not in str(error):
            raise
        line, status = str(error), BAD_INPUT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if line:
        print(f"python -m exercises: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
