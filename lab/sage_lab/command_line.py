"""The commands' parser, the types of their arguments, the options that several share, and how a command ends.

A command ends with status 0 when it is done, 2 when an argument or a file is not what it needs (one line says which), 1
when something else stopped it, and 130 on Ctrl-C. A traceback is a bug of ours.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from sage_lab.training.corpus import Corpus

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
PARENT = "SAGE_REF_PARENT"  # the process that this one ends with


class Failed(RuntimeError):
    """Something stopped a command although its arguments were right; the text is for its user."""


class Parser(argparse.ArgumentParser):
    """A parser whose help names every default, and whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see --help)\n")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        default = options.get("default")
        if names[0].startswith("-") and default not in (None, False, (), argparse.SUPPRESS):
            values = default if isinstance(default, list | tuple | range) else [default]
            text = " ".join("x".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values)
            action.help = f"{options.get('help', '')} (default: {text.replace('%', '%%')})".strip()
        return action


def written(module: str, arguments: list[str]) -> str:
    """Return a command as a record names it. An absolute path loses its folders: a record is read on other machines."""

    def shortened(argument: str) -> str:
        option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        return option + equals + Path(value).name if Path(value).is_absolute() else argument

    return shlex.join(["python", "-m", module, *map(shortened, arguments)])


def finish(program: str, run: Callable[[], int | None]) -> int:
    """Run a command and return the status for its process to end with. An error is one line on stderr."""
    try:
        status = run() or DONE
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        line, status = "interrupted", INTERRUPTED
    except BrokenPipeError:  # the reader of the output has enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        line, status = f"{error.filename}: {error.strerror}" if error.filename else str(error), BAD_INPUT
    except (ValueError, TypeError) as error:
        if ": expected " not in str(error):
            raise
        line, status = str(error), BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, Failed):
            line = str(error)
        elif isinstance(error, MemoryError) or "memory" in str(error):
            line = str(error).partition("\n")[0] or "out of memory"
        else:
            raise
        status = FAILED
    print(f"{program}: {line}", file=sys.stderr)
    return status


def end_with_parent() -> None:
    """End this process soon after its parent has ended, if that put its number into `PARENT` of the environment."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return

    def watch():
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(FAILED)

    threading.Thread(target=watch, daemon=True).start()


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
        if number >= 2**63:
            raise argparse.ArgumentTypeError(f"expected less than 2^63, got {text}")
        return number

    return parse


def _number(fits: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return parse


positive, from_zero = _whole(1), _whole(0)
positive_number = _number(lambda x: 0 < x < math.inf, "a number above 0")
number_from_zero = _number(lambda x: 0 <= x < math.inf, "a number, 0 or more")
zero_to_one = _number(lambda x: 0 <= x <= 1, "a number from 0 to 1")
percentage = _number(lambda x: 0 < x < 100, "a number above 0 and below 100")


def tile_size(text: str) -> tuple[int, int]:
    try:
        block_q, block_kv = text.split("x")
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers as in 128x64, got {text!r}") from None
    return positive(block_q), positive(block_kv)


def input_path(text: str) -> Path:
    """Return the path of a file or folder that is there."""
    try:
        Path(text).stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"expected a file that can be read, got {text!r}: {reason}") from None
    return Path(text)


def output_file(text: str) -> Path:
    """Return the path of a file that can be written. A device is refused: /dev/null would be replaced by a file."""
    path = Path(text)
    try:
        if not path.name or "\0" in text or (path.exists() and not path.is_file()):
            raise argparse.ArgumentTypeError(f"expected the name of a file, got {text!r}")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected the name of a file, got {text!r}: {error}") from None
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise argparse.ArgumentTypeError(f"expected a file in a folder that can be written, got {text!r}: see {folder}")
    return path


def device(text: str) -> str:
    """Return the name of a device that this machine has."""
    try:
        found = torch.device(text)
        if found.type == "cuda":  # asked for no memory: each of torchrun's processes would hold some on the first GPU
            is_here = torch.cuda.is_available() and (found.index or 0) < torch.cuda.device_count()
        else:
            is_here = torch.ones(1, device=found).item() == 1
    except (RuntimeError, NotImplementedError):
        is_here = False
    if not is_here:
        raise argparse.ArgumentTypeError(f"expected a device of this machine, as cpu or cuda, got {text!r}")
    return text


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the result to FILE")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")


def add_minutes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=positive_number, help="stop after the first report beyond; the same command goes on"
    )


def add_corpus_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=input_path, metavar="PATH", help="a text file or a .bin of uint16 tokens")


def corpus_of(options: argparse.Namespace) -> Corpus:
    """Return the corpus that --corpus names."""
    from sage_lab.training.corpus import read_corpus

    return read_corpus(options.corpus)
